"""Monitor a run: a hook, a custom metric in the log, and a recorder that keeps the rows in memory."""

import jax
import numpy as np

import jaxrl


def main(max_opts: int = 3_200, eval_interval: int = 800) -> list[float]:
    def norm(trainer, evaluation, is_best):
        parameters = jax.tree.leaves(trainer.state.agent.params)
        trainer.note(parameter_norm=float(np.sqrt(sum(float((x**2).sum()) for x in parameters))))
        if is_best:
            print("new best", evaluation.returns.mean())

    memory = jaxrl.MemoryRecorder()
    strategy = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(lr=1e-3), num_envs=8)
    trainer = jaxrl.Trainer(
        strategy,
        max_opts=max_opts,
        eval_interval=eval_interval,
        record_interval=eval_interval,
        hooks=jaxrl.Hooks(evaluation=norm),
        recorders=[memory],
    )
    trainer.train()
    return [row["parameter_norm"] for row in memory.rows if "parameter_norm" in row]


if __name__ == "__main__":
    print("norm of the parameters after each evaluation", main())

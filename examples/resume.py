"""Stop a run halfway and resume it: its parameters are bitwise identical to those of an uninterrupted run."""

import jax
import numpy as np

import jaxrl


def train(run_dir: str, stops: list[int], eval_interval: int) -> list[np.ndarray]:
    strategy = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(lr=1e-3), num_envs=8)
    for i, max_opts in enumerate(stops):
        trainer = jaxrl.Trainer(
            strategy, max_opts=max_opts, eval_interval=eval_interval, run_dir=run_dir, resume=i > 0, quiet=True
        )
        state = trainer.train().state
    return [np.asarray(x) for x in jax.tree.leaves(state.agent.params)]


def main(max_opts: int = 3_200, eval_interval: int = 800, runs: str = "runs/resume") -> bool:
    whole = train(f"{runs}/whole", [max_opts], eval_interval)
    halves = train(f"{runs}/halves", [max_opts // 2, max_opts], eval_interval)
    same = all(np.array_equal(a, b) for a, b in zip(whole, halves, strict=True))
    print("the same bits" if same else "other bits")
    return same


if __name__ == "__main__":
    main()

"""Train several learning rates with several seeds each in one run, and find the best."""

import jaxrl


def main(max_opts: int = 3_200, eval_interval: int = 1_600, seeds: int = 4, run_dir: str = "runs/sweep") -> float:
    strategy = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(), num_envs=8)
    members = jaxrl.population(strategy, seeds=seeds, sweep={"agent.lr": [1e-5, 1e-3]})
    trainer = jaxrl.Trainer(
        members, max_opts=max_opts, eval_interval=eval_interval, run_dir=run_dir, start_over=True, quiet=True
    )
    result = trainer.train()
    print(result.table())
    best = result.best(by="agent.lr")
    print(
        "best",
        best.values,
        "members",
        best.members,
        f"IQM {best.last.iqm:.1f} [{best.last.low:.1f}, {best.last.high:.1f}]",
    )
    return best.values["agent.lr"]


if __name__ == "__main__":
    main()

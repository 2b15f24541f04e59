"""Train PPO on CartPole-v1, load the best policy and act with it."""

import jaxrl


def main(max_opts: int = 6_400, eval_interval: int = 800, run_dir: str = "runs/first_run") -> float:
    env = jaxrl.make_env("CartPole-v1")
    strategy = jaxrl.on_policy(env, jaxrl.ppo(lr=1e-3), num_envs=8)
    trainer = jaxrl.Trainer(strategy, max_opts=max_opts, eval_interval=eval_interval, run_dir=run_dir, start_over=True)
    result = trainer.train()
    policy = jaxrl.load_policy(run_dir)
    print("action", int(policy([0.0, 0.0, 0.1, 0.5])), "best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()

"""Learn a continuous task from replay: SAC with prioritised replay and three-step returns on Pendulum-v1."""

import jaxrl


def main(max_opts: int = 6_000, eval_interval: int = 1_000, features: tuple[int, ...] = (64, 64)) -> float:
    env = jaxrl.make_env("Pendulum-v1")
    agent = jaxrl.sac(lr=1e-3, policy_lr=1e-3, temperature_lr=1e-3, features=features)
    strategy = jaxrl.off_policy(
        env,
        agent,
        buffer=jaxrl.prioritised(50_000, batch_size=256),
        processor=jaxrl.n_step(3, discount=0.98),
        num_envs=1,
        opt_interval=1,
        warmup=1_000,
    )
    result = jaxrl.Trainer(strategy, max_opts=max_opts, eval_interval=eval_interval).train()
    print("best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()

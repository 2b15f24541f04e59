"""Gather a data set with a trained policy and learn from it offline: IQL on CartPole-v1."""

import jax

import jaxrl


def main(
    max_opts: int = 4_000,
    pilot_opts: int = 6_400,
    steps: int = 20_000,
    file: str = "cartpole.npz",
    eval_interval: int = 1_000,
) -> float:
    env = jaxrl.make_env("CartPole-v1")
    pilot = jaxrl.on_policy(env, jaxrl.ppo(lr=1e-3), num_envs=8)
    policy = jaxrl.Trainer(pilot, max_opts=pilot_opts, eval_interval=0, quiet=True).train().policy
    data = jaxrl.gather(env, policy.policy, policy.params, jax.random.key(0), steps, random=0.3)
    jaxrl.save_dataset(file, data)
    strategy = jaxrl.offline(jaxrl.load_dataset(file), jaxrl.iql(lr=1e-3, features=(64, 64)), env=env)
    result = jaxrl.Trainer(strategy, max_opts=max_opts, eval_interval=eval_interval).train()
    print("best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()

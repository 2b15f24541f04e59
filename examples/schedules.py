"""Schedule hyperparameters, and normalise observations and rewards: PPO on Pendulum-v1."""

import jaxrl


def main(max_opts: int = 12_800, eval_interval: int = 1_280) -> float:
    agent = jaxrl.ppo(
        lr=jaxrl.linear(1e-3, 0.0, max_opts),
        ent_coef=0.0,
        clip_eps=jaxrl.cosine(0.2, 0.1, max_opts),
    )
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(0.9), jaxrl.one_step(0.9))
    strategy = jaxrl.on_policy(
        jaxrl.make_env("Pendulum-v1"), agent, processor=processor, num_envs=16, rollout=256, epochs=10, minibatches=32
    )
    result = jaxrl.Trainer(strategy, max_opts=max_opts, eval_interval=eval_interval).train()
    print("best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()

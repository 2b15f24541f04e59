"""Own the loop: the script steps its environment and passes each step to a session. Run it again to resume."""

from pathlib import Path

import gymnasium

import jaxrl


def main(max_opts: int = 6_000, eval_interval: int = 1_000, run_dir: str = "runs/own_loop") -> float:
    env, test_env = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    session = jaxrl.Session(
        env,
        jaxrl.dqn(lr=1e-3, epsilon_decay=2_000),
        buffer=jaxrl.uniform(20_000, batch_size=128),
        processor=jaxrl.n_step(3, discount=0.99),
        opt_interval=4,
        warmup=500,
        max_opts=max_opts,
        run_dir=run_dir,
        resume=Path(run_dir).exists(),
    )
    with session:
        obs, _ = env.reset(seed=0)
        while not session.is_done:
            next_obs, reward, terminated, truncated, _ = env.step(session.act(obs))
            learnt = session.observe(reward, next_obs, terminated, truncated)
            obs = env.reset()[0] if terminated or truncated else next_obs
            if learnt and session.opt_steps % eval_interval == 0:
                returns = [episode_return(test_env, session.policy, seed) for seed in range(10)]
                session.evaluate_score(sum(returns) / len(returns))
    print("best score", session.summary()["best_score"])
    return session.summary()["best_score"]


def episode_return(env, policy, seed: int) -> float:
    obs, total, ended = env.reset(seed=seed)[0], 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(int(policy(obs)))
        total, ended = total + reward, terminated or truncated
    return total


if __name__ == "__main__":
    main()

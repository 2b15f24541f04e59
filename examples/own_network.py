"""Train DQN with a custom network, here with layer norm, and load its policy."""

import flax.linen as nn

import jaxrl


class Values(nn.Module):
    actions: int

    @nn.compact
    def __call__(self, obs):  # [B, 4]
        x = nn.swish(nn.Dense(64)(obs))
        x = nn.swish(nn.Dense(64)(nn.LayerNorm()(x)))
        return nn.Dense(self.actions)(x)  # [B, actions]


def make_network(spec: jaxrl.EnvSpec) -> nn.Module:
    return Values(spec.action_space.n)


def main(max_opts: int = 10_000, eval_interval: int = 1_000, run_dir: str = "runs/own_network") -> float:
    env = jaxrl.make_env("CartPole-v1")
    agent = jaxrl.dqn(make_network=make_network, lr=1e-3, lr_decay=max_opts, tau=0.01, target_interval=1)
    strategy = jaxrl.off_policy(
        env, agent, buffer=jaxrl.uniform(10_000, batch_size=64), processor=jaxrl.n_step(5), num_envs=10, warmup=500
    )
    result = jaxrl.Trainer(
        strategy, max_opts=max_opts, eval_interval=eval_interval, run_dir=run_dir, start_over=True
    ).train()
    policy = jaxrl.load_policy(run_dir, make_network=make_network)
    print("action", int(policy([0.0, 0.0, 0.1, 0.5])), "best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()

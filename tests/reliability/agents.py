"""Every agent with every buffer, small: what the promises are tested over. A new agent or buffer is added here."""

from collections.abc import Callable

import jaxrl

ENV = "Catch-bsuite"


def _off_policy(agent: jaxrl.Strategy, processor: object = None, env: str = ENV) -> jaxrl.Strategy:
    return jaxrl.off_policy(
        jaxrl.make_env(env),
        agent,
        buffer=jaxrl.uniform(96, batch_size=8),
        processor=processor,
        num_envs=4,
        opt_interval=4,
        warmup=16,
    )


def _on_policy(agent: object, processor: object = None, env: str = ENV, **settings: int) -> jaxrl.Strategy:
    return jaxrl.on_policy(
        jaxrl.make_env(env), agent, processor=processor, **{"num_envs": 4, "rollout": 6, "epochs": 2, **settings}
    )


COMBINATIONS: dict[str, Callable[[], jaxrl.Strategy]] = {
    "dqn, uniform": lambda: _off_policy(jaxrl.dqn(features=(8,), target_interval=7)),
    "dueling and soft, accumulated, n-step, uniform": lambda: _off_policy(
        jaxrl.dqn(features=(8,), dueling=True, tau=0.1, target_interval=1, accumulate=2, double=False),
        jaxrl.n_step(3, discount=0.9),
        "CartPole-v1",
    ),
    "dqn on stacked frames, uniform": lambda: _off_policy(
        jaxrl.dqn(features=(8,), lr_decay=40), jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step())
    ),
    "ppo": lambda: _on_policy(jaxrl.ppo(features=(8,), lr_decay=80), minibatches=2),
    "ppo, continuous and squashed, normalised": lambda: _on_policy(
        jaxrl.ppo(features=(8,), squash=True, free_scale=False, clip_value=0.2, normalise="batch", accumulate=2),
        jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(0.9), jaxrl.one_step(0.9)),
        "Pendulum-v1",
        minibatches=2,
    ),
    "ppo with a memory, stopped by divergence": lambda: _on_policy(
        jaxrl.ppo(features=(8,), core="lstm", core_features=8, target_kl=1e-5, lr=1e-2), minibatches=2
    ),
    "a2c": lambda: _on_policy(jaxrl.a2c(features=(8,)), epochs=1, minibatches=1),
    "reinforce without a baseline": lambda: _on_policy(
        jaxrl.reinforce(features=(8,), baseline=False, core="gru", core_features=8), epochs=1, minibatches=1
    ),
    "pqn": lambda: _on_policy(jaxrl.pqn(features=(8,), epsilon_decay=40), minibatches=4, epochs=1),
}

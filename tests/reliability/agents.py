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
}

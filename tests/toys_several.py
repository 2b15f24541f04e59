"""A toy of several agents whose every number can be worked out by hand; one of them dies early."""

from functools import partial

import jax.numpy as jnp

import jaxrl
from jaxrl.envs import Env, TimeStep
from jaxrl.spaces import Box, Discrete, EnvSpec

LIVES = (2, 4, 3)
RETURNS = (3.0, 20.0, 18.0)
"""The sums `(a + 1) (1 + ... + life)` of agents `a`."""


def squad(lives=LIVES, time_limit: int | None = None, poison: float = 0.0) -> Env:
    """Pay agent `a` in step `t`, counted from 1, `(a + 1) t`, until it dies after `lives[a]` steps.

    It sees `[t, a]`. The dead are shown and paid `poison`, which must leave no trace.
    """
    lives = jnp.array(lives)
    number = jnp.arange(len(lives), dtype=jnp.float32)

    def seen(t):
        obs = jnp.stack([jnp.full(len(lives), t, jnp.float32), number], axis=-1)
        return jnp.where((t > lives)[:, None], poison, obs)

    def step(t, action, key):
        t = t + 1
        reward = jnp.where(t > lives, poison, (number + 1) * t)
        info = {"t": t, "number": jnp.where(t > lives, poison, number)}
        return t, TimeStep(seen(t), reward, t >= lives, info=info)

    spec = EnvSpec("squad", Box(-jnp.inf, jnp.inf, (2,)), Discrete(2), time_limit)
    return Env(spec, lambda key: (jnp.int32(0), seen(0)), step, partial(_drawn), agents=len(lives))


def _drawn(t):
    return jnp.full((4, 4, 3), t, jnp.uint8)


def hidden_target(agents: int = 3) -> Env:
    """Show each agent a sign of its own; it is paid 1 for the action that the sign asks for, and dies of the other.

    Games take 5 steps, so the best score is 5; at random it is the sum of 0.5 to 0.5^5, 0.97.
    """
    import jax

    def reset(key):
        signs = jax.random.bernoulli(key, 0.5, (agents,)).astype(jnp.int32)
        return signs, signs

    def step(signs, action, key):
        right = action == signs
        signs = jax.random.bernoulli(key, 0.5, (agents,)).astype(jnp.int32)
        return signs, TimeStep(signs, right.astype(jnp.float32), ~right)

    return jaxrl.Env(EnvSpec("HiddenTarget", Discrete(2), Discrete(2), 5), reset, step, agents=agents)

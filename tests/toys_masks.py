"""Toy environments whose observations say which actions are allowed, or hold what only critics may see."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.envs import Env, TimeStep
from jaxrl.masks import action_sizes
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl.trees import Array, Key

TEMPTING = 1e6
"""What a forbidden action pays; an allowed one pays at most 1."""


class Minefield(NamedTuple):
    seen: Array
    mask: Array
    """Bool `[A]`, the choices of all numbers of an action side by side."""
    mistakes: Array
    """Forbidden actions taken so far; no episode ever ends by itself, so that all of them stay here."""


def minefield(actions: Any = None, shape: tuple[int, ...] | None = None, time_limit: int | None = None) -> Env:
    """Allow another random set of actions at every step, never none; the forbidden ones pay best.

    `shape` is that of the mask.
    """
    space = actions or Discrete(3)
    sizes = action_sizes(space)
    shape = shape or (sum(sizes),)
    spec = EnvSpec(
        "Minefield", {"action_mask": Box(0, 1, shape, bool), "seen": Box(-1.0, 1.0, (2,))}, space, time_limit
    )

    def look(key: Key) -> tuple[Array, Array]:
        seen_key, *keys = jax.random.split(key, 1 + len(sizes))
        masks = [_some(key, size) for key, size in zip(keys, sizes, strict=True)]
        return jax.random.uniform(seen_key, (2,), minval=-1.0), jnp.concatenate(masks)

    def show(state: Minefield) -> dict[str, Array]:
        return {"action_mask": state.mask.reshape(shape), "seen": state.seen}

    def reset(key: Key) -> tuple[Minefield, dict[str, Array]]:
        state = Minefield(*look(key), jnp.int32(0))
        return state, show(state)

    def step(state: Minefield, action: Array, key: Key) -> tuple[Minefield, TimeStep]:
        wrong = ~is_allowed(space, state.mask[None], action[None])[0]
        reward = jnp.where(wrong, TEMPTING, state.seen[0] * jnp.atleast_1d(action)[0] / max(sizes))
        state = Minefield(*look(key), state.mistakes + wrong)
        return state, TimeStep(show(state), reward, False)

    return Env(spec, reset, step)


def _some(key: Key, size: int) -> Array:
    coin_key, place_key = jax.random.split(key)
    return jax.random.bernoulli(coin_key, 0.4, (size,)).at[jax.random.randint(place_key, (), 0, size)].set(True)


def is_allowed(space: Discrete | MultiDiscrete, mask: Array, action: Array) -> Array:
    """Return for each of `action` `[N, ...]` whether `mask` `[N, A]` allows it."""
    sizes = action_sizes(space)
    parts = action.reshape(len(action), -1)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    each = [jnp.take_along_axis(mask, begin + parts[:, i : i + 1], axis=1)[:, 0] for i, begin in enumerate(begins)]
    return jnp.stack(each).all(axis=0)

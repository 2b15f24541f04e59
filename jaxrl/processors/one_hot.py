"""One-hot encoding of integer grids and vectors."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, check_count
from jaxrl.masks import map_except_mask
from jaxrl.processors.base import Processor
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space, is_leaf
from jaxrl.trees import Array, PyTree
from jaxrl.types import Step

MAX_VALUES = 4096
"""Largest number of values."""


def one_hot(values: int) -> Processor:
    """Encode each integer of a grid or vector as `values` booleans, of which the one at its value is true.

    A grid `[N, H, W]` becomes `[N, H, W, values]`, one with channels `[N, H, W, C]` becomes `[N, H, W, C * values]`,
    and a vector `[N, K]` becomes `[N, K * values]`. An integer outside `0 .. values - 1`, such as -1 for an empty cell,
    is all false. Scalars, images (`uint8`, `[H, W, C]`) and action masks are unchanged.

    Raises:
      SettingsError: `values` is no integer from 2 to 4096. Raised later if observations have larger values, or none to
        encode.
    """
    check_count("one_hot", values, least=2, most=MAX_VALUES)
    encode = partial(map_except_mask, partial(_encode, values))
    return Processor(
        init=encode,
        process=lambda state, step: _process(encode, step),
        observe=lambda state: state,
        space=partial(_space, values),
        settings={"one_hot": values},
        changes=("obs",),
    )


def _process(encode: Any, step: Step) -> tuple[PyTree, Step]:
    obs = encode(step.obs)
    return obs, step._replace(obs=obs, final_obs=encode(step.final_obs))


def _is_encoded(shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether an array of one observation, of this shape and dtype, is encoded."""
    image = len(shape) == 3 and dtype == jnp.uint8
    return jnp.issubdtype(dtype, jnp.integer) and len(shape) > 0 and not image


def _encode(values: int, x: Array) -> Array:
    x = jnp.asarray(x)
    if not _is_encoded(x.shape[1:], x.dtype):
        return x
    hot = jax.nn.one_hot(x, values, dtype=bool)
    return hot if x.ndim == 3 else hot.reshape(*x.shape[:-1], x.shape[-1] * values)


def _space(values: int, space: Space) -> Space:
    found = []

    def encode(leaf: Box | Discrete | MultiDiscrete) -> Space:
        if not _is_encoded(leaf.shape, jnp.dtype(leaf.dtype)):
            return leaf
        # Without a bound nothing is known in advance, and integers that are too large become all false.
        high = np.max(leaf.high) if isinstance(leaf, Box) else np.max(leaf.n) - 1
        if np.isfinite(high) and high >= values:
            raise SettingsError(f"one_hot is {values}, but observations have integers up to {high:g}; raise it")
        found.append(leaf)
        # As in `_encode`, a grid without channels gets its values as channels.
        *lead, last = (*leaf.shape, 1) if len(leaf.shape) == 2 else leaf.shape
        return Box(0, 1, (*lead, last * values), "bool")

    policy_space: Space = map_except_mask(encode, space, is_leaf=is_leaf)
    if not found:
        raise SettingsError("one_hot is for grids and vectors of integers, but observations have none")
    return policy_space

"""Show grids and rows of whole numbers one-hot."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, check_count
from jaxrl.masks import map_except_mask
from jaxrl.processors.base import Processor
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl.trees import Array, PyTree
from jaxrl.types import Step

MAX_VALUES = 4096
"""Most values that a number may have."""


def one_hot(values: int) -> Processor:
    """Turn each whole number of a grid or a row into `values` flags, of which that of its value, from 0, is true.

    A grid `[N, H, W]` becomes `[N, H, W, values]`, one with channels `[N, H, W, C]` has `C * values` of them, and a row
    `[N, K]` becomes `[N, K * values]`. A number below 0 or beyond the last value, such as -1 for a place that is
    empty, has no flag. Single numbers, images (`uint8`, `[H, W, C]`) and the mask of actions are left as they are.

    Raises:
      SettingsError: `values` is no whole number from 2 to 4096; later, if an observation says that its numbers go
        further, or has none to show one-hot.
    """
    check_count("one_hot", values, least=2, most=MAX_VALUES)
    shown = partial(map_except_mask, partial(_encode, values))
    return Processor(
        init=shown,
        process=lambda state, step: _process(shown, step),
        observe=lambda state: state,
        space=partial(_space, values),
        settings={"one_hot": values},
        changes=("obs",),
    )


def _process(shown: Any, step: Step) -> tuple[PyTree, Step]:
    obs = shown(step.obs)
    return obs, step._replace(obs=obs, final_obs=shown(step.final_obs))


def _is_encoded(shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether an array of one observation is shown one-hot."""
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

    def shown(leaf: Box | Discrete | MultiDiscrete) -> Space:
        if not isinstance(leaf, Box) or not _is_encoded(leaf.shape, jnp.dtype(leaf.dtype)):
            return leaf
        high = np.max(leaf.high)
        if np.isfinite(high) and high >= values:
            raise SettingsError(f"one_hot is {values}, but observations have whole numbers up to {high:g}; raise it")
        found.append(leaf)
        *lead, last = (*leaf.shape, 1) if len(leaf.shape) == 2 else leaf.shape
        return Box(0, 1, (*lead, last * values), "bool")

    made: Space = map_except_mask(shown, space, is_leaf=lambda x: isinstance(x, Box | Discrete | MultiDiscrete))
    if not found:
        raise SettingsError("one_hot is for grids and rows of whole numbers, of which observations have none")
    return made

"""Whole numbers of a space: indices counted from 0, as agents have them, and elements, as an environment does."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, short
from jaxrl.trees import Array, PyTree


def _is_space(x: Any) -> bool:
    return isinstance(x, Box | Discrete | MultiDiscrete)


def starts_of(space: Space) -> list[Any]:
    """Return the start of each leaf: whole numbers, one for each entry of the leaf where they differ; 0 of a `Box`."""
    return [getattr(leaf, "start", 0) for leaf in jax.tree.leaves(space, is_leaf=_is_space)]


def to_indices(space: Space, elements: PyTree) -> PyTree:
    """Return elements of `space` `[..., *shape]` as indices: whole numbers counted from 0, all else as it is."""
    return _shifted(space, elements, -1)


def to_elements(space: Space, indices: PyTree) -> PyTree:
    """Invert `to_indices`."""
    return _shifted(space, indices, 1)


def _shifted(space: Space, tree: PyTree, sign: int) -> PyTree:
    starts = starts_of(space)
    if not any(map(np.any, starts)):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    moved = (_moved(x, sign, np.asarray(start, x.dtype)) for start, x in zip(starts, leaves, strict=True))
    return jax.tree.unflatten(treedef, moved)


def _moved(x: Array, sign: int, start: np.ndarray) -> Array:
    return x + sign * start.reshape((1,) * (x.ndim - start.ndim) + start.shape) if np.any(start) else x


def from_0(spec: EnvSpec) -> EnvSpec:
    """Return `spec` with all whole numbers counted from 0."""
    unshifted = lambda leaf: leaf if isinstance(leaf, Box) else replace(leaf, start=0)
    seen, done = (jax.tree.map(unshifted, space, is_leaf=_is_space) for space in spec[1:3])
    return spec._replace(observation_space=seen, action_space=done)


def require_indices(name: str, space: Space) -> None:
    """Raise `SettingsError` if whole numbers of `space`, of an environment `name` in JAX, start elsewhere than at 0."""
    for leaf, start in zip(jax.tree.leaves(space, is_leaf=_is_space), starts_of(space), strict=True):
        if np.any(start):
            raise SettingsError(
                f"environment {name} has a space {short(leaf)}, but whole numbers of an environment in JAX count "
                "from 0; leave start out, and add it in the environment"
            )

"""Reductions along a short last axis, such as that of a few actions, unrolled.

Plain: `jnp.argmax`, `jnp.sum` and so on. On CUDA each of these is a separate kernel; unrolled, they are elementwise
operations on columns, which XLA fuses with their neighbours. On CPUs it fuses the plain forms as well.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla import shaped_for

SHORT = 8
"""Longest axis that is unrolled."""
WRITTEN_OUT = ("cuda",)
"""Platforms on which it is unrolled."""


def argmax(x: Array) -> Array:
    """Return the index of the first largest entry, `[..., A] -> [...]`."""
    if not _short(x):
        return jnp.argmax(x, axis=-1)
    first, *others = _columns(x)
    place, most = jnp.zeros(first.shape, jnp.int32), first
    for i, column in enumerate(others, 1):
        place, most = jnp.where(column > most, i, place), jnp.maximum(most, column)
    return place


def largest(x: Array) -> Array:
    """Return the largest entry, `[..., A] -> [...]`."""
    return functools.reduce(jnp.maximum, _columns(x)) if _short(x) else jnp.max(x, axis=-1)


def total(x: Array, where: Array | None = None) -> Array:
    """Return the sum of the entries, or of those `where` is true, `[..., A] -> [...]`."""
    if not _short(x):
        return jnp.sum(x, axis=-1, where=where)
    return sum(_columns(x if where is None else jnp.where(where, x, 0)))  # type: ignore[return-value]


def entry(row: Array, index: Array) -> Array:
    """Return `row[..., index]` as a masked sum, which fuses; the gradient of an index would be a scatter."""
    places = jnp.arange(row.shape[-1], dtype=jnp.int32)
    if index.ndim:
        places, index = places.reshape((1,) * index.ndim + (-1,)), index[..., None]
    return total(row, places == index)


def all_true(x: Array) -> Array:
    """Return whether all flags are true, `[..., A] -> [...]`."""
    return functools.reduce(jnp.logical_and, _columns(x)) if _short(x) else x.all(axis=-1)


def log_softmax(x: Array) -> Array:
    """Return the logarithm of the softmax, `[..., A] -> [..., A]`."""
    if not _short(x):
        return jax.nn.log_softmax(x)
    shifted = x - jax.lax.stop_gradient(largest(x))[..., None]
    return shifted - jnp.log(total(jnp.exp(shifted)))[..., None]


def _short(x: Array) -> bool:
    return shaped_for(*WRITTEN_OUT) and 1 <= x.shape[-1] <= SHORT


def _columns(x: Array) -> list[Array]:
    return [x[..., i] for i in range(x.shape[-1])]

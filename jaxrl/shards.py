"""Numbers over all shards of a run, for functions that see only one of them.

A run may be spread over `V` shards, each with environments, a replay and batches of its own, see
`jaxrl.strategies.shards`. What is written for one set of environments stays written for one: it is traced under the
named axis `shards`, and where it adds over environments it adds over that axis as well, by the functions below. Without
the axis, in a run that is not spread, they return what they are given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

import jax
import jax.numpy as jnp

from jaxrl.metrics import Metrics, Stat, columns_of, metrics_of
from jaxrl.trees import Array, Key, PyTree

AXIS = "shards"
_across: ContextVar[str | None] = ContextVar("across", default=None)
"""An axis of devices over which `AXIS`, of the shards of one device, is continued."""


@contextmanager
def across(devices: str | None) -> Iterator[None]:
    """Take the axis `devices` for the outer part of `AXIS`, inside a `with` block; `None` for `AXIS` alone."""
    token = _across.set(devices)
    try:
        yield
    finally:
        _across.reset(token)


def spread() -> bool:
    """Say whether what is being traced is one shard of several."""
    return axis_size(AXIS) is not None


def axis_size(name: str) -> int | None:
    """Return the size of a named axis, or `None` outside of it."""
    try:
        return int(jax.lax.axis_size(name))
    except Exception:  # a NameError, of which JAX's documentation says nothing
        return None


def number() -> Array:
    """Return the number of this shard."""
    place, devices = jax.lax.axis_index(AXIS), _across.get()
    return place if devices is None else jax.lax.axis_index(devices) * jax.lax.axis_size(AXIS) + place


def count() -> int:
    """Return how many shards there are."""
    devices = _across.get()
    return (axis_size(AXIS) or 1) * ((devices and axis_size(devices)) or 1)


def own(key: Key) -> Key:
    """Return the key of this shard; without shards, the same key."""
    return jax.random.fold_in(key, number()) if spread() else key


def total(tree: PyTree) -> PyTree:
    """Add over all shards, in their order: a sum in floating point is then the same wherever the shards are."""
    return _over_shards(jnp.add, tree)


def mean(tree: PyTree) -> PyTree:
    """Return the mean over all shards."""
    if not spread():
        return tree
    return jax.tree.map(lambda x: x / count(), total(tree))


def least(x: Array) -> Array:
    """Return the smallest over all shards, entry by entry."""
    return _over_shards(jnp.minimum, x)


def largest(x: Array) -> Array:
    """Return the largest over all shards, entry by entry."""
    return _over_shards(jnp.maximum, x)


def merged(metrics: Metrics) -> Metrics:
    """Return metrics of all shards: totals are added, measurements count once for each shard."""
    if not spread():
        return metrics
    each = columns_of(metrics)
    columns = Stat(total(each.count), total(each.sum), least(each.min), largest(each.max))
    return metrics_of(columns, metrics)


def _over_shards(combine: Callable[[Array, Array], Array], tree: PyTree) -> PyTree:
    if not spread():
        return tree
    devices = _across.get()

    def one(x: Array) -> Array:
        rows = jax.lax.all_gather(jnp.asarray(x), AXIS)
        if devices is not None:
            rows = jax.lax.all_gather(rows, devices, tiled=True)
        return reduce(combine, [rows[i] for i in range(count())])

    return jax.tree.map(one, tree)

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

from jaxrl.metrics import Metrics, Stat, stack_metrics, unstack_metrics
from jaxrl.trees import Array, Key, PyTree

AXIS = "shards"
_across: ContextVar[str | None] = ContextVar("outer_axis", default=None)
"""An axis of devices over which `AXIS`, of the shards of one device, is continued."""


@contextmanager
def outer_axis(devices: str | None) -> Iterator[None]:
    """Take the axis `devices` for the outer part of `AXIS`, inside a `with` block; `None` for `AXIS` alone."""
    token = _across.set(devices)
    try:
        yield
    finally:
        _across.reset(token)


def is_sharded() -> bool:
    """Say whether what is being traced is one shard of several."""
    return axis_size(AXIS) is not None


def axis_size(name: str) -> int | None:
    """Return the size of a named axis, or `None` outside of it."""
    try:
        return int(jax.lax.axis_size(name))
    except Exception:  # a NameError, of which JAX's documentation says nothing
        return None


def shard_index() -> Array:
    """Return the number of this shard."""
    place, devices = jax.lax.axis_index(AXIS), _across.get()
    return place if devices is None else jax.lax.axis_index(devices) * jax.lax.axis_size(AXIS) + place


def num_shards() -> int:
    """Return how many shards there are."""
    devices = _across.get()
    return (axis_size(AXIS) or 1) * ((devices and axis_size(devices)) or 1)


def shard_key(key: Key) -> Key:
    """Return the key of this shard; without shards, the same key."""
    return jax.random.fold_in(key, shard_index()) if is_sharded() else key


def psum(tree: PyTree) -> PyTree:
    """Add over all shards, in their order: a sum in floating point is then the same wherever the shards are."""
    return _reduce(jnp.add, tree)


def pmean(tree: PyTree) -> PyTree:
    """Return the mean over all shards."""
    if not is_sharded():
        return tree
    return jax.tree.map(lambda x: x / num_shards(), psum(tree))


def pmin(x: Array) -> Array:
    """Return the smallest over all shards, entry by entry."""
    return _reduce(jnp.minimum, x)


def pmax(x: Array) -> Array:
    """Return the largest over all shards, entry by entry."""
    return _reduce(jnp.maximum, x)


def merge_metrics(metrics: Metrics) -> Metrics:
    """Return metrics of all shards: totals are added, measurements count once for each shard."""
    if not is_sharded():
        return metrics
    each = stack_metrics(metrics)
    columns = Stat(psum(each.count), psum(each.sum), pmin(each.min), pmax(each.max))
    return unstack_metrics(columns, metrics)


def _reduce(combine: Callable[[Array, Array], Array], tree: PyTree) -> PyTree:
    if not is_sharded():
        return tree
    devices = _across.get()

    def one(x: Array) -> Array:
        rows = jax.lax.all_gather(jnp.asarray(x), AXIS)
        if devices is not None:
            rows = jax.lax.all_gather(rows, devices, tiled=True)
        return reduce(combine, [rows[i] for i in range(num_shards())])

    return jax.tree.map(one, tree)

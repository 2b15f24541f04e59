"""Reductions over the shards of a run.

A run may consist of `V` shards, each with its own environments, replay and batches, see `jaxrl.strategies.sharded`.
Code written for one shard is traced under the named axis `shards`; where it reduces over environments, it also reduces
over that axis by the functions below. Outside of the axis, in a run without shards, they return their arguments.

Unlike `jax.lax.psum`, they reduce in the order of the shards, so that results have the same bits on any number of
devices.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

import jax
import jax.numpy as jnp

from jaxrl.metrics import Metrics, Stat, stack_metrics, unstack_metrics
from jaxrl.trees import Array, Key, PyTree

AXIS = "shards"
_device_axis: ContextVar[str | None] = ContextVar("device_axis", default=None)
"""Axis of devices outside of `AXIS`, which is then the axis of shards on one device."""


@contextmanager
def outer_axis(devices: str | None) -> Iterator[None]:
    """Extend `AXIS` by the outer axis `devices` inside a `with` block; `None`: `AXIS` alone."""
    token = _device_axis.set(devices)
    try:
        yield
    finally:
        _device_axis.reset(token)


def is_sharded() -> bool:
    """Return whether the code being traced runs under the axis of shards."""
    return axis_size(AXIS) is not None


def axis_size(name: str) -> int | None:
    """Return the size of a named axis, or `None` outside of it."""
    try:
        return int(jax.lax.axis_size(name))
    except Exception:  # a NameError today, but JAX does not document it
        return None


def shard_index() -> Array:
    """Return the index of this shard, int32."""
    index, devices = jax.lax.axis_index(AXIS), _device_axis.get()
    return index if devices is None else jax.lax.axis_index(devices) * jax.lax.axis_size(AXIS) + index


def num_shards() -> int:
    """Return the number of shards."""
    devices = _device_axis.get()
    return (axis_size(AXIS) or 1) * ((devices and axis_size(devices)) or 1)


def shard_key(key: Key) -> Key:
    """Return the key of this shard; without shards, `key` itself."""
    return jax.random.fold_in(key, shard_index()) if is_sharded() else key


def psum(tree: PyTree) -> PyTree:
    """Return the sum over all shards, added in their order."""
    return _reduce(jnp.add, tree)


def pmean(tree: PyTree) -> PyTree:
    """Return the mean over all shards."""
    if not is_sharded():
        return tree
    return jax.tree.map(lambda x: x / num_shards(), psum(tree))


def pmin(x: Array) -> Array:
    """Return the elementwise minimum over all shards."""
    return _reduce(jnp.minimum, x)


def pmax(x: Array) -> Array:
    """Return the elementwise maximum over all shards."""
    return _reduce(jnp.maximum, x)


def merge_metrics(metrics: Metrics) -> Metrics:
    """Merge the metrics of all shards: totals add up, and each shard contributes its measurements."""
    if not is_sharded():
        return metrics
    each = stack_metrics(metrics)
    columns = Stat(psum(each.count), psum(each.sum), pmin(each.min), pmax(each.max))
    return unstack_metrics(columns, metrics)


def step_means(values: Mapping[str, Array], weight: Array | float) -> dict[str, Array]:
    """Return the mean of each of `values`, arrays of one shape, over the steps of all shards whose `weight` is not 0.

    `weight` is 1 or 0, broadcast to their shape: 0 for steps that are not learnt from, such as those of dead agents.
    Means over no steps at all are 0.
    """
    shape = next(iter(values.values())).shape
    counts = jnp.broadcast_to(jnp.asarray(weight) > 0, shape)
    # Select instead of multiplying by the weight: an entry of weight 0 may be NaN.
    sums = {name: jnp.sum(jnp.where(counts, x, 0.0)) for name, x in values.items()}
    # Shards learn from different numbers of steps: their means must not count alike.
    sums, number = psum((sums, jnp.sum(counts, dtype=jnp.float32)))
    return {name: x / jnp.maximum(number, 1.0) for name, x in sums.items()}


def _reduce(combine: Callable[[Array, Array], Array], tree: PyTree) -> PyTree:
    if not is_sharded():
        return tree
    devices = _device_axis.get()

    def one(x: Array) -> Array:
        rows = jax.lax.all_gather(jnp.asarray(x), AXIS)
        if devices is not None:
            rows = jax.lax.all_gather(rows, devices, tiled=True)
        return reduce(combine, [rows[i] for i in range(num_shards())])

    return jax.tree.map(one, tree)

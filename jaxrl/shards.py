"""Numbers over all shards of a run, for functions that see only one of them.

A run may be spread over `V` shards, each with environments, a replay and batches of its own, see
`jaxrl.strategies.shards`. What is written for one set of environments stays written for one: it is traced under the
named axis `shards`, and where it adds over environments it adds over that axis as well, by the functions below. Without
the axis, in a run that is not spread, they return what they are given.
"""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp

from jaxrl.metrics import Metrics, Stat, columns_of, metrics_of
from jaxrl.trees import Array, Key, PyTree

AXIS = "shards"


def spread() -> bool:
    """Say whether what is being traced is one shard of several."""
    try:
        jax.lax.axis_size(AXIS)
    except NameError:
        return False
    return True


def own(key: Key) -> Key:
    """Return the key of this shard; without shards, the same key."""
    return jax.random.fold_in(key, jax.lax.axis_index(AXIS)) if spread() else key


def total(tree: PyTree) -> PyTree:
    """Add over all shards, in their order: a sum in floating point is then the same wherever the shards are."""
    return _over_shards(jnp.add, tree)


def mean(tree: PyTree) -> PyTree:
    """Return the mean over all shards."""
    if not spread():
        return tree
    return jax.tree.map(lambda x: x / jax.lax.axis_size(AXIS), total(tree))


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
    shards = range(jax.lax.axis_size(AXIS))

    def one(x: Array) -> Array:
        rows = jax.lax.all_gather(jnp.asarray(x), AXIS)
        return reduce(combine, [rows[i] for i in shards])

    return jax.tree.map(one, tree)

"""The nouns that every part of jaxrl shares.

Shape legend, used in all docstrings: `N` environments, `T` time, `B` minibatch, `P` population, `D` devices.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.spaces import (
    Array,
    Box,
    Discrete,
    EnvSpec,
    Key,
    MultiDiscrete,
    PyTree,
    Space,
    as_shape,
    below,
    box_bounds,
    channels_last,
    sample_space,
    space_from_plain,
    space_of,
    space_struct,
    space_to_plain,
    space_zeros,
    spec_from_plain,
    spec_to_plain,
)

__all__ = [
    "Array",
    "Batch",
    "Box",
    "Discrete",
    "EnvSpec",
    "Key",
    "Metrics",
    "MultiDiscrete",
    "PyTree",
    "Remembered",
    "Rollout",
    "Space",
    "Stat",
    "Step",
    "Total",
    "Transition",
    "all_finite",
    "as_shape",
    "as_stat",
    "below",
    "box_bounds",
    "channels_last",
    "column",
    "columns_of",
    "merge_stats",
    "metrics_of",
    "reduce_metrics",
    "row_struct",
    "sample_space",
    "space_from_plain",
    "space_of",
    "space_struct",
    "space_to_plain",
    "space_zeros",
    "spec_from_plain",
    "spec_to_plain",
    "stat",
    "stats",
    "total",
    "totals",
    "tree_bytes",
    "tree_where",
]

# --- data -----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What one step of `N` environments yields. Every leaf begins with the axis `[N]`."""

    action: PyTree
    extras: PyTree
    """Whatever the agent's `act` returned beside the action, such as log-probabilities and values."""
    reward: Array
    terminated: Array
    """The episode reached an end of its own."""
    truncated: Array
    """The episode was cut from outside, by a time limit say; never true together with `terminated`."""
    final_obs: PyTree
    """The true successor, before any reset."""
    obs: PyTree
    """What the policy sees next: `final_obs`, or the first observation of a new episode."""
    info: Mapping[str, Array] = {}
    valid: Array | bool = True
    """False where the environment gave a non-finite observation or reward: nothing may be learnt from that step."""
    obs_valid: Array | tuple[()] = ()
    """False where a first observation was not finite: `obs` is zeros in its place, and belongs in no statistics. `()`
    where all are."""


class Transition(NamedTuple):
    """What is learnt from. Past the processor nobody sees `done`."""

    obs: PyTree
    action: PyTree
    reward: Array
    """The reward, already summed and discounted over the `n` steps of an n-step processor."""
    discount: Array
    """`gamma^k` to the successor, and 0 only where the episode TERMINATED."""
    next_obs: PyTree
    extras: PyTree = ()
    weight: Array | float = 1.0
    """1, or 0 for a row from which nothing may be learnt."""


class Remembered(NamedTuple):
    """What a recurrent agent sees: an observation, and what it remembers of the episode so far."""

    obs: PyTree
    memory: PyTree


class Rollout(NamedTuple):
    """`T` steps of `N` environments, in order."""

    items: Transition
    """Over one step each, leaves `[T, N, ...]`."""
    last: Array
    """`[T, N]` bool: no later step may be counted towards this one, for the episode ended here, was cut, or goes on
    with a step from which nothing may be learnt. What is still to come is worth `discount` times that of `next_obs`."""


class Batch(NamedTuple):
    """`B` sampled items."""

    items: PyTree
    """The items, each leaf `[B, ...]`; for replay a `Transition`."""
    index: Array  # type: ignore[assignment]
    """`[B]` int32, where the items lie in the buffer."""
    weight: Array
    """`[B]`, the weight of each item in the loss (importance weights of prioritised replay; 1 otherwise)."""


# --- metrics --------------------------------------------------------------------------------------------------


class Stat(NamedTuple):
    """Count, sum, smallest and largest of a measured number; all scalars."""

    count: Array  # type: ignore[assignment]
    sum: Array
    min: Array
    max: Array


class Total(NamedTuple):
    """A number of events, to be added up."""

    count: Array  # type: ignore[assignment]


Metrics = Mapping[str, Array | Stat | Total]
"""What a training step reports: a plain scalar counts as one measurement."""


def stat(values: Array, where: Array | bool = True) -> Stat:
    """Summarise the entries of `values` at which `where` holds (both of one shape)."""
    values = jnp.asarray(values, jnp.float32)
    where = jnp.broadcast_to(where, values.shape)
    return Stat(
        count=jnp.sum(where, dtype=jnp.int32),
        sum=jnp.sum(jnp.where(where, values, 0.0)),
        min=jnp.min(jnp.where(where, values, math.inf)),
        max=jnp.max(jnp.where(where, values, -math.inf)),
    )


def stats(values: Mapping[str, Array], where: Array | bool = True) -> dict[str, Stat]:
    """Summarise several arrays of one shape as `stat` does each: together they take as few kernels as one."""
    columns = jax.vmap(functools.partial(stat, where=where))(
        jnp.stack([jnp.asarray(x, jnp.float32) for x in values.values()])
    )
    return {name: jax.tree.map(lambda x, i=i: x[i], columns) for i, name in enumerate(values)}


def totals(events: Mapping[str, Array]) -> dict[str, Total]:
    """Count the true entries of several arrays of one shape, together."""
    counts = jax.vmap(total)(jnp.stack(list(events.values()))).count
    return {name: Total(counts[i]) for i, name in enumerate(events)}


def total(events: Array) -> Total:
    """Count the entries of `events` that are true."""
    return Total(jnp.sum(events, dtype=jnp.int32))


def reduce_metrics(stacked: Metrics) -> Metrics:
    """Reduce metrics stacked along a leading axis, as `lax.scan` returns them, to one of each."""

    def reduce(metric: Any) -> Stat | Total:
        if isinstance(metric, Total):
            return Total(metric.count.sum(dtype=jnp.int32))
        if isinstance(metric, Stat):
            return Stat(metric.count.sum(dtype=jnp.int32), metric.sum.sum(), metric.min.min(), metric.max.max())
        return stat(metric)

    return {name: reduce(metric) for name, metric in stacked.items()}


def column(scalars: Sequence[Array]) -> Array:
    """Stack scalars. As a chain of selects it is one kernel with what follows; a concatenation takes one a scalar."""
    place = jnp.arange(len(scalars))
    stacked = jnp.broadcast_to(scalars[0], place.shape)
    for i, scalar in enumerate(scalars[1:], 1):
        stacked = jnp.where(place == i, scalar, stacked)
    return stacked


def as_stat(metric: Array | Stat | Total) -> Stat:
    """Return any metric as a `Stat`, of which a `Total` fills the count alone."""
    if isinstance(metric, Stat):
        return metric
    if isinstance(metric, Total):
        return Stat(metric.count, jnp.float32(0), jnp.float32(math.inf), jnp.float32(-math.inf))
    return stat(metric)


def columns_of(metrics: Metrics) -> Stat:
    """Return metrics as one `Stat` whose fields are `[M]`, in the order of their sorted names."""
    each = [as_stat(metric) for _, metric in sorted(metrics.items())]
    return Stat(*(column(scalars) for scalars in zip(*each, strict=True)))


def metrics_of(columns: Stat, like: Metrics) -> Metrics:
    """Take `columns_of` back, for metrics of the names and kinds of `like`."""
    made: dict[str, Stat | Total] = {}
    for i, (name, metric) in enumerate(sorted(like.items())):
        one = jax.tree.map(lambda x, i=i: x[i], columns)
        made[name] = Total(one.count) if isinstance(metric, Total) else one
    return made


def merge_stats(a: Stat, b: Stat) -> Stat:
    """Summarise what two summaries do."""
    return Stat(a.count + b.count, a.sum + b.sum, jnp.minimum(a.min, b.min), jnp.maximum(a.max, b.max))


# --- pytrees --------------------------------------------------------------------------------------------------


def tree_where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Choose `new` or `old` leaf by leaf; `condition` is a scalar, or `[N]` against leaves `[N, ...]`."""

    def choose(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(choose, new, old)


def all_finite(tree: PyTree) -> Array:
    """Say whether every floating-point entry of `tree` is finite; a scalar bool.

    Leaves of one shape are looked at in one pass: parameters, their moments and a target network cost one reduction,
    which on a CPU is the dear part.
    """
    finite: dict[tuple[int, ...], Array] = {}
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            shape = jnp.shape(leaf)
            finite[shape] = jnp.isfinite(leaf) & finite[shape] if shape in finite else jnp.isfinite(leaf)
    return functools.reduce(jnp.logical_and, (jnp.all(x) for x in finite.values()), jnp.bool_(True))


def row_struct(tree: PyTree) -> PyTree:
    """Return the shapes of one row of leaves `[rows, ...]`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all leaves; arrays, `ShapeDtypeStruct`s and keys alike."""

    def leaf_bytes(leaf: Any) -> int:
        itemsize = 16 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).itemsize
        return math.prod(leaf.shape) * itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))

"""Metrics: measurements and event counts, with summaries that can be merged."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla.columns import column, of_each


class Stat(NamedTuple):
    """Count, sum, minimum and maximum of a measurement; all scalars."""

    count: Array  # type: ignore[assignment]
    sum: Array
    min: Array
    max: Array


class Total(NamedTuple):
    """A number of events; totals add up."""

    count: Array  # type: ignore[assignment]


Metrics = Mapping[str, Array | Stat | Total]
"""Metrics that a training step reports, by name; a plain scalar counts as one measurement."""


def stat(values: Array, where: Array | bool = True) -> Stat:
    """Summarise the entries of `values` where `where`, of the same shape, is true."""
    values = jnp.asarray(values, jnp.float32)
    where = jnp.broadcast_to(where, values.shape)
    return Stat(
        count=jnp.sum(where, dtype=jnp.int32),
        sum=jnp.sum(jnp.where(where, values, 0.0)),
        min=jnp.min(jnp.where(where, values, math.inf)),
        max=jnp.max(jnp.where(where, values, -math.inf)),
    )


def stats(values: Mapping[str, Array], where: Array | bool = True) -> dict[str, Stat]:
    """Summarise several arrays of one shape, as `stat` does each; together they take as few kernels as one."""
    columns = of_each(functools.partial(stat, where=where), [jnp.asarray(x, jnp.float32) for x in values.values()])
    return {name: jax.tree.map(lambda x, i=i: x[i], columns) for i, name in enumerate(values)}


def totals(events: Mapping[str, Array]) -> dict[str, Total]:
    """Count the true entries of each of several arrays of one shape, all in one reduction."""
    counts = jax.vmap(total)(jnp.stack(list(events.values()))).count
    return {name: Total(counts[i]) for i, name in enumerate(events)}


def total(events: Array) -> Total:
    """Count the true entries of `events`."""
    return Total(jnp.sum(events, dtype=jnp.int32))


def as_stat(metric: Array | Stat | Total) -> Stat:
    """Convert any metric to a `Stat`; a `Total` fills only its count."""
    if isinstance(metric, Stat):
        return metric
    if isinstance(metric, Total):
        return Stat(metric.count, jnp.float32(0), jnp.float32(math.inf), jnp.float32(-math.inf))
    return stat(metric)


def stack_metrics(metrics: Metrics) -> Stat:
    """Stack metrics into one `Stat` with fields `[M]`, sorted by name."""
    each = [as_stat(metric) for _, metric in sorted(metrics.items())]
    return Stat(*(column(scalars) for scalars in zip(*each, strict=True)))


def unstack_metrics(columns: Stat, like: Metrics) -> Metrics:
    """Invert `stack_metrics`, for metrics with the names and kinds of `like`."""
    made: dict[str, Stat | Total] = {}
    for i, (name, metric) in enumerate(sorted(like.items())):
        one = jax.tree.map(lambda x, i=i: x[i], columns)
        made[name] = Total(one.count) if isinstance(metric, Total) else one
    return made


def merge_stats(a: Stat, b: Stat) -> Stat:
    """Merge two summaries."""
    return Stat(a.count + b.count, a.sum + b.sum, jnp.minimum(a.min, b.min), jnp.maximum(a.max, b.max))

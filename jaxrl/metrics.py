"""Metrics: mergeable summaries of measurements, and event counts."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla.reductions import stack_scalars, stack_summaries


class Stat(NamedTuple):
    """Count, sum, minimum and maximum of a measurement; all scalars."""

    count: Array  # type: ignore[assignment]
    sum: Array
    min: Array
    max: Array


class Total(NamedTuple):
    """Number of events; merged by addition."""

    count: Array  # type: ignore[assignment]


Metrics = Mapping[str, Array | Stat | Total]
"""Metrics of a training step by name; a plain scalar is one measurement."""


def stat(values: Array, where: Array | bool = True) -> Stat:
    """Summarise the entries of `values` where `where`, broadcast to its shape, is true."""
    values = jnp.asarray(values, jnp.float32)
    where = jnp.broadcast_to(where, values.shape)
    return Stat(
        count=jnp.sum(where, dtype=jnp.int32),
        sum=jnp.sum(jnp.where(where, values, 0.0)),
        min=jnp.min(jnp.where(where, values, math.inf)),
        max=jnp.max(jnp.where(where, values, -math.inf)),
    )


def stats(values: Mapping[str, Array], where: Array | bool = True) -> dict[str, Stat]:
    """Apply `stat` to several arrays of one shape, with as few kernels as for one."""
    columns = stack_summaries(
        functools.partial(stat, where=where), [jnp.asarray(x, jnp.float32) for x in values.values()]
    )
    return {name: jax.tree.map(lambda x, i=i: x[i], columns) for i, name in enumerate(values)}


def totals(events: Mapping[str, Array]) -> dict[str, Total]:
    """Apply `total` to several arrays of one shape, in one reduction."""
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
    """Stack metrics, sorted by name, into one `Stat` with fields `[M]`: four arrays instead of four per metric."""
    each = [as_stat(metric) for _, metric in sorted(metrics.items())]
    return Stat(*(stack_scalars(scalars) for scalars in zip(*each, strict=True)))


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

"""Metrics of several steps, as a scan stacks them, reduced to one of each."""

from typing import Any

import jax.numpy as jnp

from jaxrl.metrics import Metrics, Stat, Total, stat


def reduce_metrics(stacked: Metrics) -> Metrics:
    """Reduce metrics stacked along a leading axis to one of each."""

    def reduce(metric: Any) -> Stat | Total:
        if isinstance(metric, Total):
            return Total(metric.count.sum(dtype=jnp.int32))
        if isinstance(metric, Stat):
            return Stat(metric.count.sum(dtype=jnp.int32), metric.sum.sum(), metric.min.min(), metric.max.max())
        return stat(metric)

    return {name: reduce(metric) for name, metric in stacked.items()}

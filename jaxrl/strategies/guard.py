"""An update that cannot poison the agent."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl.agents.base import Agent
from jaxrl.types import Array, Batch, Metrics, PyTree, Stat, Total, all_finite, stat, tree_where


class Health(NamedTuple):
    """How updates have been going."""

    skipped_in_a_row: Array
    """Int32 scalar, updates skipped since the last one that was made."""


def healthy() -> Health:
    """Return the health of a run that has skipped nothing."""
    return Health(jnp.int32(0))


def guarded_update(
    agent: Agent, state: PyTree, health: Health, batch: Batch, noise: PyTree, opt_step: Array
) -> tuple[PyTree, Health, Metrics, Array]:
    """Make one update, or none where its loss, gradient or result is not finite.

    A skipped update leaves the agent's whole state bitwise as it was, is counted in `skipped_updates`, and adds
    nothing to the other metrics. Returns the agent's state, the health, the metrics and the priorities `[B]`.
    """
    new, metrics, priorities = agent.update(state, batch, noise, opt_step)
    # A `Stat` without measurements has infinite bounds; its sum tells whether what was measured is finite.
    measured = {name: metric.sum if isinstance(metric, Stat) else metric for name, metric in metrics.items()}
    ok = all_finite((new, measured))
    health = Health(jnp.where(ok, 0, health.skipped_in_a_row + 1))
    kept = {name: _mask(metric, ok) for name, metric in metrics.items()}
    priorities = jnp.where(ok, priorities, 0.0)
    return tree_where(ok, new, state), health, {**kept, "skipped_updates": Total(1 - ok.astype(jnp.int32))}, priorities


def _mask(metric: Array | Stat | Total, ok: Array) -> Stat | Total:
    if isinstance(metric, Total):
        return Total(jnp.where(ok, metric.count, 0))
    if isinstance(metric, Stat):
        return tree_where(ok, metric, stat(jnp.zeros(()), False))
    return stat(metric, ok)

"""An update that cannot poison the agent, and the record of how often one was tried."""

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.agents.base import Agent
from jaxrl.metrics import Metrics, Stat, Total, stat
from jaxrl.trees import Array, Key, PyTree, tree_where
from jaxrl.types import Batch, Transition
from jaxrl.xla.finite import find_non_finite, select, stays_finite
from jaxrl.xla.stacking import stack_summaries

RETRY_STREAM = 2**32 - 1
"""Folded into the key of a run's stream for another try: no iteration has this number."""
PARAMETERS = "parameters"
"""Named when every metric of an update was finite, but not what it made of the agent."""


class Health(NamedTuple):
    """How updates have been going; int32 and uint32 scalars."""

    skipped_in_a_row: Array
    """Updates skipped since the last one that was made."""
    bad_name: Array
    """CRC-32 of the name of the first metric that was not finite in the latest row: a name cannot live on a device."""
    most_in_a_row: Array
    """The most that were ever skipped in a row: what happens between two looks is not missed."""
    most_since: Array
    """Optimisation step of the first of those."""


def init_health() -> Health:
    """Return the health of a run that has skipped nothing."""
    return Health(jnp.int32(0), jnp.uint32(0), jnp.int32(0), jnp.uint32(0))


def get_health(state: Any) -> Health:
    """Return the health in a training state, its field `health`."""
    health: Health = state.health
    return health


def reseed(state: Any, number: int) -> Any:
    """Return a good training state with its failure counters reset, on the random stream of try `number`."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, RETRY_STREAM), number)
    return state._replace(key=key, health=init_health())


def find_metric_name(code: int, names: Iterable[str]) -> str:
    """Return which of `names` (or `PARAMETERS`) has the CRC-32 `code`."""
    return next((name for name in (PARAMETERS, *names) if zlib.crc32(name.encode()) == code), "unknown")


def guarded_update(
    agent: Agent, state: PyTree, health: Health, batch: Batch, key: Key, opt_step: Array
) -> tuple[PyTree, Health, Metrics, Array]:
    """Make one update, or none where its loss, gradient or result is not finite.

    Of the agent's state an entry counts that was finite before: one that keeps bounds may begin them at infinity.

    A skipped update leaves the agent's whole state bitwise as it was, is counted in `skipped_updates`, and adds
    nothing to the other metrics. Returns the agent's state, the health, the metrics, and the priorities `[B]`: after a
    skipped update -1, not known.
    """
    new, metrics, priorities = agent.update(state, batch, key, opt_step)
    metrics = shards.merge_metrics(metrics)
    # A `Stat` without measurements has infinite bounds; its sum tells whether what was measured is finite.
    numbers = {name: m.sum if isinstance(m, Stat) else m for name, m in metrics.items() if not isinstance(m, Total)}
    health, ok = _update_health(
        health, {**numbers, PARAMETERS: jnp.where(stays_finite(new, state), 0.0, jnp.nan)}, opt_step
    )
    kept = {name: _mask(metric, ok) for name, metric in metrics.items()}
    counted = {**kept, "skipped_updates": Total(1 - ok.astype(jnp.int32))}
    return select(ok, new, state), health, counted, jnp.where(ok, priorities, -1.0)


def return_bound_metrics(items: Transition) -> Metrics:
    """Tell the largest size of a reward and the largest discount of transitions; rows of weight 0 do not count.

    From them follows how large a return can be.
    """
    counts = jnp.asarray(items.weight) > 0
    sizes = [jnp.where(counts, size, 0.0).ravel() for size in (jnp.abs(items.reward), items.discount)]
    largest = shards.pmax(stack_summaries(jnp.max, sizes))
    return {"largest_reward": largest[0], "largest_discount": largest[1]}


def _update_health(health: Health, numbers: dict[str, Array], opt_step: Array) -> tuple[Health, Array]:
    """Take note of an update that told these numbers; say whether all are finite."""
    codes = jnp.asarray([zlib.crc32(name.encode()) for name in numbers], jnp.uint32)
    ok, first = find_non_finite(list(numbers.values()), codes)
    skipped = jnp.where(ok, 0, health.skipped_in_a_row + 1)
    most = jnp.maximum(health.most_in_a_row, skipped)
    since = jnp.asarray(opt_step, jnp.uint32) + 1 - skipped.astype(jnp.uint32)
    return Health(
        skipped_in_a_row=skipped,
        bad_name=jnp.where(skipped == 1, first, health.bad_name),
        most_in_a_row=most,
        most_since=jnp.where(skipped > health.most_in_a_row, since, health.most_since),
    ), ok


def _mask(metric: Array | Stat | Total, ok: Array) -> Stat | Total:
    if isinstance(metric, Total):
        return Total(jnp.where(ok, metric.count, 0))
    if isinstance(metric, Stat):
        return tree_where(ok, metric, stat(jnp.float32(0), False))
    return stat(metric, ok)

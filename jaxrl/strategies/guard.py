"""Guarded updates: an update with a non-finite loss, gradient or result is skipped and counted."""

import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import shards, streams
from jaxrl.agents.base import Agent
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics, Stat, Total, stat
from jaxrl.trees import Array, Key, PyTree, require_same, tree_where
from jaxrl.types import Batch, Transition
from jaxrl.xla import reductions
from jaxrl.xla.in_place import attempt

PARAMETERS = "parameters"
"""Reported when the metrics are finite but the new agent state is not."""


class Health(NamedTuple):
    """Counters of skipped updates; int32 and uint32 scalars."""

    skipped_in_a_row: Array
    """Updates skipped since the last accepted one."""
    bad_name: Array
    """CRC-32 of the name of the first non-finite metric in the latest series; a device cannot hold the name itself."""
    most_in_a_row: Array
    """Longest series of skipped updates so far, so that the host, which reads it only occasionally, misses none."""
    most_since: Array
    """Optimisation step at which that series began."""


def init_health() -> Health:
    """Return counters for a run without skipped updates."""
    return Health(jnp.int32(0), jnp.uint32(0), jnp.int32(0), jnp.uint32(0))


def get_health(state: Any) -> Health:
    """Return the field `health` of a training state."""
    return state.health


def reseed(state: Any, number: int) -> Any:
    """Return `state` with its counters reset, on the random stream of retry `number`."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, streams.RETRY), number)
    return state._replace(key=key, health=init_health())


def find_metric_name(code: int, names: Iterable[str]) -> str:
    """Return the one of `names`, or `PARAMETERS`, whose CRC-32 is `code`."""
    return next((name for name in (PARAMETERS, *names) if zlib.crc32(name.encode()) == code), "unknown")


def guarded_update(
    agent: Agent, state: PyTree, health: Health, batch: Batch, key: Key, opt_step: Array
) -> tuple[PyTree, Health, Metrics, Array]:
    """Update the agent; skip the update if its loss, gradient or result is not finite.

    Entries of the state that were infinite before are not tested, since bounds may start at infinity. A skipped update
    leaves the agent's state bitwise unchanged, counts in `skipped_updates` and adds nothing to the other metrics.

    Returns:
      The agent's state, the health, the metrics, and priorities `[B]`, which are -1 (unknown) after a skipped update.
    """
    # `accept(ok)` returns the new state or the old one. With large states on CPUs, it computes the last part of the
    # update a second time, in place of the old state; `new` is then only tested, and never written.
    (new, metrics, priorities), accept = attempt(partial(_update, agent), state, batch, key, opt_step)
    metrics = shards.merge_metrics(metrics)
    # A `Stat` without measurements has infinite bounds, so only its sum is tested. Counts are always finite.
    numbers = {name: m.sum if isinstance(m, Stat) else m for name, m in metrics.items() if not isinstance(m, Total)}
    # The parameters come last, so that a non-finite metric, such as the loss, is reported instead of them.
    health, ok = _update_health(
        health, {**numbers, PARAMETERS: jnp.where(reductions.stays_finite(new, state), 0.0, jnp.nan)}, opt_step
    )
    # The new state is selected as a whole: a partial update would leave parameters and moments inconsistent.
    kept = {name: mask(metric, ok) for name, metric in metrics.items()}
    counted = {**kept, "skipped_updates": Total(1 - ok.astype(jnp.int32))}
    return accept(ok), health, counted, jnp.where(ok, priorities, -1.0)


def _update(agent: Agent, state: PyTree, batch: Batch, key: Key, opt_step: Array) -> tuple[PyTree, Metrics, Array]:
    """Call the agent's update; raise `SettingsError` unless it returns what `UpdateFn` says."""
    made, name = agent.update(state, batch, key, opt_step), f"update of {agent.name}"
    if not isinstance(made, tuple) or len(made) != 3:
        found = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise SettingsError(f"{name} returned {found}; expected three: state, metrics, priorities")
    new, metrics, _ = made
    if not isinstance(metrics, Mapping):
        raise SettingsError(f"{name} returned metrics of {type(metrics).__name__}; expected a dict of scalars by name")
    require_same(f"the state that {name} returned", _structs(new), "the state before it", _structs(state))
    return made


def check_priorities(agent: Agent, priorities: Array, batch: Batch) -> None:
    """Raise `SettingsError` unless there is a priority for each item of `batch`; rollouts have none."""
    shape, expected = jnp.shape(priorities), jnp.shape(batch.weight)[:1]
    if shape != expected:
        raise SettingsError(
            f"update of {agent.name} returned priorities of shape {list(shape)}; expected one for each item of the "
            f"batch, {list(expected)}, as its absolute error"
        )


def _structs(tree: PyTree) -> PyTree:
    """Return the shapes and dtypes of a tree, of which leaves may be plain numbers."""
    return jax.eval_shape(lambda tree: tree, tree)


def return_bound_metrics(items: Transition) -> Metrics:
    """Return the largest absolute reward and the largest discount, which bound the returns; skip rows of weight 0."""
    # Rows of weight 0, such as those of invalid steps, may hold arbitrary numbers.
    counts = jnp.asarray(items.weight) > 0
    sizes = [jnp.where(counts, size, 0.0).ravel() for size in (jnp.abs(items.reward), items.discount)]
    largest = shards.pmax(reductions.stack_summaries(jnp.max, sizes))
    return {"largest_reward": largest[0], "largest_discount": largest[1]}


def _update_health(health: Health, numbers: dict[str, Array], opt_step: Array) -> tuple[Health, Array]:
    """Update the counters; return also whether all `numbers` are finite."""
    codes = jnp.asarray([zlib.crc32(name.encode()) for name in numbers], jnp.uint32)
    ok, first = reductions.find_non_finite(list(numbers.values()), codes)
    # Names are compared as codes: the program returns the code of the first bad metric, the host looks up its name.
    skipped = jnp.where(ok, 0, health.skipped_in_a_row + 1)
    most = jnp.maximum(health.most_in_a_row, skipped)
    # The series began `skipped - 1` steps before this one.
    since = jnp.asarray(opt_step, jnp.uint32) + 1 - skipped.astype(jnp.uint32)
    return Health(
        skipped_in_a_row=skipped,
        bad_name=jnp.where(skipped == 1, first, health.bad_name),
        most_in_a_row=most,
        most_since=jnp.where(skipped > health.most_in_a_row, since, health.most_since),
    ), ok


def mask(metric: Array | Stat | Total, ok: Array) -> Stat | Total:
    """Return the metric of an update, without any measurement unless `ok`."""
    if isinstance(metric, Total):
        return Total(jnp.where(ok, metric.count, 0))
    if isinstance(metric, Stat):
        return tree_where(ok, metric, stat(jnp.float32(0), False))
    return stat(metric, ok)

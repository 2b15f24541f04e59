"""When updates stop being finite: whether a state is past hope, what to say of it, and how to try again.

A state says so in its field `health`, as `strategies.guard` keeps it; a strategy without one never diverges here.
"""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from jaxrl.strategies.guard import Health, healthy, name_of
from jaxrl.types import PyTree

RETRY_STREAM = 2**32 - 1
"""Folded into the key of a run's stream for another try: no iteration has this number."""


def in_good_health(state: PyTree) -> bool:
    """Say whether the last update was made, not skipped."""
    health = _health(state)
    return health is None or not np.any(health.skipped_in_a_row)


def diverged(state: PyTree, limit: int) -> bool:
    """Say whether `limit` updates in a row were skipped at any time so far; a limit of 0 is none."""
    health = _health(state)
    return bool(limit and health is not None and np.any(health.most_in_a_row >= limit))


def explain(state: PyTree, metrics: Iterable[str]) -> str:
    """Say how many updates were skipped, from which on, and which of `metrics` was the first that was not finite."""
    health = _health(state)
    assert health is not None
    name = name_of(int(np.max(health.bad_name)), metrics)
    return (
        f"{np.max(health.most_in_a_row)} updates in a row were skipped, "
        f"the first at optimisation step {np.min(health.most_since)}, where {name} was not finite"
    )


def another_try(state: PyTree, number: int) -> PyTree:
    """Return a good `state` with a clean bill of health, and with the stream of randomness of try `number`."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, RETRY_STREAM), number)
    fields = {"key": key, "health": healthy()}
    return state._replace(**fields) if hasattr(state, "_replace") else dataclasses.replace(state, **fields)


def _health(state: PyTree) -> Health | None:
    health = getattr(state, "health", None)
    return None if health is None else jax.device_get(health)

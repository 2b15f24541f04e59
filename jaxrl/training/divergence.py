"""When updates stop being finite: whether a state is past hope, what to say of it, and how to try again.

A state says so in its field `health`, as `strategies.guard` keeps it; a strategy without one never diverges here. Nor
does a run succeed in which the environments gave no finite step.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.strategies.guard import Health, healthy, name_of
from jaxrl.trees import PyTree

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


def skips_left(state: PyTree, limit: int) -> int:
    """Return how many more updates must at least be skipped until `limit` in a row were; 0: they were, at any time."""
    health = _health(state)
    if health is None:
        return limit
    return 0 if np.any(health.most_in_a_row >= limit) else limit - int(np.max(health.skipped_in_a_row))


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


class Validity(NamedTuple):
    """How many environment steps the rows of a run tell of, and how many of them were not valid; of this process."""

    steps: int = 0
    invalid: int = 0
    warned: bool = False

    @property
    def verdict(self) -> str | None:
        """What to say of a run none of whose steps was valid."""
        if not 0 < self.steps <= self.invalid:
            return None
        return (
            f"none of {self.steps} environment steps gave a finite observation and reward, so that nothing was learnt; "
            "look at what the environment's reset and step return, with jaxrl.check_env"
        )


def look(validity: Validity, row: Mapping[str, Any], steps: int) -> tuple[Validity, str | None]:
    """Take in the row of an interval of `steps` environment steps.

    Return also a warning if none of them was valid, the first time that this is so.
    """
    invalid = row.get("invalid_steps") or 0
    none = 0 < steps <= invalid
    seen = Validity(validity.steps + steps, validity.invalid + invalid, validity.warned or none)
    if validity.warned or not none:
        return seen, None
    return seen, f"none of the {steps} environment steps since the last row was finite: nothing was learnt from them"


def _health(state: PyTree) -> Health | None:
    health = getattr(state, "health", None)
    return None if health is None else jax.device_get(health)

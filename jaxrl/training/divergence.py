"""When updates stop being finite: whether training has diverged, and what to say of it.

A strategy's `health` says how its updates go, as `strategies.guard` keeps it; one without never diverges here. Nor does
a run succeed in which the environments gave no finite step.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.strategies.guard import Health, find_metric_name


def in_good_health(health: Health | None) -> bool:
    """Say whether the last update was made, not skipped."""
    return health is None or not np.any(health.skipped_in_a_row)


def diverged(health: Health | None, limit: int) -> bool:
    """Say whether `limit` updates in a row were skipped at any time so far; a limit of 0 is none."""
    return bool(limit and health is not None and np.any(health.most_in_a_row >= limit))


def skips_left(health: Health, limit: int) -> int:
    """Return how many more updates must at least be skipped until `limit` in a row were; 0: they were, at any time."""
    return 0 if diverged(health, limit) else limit - int(np.max(health.skipped_in_a_row))


def explain(health: Health, metrics: Iterable[str]) -> str:
    """Say how many updates were skipped, from which on, and which of `metrics` was the first that was not finite."""
    name = find_metric_name(int(np.max(health.bad_name)), metrics)
    return (
        f"{np.max(health.most_in_a_row)} updates in a row were skipped, "
        f"the first at optimisation step {np.min(health.most_since)}, where {name} was not finite"
    )


class Validity(NamedTuple):
    """How many environment steps the rows of a run are on, and how many of them were not valid; of this process."""

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

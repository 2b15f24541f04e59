"""Detection of divergence from non-finite updates, and its messages.

The health counters are those of `strategies.guard`; a strategy without them never counts as diverged. A run without a
single finite environment step fails, too.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.strategies.guard import Health, find_metric_name


def in_good_health(health: Health | None) -> bool:
    """Return whether the last update was applied, not skipped."""
    return health is None or not np.any(health.skipped_in_a_row)


def has_diverged(health: Health | None, limit: int) -> bool:
    """Return whether `limit` updates in a row were ever skipped; a limit of 0 is none."""
    return bool(limit and health is not None and np.any(health.most_in_a_row >= limit))


def skips_left(health: Health, limit: int) -> int:
    """Return how many more updates must be skipped to reach `limit` in a row; 0 if it was ever reached."""
    return 0 if has_diverged(health, limit) else limit - int(np.max(health.skipped_in_a_row))


def explain(health: Health, metrics: Iterable[str]) -> str:
    """Return a text with the number of skipped updates, the first of them, and the first non-finite of `metrics`."""
    name = find_metric_name(int(np.max(health.bad_name)), metrics)
    return (
        f"{np.max(health.most_in_a_row)} updates in a row were skipped, "
        f"the first at optimisation step {np.min(health.most_since)}, where {name} was not finite"
    )


class Validity(NamedTuple):
    """Counts of environment steps in the rows of this process, and of invalid ones among them."""

    steps: int = 0
    invalid: int = 0
    warned: bool = False

    @property
    def verdict(self) -> str | None:
        """Error message if none of the steps was valid, else `None`."""
        if not 0 < self.steps <= self.invalid:
            return None
        return (
            f"none of {self.steps} environment steps gave a finite observation and reward, so that nothing was learnt; "
            "look at what the environment's reset and step return, with jaxrl.check_env"
        )


def look(validity: Validity, row: Mapping[str, Any], steps: int) -> tuple[Validity, str | None]:
    """Add the row of an interval of `steps` environment steps; return also a warning if all were invalid, once."""
    invalid = row.get("invalid_steps") or 0
    none = 0 < steps <= invalid
    seen = Validity(validity.steps + steps, validity.invalid + invalid, validity.warned or none)
    if validity.warned or not none:
        return seen, None
    return seen, f"none of the {steps} environment steps since the last row was finite: nothing was learnt from them"

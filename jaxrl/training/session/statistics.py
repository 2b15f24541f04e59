"""Running statistics of a stream of numbers, such as returns: small, exact, and robust to NaN."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from jaxrl.errors import SettingsError, check_count, suggest


@dataclass(frozen=True)
class Series:
    """The running state of one series of numbers; missing and non-finite ones are only counted."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean (Welford 1962), which keeps its precision if the mean is large."""
    low: float = math.inf
    high: float = -math.inf
    recent: tuple[float, ...] = ()
    """The latest numbers, oldest first."""
    missing: int = 0
    """Count of missing numbers."""
    not_finite: int = 0
    total: float = 0.0

    def add(self, value: float | None, window: int) -> "Series":
        """Add a number, or `None` for a missing one."""
        if value is None:
            return replace(self, missing=self.missing + 1)
        value = float(value)
        if not math.isfinite(value):
            return replace(self, not_finite=self.not_finite + 1)
        # Welford's update: first the mean, then the squares from the deviations from the old and the new mean.
        count, apart = self.count + 1, value - self.mean
        mean = self.mean + apart / count
        return Series(
            count=count,
            mean=mean,
            squares=self.squares + apart * (value - mean),
            low=min(self.low, value),
            high=max(self.high, value),
            recent=(*self.recent, value)[-window:],
            missing=self.missing,
            not_finite=self.not_finite,
            total=self.total + value,
        )


AGGREGATIONS: dict[str, Callable[[Series], float]] = {
    "mean": lambda series: series.mean,
    "std": lambda series: math.sqrt(series.squares / series.count),
    "min": lambda series: series.low,
    "max": lambda series: series.high,
    "last": lambda series: series.recent[-1],
    "rolling": lambda series: math.fsum(series.recent) / len(series.recent),
    "sum": lambda series: series.total,
}
"""Aggregations of a non-empty series; `rolling` is the mean of the latest numbers."""

DEFAULT_AGGREGATIONS = ("mean", "std", "min", "max", "last", "rolling")
"""Default aggregations of a name."""


class Statistics:
    """Running statistics by name. Immutable: `add` returns a new object.

    statistics = jaxrl.Statistics({"return": ["mean", "rolling"]}, window=100)
    statistics = statistics.add({"return": 200.0, "battery": None})
    statistics.summary()  # {"return_mean": 200.0, "return_rolling": 200.0, "return_count": 1, ...}
    """

    def __init__(
        self,
        chosen: Mapping[str, Sequence[str]] | None = None,
        *,
        others: Sequence[str] = DEFAULT_AGGREGATIONS,
        window: int = 100,
    ) -> None:
        """Choose the aggregations.

        Args:
          chosen: aggregations by name, of `mean`, `std`, `min`, `max`, `last`, `rolling` and `sum`.
          others: aggregations of every other name (default: all but `sum`).
          window: the number of latest values in `rolling`.

        Raises:
          SettingsError: an unknown aggregation, or a window below 1.
        """
        self.chosen = {name: tuple(kinds) for name, kinds in (chosen or {}).items()}
        self.others, self.window = tuple(others), check_count("window", window)
        for kind in {kind for kinds in (self.others, *self.chosen.values()) for kind in kinds}:
            if kind not in AGGREGATIONS:
                raise SettingsError(f"unknown aggregation {kind!r}; {suggest(kind, AGGREGATIONS)}")
        self.series: dict[str, Series] = {name: Series() for name in self.chosen}

    def add(self, values: Mapping[str, Any]) -> "Statistics":
        """Add a number for each name; a known name that is absent, or `None`, counts as missing."""
        names = [*self.series, *(name for name in values if name not in self.series)]
        return self._with({n: self.series.get(n, Series()).add(values.get(n), self.window) for n in names})

    def note(self, values: Mapping[str, Any]) -> "Statistics":
        """Add numbers like `add`, but ignore absent names."""
        new = {name: self.series.get(name, Series()).add(value, self.window) for name, value in values.items()}
        return self._with({**self.series, **new})

    def summary(self) -> dict[str, float | int | None]:
        """Return `<name>_<aggregation>`, `None` without a number, and the counts of numbers."""
        summary: dict[str, float | int | None] = {}
        for name, series in self.series.items():
            for kind in self.chosen.get(name, self.others):
                summary[f"{name}_{kind}"] = AGGREGATIONS[kind](series) if series.count else None
            summary[f"{name}_count"] = series.count
            summary |= {f"{name}_{what}": n for what in ("missing", "not_finite") if (n := getattr(series, what))}
        return summary

    def fresh(self) -> "Statistics":
        """Return empty statistics with the same aggregations."""
        return self._with({name: Series() for name in self.chosen})

    def facts(self) -> dict[str, list[Any]]:
        """Return the running state, for JSON."""
        return {
            name: [x if x not in (math.inf, -math.inf) else None for x in astuple(s)] for name, s in self.series.items()
        }

    def take_up(self, facts: Mapping[str, Sequence[Any]]) -> "Statistics":
        """Return these statistics with the state from `facts()`; raise `ValueError` if it is malformed."""

        def series(values: Sequence[Any]) -> Series:
            count, mean, squares, low, high, recent, missing, not_finite, total = values
            low, high = (x if y is None else float(y) for x, y in ((math.inf, low), (-math.inf, high)))
            kept = tuple(float(x) for x in recent)[-self.window :]
            return Series(
                int(count),
                float(mean),
                float(squares),
                low,
                high,
                kept,
                int(missing),
                int(not_finite),
                float(total),
            )

        try:
            return self._with({**self.series, **{str(name): series(values) for name, values in facts.items()}})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"no statistics: {error}") from error

    def _with(self, series: dict[str, Series]) -> "Statistics":
        # Never updated in place: an interrupted session keeps the previous object.
        new = Statistics(self.chosen, others=self.others, window=self.window)
        new.series = series
        return new

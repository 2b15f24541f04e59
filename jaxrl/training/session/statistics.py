"""Running statistics of a stream of numbers, such as returns: small, exact, and robust to NaN.

Below them are the rows of a session: like a trainer's, over what the loop reported since the previous row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from jaxrl.errors import SettingsError, check_count, suggest
from jaxrl.training.evaluator import Evaluation, eval_columns


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
        count, deviation = self.count + 1, value - self.mean
        mean = self.mean + deviation / count
        return Series(
            count=count,
            mean=mean,
            squares=self.squares + deviation * (value - mean),
            low=min(self.low, value),
            high=max(self.high, value),
            recent=(*self.recent, value)[-window:],
            missing=self.missing,
            not_finite=self.not_finite,
            total=self.total + value,
        )


def _rolling(series: Series) -> float:
    try:
        return math.fsum(series.recent) / len(series.recent)
    except OverflowError:  # of the sum
        return math.fsum(x / len(series.recent) for x in series.recent)


AGGREGATIONS: dict[str, Callable[[Series], float]] = {
    "mean": lambda series: series.mean,
    "std": lambda series: math.sqrt(series.squares / series.count) if series.squares >= 0 else math.nan,
    "min": lambda series: series.low,
    "max": lambda series: series.high,
    "last": lambda series: series.recent[-1],
    "rolling": _rolling,
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
        """Return the running state, for JSON: as text where not finite, and extremes of no numbers as `None`."""
        as_text = lambda x: str(x) if isinstance(x, float) and not math.isfinite(x) else x
        empty = {"low": None, "high": None}
        return {
            name: [as_text(x) for x in {**asdict(series), **({} if series.count else empty)}.values()]
            for name, series in self.series.items()
        }

    def restore(self, facts: Mapping[str, Sequence[Any]]) -> "Statistics":
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


# --- rows ---------------------------------------------------------------------------------------------------------


IN_ROWS = ("mean", "min", "max")
"""Default aggregations of a series in rows."""
OF_EVALUATION = ("eval_reward_std", "eval_reward_min", "eval_reward_max", "eval_length")
"""Columns of an evaluation in the row of its score, besides the score."""
OF_EPISODES = {"episode_return": ["mean"], "episode_length": ["mean"]}
"""Series of the episodes, which every row has."""
OF_SESSION = frozenset((*OF_EPISODES, "terminated"))
"""Series of the summary that are not noted by the user."""


class Episode(NamedTuple):
    """A finished episode."""

    env: int
    """Index of the environment."""
    episode_return: float
    """Undiscounted."""
    length: int
    terminated: bool
    """Whether it terminated; otherwise it was truncated."""
    opt_steps: int
    """Optimisation steps at its end."""
    env_steps: int

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers for statistics."""
        return {"episode_return": self.episode_return, "episode_length": float(self.length)}


class Interval(NamedTuple):
    """Host-side statistics since the previous row; metrics of the updates are in the sums on the device."""

    statistics: Statistics = Statistics(OF_EPISODES)
    terminated: int = 0
    """Number of terminated episodes."""
    opt_steps: int = 0
    """Value at the start of the interval, like those below."""
    env_steps: int = 0
    invalid: int = 0
    wall: float = 0.0
    """Seconds of the session."""

    @classmethod
    def of(cls, statistics: Statistics) -> "Interval":
        """Return the first interval of a session with these statistics: `rolling` is over the same window."""
        return cls(Statistics(OF_EPISODES, window=statistics.window))

    @property
    def returns(self) -> Series:
        """Returns of the episodes that ended."""
        return self.statistics.series["episode_return"]

    def add_notes(self, values: Mapping[str, float | None]) -> "Interval":
        """Add numbers noted by the user."""
        return self._replace(statistics=self.statistics.note({f"info/{name}": x for name, x in values.items()}))

    def columns(
        self, opt_steps: int, env_steps: int, invalid: int, wall: float, chosen: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """Return the columns of a row at these counts; speeds are per wall-clock second, the user's loop included.

        `chosen` has the aggregations of noted numbers by name, in place of the default `IN_ROWS`.
        """
        seconds = wall - self.wall
        rates = {"opt_steps_per_sec": opt_steps - self.opt_steps, "env_steps_per_sec": env_steps - self.env_steps}
        columns: dict[str, Any] = {name: steps / seconds if seconds > 0 else None for name, steps in rates.items()}
        for name, series in self.statistics.series.items():
            kinds = chosen.get(name.removeprefix("info/"), IN_ROWS) if name.startswith("info/") else IN_ROWS
            for kind in kinds:
                number = AGGREGATIONS[kind](series) if series.count else None
                columns[name if kind == "mean" else f"{name}_{kind}"] = number
        # Episodes whose return overflowed count, too.
        episodes = self.returns.count + self.returns.not_finite
        return {
            **columns,
            "episodes": episodes,
            "terminated": self.terminated,
            "truncated": episodes - self.terminated,
            "invalid_steps": invalid - self.invalid,
        }

    def facts(self) -> dict[str, Any]:
        """Return the interval as a dict, for JSON."""
        return {**self._asdict(), "statistics": self.statistics.facts()}

    def restore(self, facts: Mapping[str, Any]) -> "Interval":
        """Return the interval from `facts()`; raise `ValueError` if they are malformed."""
        like = Interval()._asdict()
        if not isinstance(facts, Mapping) or facts.keys() != like.keys():
            raise ValueError(f"expected an interval of {', '.join(like)}")
        if any(type(facts[name]) not in (type(x), int) for name, x in like.items() if name != "statistics"):
            raise ValueError("an interval is made of numbers")
        return Interval(**{**facts, "statistics": self.statistics.restore(facts["statistics"])})


def add_episodes(
    statistics: Statistics, interval: Interval, episodes: Sequence[Episode]
) -> tuple[Statistics, Interval]:
    """Return the statistics of a session and its interval with finished episodes added."""
    for episode in episodes:
        statistics = statistics.note({**episode.numbers, "terminated": float(episode.terminated)})
        interval = interval._replace(
            statistics=interval.statistics.note(episode.numbers), terminated=interval.terminated + episode.terminated
        )
    return statistics, interval


def score_columns(score: float, is_best: bool, returns: Series, evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the columns of the score of a policy, and of its `evaluation` if it is from one.

    They are named as in a trainer's row. `returns` are those of the latest training episodes.
    """
    found = {} if evaluation is None else eval_columns(evaluation, score, None, is_best)
    return {
        **{name: found[name] for name in OF_EVALUATION if found},
        "eval_reward": score,
        "score": score,
        "is_best": is_best,
        "train_return": returns.mean if returns.count else None,
    }

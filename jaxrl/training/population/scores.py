"""Results of a population: scores by member, by setting and overall, with confidence intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxrl.errors import SettingsError, suggest
from jaxrl.parsing import format_repr, format_settings
from jaxrl.training.report import Result, axes_for, draw, run_dir_part
from jaxrl.training.stops import HALVED

RESAMPLES = 2_000
"""Number of bootstrap resamples."""
SHOWN = 20
"""Maximum settings in a table, the best ones."""


class Spread(NamedTuple):
    """Summary statistics of members' scores; NaN if there are none."""

    members: int
    mean: float
    iqm: float
    """Mean of the middle half (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264)."""
    low: float
    """With `high`, the 95 % confidence interval of `iqm` from a bootstrap stratified over settings."""
    high: float

    @property
    def interval(self) -> str:
        """The interval as text; a dash if there is none."""
        return f"[{self.low:.5g}, {self.high:.5g}]" if np.isfinite(self.low) else "-"


def spread(strata: Iterable[Sequence[float]]) -> Spread:
    """Summarise the finite scores; each of `strata` has those of one setting.

    The interval is NaN unless some setting has at least two.
    """
    finite = [np.asarray([x for x in scores if np.isfinite(x)], np.float64) for scores in strata]
    finite = [scores for scores in finite if len(scores)]
    if not finite:
        return Spread(0, *[float("nan")] * 4)
    several = any(len(scores) > 1 for scores in finite)
    low, high = interval(finite) if several else (np.nan, np.nan)
    every = np.concatenate(finite)
    return Spread(len(every), float(every.mean()), float(iqm(every)), float(low), float(high))


def interval(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ends `[2, ...]` of the 95 % interval of the IQM of finite scores, `[..., members]` per stratum.

    Leading dimensions are independent: all use the same resamples, so each result equals that computed alone.
    """
    # Fixed seed: equal scores always have equal intervals.
    rng = np.random.default_rng(0)
    drawn = [scores[..., rng.integers(count := scores.shape[-1], size=(RESAMPLES, count))] for scores in strata]
    return np.asarray(np.quantile(iqm(np.concatenate(drawn, axis=-1)), (0.025, 0.975), axis=-1))


def iqm(scores: np.ndarray) -> np.ndarray:
    """Return the interquartile mean along the last axis, without the lowest and highest `n // 4` scores."""
    count = scores.shape[-1]
    return np.asarray(np.sort(scores, axis=-1)[..., count // 4 : count - count // 4].mean(axis=-1))


class MemberResult(NamedTuple):
    """The result of one member."""

    number: int
    seed: int
    swept: Mapping[str, Any]
    """Its initial values of the swept settings."""
    status: str
    """Why it stopped, for example `diverged`; `running` if the population was stopped first."""
    best_score: float | None
    last_score: float | None
    result: Result | None
    """`None` if it never started or has diverged."""
    values: Mapping[str, Any] = {}
    """Its current values of the swept settings, if a search changes them during training."""
    parent: int | None = None
    """The member that it last copied in a search."""

    def __repr__(self) -> str:
        score = None if self.best_score is None else f"best score {self.best_score:.6g}"
        run_dir = None if self.result is None else run_dir_part(self.result.summary["run_dir"])
        return format_repr(
            "MemberResult", self.number, format_settings({"seed": self.seed, **self.now}), self.status, score, run_dir
        )

    @property
    def now(self) -> dict[str, Any]:
        """Its final values of the swept settings."""
        return {**self.swept, **self.values}


class Setting(NamedTuple):
    """A group of members with equal values of some settings, and their scores."""

    values: Mapping[str, Any]
    members: tuple[int, ...]
    last: Spread
    """Statistics of the last scores of members that halving did not end, or of all if it ended all."""
    best: float
    """The best score of any of them, biased upwards as a maximum of noisy scores; NaN if there is none."""
    halved: int = 0
    """Number of members that a search ended early."""
    diverged: int = 0
    """Number of members that diverged."""


class PopulationResult(NamedTuple):
    """The results of a population."""

    members: tuple[MemberResult, ...]
    stop: str | None
    """Why the entire population was stopped, or `None`."""

    def __repr__(self) -> str:
        scores = [member.best_score for member in self.members if member.best_score is not None]
        trained = next((m.result.summary["trained"] for m in self.members if m.result is not None), None)
        best = f"best score {max(scores):.6g}" if scores else None
        stop = f"stopped by {self.stop}" if self.stop else None
        return format_repr("PopulationResult", trained, f"{len(self.members)} members", best, stop, "see .table()")

    def by(self, *names: str) -> list[Setting]:
        """Group the members by their values of the swept settings `names`, by default of all of them.

        Values are the final ones, as PBT changes them. Groups are sorted by the interquartile mean of last scores, the
        best first, ties in order of members. Members ended by halving count only in groups without others, which come
        last.

        Raises:
          SettingsError: a setting was not swept.
        """
        swept = list(self.members[0].swept)
        for name in names:
            if name not in swept:
                raise SettingsError(f"{name!r} was not swept; {suggest(name, swept) if swept else 'nothing was'}")
        groups: dict[tuple[Any, ...], list[MemberResult]] = {}
        for member in self.members:
            groups.setdefault(tuple(member.now[name] for name in names or swept), []).append(member)
        found = [_setting(dict(zip(names or swept, key, strict=True)), group) for key, group in groups.items()]
        whole = lambda setting: setting.halved < len(setting.members)
        return sorted(found, key=lambda setting: (not whole(setting), -np.nan_to_num(setting.last.iqm, nan=-np.inf)))

    def best(self, by: str | None = None) -> Setting:
        """Return the best group by the setting `by`, or by all swept settings."""
        return self.by(*([by] if by else []))[0]

    def best_member(self) -> MemberResult:
        """Return the member with the highest best score in the group `best()`, of those that halving left."""
        numbers = set(self.best().members)
        score = lambda member: -math.inf if member.best_score is None else member.best_score
        return max(comparable([member for member in self.members if member.number in numbers]), key=score)

    def plot(self, axes: Any = None) -> Any:
        """Plot the evaluation scores of each member over environment steps, with one colour per setting.

        Arguments, result and errors are those of `Result.plot`.
        """
        curves = {member.number: member.result.curve for member in self.members if member.result is not None}
        axes = axes_for([point for curve in curves.values() for point in curve], axes)
        settings = self.by()
        names = name_settings([setting.values for setting in settings])
        for i, (setting, name) in enumerate(zip(settings, names, strict=True)):
            drawn = [number for number in setting.members if number in curves]
            for number in drawn:
                label = name if number == drawn[0] else None
                draw(axes, curves[number], "score", color=f"C{i}", label=label, alpha=0.7)
        axes.legend()
        return axes

    def table(self) -> str:
        """Return a table with a line per setting, the best first."""
        settings = self.by()
        names = name_settings([setting.values for setting in settings])
        lines = [f"{'members':>8}{'last, IQM':>12}{'95 % interval':>24}{'best':>12}  setting"]
        for setting, name in list(zip(settings, names, strict=True))[:SHOWN]:
            last = setting.last
            numbers = f"{len(setting.members):>8}{last.iqm:>12.5g}{last.interval:>24}{setting.best:>12.5g}"
            lines.append(f"{numbers}  {name}{_remarks(setting)}")
        more = len(settings) - SHOWN
        return "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])])


class _HasStatus(Protocol):
    @property
    def status(self) -> str: ...


OneMember = TypeVar("OneMember", bound=_HasStatus)


def comparable(members: Sequence[OneMember]) -> Sequence[OneMember]:
    """Return the members that halving did not end, whose scores come from longer training; all if there are none."""
    return [member for member in members if member.status != HALVED] or members


def _setting(values: Mapping[str, Any], group: Sequence[MemberResult]) -> Setting:
    strata: dict[tuple[Any, ...], list[float]] = {}
    compared = comparable(group)
    for member in compared:
        last = float("nan") if member.last_score is None or member.status == "diverged" else member.last_score
        strata.setdefault(tuple(member.now.values()), []).append(last)
    best = max((m.best_score for m in compared if m.best_score is not None), default=float("nan"))
    halved = sum(member.status == HALVED for member in group)
    diverged = sum(member.status == "diverged" for member in group)
    numbers = tuple(member.number for member in group)
    return Setting(values, numbers, spread(strata.values()), best, halved, diverged)


def _remarks(setting: Setting) -> str:
    """Return the table's remarks on halved and diverged members."""
    counts = {"halved": setting.halved, "diverged": setting.diverged}
    some = lambda count: f"{count} of them " if count < len(setting.members) else ""
    return "".join(f", {some(count)}{what}" for what, count in counts.items() if count)


def format_swept(values: Mapping[str, Any], digits: str = ".6g") -> str:
    """Format swept values as on a command line, floats with these `digits`; `-` if there are none."""
    words = (f"{name}={x:{digits}}" if isinstance(x, float) else f"{name}={x}" for name, x in values.items())
    return " ".join(words) or "-"


def name_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each of `settings` as `format_swept` does, with all digits where others would have the same name."""
    short, exact = ([format_swept(values, digits) for values in settings] for digits in (".6g", ""))
    others: dict[str, set[str]] = {}
    for name, full in zip(short, exact, strict=True):
        others.setdefault(name, set()).add(full)
    return [name if len(others[name]) == 1 else full for name, full in zip(short, exact, strict=True)]

"""Search among the members of a population: successive halving, and population-based training (PBT).

Both decide at gates, certain optimisation steps at which all members wait for each other. A decision is a function of
the members' scores, a seed and the index of the gate, so a run that is killed and resumed repeats it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxrl.errors import SettingsError, check_between, check_count, suggest
from jaxrl.strategies.population import DISCOUNT, Range

SELECTIONS = ("truncation", "tournament")
STREAM = 2**32 - 1
"""First part of the seed of each draw of PBT. Without it some would repeat the draws of a population's combinations,
which are seeded by its seed and their place: trailing zeros do not tell seeds apart."""


class Copy(NamedTuple):
    """A member that continues from the state of another, with new settings."""

    member: int
    parent: int
    values: Mapping[str, float]
    """New values of the swept settings."""


class Verdict(NamedTuple):
    """Decision of a search at a gate."""

    ended: tuple[int, ...] = ()
    """Members that stop."""
    copies: tuple[Copy, ...] = ()


class Search(Protocol):
    """Allocation of optimisation steps to the better members of a population."""

    name: str

    def gates(self, members: int, max_opts: int, eval_interval: int) -> list[int]:
        """Return the optimisation steps of the gates, ascending and before the end at `max_opts`."""
        ...

    def decide(self, gate: int, scores: Mapping[int, float], values: Mapping[int, Mapping[str, Any]]) -> Verdict:
        """Decide at gate number `gate` (from 0), given the scores and settings of the remaining members."""
        ...

    def within(self, sweep: Mapping[str, Any], seed: int) -> "Search":
        """Return the search with the values or ranges of the population's sweep, and the seed for its draws."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the settings that rebuild it, in plain values."""
        ...


def rank(scores: Mapping[int, float]) -> list[int]:
    """Return the members from best to worst score; non-finite scores last, ties by number."""
    return sorted(scores, key=lambda number: (-_finite(scores[number]), number))


def _finite(score: float) -> float:
    return score if math.isfinite(score) else -math.inf


def _gate_steps(steps: Sequence[float], max_opts: int, eval_interval: int) -> list[int]:
    """Return the optimisation steps of the first evaluations at or after `steps`, before the end."""
    whole = [math.ceil(round(step, 6)) for step in steps]  # rounding first: a product may exceed an integer by one bit
    # A set, because several rungs may fall on one evaluation.
    rounded = {-(-step // eval_interval) * eval_interval for step in whole}
    return sorted(step for step in rounded if 0 < step < max_opts)


class Halving(NamedTuple):
    """Successive halving (Jamieson and Talwalkar 2016): at each rung the best members continue, the others stop.

    With `factor` f, one in f members continues at each rung, rounded up. n members have `log_f(n)` rungs, each at f
    times the steps of the one before, as far as they are before the end.
    """

    factor: int = 3
    first: float = 0.25
    """First rung, as a share of all steps until the end. With 1/4, at most about half of all steps are run, for any
    factor; an earlier rung saves more, but compares members that have hardly started to learn. 0: as early as the
    number of members allows, so that the last rung is at the share `1 / f`."""

    @property
    def name(self) -> str:
        return "halving"

    def gates(self, members: int, max_opts: int, eval_interval: int) -> list[int]:
        # An integer loop, because a floating-point logarithm may fall just short of an integer.
        rungs = 1
        while self.factor ** (rungs + 1) <= members:
            rungs += 1
        first = self.first or self.factor**-rungs
        return _gate_steps([max_opts * first * self.factor**k for k in range(rungs)], max_opts, eval_interval)

    def decide(self, gate: int, scores: Mapping[int, float], values: Mapping[int, Mapping[str, Any]]) -> Verdict:
        return Verdict(ended=tuple(sorted(rank(scores)[math.ceil(len(scores) / self.factor) :])))

    def within(self, sweep: Mapping[str, Any], seed: int) -> "Halving":
        check_count("halving: factor", self.factor, least=2)
        if check_between("halving: first", self.first, 0.0, 1.0) == 1:
            raise SettingsError("halving: first is 1, the end, where nothing is left to save; expected a share below 1")
        return self

    def settings(self) -> dict[str, Any]:
        return self._asdict()


class PBT(NamedTuple):
    """Population-based training (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846).

    Every `interval` optimisation steps the worst members copy the state of some of the best, except for the stream of
    randomness (exploit), and perturb the copied settings (explore).
    """

    interval: int
    share: float = 0.2
    """Share of members that are replaced, and of those that replace them; rounded down, but at least 1."""
    select: Literal["truncation", "tournament"] = "truncation"
    """`truncation`: members of the worst share copy random ones of the best. `tournament`: each member is compared with
    a random other and copies it if that is better, or the winner over that one if it loses as well."""
    factors: tuple[float, ...] = (0.8, 1.25)
    """Random factors for a perturbed setting; in a list of values, it moves one place down or up instead."""
    resample: float = 0.25
    """Probability of resampling a setting instead."""
    sweep: Mapping[str, Any] = {}
    """Values or range of each setting, which perturbation does not leave."""
    seed: int = 0

    @property
    def name(self) -> str:
        return "pbt"

    def gates(self, members: int, max_opts: int, eval_interval: int) -> list[int]:
        if self.interval % eval_interval:
            below = max(self.interval // eval_interval, 1) * eval_interval
            raise SettingsError(
                f"pbt: interval {self.interval} is not a multiple of eval_interval {eval_interval}, whose scores it "
                f"goes by; the nearest that is: {below} or {below + eval_interval}"
            )
        return list(range(self.interval, max_opts, self.interval))

    def decide(self, gate: int, scores: Mapping[int, float], values: Mapping[int, Mapping[str, Any]]) -> Verdict:
        parents = self._parents(gate, scores)
        explored = {member: self._explore(gate, member, values[parent]) for member, parent in parents.items()}
        return Verdict(
            copies=tuple(Copy(member, parent, explored[member]) for member, parent in sorted(parents.items()))
        )

    def _parents(self, gate: int, scores: Mapping[int, float]) -> dict[int, int]:
        """Return the parent of each replaced member; no parent is itself replaced."""
        order = rank(scores)
        # Without a finite score there is nothing worth copying.
        if len(order) < 2 or not math.isfinite(scores[order[0]]):
            return {}
        if self.select == "truncation":
            # At most half, so that no member is both among the best and the worst.
            # Rounded first: a product such as 100 * 0.29 is a little less than the whole number meant.
            count = min(max(1, int(round(len(order) * self.share, 6))), len(order) // 2)
            best, worst = order[:count], order[-count:]
            # Members with equal scores do not copy each other.
            beaten = [number for number in worst if _finite(scores[number]) < _finite(scores[best[-1]])]
            return {number: best[int(self._rng(gate, number).integers(count))] for number in beaten}
        position = {number: at for at, number in enumerate(order)}
        # Each member meets a random other; only the losers' encounters are kept.
        drawn = {number: int(self._rng(gate, number).integers(len(order) - 1)) for number in order}
        met = {number: order[at + (at >= position[number])] for number, at in drawn.items()}
        met = {a: b for a, b in met.items() if position[b] < position[a] and _finite(scores[b]) > _finite(scores[a])}
        roots: dict[int, int] = {}
        for number in order:  # from the best down, so that the opponent's root is known
            roots[number] = roots[met[number]] if number in met else number
        return {number: root for number, root in roots.items() if number != root}

    def _explore(self, gate: int, member: int, parent: Mapping[str, Any]) -> dict[str, float]:
        return {
            # One generator for each setting, numbered from 1. The one without a number has drawn the parent.
            name: self._perturb(self._rng(gate, member, index + 1), self.sweep[name], float(parent[name]))
            for index, name in enumerate(self.sweep)
        }

    def _perturb(self, rng: np.random.Generator, allowed: Any, value: float) -> float:
        # Both are drawn in any case, so that a fresh value does not depend on whether there is a factor to draw.
        resampled, factor = rng.random() < self.resample, self.factors[int(rng.integers(len(self.factors)))]
        if isinstance(allowed, Range):
            return allowed.draw(rng) if resampled else min(max(value * factor, allowed.low), allowed.high)
        # A list is a ladder: only the direction of a factor matters, not its size.
        ladder = sorted(float(x) for x in allowed)
        nearest_place = min(range(len(ladder)), key=lambda at: abs(ladder[at] - value))
        moved = int(rng.integers(len(ladder))) if resampled else nearest_place + (factor > 1) - (factor < 1)
        return ladder[min(max(moved, 0), len(ladder) - 1)]

    def _rng(self, *which: int) -> np.random.Generator:
        return np.random.default_rng([STREAM, self.seed, *which])

    def within(self, sweep: Mapping[str, Any], seed: int) -> "PBT":
        check_count("pbt: interval", self.interval)
        check_between("pbt: share", self.share, 0.0, 0.5)
        check_between("pbt: resample", self.resample, 0.0, 1.0)
        if self.select not in SELECTIONS:
            raise SettingsError(f"pbt: select is {self.select!r}; {suggest(str(self.select), SELECTIONS)}")
        if not self.factors or not all(isinstance(x, int | float) and 0 < x < math.inf for x in self.factors):
            raise SettingsError(f"pbt: factors are {self.factors!r}; expected positive numbers, as in (0.8, 1.25)")
        if not sweep:
            raise SettingsError("pbt changes swept settings, and none is; sweep one, as agent.lr from a range")
        for name in sweep:
            if not (name.startswith("agent.") or name == DISCOUNT):
                raise SettingsError(f"pbt cannot change {name} on the way; sweep agent.* or {DISCOUNT}")
        return self._replace(sweep=dict(sweep), seed=seed)

    def settings(self) -> dict[str, Any]:
        settings = {name: value for name, value in self._asdict().items() if name not in ("sweep", "seed")}
        return {**settings, "factors": list(self.factors)}


SEARCHES: dict[str, tuple[type[Halving] | type[PBT], str]] = {"halving": (Halving, "factor"), "pbt": (PBT, "interval")}
"""Searches by name, with the setting for a bare number on the command line."""


def parse_search(name: str, given: Any) -> dict[str, Any]:
    """Parse the settings of a search from a file or the command line: a number, `name=value`, or a mapping.

    Raises:
      SettingsError: a setting is unknown or given twice.
    """
    kind, main = SEARCHES[name]
    if isinstance(given, list | tuple):
        pairs = [str(word).partition("=") for word in given]
        # A bare value is that of the main setting.
        named = [(key if equals else main, value if equals else key) for key, equals, value in pairs]
        given = dict(named)
        if len(given) < len(named):
            twice = next(key for at, (key, _) in enumerate(named) if key in dict(named[:at]))
            raise SettingsError(f"{name} names {twice} twice; give it once")
    if not isinstance(given, Mapping):
        given = {main: given}
    known = {field: hint for field, hint in kind.__annotations__.items() if field not in ("sweep", "seed")}
    for key in given:
        if key not in known:
            raise SettingsError(f"unknown setting {name}.{key}; {suggest(str(key), known)}")
    if main not in given and main not in kind._field_defaults:
        raise SettingsError(f"{name} needs its {main}, as in --{name} 2000")
    return {key: _parse(f"{name}.{key}", value, kind._field_defaults.get(key, 0)) for key, value in given.items()}


def _parse(name: str, value: Any, default: Any) -> Any:
    """Convert a value to the type of its default."""
    try:
        if isinstance(default, tuple):
            parts = value.strip("[]()").split(",") if isinstance(value, str) else value
            return tuple(float(part) for part in parts)
        if isinstance(default, int):
            # Parsed as a float, so that `1e4` is accepted as an integer.
            found = float(value)
            if found != int(found):
                raise ValueError
            return int(found)
        return type(default)(value)
    except (TypeError, ValueError, OverflowError):
        raise SettingsError(f"{name} is {value!r}; expected {_EXPECTED[type(default)]}") from None


_EXPECTED = {tuple: "numbers, as in 0.8,1.25", int: "a whole number", float: "a number", str: "a name"}


def make_search(settings: Mapping[str, Any]) -> Halving | PBT | None:
    """Build the search in the settings of a population, or return `None`.

    Raises:
      SettingsError: there is more than one.
    """
    asked = [name for name in SEARCHES if settings.get(name) is not None]
    if len(asked) > 1:
        raise SettingsError(f"{' and '.join(asked)} are two searches; choose one")
    return SEARCHES[asked[0]][0](**parse_search(asked[0], settings[asked[0]])) if asked else None

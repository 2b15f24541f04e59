"""Search among the members of a population: halving, and population-based training (PBT).

Both look at the members' scores at certain points, the gates, where all of them wait for each other. What they decide
is a function of these scores, of a seed and of the number of the gate, so that a run that was killed decides the same
again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxrl.errors import SettingsError, check_between, check_count, suggest
from jaxrl.strategies.population import DISCOUNT, Range

SELECTIONS = ("truncation", "tournament")


class Copy(NamedTuple):
    """A member that goes on as another one stands, with other settings."""

    member: int
    parent: int
    values: Mapping[str, float]
    """Its values of the swept settings from now on."""


class Verdict(NamedTuple):
    """What a search decides at a gate."""

    ended: tuple[int, ...] = ()
    """Members that go no further."""
    copies: tuple[Copy, ...] = ()


class Search(Protocol):
    """A way to spend the optimisation steps of a population where they are worth most."""

    name: str

    def gates(self, members: int, max_opts: int, eval_interval: int) -> list[int]:
        """Return the optimisation steps at which it decides, ascending and before the end."""
        ...

    def decide(self, gate: int, scores: Mapping[int, float], values: Mapping[int, Mapping[str, Any]]) -> Verdict:
        """Decide at the gate of this number (from 0) about the members that are still there, given their scores."""
        ...

    def within(self, sweep: Mapping[str, Any], seed: int) -> "Search":
        """Return the search among the values or ranges that a population sweeps, with the seed of its draws."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return in plain values what makes it again."""
        ...


def rank(scores: Mapping[int, float]) -> list[int]:
    """Return the members from the best score to the worst: a score that is not finite last, of equals the first."""
    return sorted(scores, key=lambda number: (-_finite(scores[number]), number))


def _finite(score: float) -> float:
    return score if math.isfinite(score) else -math.inf


def _gate_steps(steps: Sequence[float], max_opts: int, eval_interval: int) -> list[int]:
    """Return the evaluations at or past `steps` that come before the end."""
    whole = [math.ceil(round(step, 6)) for step in steps]  # for a product may be above a number by a last bit
    rounded = {-(-step // eval_interval) * eval_interval for step in whole}
    return sorted(step for step in rounded if 0 < step < max_opts)


class Halving(NamedTuple):
    """Successive halving (Jamieson and Talwalkar 2016): at each rung the best go on, the others stop.

    With `factor` f one in f members goes on at each rung, rounded up. There are as many rungs as there are members for,
    `log_f(n)` of n, each at f times the steps of the one before, before the end.
    """

    factor: int = 3
    first: float = 0.25
    """Where the first rung is, as a share of `max_opts`. With 1/4, at most about half of all steps are made, whatever
    the factor; an earlier one saves more, but judges by learning that has hardly begun. 0: as early as there are
    members for, so that the last rung is at `max_opts / f`."""

    @property
    def name(self) -> str:
        return "halving"

    def gates(self, members: int, max_opts: int, eval_interval: int) -> list[int]:
        rungs = 1
        while self.factor ** (rungs + 1) <= members:
            rungs += 1
        first = self.first or self.factor**-rungs
        return _gate_steps([max_opts * first * self.factor**k for k in range(rungs)], max_opts, eval_interval)

    def decide(self, gate: int, scores: Mapping[int, float], values: Mapping[int, Mapping[str, Any]]) -> Verdict:
        return Verdict(ended=tuple(sorted(rank(scores)[math.ceil(len(scores) / self.factor) :])))

    def within(self, sweep: Mapping[str, Any], seed: int) -> "Halving":
        check_count("halving: factor", self.factor, least=2)
        check_between("halving: first", self.first, 0.0, 1.0)
        return self

    def settings(self) -> dict[str, Any]:
        return self._asdict()


class PBT(NamedTuple):
    """Population-based training (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846).

    Every `interval` optimisation steps the worst members take over everything of some of the best but their streams of
    randomness (exploit), and change the settings that they took over (explore).
    """

    interval: int
    share: float = 0.2
    """Share of the members that is replaced, and of those that they are replaced by, rounded down, but at least 1."""
    select: Literal["truncation", "tournament"] = "truncation"
    """`truncation`: one of the worst share becomes one of the best share. `tournament`: each member meets another, and
    becomes it if that one is better; where that one loses as well, whoever beat it."""
    factors: tuple[float, ...] = (0.8, 1.25)
    """What a setting is multiplied by, one of them; in a list of values it moves one place down or up."""
    resample: float = 0.25
    """Probability that a setting is drawn anew instead."""
    sweep: Mapping[str, Any] = {}
    """The values or range of each setting. A changed one stays within."""
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
        """Return who takes over from whom; no parent is replaced itself."""
        order = rank(scores)
        if len(order) < 2 or not math.isfinite(scores[order[0]]):
            return {}
        if self.select == "truncation":
            count = min(max(1, int(len(order) * self.share)), len(order) // 2)
            best, worst = order[:count], order[-count:]
            beaten = [number for number in worst if _finite(scores[number]) < _finite(scores[best[-1]])]
            return {number: best[int(self._rng(gate, number).integers(count))] for number in beaten}
        place = {number: at for at, number in enumerate(order)}
        met = {number: order[int(self._rng(gate, number).integers(len(order)))] for number in order}
        met = {a: b for a, b in met.items() if place[b] < place[a] and _finite(scores[b]) > _finite(scores[a])}
        roots: dict[int, int] = {}
        for number in order:  # from the best down, so that whoever was met is known
            roots[number] = roots[met[number]] if number in met else number
        return {number: root for number, root in roots.items() if number != root}

    def _explore(self, gate: int, member: int, parent: Mapping[str, Any]) -> dict[str, float]:
        return {
            name: self._changed(self._rng(gate, member, place + 1), self.sweep[name], float(parent[name]))
            for place, name in enumerate(self.sweep)
        }

    def _changed(self, rng: np.random.Generator, allowed: Any, value: float) -> float:
        anew, factor = rng.random() < self.resample, self.factors[int(rng.integers(len(self.factors)))]
        if isinstance(allowed, Range):
            return allowed.draw(rng) if anew else min(max(value * factor, allowed.low), allowed.high)
        ladder = sorted(float(x) for x in allowed)
        nearest_place = min(range(len(ladder)), key=lambda at: abs(ladder[at] - value))
        moved = int(rng.integers(len(ladder))) if anew else nearest_place + (1 if factor > 1 else -1)
        return ladder[min(max(moved, 0), len(ladder) - 1)]

    def _rng(self, *which: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *which])

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
"""Searches by name, with the setting that a bare number on the command line is."""


def parse_search(name: str, given: Any) -> dict[str, Any]:
    """Return the settings of a search as a file or a command line has them: a number, `name=value`, or a mapping.

    Raises:
      SettingsError: a setting that it does not have.
    """
    kind, main = SEARCHES[name]
    if isinstance(given, list | tuple):
        pairs = [str(word).partition("=") for word in given]
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
    """Return a value in the type of its default."""
    try:
        if isinstance(default, tuple):
            parts = value.strip("[]()").split(",") if isinstance(value, str) else value
            return tuple(float(part) for part in parts)
        if isinstance(default, int):
            found = float(value)
            if found != int(found):
                raise ValueError
            return int(found)
        return type(default)(value)
    except (TypeError, ValueError, OverflowError):
        raise SettingsError(f"{name} is {value!r}; expected {_EXPECTED[type(default)]}") from None


def upgrade_settings(population: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a population as it is written today, of what any version wrote into the directory of a run."""
    full = {"layout": "spread", "width": None, **population}
    if isinstance(full.get("halving"), Mapping):
        full["halving"] = {"first": 0.0, **full["halving"]}
    return full


_EXPECTED = {tuple: "numbers, as in 0.8,1.25", int: "a whole number", float: "a number", str: "a name"}


def make_search(settings: Mapping[str, Any]) -> Halving | PBT | None:
    """Return the search that the settings of a population ask for, if they do.

    Raises:
      SettingsError: they ask for two.
    """
    asked = [name for name in SEARCHES if settings.get(name) is not None]
    if len(asked) > 1:
        raise SettingsError(f"{' and '.join(asked)} are two searches; choose one")
    return SEARCHES[asked[0]][0](**parse_search(asked[0], settings[asked[0]])) if asked else None

"""Lineages in a population whose search replaces members by copies of others."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.reports.groups import format_value
from jaxrl.reports.read import Run
from jaxrl.reports.tables import steps_of
from jaxrl.training.storage.run_dir import METRICS

BEGINNING = b'{"kind": "lineage", '
"""Start of a lineage row, as training writes it; the many other rows are not parsed."""


class Takeover(NamedTuple):
    """Replacement of a member by a copy of its parent."""

    opt_steps: int
    member: int
    parent: int
    values: Mapping[str, Any]
    """Swept settings of the member from then on."""


def takeovers(population: Path) -> list[Takeover]:
    """Return the takeovers in the log of a population, in order; incomplete or damaged lines are skipped."""
    try:
        with (population / METRICS).open("rb") as file:
            found = [_takeover(line) for line in file if line.startswith(BEGINNING)]
    except OSError:
        return []
    return sorted((one for one in found if one is not None), key=lambda one: one[:3])


def _takeover(line: bytes) -> Takeover | None:
    try:
        row = json.loads(line)
        found = Takeover(row["opt_steps"], row["member"], row["parent"], dict(row.get("values") or {}))
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return found if all(type(number) is int for number in found[:3]) else None


def lineages(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return the plot data of every population with takeovers, one line per founder."""
    members: dict[Path, list[Run]] = {}
    for run in runs:
        if run.population is not None:
            members.setdefault(run.path.parent.parent, []).append(run)
    searches = [(found, takeovers(path)) for path, found in members.items()]
    return [_lineage(found, taken) for found, taken in searches if taken]


def _lineage(members: Sequence[Run], taken: Sequence[Takeover]) -> dict[str, Any]:
    numbers = [member.member for member in members if member.member is not None]
    lives = _Lives(numbers)
    for step in sorted({one.opt_steps for one in taken}):
        # Takeovers of one step are simultaneous.
        lives.take([one for one in taken if one.opt_steps == step and {one.member, one.parent} <= set(numbers)])
    for member in members:
        lives.end(member.member, steps_of(member)[0])
    return {"name": members[0].population, "members": numbers, "lines": lives.lines()}


class _Lives:
    """Members over optimisation steps, grouped by the founder from whom each descends at that step."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._founder = {number: number for number in numbers}
        self._begun = dict.fromkeys(numbers, 0)
        self._said = {number: f"member {number}" for number in numbers}
        self._points: dict[int, list[tuple[float | None, int | None, str]]] = {number: [] for number in numbers}

    def take(self, taken: Sequence[Takeover]) -> None:
        """Apply the takeovers of one step, all from the parents as they were before it."""
        # A parent may itself be replaced at this step.
        before = dict(self._founder)
        for one in taken:
            self.end(one.member, one.opt_steps)
            self._founder[one.member], self._begun[one.member] = before[one.parent], one.opt_steps
            values = ", ".join(f"{name}={format_value(value)}" for name, value in one.values.items())
            self._said[one.member] = f"member {one.member}, from member {one.parent}, {values}"
            self._line(one.member, (one.opt_steps, one.parent), (one.opt_steps, one.member))

    def end(self, member: int | None, opt_steps: float) -> None:
        """End the current segment of a member's line."""
        if member is not None and opt_steps > self._begun[member]:
            self._line(member, (self._begun[member], member), (opt_steps, member))

    def _line(self, member: int, *places: tuple[float, int]) -> None:
        points = self._points[self._founder[member]]
        points += [(*place, self._said[member]) for place in places]
        # A gap, before another segment of the same founder.
        points.append((None, None, ""))

    def lines(self) -> list[dict[str, Any]]:
        """Return each founder's points with gaps, and whether any member descends from it at the end."""
        alive = set(self._founder.values())
        return [
            {"founder": founder, "alive": founder in alive, **dict(zip("xy", zip(*points, strict=True), strict=False))}
            | {"text": [text for *_, text in points]}
            for founder, points in self._points.items()
            if points
        ]

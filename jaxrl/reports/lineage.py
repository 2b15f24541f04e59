"""Who of a population went on from whom, where a search lets members take over each other's place."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.reports.groups import shown
from jaxrl.reports.read import Run
from jaxrl.reports.tables import reached
from jaxrl.training.storage.run_dir import METRICS

BEGINNING = b'{"kind": "lineage", '
"""Of a row that tells it, as training writes them; other rows are many, and not taken apart."""


class Takeover(NamedTuple):
    """A member that went on as another one stood."""

    opt_steps: int
    member: int
    parent: int
    values: Mapping[str, Any]
    """The swept settings under which it went on."""


def takeovers(population: Path) -> list[Takeover]:
    """Return those that the log of a population tells, in order; lines that are half-written or damaged tell none."""
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
    """Return for every population in which members took over from others the lives to draw, a line a founder."""
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
        # All takeovers of a step at once, since parents and children change places in it.
        lives.take([one for one in taken if one.opt_steps == step and {one.member, one.parent} <= set(numbers)])
    for member in members:
        lives.end(member.member, reached(member)[0])
    return {"name": members[0].population, "members": numbers, "lines": lives.lines()}


class _Lives:
    """Members at their heights over optimisation steps, each by the founder from whom it descends at that time."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._founder = {number: number for number in numbers}
        self._begun = dict.fromkeys(numbers, 0)
        self._said = {number: f"member {number}" for number in numbers}
        self._points: dict[int, list[tuple[float | None, int | None, str]]] = {number: [] for number in numbers}

    def take(self, taken: Sequence[Takeover]) -> None:
        """Let members take over at one step, all from the parents as they stood before."""
        # A parent may itself take over from another at this step.
        before = dict(self._founder)
        for one in taken:
            self.end(one.member, one.opt_steps)
            self._founder[one.member], self._begun[one.member] = before[one.parent], one.opt_steps
            values = ", ".join(f"{name}={shown(value)}" for name, value in one.values.items())
            self._said[one.member] = f"member {one.member}, from member {one.parent}, {values}"
            self._line(one.member, (one.opt_steps, one.parent), (one.opt_steps, one.member))

    def end(self, member: int | None, opt_steps: float) -> None:
        """End the part of a member's life that goes on."""
        if member is not None and opt_steps > self._begun[member]:
            self._line(member, (self._begun[member], member), (opt_steps, member))

    def _line(self, member: int, *places: tuple[float, int]) -> None:
        points = self._points[self._founder[member]]
        points += [(*place, self._said[member]) for place in places]
        # A gap: what follows is another line of the same founder.
        points.append((None, None, ""))

    def lines(self) -> list[dict[str, Any]]:
        """Return for each founder its points with gaps, and whether any member descends from it at last."""
        alive = set(self._founder.values())
        return [
            {"founder": founder, "alive": founder in alive, **dict(zip("xy", zip(*points, strict=True), strict=False))}
            | {"text": [text for *_, text in points]}
            for founder, points in self._points.items()
            if points
        ]

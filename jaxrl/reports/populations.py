"""Plot data of populations: parallel coordinates of swept settings and scores, and lineages of searches."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.reports.groups import format_value
from jaxrl.reports.read import Run
from jaxrl.reports.tables import steps_of
from jaxrl.training.storage.logs import to_float
from jaxrl.training.storage.run_dir import METRICS

RATIO = 20
"""Ratio of largest to smallest value from which an axis is logarithmic."""
BEGINNING = b'{"kind": "lineage", '
"""Start of a lineage row, as training writes it; the many other rows are not parsed."""


def populations(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return members and axes of every population with a sweep; the last axis is the last score."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        if run.population is not None and run.swept and run.settings:
            members.setdefault(run.population, []).append(run)
    return [_population(name, found) for name, found in members.items()]


def _population(name: str, members: Sequence[Run]) -> dict[str, Any]:
    columns = {swept: [member.settings.get(swept) for member in members] for swept in members[0].swept}
    scores: list[Any] = [member.last if math.isfinite(member.last) else None for member in members]
    axes = [{"name": swept, **axis(values)} for swept, values in (*columns.items(), ("last score", scores))]
    return {"name": name, "members": [member.member for member in members], "axes": axes}


def axis(values: Sequence[Any]) -> dict[str, Any]:
    """Return the height of each value, from 0 to 1 or `None` if missing, and ticks, each a height and a label.

    Names and flags are spread evenly; numbers have a linear axis, or a logarithmic one if their range is wide.
    """
    known = [value for value in values if value is not None]
    labels = [format_value(value) for value in values]
    if not all(math.isfinite(to_float(value)) for value in known):
        names = list(dict.fromkeys(map(format_value, known)))
        places = {name: i / max(len(names) - 1, 1) for i, name in enumerate(names)}
        heights = [None if value is None else places[format_value(value)] for value in values]
        return {"heights": heights, "ticks": [[place, name] for name, place in places.items()], "values": labels}
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    scale = math.log if low > 0 and high >= RATIO * low else float
    width = scale(high) / 2 - scale(low) / 2 or 1.0  # halved, so that the difference cannot overflow
    heights = [None if value is None else (scale(value) / 2 - scale(low) / 2) / width for value in values]
    ends = [[0, format_value(float(low))], *([[1, format_value(float(high))]] if high > low else [])]
    return {"heights": heights, "ticks": ends, "values": labels}


# --- lineages -----------------------------------------------------------------------------------------------------


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
    lines = _Lines(numbers)
    for step in sorted({one.opt_steps for one in taken}):
        # Takeovers of one step are simultaneous.
        lines.take([one for one in taken if one.opt_steps == step and {one.member, one.parent} <= set(numbers)])
    for member in members:
        lines.end(member.member, steps_of(member)[0])
    return {"name": members[0].population, "members": numbers, "lines": lines.data()}


class _Lines:
    """Members over optimisation steps, grouped by the founder from whom each descends at that step."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._founder = {number: number for number in numbers}
        self._begun = dict.fromkeys(numbers, 0)
        self._labels = {number: f"member {number}" for number in numbers}
        self._points: dict[int, list[tuple[float | None, int | None, str]]] = {number: [] for number in numbers}

    def take(self, taken: Sequence[Takeover]) -> None:
        """Apply the takeovers of one step, all from the parents as they were before it."""
        # A parent may itself be replaced at this step.
        before = dict(self._founder)
        for one in taken:
            self.end(one.member, one.opt_steps)
            self._founder[one.member], self._begun[one.member] = before[one.parent], one.opt_steps
            values = ", ".join(f"{name}={format_value(value)}" for name, value in one.values.items())
            self._labels[one.member] = f"member {one.member}, from member {one.parent}, {values}"
            self._line(one.member, (one.opt_steps, one.parent), (one.opt_steps, one.member))

    def end(self, member: int | None, opt_steps: float) -> None:
        """End the current segment of a member's line."""
        if member is not None and self._begun[member] < opt_steps < math.inf:
            self._line(member, (self._begun[member], member), (opt_steps, member))

    def _line(self, member: int, *places: tuple[float, int]) -> None:
        points = self._points[self._founder[member]]
        points += [(*place, self._labels[member]) for place in places]
        # A gap, before another segment of the same founder.
        points.append((None, None, ""))

    def data(self) -> list[dict[str, Any]]:
        """Return each founder's points with gaps, and whether any member descends from it at the end."""
        alive = set(self._founder.values())
        return [
            {"founder": founder, "alive": founder in alive, **dict(zip("xy", zip(*points, strict=True), strict=False))}
            | {"text": [text for *_, text in points]}
            for founder, points in self._points.items()
            if points
        ]

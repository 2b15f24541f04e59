"""Parallel coordinates of a population: the members' swept settings and last scores."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl.reports.groups import format_value
from jaxrl.reports.read import Run
from jaxrl.reports.rows import number

RATIO = 20
"""Ratio of largest to smallest value from which an axis is logarithmic."""


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
    if not all(math.isfinite(number(value)) for value in known):
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

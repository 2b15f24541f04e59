"""Tables of the page: column names and rows of text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.errors import one_line
from jaxrl.reports.groups import Group, differences
from jaxrl.reports.read import Run
from jaxrl.training import ledger
from jaxrl.training.stops import FINISHED
from jaxrl.training.storage.logs import to_float

PARTS = (*ledger.PARTS, "other")
"""Parts of a run's seconds, as in `metadata.json`."""
MOST_EVENTS = 500
"""Maximum number of events shown, the last ones."""


class Table(NamedTuple):
    """Column names and rows of text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def text(value: object, form: str = ".5g") -> str:
    """Format a number; a dash if it is unknown, or anything else, which a row on disk may hold."""
    return f"{number:{form}}" if np.isfinite(number := to_float(value)) else "-"


def setting_table(groups: Sequence[Group]) -> Table:
    """Return the settings in which runs differ, oriented so that the table is longer than wide."""
    differing = differences(groups)
    names = [group.name for group in groups]
    if len(groups) <= len(differing):
        return Table(("setting", *names), tuple((name, *values) for name, values in differing.items()))
    return Table(("runs", *differing), tuple((n, *(v[i] for v in differing.values())) for i, n in enumerate(names)))


def group_table(groups: Iterable[Group]) -> Table:
    """Return the last scores of each group, the best first."""
    spreads = sorted(
        ((group, group.last) for group in groups), key=lambda pair: -np.nan_to_num(pair[1].iqm, nan=-1e300)
    )
    rows = [
        (
            group.name,
            f"{last.members} of {len(group.runs)}",
            text(last.mean),
            text(last.iqm),
            f"{text(last.low)} to {text(last.high)}" if np.isfinite(last.low) else "-",
            text(max((run.best for run in group.runs if np.isfinite(run.best)), default=None)),
        )
        for group, last in spreads
    ]
    return Table(("settings", "scored", "last, mean", "last, IQM", "95 % interval", "best of any"), tuple(rows))


def run_table(groups: Iterable[Group]) -> Table:
    """Return scores, speed and problems of each run."""
    columns = ("run", "settings", "seed", "status", "last", "best", "best at", "optimisation steps")
    more = ("environment steps", "opts/s", "env steps/s", "skipped updates", "invalid steps", "rollbacks")
    rows = [_run_row(group, run) for group in groups for run in group.runs]
    return Table((*columns, *more), tuple(rows))


def _run_row(group: Group, run: Run) -> tuple[str, ...]:
    facts, log = run.metadata, run.log
    opts, envs = steps_of(run)
    # The metadata has the speed of the entire run, the last row only that of its interval.
    speeds = [to_float(facts.get(name)) for name in ("opt_steps_per_sec", "env_steps_per_sec")]
    speeds = [recorded if np.isfinite(recorded) else row for recorded, row in zip(speeds, log.speeds, strict=True)]
    # The metadata of a killed run may not count all of its events.
    went_back = sum(event.get("event") == "rollback" for event in log.events)
    rollbacks = max(int(np.nan_to_num(to_float(facts.get("rollbacks")))), went_back)
    return (
        run.name,
        group.name,
        "-" if run.seed is None else str(run.seed),
        f"finished ({run.status})" if run.status in FINISHED else run.status,
        text(run.last),
        text(run.best),
        text(run.best_opt_steps, ",.0f"),
        text(opts, ",.0f"),
        text(envs, ",.0f"),
        *[text(speed, ",.0f") for speed in speeds],
        f"{log.skipped:,}",
        f"{log.invalid:,}",
        str(rollbacks),
    )


def steps_of(run: Run) -> tuple[float, float]:
    """Return the numbers of optimisation and environment steps that a run has made."""
    rows = [curve.x[:2, -1] for curve in (run.log.score, run.log.returns) if len(curve.y)]
    recorded = np.array([to_float(run.metadata.get(name)) for name in ("opt_steps", "env_steps")])
    # The maximum of rows and metadata: the metadata of a running run are as old as its last save.
    opts, envs = np.fmax.reduce(np.stack([recorded, *rows]))
    return float(opts), float(envs)


def time_table(groups: Iterable[Group]) -> Table:
    """Return the seconds of each run by part; of a run in progress, until its last checkpoint."""
    runs = [run for group in groups for run in group.runs]
    known = [(run, run.metadata.get("seconds")) for run in runs]
    rows = [
        (run.name, text(run.metadata.get("wall_s"), ",.1f"), *[text(seconds.get(part), ",.2f") for part in PARTS])
        for run, seconds in known
        if isinstance(seconds, Mapping)
    ]
    return Table(("run", "seconds in all", *PARTS), tuple(rows))


def event_table(groups: Iterable[Group]) -> Table:
    """Return the events of runs: rollbacks, warnings, resumptions."""
    events = [(run, event) for group in groups for run in group.runs for event in run.log.events]
    rows = [
        (run.name, text(event.get("opt_steps"), ",.0f"), _word(event.get("event")), _word(event.get("message")))
        for run, event in events[-MOST_EVENTS:]
    ]
    return Table(("run", "optimisation step", "event", "what"), tuple(rows))


def _word(value: object) -> str:
    return one_line(value)[:500]

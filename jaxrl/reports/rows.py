"""Reading of the logs of a run, tolerating damaged lines."""

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

import jaxrl.training.storage.logs as logs
from jaxrl.paths import reason_of_path
from jaxrl.training.storage.logs import to_float
from jaxrl.training.storage.run_dir import EPISODES, METRICS

Opened = Callable[[str], IO[bytes]]
"""Opens a log of a run or a member by name; raises `OSError` if there is none."""
AXES = ("opt_steps", "env_steps", "seconds")
"""X axes of curves."""
NAMES = dict(zip(AXES, ("optimisation steps", "environment steps", "seconds"), strict=True))
COLUMNS = ("episode_return", "skipped_updates", "invalid_steps", "opt_steps_per_sec", "env_steps_per_sec")
TAIL = 4 * 2**20
"""Bytes at the end of the log of episodes that are searched for the last evaluation."""
MOST = 2.0**53
"""Bound of valid counts in a row: no run has that many steps, and floats represent larger integers inexactly."""
Table = list[tuple[float, ...]]


class Curve(NamedTuple):
    """Points of a run with finite values, sorted by optimisation steps."""

    x: np.ndarray
    """`[3, N]`, a row for each of `AXES`; NaN if missing in the log."""
    y: np.ndarray
    """`[N]`."""


class Log(NamedTuple):
    """The parts of `metrics.jsonl` that reports use."""

    score: Curve
    """Scores of evaluations."""
    last: float
    """Score of the last evaluation; NaN if it is not finite, or there is none."""
    returns: Curve
    """Mean returns of training episodes."""
    best: tuple[float, float]
    """Confirmed score of the best policy since scores last became incomparable, and its optimisation steps, or NaN."""
    skipped: int
    """Number of updates skipped because they were not finite."""
    invalid: int
    """Number of invalid environment steps."""
    speeds: tuple[float, float]
    """Optimisation and environment steps per second in the last row that has them, or NaN."""
    events: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...]
    """Problems of the log."""


def read_log(opened: Opened) -> Log:
    """Read the log of a run, whose last line another process may be writing; a missing log is empty."""
    trained: Table = []
    others: list[dict[str, Any]] = []
    damaged: list[int] = []
    torn = False
    try:
        with opened(METRICS) as file:
            for number, line in enumerate(file, start=1):
                torn = not line.endswith(b"\n")
                if not torn and not _take(line, trained, others):
                    damaged.append(number)
    except FileNotFoundError:
        return _log(trained, others, [f"there is no {METRICS}"])
    except OSError as error:
        return _log(trained, others, [f"{METRICS} cannot be read: {reason_of_path(error)}"])
    remarks = [f"{len(damaged)} lines of {METRICS} are no rows ({logs.list_lines(damaged)})"] if damaged else []
    remarks += [f"the last line of {METRICS} is half-written"] if torn else []
    return _log(trained, others, remarks)


def _take(line: bytes, trained: Table, others: list[dict[str, Any]]) -> bool:
    """Append the row in `line` to `trained` or `others`; return whether it is valid."""
    if (row := logs.parse(line)) is None:
        return False
    if row.get("kind") == "train":
        trained.append((*where(row), *[to_float(row.get(name)) for name in COLUMNS]))
    else:
        others.append(row)
    return True


def where(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the position of a row on each of `AXES`."""
    return to_float(row.get("opt_steps")), to_float(row.get("env_steps")), to_float(row.get("wall_s"))


def _log(trained: Table, others: list[dict[str, Any]], remarks: list[str]) -> Log:
    table = np.asarray(trained, np.float64).reshape(-1, len(AXES) + len(COLUMNS))
    evaluated = [row for row in others if row.get("kind") == "eval"]
    scores = [(*where(row), to_float(row.get("score", row.get("eval_reward")))) for row in evaluated]
    if not remarks and not len(table) and not scores:
        remarks = [f"{METRICS} has no rows yet"]
    elif not scores:
        remarks = [*remarks, "it has no evaluations"]
    rates = table[np.isfinite(table[:, 6:8]).all(axis=1), 6:8]
    return Log(
        score=_curve(np.asarray(scores, np.float64).reshape(-1, 4)),
        last=_last(scores),
        returns=_curve(table[:, :4]),
        best=_best(others),
        skipped=_count(table[:, 4]),
        invalid=_count(table[:, 5]),
        speeds=(float(rates[-1, 0]), float(rates[-1, 1])) if len(rates) else (np.nan, np.nan),
        events=tuple(row for row in others if row.get("kind") == "event"),
        remarks=tuple(remarks),
    )


def _best(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    found = np.nan, np.nan
    for row in rows:
        if row.get("event") == "best":  # scores before are not comparable with those after
            found = np.nan, np.nan
        elif row.get("kind") == "eval" and row.get("is_best") is True:
            found = better(found, (_best_score(row), to_float(row.get("opt_steps"))))
    return found


def better(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the one of two scores, with their steps, that is greater; the first of equal ones."""
    finite = [pair for pair in (one, other) if np.isfinite(pair[0])]
    return max(finite, key=lambda pair: pair[0], default=(np.nan, np.nan))


def _best_score(row: Mapping[str, Any]) -> float:
    """Return the score that made a policy the best: that of its confirmation, if there was one."""
    confirmed = row.get("confirm_score")
    return to_float(row.get("score") if confirmed is None else confirmed)


def _count(column: np.ndarray) -> int:
    return int(column[(column >= 0) & (column < MOST)].sum())


def _last(scores: Sequence[tuple[float, ...]]) -> float:
    """Return the last number of the row at the most optimisation steps, the later one of several; NaN if not finite."""
    placed = [row for row in scores if np.isfinite(row[0])]
    last = max(reversed(placed), key=lambda row: row[0])[-1] if placed else np.nan
    return last if np.isfinite(last) else np.nan


def _curve(points: np.ndarray) -> Curve:
    """Return the finite rows of `points [N, 4]`, sorted stably by their first column."""
    kept = points[np.isfinite(points[:, 3]) & np.isfinite(points[:, 0])]
    kept = kept[np.argsort(kept[:, 0], kind="stable")]
    return Curve(kept[:, :3].T, kept[:, 3])


def read_episodes(opened: Opened, whole: bool = False) -> dict[int, list[float]]:
    """Return the returns of evaluation episodes by optimisation step: of the last evaluation, or of all if `whole`."""
    try:
        with opened(EPISODES) as file:
            begin = 0 if whole else max(file.seek(0, 2) - TAIL, 0)
            file.seek(begin)
            # Drop the first line, in the middle of which reading may start, and the last, which may be incomplete.
            lines = file.read().split(b"\n")[1 if begin else 0 : -1]
    except OSError:
        return {}
    found: dict[int, list[float]] = {}
    for line in lines:
        if (row := logs.parse(line)) is not None:
            found.setdefault(row["opt_steps"], []).append(to_float(row.get("return")))
    kept = found if whole else {step: found[step] for step in sorted(found)[-1:]}
    finite = {step: [value for value in values if np.isfinite(value)] for step, values in kept.items()}
    return {step: values for step, values in finite.items() if values}

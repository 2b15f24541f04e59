"""The rows of a log in a few numbers each, fast, whatever is damaged in between."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

AXES = ("opt_steps", "env_steps", "seconds")
"""What a curve can be drawn over."""
NAMES = dict(zip(AXES, ("optimisation steps", "environment steps", "seconds"), strict=True))
BEGINNING = re.compile(rb'\{"kind": "train", "opt_steps": (\d+), "env_steps": (\d+), "wall_s": ([\d.eE+-]+)[,}]')
"""Of a row of metrics as the recorder writes it. Such rows are many and long, so that only some columns are read."""
COLUMNS = ("episode_return", "skipped_updates", "invalid_steps", "opt_steps_per_sec", "env_steps_per_sec")
KEYS = tuple(f'"{name}": '.encode() for name in COLUMNS)
TAIL = 4 * 2**20
"""Bytes at the end of the log of episodes, in which those of the last evaluation are looked for."""
MOST = 2.0**53
"""Below which a row's count counts: no run has made so many steps, and floats count no further."""
Table = list[tuple[float, ...]]


class Curve(NamedTuple):
    """Points of a run, in the order of its optimisation steps; only finite values."""

    x: np.ndarray
    """`[3, N]`, over each of `AXES`; NaN where the log did not say."""
    y: np.ndarray
    """`[N]`."""


class Log(NamedTuple):
    """What the report keeps of `metrics.jsonl`."""

    score: Curve
    """Scores of evaluations."""
    returns: Curve
    """Mean returns of the episodes of training."""
    bests: tuple[float, ...]
    """Scores of the policies that became the best, in order, as they were confirmed."""
    skipped: int
    """Updates that were not finite and so not made."""
    invalid: int
    """Environment steps that were not valid."""
    speeds: tuple[float, float]
    """Optimisation and environment steps per second in the last row that has them, or NaN."""
    events: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...]
    """What is wrong with the log."""


def read_log(path: Path) -> Log:
    """Read the log `path`, of which another process may be writing the last line; a log that is missing is empty."""
    trained: Table = []
    others: list[dict[str, Any]] = []
    damaged: list[int] = []
    torn = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                torn = not line.endswith(b"\n")
                if not torn and not _take(line, trained, others):
                    damaged.append(number)
    except FileNotFoundError:
        return _log(path, trained, others, [f"there is no {path.name}"])
    except OSError as error:
        return _log(path, trained, others, [f"{path.name} cannot be read: {error.strerror or error}"])
    remarks = [f"{len(damaged)} lines of {path.name} are no rows ({_numbers(damaged)})"] if damaged else []
    remarks += [f"the last line of {path.name} is half-written"] if torn else []
    return _log(path, trained, others, remarks)


def _numbers(lines: list[int]) -> str:
    return ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")


def _take(line: bytes, trained: Table, others: list[dict[str, Any]]) -> bool:
    """Add the row in `line` to those of its kind; return whether there is one."""
    # Of rows as the recorder writes them only some columns are read; any other row is parsed as a whole.
    if (found := BEGINNING.match(line)) and line.endswith(b"}\n"):
        try:
            trained.append((*map(float, found.groups()), *[_column(line, key) for key in KEYS]))
            return True
        except ValueError:
            pass
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or type(row.get("opt_steps")) is not int:
        return False
    if row.get("kind") == "train":
        trained.append((*where(row), *[number(row.get(name)) for name in COLUMNS]))
    else:
        others.append(row)
    return True


def _column(line: bytes, key: bytes) -> float:
    """Return the number after `key` in a row of metrics, NaN if it has none; raise `ValueError` if it is damaged."""
    at = line.find(key)
    if at < 0:
        return np.nan
    at += len(key)
    end = line.find(b",", at)
    text = line[at : end if end >= 0 else -2]
    return np.nan if text == b"null" else float(text)


def number(value: object) -> float:
    """Return a number of a row, NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan
    except OverflowError:  # a whole number beyond all floats
        return np.nan


def where(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return where a row stands on each of `AXES`."""
    return number(row.get("opt_steps")), number(row.get("env_steps")), number(row.get("wall_s"))


def _log(path: Path, trained: Table, others: list[dict[str, Any]], remarks: list[str]) -> Log:
    table = np.asarray(trained, np.float64).reshape(-1, len(AXES) + len(COLUMNS))
    evaluated = [row for row in others if row.get("kind") == "eval"]
    scores = [(*where(row), number(row.get("score", row.get("eval_reward")))) for row in evaluated]
    bests = [number(row.get("confirm_score", row.get("score"))) for row in evaluated if row.get("is_best") is True]
    if not remarks and not len(table) and not scores:
        remarks = [f"{path.name} has no rows yet"]
    elif not scores:
        remarks = [*remarks, "it has no evaluations"]
    rates = table[np.isfinite(table[:, 6:8]).all(axis=1), 6:8]
    return Log(
        score=_curve(np.asarray(scores, np.float64).reshape(-1, 4)),
        returns=_curve(table[:, :4]),
        bests=tuple(score for score in bests if np.isfinite(score)),
        skipped=_count(table[:, 4]),
        invalid=_count(table[:, 5]),
        speeds=(float(rates[-1, 0]), float(rates[-1, 1])) if len(rates) else (np.nan, np.nan),
        events=tuple(row for row in others if row.get("kind") == "event"),
        remarks=tuple(remarks),
    )


def _count(column: np.ndarray) -> int:
    return int(column[(column >= 0) & (column < MOST)].sum())


def _curve(points: np.ndarray) -> Curve:
    """Return the finite ones of `points [N, 4]`, sorted by their first column, of equal ones the later last."""
    kept = points[np.isfinite(points[:, 3]) & np.isfinite(points[:, 0])]
    kept = kept[np.argsort(kept[:, 0], kind="stable")]
    return Curve(kept[:, :3].T, kept[:, 3])


def read_episodes(path: Path, whole: bool = False) -> dict[int, list[float]]:
    """Return the returns of evaluation episodes by optimisation step: of the last evaluation, or of all if `whole`."""
    try:
        with path.open("rb") as file:
            begin = 0 if whole else max(file.seek(0, 2) - TAIL, 0)
            file.seek(begin)
            # The first line may be cut where reading begins, and the last be half-written.
            lines = file.read().split(b"\n")[1 if begin else 0 : -1]
    except OSError:
        return {}
    found: dict[int, list[float]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            if np.isfinite(value := number(row["return"])):
                found.setdefault(int(row["opt_steps"]), []).append(value)
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            continue
    return found if whole else {step: found[step] for step in sorted(found)[-1:]}

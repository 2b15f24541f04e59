"""Reports for other programs: CSV tables, and JSON for marl-eval."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.paths import writing
from jaxrl.reports.curves import band
from jaxrl.reports.groups import Group, format_value
from jaxrl.reports.read import Run

COLUMNS = ("run", "group", "seed", "member", "opt_steps", "env_steps", "seconds", "score", "return")
AGGREGATES = ("runs", "mean", "iqm", "iqm_low", "iqm_high")
SUITES = ("bsuite", "MinAtar", "misc")
"""Suites whose names are suffixes of environment names, as in `Catch-bsuite`."""


def to_csv(groups: Iterable[Group]) -> str:
    """Return one table of all runs, with a row for each score and mean return; those of one step share a row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for group in groups:
        for run in group.runs:
            begin = [run.name, group.name, run.seed, run.member]
            writer.writerows([*begin, *line] for line in _lines(run))
    return out.getvalue()


def to_aggregate_csv(groups: Iterable[Group], x: str) -> str:
    """Return one table of all groups: mean, IQM and bounds of its 95 % interval over `x`, one of `AXES`.

    Each row is a point at which any run of a group has a score or a mean return; `runs` is the number of runs with one.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("group", "metric", x, *AGGREGATES))
    for group in groups:
        for metric, curves in (
            ("score", [run.log.score for run in group.runs]),
            ("return", [run.log.returns for run in group.runs]),
        ):
            if (found := band(curves, x, least=1)) is not None:
                for place, *numbers in zip(*(column.tolist() for column in found), strict=True):
                    at = place if x == "seconds" else int(place)
                    writer.writerow([group.name, metric, at, *("" if np.isnan(y) else y for y in numbers)])
    return out.getvalue()


def _lines(run: Run) -> list[list[Any]]:
    """Return the last five columns of a run's rows, sorted by step; a score and a return of one step share a row."""
    lines: dict[float, list[list[Any]]] = {}
    for place, curve in ((3, run.log.score), (4, run.log.returns)):
        for opts, envs, seconds, y in zip(*curve.x.tolist(), curve.y.tolist(), strict=True):
            here = lines.setdefault(opts, [])
            if all(line[place] is not None for line in here):
                at = (int(envs) if np.isfinite(envs) else None, seconds if np.isfinite(seconds) else None)
                here.append([int(opts), *at, None, None])
            next(line for line in here if line[place] is None)[place] = y
    return [line for opts in sorted(lines) for line in lines[opts]]


def to_marl_eval(groups: Sequence[Group]) -> str:
    """Return the evaluations of all runs as JSON for marl-eval (Gorsane et al. 2022, https://arxiv.org/abs/2209.10485).

    Each group is an algorithm. The `return` of an evaluation lists the returns of its episodes, or its score if these
    are unknown; the absolute metric is the score of the best policy.
    """
    suites: dict[str, Any] = {}
    for group in groups:
        suite, task = _task(format_value(group.runs[0].settings.get("env", "unknown")))
        algorithms = suites.setdefault(suite, {}).setdefault(task, {})
        runs = [_evaluations(run) for run in group.runs if len(run.log.score.y)]
        if runs:
            algorithms[_algorithm(group)] = {f"run_{i}": run for i, run in enumerate(runs)}
    return json.dumps(suites, indent=1) + "\n"


def _algorithm(group: Group) -> str:
    """Return the name of a group without its environment."""
    env = format_value(group.runs[0].settings.get("env", "unknown"))
    return " ".join(group.name.replace(f" {env}", " ", 1).split())


def _task(env: str) -> tuple[str, str]:
    """Split the name of an environment into suite and task."""
    suite, colon, task = env.partition(":")
    if colon:
        return suite, task
    task, dash, suite = env.rpartition("-")
    return (suite, task) if dash and suite in SUITES else ("gym", env)


def _evaluations(run: Run) -> dict[str, Any]:
    curve, episodes = run.log.score, run.episodes(whole=True)
    steps: dict[str, Any] = {}
    for i, ((opts, envs, seconds), score) in enumerate(zip(curve.x.T.tolist(), curve.y.tolist(), strict=True)):
        steps[f"step_{i}"] = {
            "step_count": int(envs if np.isfinite(envs) else opts),
            "elapsed_time": seconds if np.isfinite(seconds) else None,
            "return": episodes.get(int(opts)) or [score],
        }
    best = run.best if np.isfinite(run.best) else float(curve.y.max())
    return {**steps, "absolute_metrics": {"return": [best]}}


def require_outside(path: Path, runs: Iterable[str]) -> None:
    """Raise `SettingsError` if `path`, to be written, is inside one of the run directories."""
    whole = path.resolve()
    for run in runs:
        if whole.is_relative_to(Path(run).resolve()):
            raise SettingsError(f"{path} lies in the run {run}, which is only read; choose another place")


def write(path: Path, text: str) -> None:
    """Write a file; raise `SettingsError` if that fails."""
    with writing(path):
        path.write_text(text, "utf-8")

"""Groups of runs with equal settings except the seed: names, differences and scores."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.errors import one_line
from jaxrl.reports.read import Run
from jaxrl.training.population.scores import Spread, comparable, spread
from jaxrl.training.settings import CHANGEABLE, OF_SCORES

LONGEST_LABEL = 120
MAY_DIFFER = (CHANGEABLE - OF_SCORES - {"init_from", "init_parts"}) | {"seed"}
"""Settings in which the runs of a group may differ."""
DEFAULTS: dict[str, Any] = {
    "eval_env": None,
    "eval_env_args": {},
    "eval_actions": "greedy",
    "init_from": None,
    "init_parts": [],
}
"""How runs are evaluated, and begin, whose settings do not say it."""


class Group(NamedTuple):
    """Runs with equal settings except the seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def last(self) -> Spread:
        """Spread of their last scores, as in the results of populations."""
        return spread([[run.last for run in comparable(self.runs)]])


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs by the settings on which training and the meaning of scores depend, except the seed.

    A run with unreadable settings forms its own group. Groups are named by algorithm and environment, and by the
    settings in which they differ from other groups of these.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    groups = list(found.values())
    names = _unique(_labels([group[0] for group in groups]))
    return [Group(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def _deciding(run: Run, form: Callable[[object], str]) -> dict[str, str]:
    """Return the settings that tell groups apart, their values in a `form`; `varied` for those a search changed."""
    settings = {name: value for name, value in run.settings.items() if DEFAULTS.get(name, ...) != value}
    own = {name: form(value) for name, value in settings.items() if name not in MAY_DIFFER}
    return own | dict.fromkeys(run.swept if run.varied else (), "varied")


def _exact(value: object) -> str:
    """Return the value of a setting with all its digits."""
    return repr(value) if isinstance(value, float) else format_value(value)


def _key(run: Run) -> str:
    return json.dumps([run.varied, _deciding(run, _exact)], sort_keys=True) if run.settings else str(run.path)


def _title(run: Run) -> tuple[str, str]:
    return format_value(run.settings.get("algo", "unknown")), format_value(run.settings.get("env", "unknown"))


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of groups, of each of which `runs` has one run."""
    # Settings distinguish only groups of the same algorithm and environment.
    alike: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in runs:
        if run.settings:
            alike.setdefault(_title(run), []).append(_deciding(run, _exact))
    differing = {
        title: [
            name
            for name in _names(found)
            if name not in ("algo", "env") and len({settings.get(name) for settings in found}) > 1
        ]
        for title, found in alike.items()
    }
    return [_label(run, differing[_title(run)]) if run.settings else run.name for run in runs]


def _label(run: Run, names: Sequence[str]) -> str:
    """Return the name of the group of `run`, with its settings `names`."""
    own = _deciding(run, format_value)
    label = " ".join([*_title(run), *(f"{name}={own.get(name, '-')}" for name in names)])
    return label if len(label) <= LONGEST_LABEL else f"{label[:LONGEST_LABEL]}..."


def _names(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in settings for name in mapping))


def _unique(labels: Sequence[str]) -> list[str]:
    """Return `labels`, with numbers appended to those that occur several times."""
    total, so_far, found = Counter(labels), Counter[str](), []
    for label in labels:
        so_far[label] += 1
        found.append(label if total[label] == 1 else f"{label} ({so_far[label]})")
    return found


def format_value(value: object) -> str:
    """Format the value of a setting."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return one_line(value)
    try:
        return one_line(json.dumps(value, default=str))
    # Integers of thousands of digits, keys that are dates, unlimited depth.
    except (ValueError, TypeError, RecursionError):
        return one_line(value)


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the settings, including the seed, in which any two runs differ, with the values in each group."""
    runs = [run for group in groups for run in group.runs if run.settings]
    found: dict[str, list[str]] = {}
    for name in _names(run.settings for run in runs):
        values = [_values(group, name) for group in groups]
        if len({value for cell in values for value in cell}) > 1:
            found[name] = [", ".join(cell) or "-" for cell in values]
    return found


def _values(group: Group, name: str) -> list[str]:
    """Return the distinct values of a setting in a group, in order of the runs; `-` for a run without it."""
    values = [format_value(run.settings[name]) if name in run.settings else "-" for run in group.runs if run.settings]
    return list(dict.fromkeys(values))


def count(groups: Sequence[Group]) -> str:
    """Format the numbers of runs and settings, as in `3 runs, 1 setting`."""
    runs, settings = sum(len(group.runs) for group in groups), len(groups)
    return f"{runs} run{'s' * (runs != 1)}, {settings} setting{'s' * (settings != 1)}"


def remarks(groups: Iterable[Group]) -> list[str]:
    """Return remarks on problems of runs, and on duplicates."""
    found: list[str] = []
    for group in groups:
        # Equal settings and seeds: most likely a copy of a run.
        seen: dict[int, str] = {}
        for run in group.runs:
            found += [f"{run.name}: {remark}" for remark in run.remarks]
            if run.varied:  # the search has made members with equal seeds differ
                continue
            if run.seed in seen:
                found.append(f"{run.name}: has the settings and the seed of {seen[run.seed]}; both count")
            if run.seed is not None:
                seen.setdefault(run.seed, run.name)
    return found

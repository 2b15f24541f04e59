"""Where the members of a population are."""

import os
import shutil
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.paths import local
from jaxrl.training.storage.run_dir import CONFIG, read_metadata, read_yaml, require_run, sync_dir

MEMBERS, POPULATION = "members", "population"
"""The folder of a population's members, and the entry of its `config.yaml` that says what they are."""


def member_dir(population: str | Path, number: int) -> Path:
    """Return the directory of a member."""
    return Path(population) / MEMBERS / f"{number:05d}"


def group_of(run_dir: Path) -> Path | None:
    """Return the directory of the population that the run in `run_dir` is a member of, or `None`."""
    group = run_dir.parent.parent
    return group if run_dir.parent.name == MEMBERS and (group / CONFIG).is_file() else None


def population_of(path: str | Path) -> dict[str, Any] | None:
    """Return what makes the population in the directory `path`, or `None` if a run of its own is there."""
    found = read_yaml(Path(path) / CONFIG).get(POPULATION)
    return found if isinstance(found, dict) else None


def resolve(run_dir: str | Path, member: int | None = None) -> Path:
    """Return the directory of a run: itself, or of a population that of `member`, by default of the best.

    The best is that of the highest best score; of equal ones the first.

    Raises:
      SettingsError: there is no such member, or this is no population.
    """
    path = Path(local(run_dir))
    require_run(path)
    if population_of(path) is None:
        if member is not None:
            raise SettingsError(f"{run_dir} is a run of its own, and has no member {member}; leave the member out")
        return path
    there = [int(found.name) for found in runs_of(path)]
    if not there:
        raise SettingsError(f"{run_dir} has no members yet")
    if member is None:
        scores = {number: read_metadata(member_dir(path, number)).get("best_score") for number in there}
        known = {number: score for number, score in scores.items() if isinstance(score, int | float)}
        return member_dir(path, max(known, key=lambda number: known[number]) if known else there[0])
    if member not in there:
        raise SettingsError(f"{run_dir} has no member {member}; expected {there[0]} to {there[-1]}")
    return member_dir(path, member)


def runs_of(run_dir: str | Path, member: int | None = None) -> list[Path]:
    """Return the run in a directory, or of a population all its members, or `member` alone."""
    run_dir = Path(local(run_dir))
    if member is not None or population_of(run_dir) is None:
        return [resolve(run_dir, member)]
    folders = (path for path in (run_dir / MEMBERS).glob("*") if path.name.isascii() and path.name.isdecimal())
    return sorted(path for path in folders if path == member_dir(run_dir, int(path.name)))


def extract(run_dir: str | Path, member: int, to: str | Path) -> Path:
    """Copy a member of a population to a directory of its own, as a run that can be resumed; return that.

    Raises:
      SettingsError: there is no such member, or something is at `to` already.
    """
    path, target = resolve(run_dir, member), Path(local(to))
    if target.resolve().is_relative_to(Path(local(run_dir)).resolve()):
        raise SettingsError(f"{target} lies inside {run_dir}, which stays as it is; choose another directory")
    if os.path.lexists(target):
        raise SettingsError(f"{target} exists already; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(path, target, symlinks=True)  # none but that which `require_inside` allows
    sync_dir(target.parent)
    return target

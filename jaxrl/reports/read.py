"""Reading runs from disk: files are opened read-only, and no lock is taken."""

import functools
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError, one_line, safe_str
from jaxrl.parsing import flatten_settings
from jaxrl.paths import local
from jaxrl.reports.rows import Log, Opened, better, read_episodes, read_log
from jaxrl.training.storage.files import read_json
from jaxrl.training.storage.logs import to_float
from jaxrl.training.storage.members import POPULATION
from jaxrl.training.storage.run_dir import (
    MEMBERS_FILE,
    METADATA,
    VIDEOS,
    films_in,
    log_of_members,
    member_dir,
    open_log,
    population_dir,
    read_members,
    read_metadata,
    read_settings,
    require_run,
)

LARGEST_FILM = 20 * 2**20
"""Largest film that the page includes, in bytes."""


class Run(NamedTuple):
    """A run, or a member of a population."""

    name: str
    path: Path
    member: int | None
    """Number in the population."""
    population: str | None
    """Name of the population."""
    swept: tuple[str, ...]
    """Names of the population's swept settings."""
    varied: str
    """Description of a search that changes these during training (PBT), otherwise empty."""
    settings: Mapping[str, Any]
    """All settings by dotted name; empty if they cannot be read."""
    metadata: Mapping[str, Any]
    opened: Opened
    """Opens a log by name."""
    log: Log
    best: float
    """Confirmed score of the best policy; NaN if there is none."""
    best_opt_steps: float
    """Optimisation steps of that policy; NaN if unknown."""
    film: Path | None
    """Newest film of the run."""
    remarks: tuple[str, ...]

    @property
    def seed(self) -> int | None:
        """The seed; `None` if unknown."""
        seed = self.settings.get("seed")
        return seed if isinstance(seed, int) and abs(seed) < 2**64 else None

    @property
    def status(self) -> str:
        """Reason why the run stopped, or `running`."""
        return one_line(self.metadata.get("status", "unknown"))[:100]

    @property
    def last(self) -> float:
        """Score of the last evaluation; NaN if it is not finite, there is none, or the run diverged."""
        return np.nan if self.status == "diverged" else self.log.last

    def episodes(self, whole: bool = False) -> dict[int, list[float]]:
        """Return the returns of evaluation episodes by optimisation step: of the last evaluation, or all if `whole`."""
        return read_episodes(self.opened, whole)


def read_runs(paths: Iterable[str]) -> list[Run]:
    """Read runs, and all members of populations; a path given twice is read once.

    Raises:
      SettingsError: a path is not a run directory.
    """
    # By real path, so that a run is not counted twice under two names.
    folders = {os.path.realpath(path): Path(path) for path in map(local, paths)}
    for path in folders.values():
        require_run(path)
    names = _names(list(folders.values()))
    return [run for path, name in zip(folders.values(), names, strict=True) for run in _runs_in(path, name)]


def _names(paths: list[Path]) -> list[str]:
    """Return the last component of each path, or the full path if the component is not unique."""
    last = [Path(os.path.realpath(path)).name for path in paths]
    return [name if last.count(name) == 1 else path.as_posix() for name, path in zip(last, paths, strict=True)]


def _runs_in(path: Path, name: str) -> list[Run]:
    config, remarks = _read(read_settings, path)
    group = config.get(POPULATION)
    if not isinstance(group, dict) and not (path / MEMBERS_FILE).is_file():
        return [_single(path, name, config, remarks)]
    swept = group.get("sweep") if isinstance(group, dict) else None
    names = tuple(map(str, swept)) if isinstance(swept, dict) else ()
    there, wrong = _read(read_members, path)
    remarks += wrong
    varied = safe_str([group["pbt"], swept]) if isinstance(group, dict) and group.get("pbt") else ""
    held = functools.cache(partial(log_of_members, path))  # a log is read once, even if a process is writing it
    members = []
    for member, one in there.items():
        run, opened = member_dir(path, member), lambda log, member=member: held(log)(member)
        found = _run(run, f"{name}/{run.name}", one.settings, one.metadata, [], opened)
        members.append(found._replace(member=member, population=name, swept=names, varied=varied))
    if not members:
        return [_single(path, name, config, [*remarks, "it has no members yet"])]
    return [members[0]._replace(remarks=(*remarks, *members[0].remarks)), *members[1:]]


def _read(reader: Any, path: Path) -> tuple[dict[Any, Any], list[str]]:
    """Return the content of a small file, or nothing and the reason."""
    try:
        return reader(path), []
    except SettingsError as error:
        return {}, [str(error)]


def _single(path: Path, name: str, config: Mapping[str, Any], remarks: list[str]) -> Run:
    # Missing metadata are worth a remark; those of a member are in the file that its settings were read from.
    metadata, wrong = _read(read_json, path / METADATA) if population_dir(path) is None else (read_metadata(path), [])
    return _run(path, name, config, metadata, [*remarks, *wrong], partial(open_log, path))


def _run(
    path: Path, name: str, config: Mapping[str, Any], metadata: Mapping[str, Any], remarks: list[str], opened: Opened
) -> Run:
    log = read_log(opened)
    best, best_opt_steps = _best(metadata, log)
    film, large = _film(path)
    own = {key: value for key, value in config.items() if key != POPULATION}
    return Run(
        name=one_line(name),
        path=path,
        member=None,
        population=None,
        swept=(),
        varied="",
        settings=flatten_settings(own, keep_empty=True),
        metadata=metadata,
        opened=opened,
        log=log,
        best=best,
        best_opt_steps=best_opt_steps,
        film=film,
        remarks=tuple(one_line(remark)[:500] for remark in (*remarks, *log.remarks, *large)),
    )


def _best(metadata: Mapping[str, Any], log: Log) -> tuple[float, float]:
    """Return score and optimisation steps of the best policy, NaN if unknown."""
    saved = to_float(metadata.get("best_score")), to_float(metadata.get("best_opt_steps"))
    # The metadata of a run that is running or was killed are as old as its last save; the rows may be newer.
    if not np.isfinite(log.best[0]) or (np.isfinite(saved[0]) and metadata.get("status") != "running"):
        return saved
    return better(saved, log.best)


def _film(path: Path) -> tuple[Path | None, list[str]]:
    """Return the newest film of a run, and a remark if it is too large to be shown."""
    try:
        films = [(entry.stat().st_mtime, entry.stat().st_size, entry) for entry in films_of(path)]
    except OSError:
        return None, []
    if not films:
        return None, []
    _, size, film = max(films)
    if size > LARGEST_FILM:
        return None, [f"{film.name} has {size / 2**20:.0f} MiB and is left out; at most 20 are taken in"]
    return film, []


def films_of(path: Path) -> list[Path]:
    """Return the films of a run, including those made during training."""
    return [*films_in(path), *films_in(path / VIDEOS)]

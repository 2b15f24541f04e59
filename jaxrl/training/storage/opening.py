"""The stored checkpoints and best policies of a run, by its path, whether it is a run of its own or a member."""

import json
import os
import shutil
import warnings
from pathlib import Path

from jaxrl.errors import SettingsError, StorageError
from jaxrl.paths import local
from jaxrl.training.storage.checkpoints import CheckpointError, Store, is_step
from jaxrl.training.storage.files import new_directory, write_atomically
from jaxrl.training.storage.logs import copy_logs
from jaxrl.training.storage.members import require_no_member, resolve
from jaxrl.training.storage.population_saves import MemberStore, PopulationStore
from jaxrl.training.storage.run_dir import (
    BEST,
    CHECKPOINTS,
    METADATA,
    number_of,
    population_dir,
    read_metadata,
    read_settings,
    write_settings,
)


def split_checkpoint(path: Path) -> tuple[Path, int | None]:
    """Return the run that `path` names, and the step if it names one of the run's checkpoints."""
    given = is_step(path.name) and path.parent.name == CHECKPOINTS
    return (path.parent.parent, int(path.name)) if given else (path, None)


def step_of(run: Path, step: int | str, store: Store) -> int:
    """Return the step of a checkpoint in the `store` of `run`: `step`, or for `latest` that of the newest valid one.

    Raises:
      SettingsError: there is no such checkpoint.
      NoCheckpointError: no checkpoint is valid.
    """
    if step == "latest":
        return store.newest_facts()[0]
    kept = store.steps()
    if step not in kept:
        there = f"kept are {', '.join(map(str, kept))}" if kept else "it keeps none"
        raise SettingsError(f"{run} keeps no checkpoint of step {step}; {there}")
    return int(step)


def open_store(run: Path, name: str, opened: "dict[Path, PopulationStore] | None" = None) -> Store:
    """Open for reading what a run stores under `name`: its own store, or a member's part of its population's.

    `opened` caches the population's stores, so that each is read once for all members.
    """
    if (population := population_dir(run)) is None:
        return Store(run / name, 1)
    opened = {} if opened is None else opened
    saves = opened.setdefault(population / name, PopulationStore(population / name, 1))
    return MemberStore(saves, number_of(run))


def extract(run_dir: str | Path, member: int, to: str | Path) -> Path:
    """Copy a member of a population to the directory `to`, as a run that can be resumed; return its path.

    Raises:
      SettingsError: there is no such member, or `to` exists.
      StorageError: the copy cannot be written; no partial copy is left behind.
    """
    path, target = resolve(run_dir, member), Path(local(to))
    if target.resolve().is_relative_to(Path(local(run_dir)).resolve()):
        raise SettingsError(f"{target} lies inside {run_dir}, which stays as it is; choose another directory")
    if os.path.lexists(target):
        raise SettingsError(f"{target} exists already; choose another directory")
    require_no_member(target)
    try:
        with new_directory(target) as made:
            # Links are copied as links; the only one that `require_inside` allows is wandb's.
            if path.is_dir():
                shutil.copytree(path, made, symlinks=True, dirs_exist_ok=True)
            write_atomically(made / METADATA, json.dumps(read_metadata(path), indent=2) + "\n")
            copy_logs(path, made)
            write_settings(made, read_settings(path))
            for name in (CHECKPOINTS, BEST):
                _copy_rows(open_store(path, name), made / name)
    except (OSError, shutil.Error, StorageError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first(error)
        raise StorageError(f"cannot write {target}: {reason}; nothing of it stays") from error
    return target


def _copy_rows(store: Store, to: Path) -> None:
    """Copy a member's rows from the store of its population into `to`; warn of damaged ones."""
    for step in store.steps() if isinstance(store, MemberStore) else ():
        try:
            store.copy(step, to)
        except CheckpointError as error:
            warnings.warn(f"{store.directory}: step {step} of the member is left out: {error}", stacklevel=3)


def _first(error: Exception) -> str:
    """Return the first failure that a `shutil.Error` has collected."""
    failures = error.args[0] if error.args else ""
    return str(failures[0][2] if isinstance(failures, list) and failures else failures)

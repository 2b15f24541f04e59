"""Forks: new runs that start from a checkpoint of another run."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.parsing import as_int
from jaxrl.paths import local
from jaxrl.training.storage.checkpoints import CheckpointError
from jaxrl.training.storage.logs import copy_logs
from jaxrl.training.storage.members import population_of
from jaxrl.training.storage.opening import open_store, step_of
from jaxrl.training.storage.run_dir import (
    BEST,
    BOARD,
    CHECKPOINTS,
    read_settings,
    require_run,
    write_settings,
)


class Fork(NamedTuple):
    """The origin of a fork."""

    run: Path
    """Directory of the original run, which is not modified."""
    step: int | str
    """Optimisation steps of the checkpoint, or `latest`."""


def resolve_fork(
    resume: bool | str | os.PathLike[str], from_step: int | str | None, run_dir: str | None
) -> tuple[str | None, Fork | None]:
    """Return the directory of a run, and its origin if it is a fork.

    Args:
      resume: whether to resume the run in `run_dir`, or the directory of the run to resume or fork.
      from_step: the checkpoint of that run from which the new run in `run_dir` starts.
      run_dir: the directory of the run.

    Raises:
      SettingsError: the arguments contradict each other.
    """
    if not isinstance(resume, bool | str | os.PathLike):
        raise SettingsError(f"resume is {resume!r}; expected a bool, or the directory of a run")
    source = None if isinstance(resume, bool) else local(Path(resume))
    if from_step is None:
        if source is not None and run_dir is not None and Path(run_dir).absolute() != source.absolute():
            raise SettingsError(
                f"{source} goes on in its own directory, not in {run_dir}; leave run_dir out, or say from which "
                "checkpoint on a new run begins there, by from_step"
            )
        return (run_dir if source is None else str(source)), None
    if source is None:
        raise SettingsError("from_step is a checkpoint of another run; name that, as in resume='runs/old'")
    if run_dir is None or Path(run_dir).absolute() == source.absolute():
        raise SettingsError(f"from_step begins a new run, and leaves {source} as it is; name a new run_dir for it")
    step = as_int(from_step)
    if step != "latest" and not (type(step) is int and step >= 0):
        raise SettingsError(f"from_step is {from_step!r}; expected latest or a number of optimisation steps")
    return run_dir, Fork(source, step)


def copy_checkpoint(fork: Fork, target: Path) -> int:
    """Copy a checkpoint of `fork.run`, with logs and best policy, to the empty run directory `target`; return its step.

    Logs are copied in full: resuming removes rows after the checkpoint. A best policy found later is not copied.
    `config.yaml` is copied last, as it makes the directory a run.

    Raises:
      SettingsError: there is no such run or checkpoint, or `target` lies inside the run.
      NoCheckpointError: the checkpoint is damaged.
    """
    source = fork.run.absolute()
    require_run(source)
    if population_of(source) is not None:
        raise SettingsError(f"{fork.run} is a population; branch off from one of its members, as of {fork.run}/members")
    # A fork inside the original run would be copied or moved aside with it.
    if target.absolute().is_relative_to(source):
        raise SettingsError(f"{target} lies inside {fork.run}, which is to stay as it is; choose another directory")
    checkpoints, bests = open_store(source, CHECKPOINTS), open_store(source, BEST)
    step = step_of(fork.run, fork.step, checkpoints)
    try:
        checkpoints.copy(step, target / CHECKPOINTS)
    except CheckpointError as error:
        raise NoCheckpointError(f"checkpoint {step} of {fork.run} {error.verdict}: {error}") from error
    # A later best policy was never reached by this run.
    for best in [best for best in bests.steps() if best <= step]:
        with contextlib.suppress(CheckpointError):  # not essential: the run will find another
            bests.copy(best, target / BEST)
    copy_logs(source, target)
    if (source / BOARD).is_dir():
        shutil.copytree(source / BOARD, target / BOARD)
    write_settings(target, read_settings(source))
    return step

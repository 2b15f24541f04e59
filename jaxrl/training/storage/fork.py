"""A run that branches off at a checkpoint of another: what it takes along from there."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.parsing import as_int
from jaxrl.paths import local
from jaxrl.training.storage.checkpoints import CheckpointError, Store
from jaxrl.training.storage.group import BEST, CHECKPOINTS, open_store
from jaxrl.training.storage.log_sums import LOGS
from jaxrl.training.storage.members import population_of
from jaxrl.training.storage.run_dir import CONFIG, FORMAT, RunDir, require_run

BOARD = "tensorboard"


class Fork(NamedTuple):
    """Where a run branches off."""

    run: Path
    """The directory of the run that stays as it is."""
    step: int | str
    """The checkpoint, by its optimisation steps, or `latest`."""


def origin(
    resume: bool | str | os.PathLike[str], from_step: int | str | None, run_dir: str | None
) -> tuple[str | None, Fork | None]:
    """Return the directory in which a run goes on, and where it branches off if it is a new one.

    Args:
      resume: whether to go on in `run_dir`, or the directory of the run to go on from.
      from_step: the checkpoint of that run with which the run in `run_dir` begins.
      run_dir: the directory of the run.

    Raises:
      SettingsError: these do not go together.
    """
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


def branch_off(fork: Fork, target: Path) -> int:
    """Fill the empty run directory `target` with what `fork.run` was at a checkpoint; return its step.

    Logs are copied whole: resuming takes back what they hold after the checkpoint. A best policy that came after it
    stays behind. `config.yaml` comes last: a directory that has one is a run.

    Raises:
      SettingsError: there is no such run or checkpoint.
      NoCheckpointError: the checkpoint is damaged.
    """
    source = fork.run.absolute()
    require_run(source)
    if population_of(source) is not None:
        raise SettingsError(f"{fork.run} is a population; branch off from one of its members, as of {fork.run}/members")
    # A fork inside of the run would be part of it, and be copied or moved aside with it.
    if target.absolute().is_relative_to(source):
        raise SettingsError(f"{target} lies inside {fork.run}, which is to stay as it is; choose another directory")
    checkpoints, bests = open_store(source, CHECKPOINTS), open_store(source, BEST)
    step = step_of(fork, checkpoints)
    try:
        checkpoints.copy(step, target / CHECKPOINTS)
    except CheckpointError as error:
        raise NoCheckpointError(f"checkpoint {step} of {fork.run} {error.verdict}: {error}") from error
    # A best policy from after the branch belongs to a future that this run does not have.
    for best in [best for best in bests.steps() if best <= step]:
        with contextlib.suppress(CheckpointError):  # the run goes on without it, and finds another
            bests.copy(best, target / BEST)
    for name in LOGS:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)
    if (source / BOARD).is_dir():
        shutil.copytree(source / BOARD, target / BOARD)
    shutil.copyfile(source / CONFIG, target / CONFIG)
    return step


def describe_fork(directory: RunDir, fork: Fork, step: int) -> None:
    """Write into `metadata.json` of a run where it comes from."""
    directory.write_metadata(
        format=FORMAT,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        opt_steps=step,
        saved_opt_steps=step,
        forked_from={"run": str(fork.run.absolute()), "opt_steps": step},
    )


def told(fork: Fork, step: int) -> str:
    """Return the event of a run that branched off."""
    left = any(best > step for best in open_store(fork.run, BEST).steps())
    aside = "; its best policy came later, and was not taken along" if left else ""
    return f"branched off from {fork.run.absolute()} at {step} optimisation steps{aside}"


def step_of(fork: Fork, store: Store) -> int:
    """Return the step that `fork` means.

    Raises:
      SettingsError: it is not kept.
      NoCheckpointError: none is whole.
    """
    kept = store.steps()
    if fork.step == "latest":
        return store.newest_facts()[0]
    if fork.step not in kept:
        there = f"kept are {', '.join(map(str, kept))}" if kept else "it keeps none"
        raise SettingsError(f"{fork.run} keeps no checkpoint of step {fork.step}; {there}")
    assert isinstance(fork.step, int)
    return fork.step

"""All that a run writes: its directory, checkpoints and best policy. Without a directory it writes nothing."""

import functools
import math
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl.errors import NoCheckpointError, SettingsError, StorageError
from jaxrl.training.changes import HARMLESS, Change, changes, measured_otherwise, unread
from jaxrl.training.program import Form
from jaxrl.training.storage.checkpoints import OtherVersionError, Store
from jaxrl.training.storage.fork import Fork, branch_off, describe_fork, origin, told
from jaxrl.training.storage.group import BEST, CHECKPOINTS
from jaxrl.training.storage.log_sums import LogSums, damage
from jaxrl.training.storage.members import MEMBERS, member_dir
from jaxrl.training.storage.run_dir import (
    CONFIG,
    EPISODES,
    FORMAT,
    METADATA,
    METRICS,
    RunDir,
    make_dir,
    plain,
    read_metadata,
    read_yaml,
    require_empty,
)
from jaxrl.trees import PyTree
from jaxrl.xla.contexts import product_precision

VERSIONS = ("jaxrl", "jax", "jaxlib", "flax", "optax", "gymnax")
"""Packages whose version may decide a bit of the training."""
MIN_SAVE_GAP_S, MAX_SAVE_GAP_S, MAX_SAVE_SHARE = 10.0, 600.0, 0.05
"""Seconds between saves of a run without a `save_interval`: so many that writing takes at most this share of the time,
but never more than the second."""
OTHER_VERSIONS = ("orbax-checkpoint", "chex", "numpy")


class Resume(NamedTuple):
    """Whether and how to go on with the run in a directory."""

    run: bool = False
    allow_changes: bool = False
    """Go on although settings or versions differ that decide the training."""
    start_over: bool = False
    """Begin again, whatever the settings of a run that is there; it is moved aside."""
    fork: Fork | None = None
    """Begin a new run from a checkpoint of another."""


def resumption(
    resume: bool | str | os.PathLike[str],
    from_step: int | str | None,
    run_dir: str | None,
    allow_changes: bool,
    start_over: bool,
) -> tuple[str | None, Resume]:
    """Return the directory of a run, and whether and how it is taken up; see `origin`.

    Raises:
      SettingsError: these do not go together.
    """
    run_dir, fork = origin(resume, from_step, run_dir)
    if resume and run_dir is None:
        raise SettingsError("resume needs the run_dir to go on with")
    if allow_changes and not resume:
        raise SettingsError("allow_changes says how to resume; set resume as well")
    if start_over and run_dir is None:
        raise SettingsError("start_over needs the run_dir in which to begin again")
    if start_over and fork is not None:
        raise SettingsError("start_over begins a run again, from_step one from a checkpoint; leave one of them out")
    return run_dir, Resume(bool(resume), allow_changes, start_over, fork)


class Best(NamedTuple):
    """The best policy so far."""

    opt_steps: int
    score: float
    params: PyTree
    facts: Mapping[str, Any]


class Storage:
    """What a run writes. A failure is reported and survived; the newest attempts decide how the run ends."""

    def __init__(
        self,
        path: str | None,
        keep: int,
        settings: Mapping[str, Any],
        resume: Resume,
        regular: Callable[[int], bool] = lambda opt_steps: True,
        fits: Callable[[Store, Mapping[str, Any]], bool] = lambda checkpoints, facts: True,
        stores: Callable[[str], Store] | None = None,
    ) -> None:
        """Take hold of the run directory `path`, or of nothing if it is `None`.

        `fits` says of checkpoints, and the facts of the newest, whether they can be gone on from under these settings.
        `stores` are those of a member of a population, by name; others have their own.

        Raises:
          SettingsError: the directory holds something else, or a run with other settings, or cannot be written.
          RunDirInUseError: another process holds it.
          NoCheckpointError: `resume`, and no checkpoint is valid.
          StorageError: the disk is full.
        """
        self.report: Callable[[str], None] = lambda line: None
        """Told in one line when writing begins to fail, and when it works again."""
        self.on_saved: Callable[[int], None] = lambda opt_steps: None
        """Told when a checkpoint is whole on the disk."""
        self.dir: RunDir | None = None
        self.best_score: float | None = None
        """Score of the best policy on disk."""
        self.resumes = False
        """Whether there is a checkpoint to go on from."""
        self.changes: list[Change] = []
        """How settings and versions differ from those of the checkpoint."""
        self.decisive: list[Change] = []
        """Those of them on which the training depends."""
        self._unused: Path | None = None
        """The directory of a run that has branched off and not gone on yet."""
        self._step = 0
        """Where it did."""
        self._failures: dict[str, StorageError] = {}
        self._pending: float | None = None
        self._settings, self._resume, self._fits = plain(settings), resume, fits
        if path is None:
            return
        self._versions = versions(VERSIONS)
        # From here on the directory is locked: nobody else writes to it.
        self.dir = (
            self._new_fork(resume.fork, Path(path)) if resume.fork else RunDir(path, resume.run or self._replaces(path))
        )
        # The best policy has a store of its own, which pruning of checkpoints does not touch.
        self.checkpoints = stores(CHECKPOINTS) if stores else Store(self.dir / CHECKPOINTS, keep, regular)
        self.best = stores(BEST) if stores else Store(self.dir / BEST, 1)
        self._logs = LogSums(self.dir.path)
        # What is there is compared with the settings before any of it is written over.
        try:
            self._look_back(resume)
            self.dir.sign()
            if not self.resumes:
                self._describe()
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError(f"cannot write the run directory {self.dir.path}: {error.strerror}") from error

    def _new_fork(self, fork: Fork, path: Path) -> RunDir:
        """Begin the run in `path` with what another was; it is removed again unless the run goes on."""
        if path.exists():
            require_empty(path)
        else:
            make_dir(path)
        # From here on, `close` removes the directory unless the run has gone on.
        self._unused = path
        try:
            self._step = branch_off(fork, path)
            directory = RunDir(path, resume=True)
            describe_fork(directory, fork, self._step)
            return directory
        except OSError as error:
            self.close()
            raise StorageError(f"cannot write the run directory {path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _look_back(self, resume: Resume) -> None:
        """Find out what there is to go on from."""
        assert self.dir is not None
        if not (resume.run or self._replaces(self.dir.path)):
            return
        if (self.dir / MEMBERS).is_dir():
            raise SettingsError(
                f"{self.path} is a population, and this trains one run; give its Population to the Trainer, or go on "
                f"with one of the members, as {member_dir(self.dir.path, 0)}"
            )
        # The old run is moved aside whole, never deleted.
        if resume.start_over:
            self.dir.set_aside()
            return
        if never_saved(self.dir.path, self.checkpoints):
            old = {"settings": read_yaml(self.dir / CONFIG)}
        else:
            try:
                step, old = self.checkpoints.newest_facts()
            except OtherVersionError:
                raise
            except NoCheckpointError as error:
                # Checkpoints are there, but none is whole: beginning again would lose them, so the user must ask for
                # it.
                raise NoCheckpointError(f"{error}; begin the run again with --start-over") from error
            self.resumes = True
            if 0 < (most := self._settings.get("max_opts", step)) < step:
                raise SettingsError(
                    f"max_opts is {most}, but {self.path} has made {step} optimisation steps; expected at least as many"
                )
        self._compare(old)

    def _replaces(self, path: str | Path) -> bool:
        """Return whether this begins again where another run is."""
        return self._resume.start_over and (Path(path) / CONFIG).is_file()

    def _compare(self, old: Mapping[str, Any]) -> None:
        """Take note of how settings and versions differ from `old`; refuse what decides the training."""
        settings, installed = self._settings, self._versions
        self.changes = changes(old.get("settings"), settings)
        self.changes += changes(old.get("versions", installed), installed, "versions")
        harmless = HARMLESS | unread(self._settings)
        free = lambda name: name in harmless or name.partition(".")[0] in harmless
        self.decisive = [change for change in self.changes if not free(change.name)]
        # Changed settings may still fit what was saved. Only the checkpoint itself can tell.
        fits = not self.decisive or not self.resumes or self._fits(self.checkpoints, old)
        if self.resumes and fits:
            self.decisive = [change for change in self.decisive if not change.only_names]
        if not self.decisive:
            return
        said = f"{self.path} was trained with other settings or versions ({'; '.join(map(str, self.decisive))})"
        # No permission helps here: the seed is part of every random number so far.
        if any(change.name == "seed" for change in self.decisive):
            raise SettingsError(f"{said}; the seed decided all of it: go on with its own, or use --start-over")
        if not fits:
            one = len(self.decisive) == 1
            which = f"{self.decisive[0].name} cannot change" if one else "not all of these can change"
            raise SettingsError(
                f"{said}; {which}, for what was saved would not fit: go on with its own, or use --start-over"
            )
        if not self._resume.allow_changes:
            raise SettingsError(
                f"{said}; go on with its own, or allow the change with --allow-changes (allow_changes=True in Python)"
            )

    def _describe(self) -> None:
        """Write what describes the run."""
        assert self.dir is not None
        created = {} if self.resumes else {"created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "opt_steps": 0}
        self.dir.write_config(self._settings)
        self.dir.write_metadata(format=FORMAT, **created, **self._machine(), status="running")

    def _machine(self) -> dict[str, Any]:
        return {
            "versions": {"python": platform.python_version(), **self._versions, **versions(OTHER_VERSIONS)},
            "devices": [str(device.device_kind) for device in jax.devices()],
            "products": product_precision(jax.devices()[0]),
            "platform": platform.platform(),
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as `config.yaml` holds them."""
        return dict(self._settings)

    @property
    def path(self) -> Path | None:
        """The run directory."""
        return None if self.dir is None else self.dir.path

    @property
    def error(self) -> StorageError | None:
        """What could not be written at the last attempt."""
        return next(iter(self._failures.values()), None)

    # --- writing ---

    def resumption(self, opt_steps: int, aside: str = "") -> str:
        """Say from where a run that is resumed goes on, with `aside` if from a checkpoint, and what has changed."""
        how = f"resumed at {opt_steps} optimisation steps{aside}" if self.resumes else "began again"
        changed = "; ".join(map(str, self.changes))
        return f"{how}; changed: {changed}" if changed else how

    @property
    def measured_anew(self) -> str | None:
        """What makes scores from now on mean something else than those of the checkpoint, if anything does."""
        other = measured_otherwise(self.changes)
        return "; ".join(map(str, other)) if other and self.resumes else None

    def beginning(self) -> str | None:
        """Say where the run comes from, if it branched off from another."""
        return told(self._resume.fork, self._step) if self._resume.fork is not None else None

    def renew(self, settings: Mapping[str, Any]) -> None:
        """Go on under other settings: those of `config.yaml`, and of what is saved from now on.

        Raises:
          StorageError: they could not be written.
        """
        settings = plain(settings)
        self.decisive, self._settings = changes(self._settings, settings), settings
        if self.dir is not None:
            try:
                self.dir.write_config(settings)
            except OSError as error:
                raise StorageError(f"cannot write {self.dir / CONFIG}: {error.strerror or error}") from error

    def save(
        self, opt_steps: int, tree: PyTree, facts: Mapping[str, Any], best: Best | None, again: bool = False
    ) -> None:
        """Begin a checkpoint, once the one before it has come to its end; the `best` policy is on disk before it is.

        For a run that goes on from the checkpoint does not meet that policy again. One that is there already is not
        written again, unless `again`: the state has changed without an optimisation.
        """
        if self.dir is not None:
            # The best policy first: its save is handed to the checkpoint as `after`, so it is on disk before a
            # checkpoint that has seen it.
            self.keep_best(best)
            self.settle()
            # A step that was just saved would be taken for this one.
            if again:
                self.checkpoints.newest = None
            facts = {**facts, "settings": self._settings, "versions": self._versions, "logs": self._logs.facts()}
            self.checkpoints.save(opt_steps, tree, facts, after=self.best)

    def is_time_to_save(self, seconds: float) -> bool:
        """Say whether a run without a `save_interval` is to save, `seconds` after it last did."""
        if self.dir is None or self.checkpoints.is_writing:
            return False
        return seconds >= min(max(MIN_SAVE_GAP_S, self.checkpoints.write_s / MAX_SAVE_SHARE), MAX_SAVE_GAP_S)

    def settle(self, block: bool = True) -> None:
        """Take note of how the save in progress has ended; without `block`, only if it has."""
        step = self._settled("checkpoint", self.checkpoints, block) if self.dir is not None else None
        if step is not None:
            self.note(saved_opt_steps=step)
            self.on_saved(step)

    def keep_best(self, best: Best | None) -> None:
        """Begin to write the best policy, unless the disk has one as good: a resumed run passes its own past again."""
        if self.dir is None or best is None:
            return
        # The score on disk is known only after the save before has ended.
        self._settle_best()
        # A policy that could not be written leaves `best_score` as it was, so the next call tries again.
        if self.best_score is None or best.score > self.best_score:
            self._pending = best.score
            self.best.newest = None  # one of the same step is another policy, scored otherwise or from another past
            self.best.save(best.opt_steps, best.params, best.facts)

    def note(self, **facts: Any) -> None:
        """Merge `facts` into `metadata.json`."""
        if self.dir is None:
            return
        try:
            self.dir.write_metadata(**facts)
            self._recovered("metadata")
        except OSError as error:
            self._failed("metadata", StorageError(f"{self.dir / METADATA} could not be written: {error.strerror}"))

    def describe(self, entries: Mapping[str, Any]) -> None:
        """Merge entries of the user's own into `about` in `metadata.json`."""
        if self.dir is not None:
            there = read_metadata(self.dir.path).get("about")
            self.note(about={**(there if isinstance(there, dict) else {}), **entries})

    def finish(self) -> None:
        """Wait for what is being written."""
        if self.dir is None:
            return
        try:
            # The best policy before the checkpoint, in the order in which they were begun.
            self._settle_best()
            self.settle()
        finally:
            self.best.close()
            self.checkpoints.close()

    def close(self) -> None:
        """Let go of the directory."""
        if self.dir is not None:
            self.dir.release()
        if self._unused is not None:
            shutil.rmtree(self._unused, ignore_errors=True)

    def _settle_best(self) -> None:
        if self._settled("best policy", self.best, block=True) is not None:
            self.best_score = self._pending

    def _settled(self, what: str, store: Store, block: bool) -> int | None:
        try:
            step = store.wait(block)
        except StorageError as error:
            self._failed(what, error)
            return None
        if step is not None:
            self._recovered(what)
        return step

    def _failed(self, what: str, error: StorageError) -> None:
        # Reported when writing begins to fail, not at each attempt.
        if what not in self._failures:
            self.report(f"warning: {error}; training goes on")
        self._failures[what] = error

    def _recovered(self, what: str) -> None:
        if self._failures.pop(what, None):
            self.report(f"the {what} could be written again")

    # --- reading ---

    def expect(self, forms: Sequence[Form]) -> None:
        """Take it that checkpoints may have other `forms` than the structure that they are loaded into."""
        if self.dir is not None:
            self.checkpoints.forms = forms

    def check_fits(self, like: PyTree) -> None:
        """Raise `SettingsError`, naming the leaf, if the checkpoint to go on from does not fit `like`."""
        self.checkpoints.check_newest(like)

    def load(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """Load the newest valid checkpoint; return its step, state and facts.

        Raises:
          NoCheckpointError: no checkpoint is valid.
          SettingsError: it was made for another structure; the leaf is named.
        """
        step, tree, facts = self.checkpoints.load_newest(like)
        self._compare(facts)  # again: it may be an older one than that which was looked at first
        self._forget_logs()
        assert self.dir is not None
        # A changed log is worth a warning, but training does not depend on it.
        for problem in damage(self.dir.path, facts):
            warnings.warn(f"{self.path}: {problem}", stacklevel=2)
        return step, tree, facts

    def go_on(self) -> None:
        """Write what describes the run now that nothing speaks against going on."""
        try:
            self._describe()
            # From here on a fork is a run of its own, and stays.
            self._unused = None
        except OSError as error:
            raise StorageError(f"cannot write the run directory {self.path}: {error.strerror}") from error

    def rollback(self, like: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
        """Load the newest checkpoint saved in good health, and drop those after it; `None` if there is none.

        One that was saved at its regular turn is preferred: the rollback point must not depend on when the run was
        interrupted.
        """
        if self.dir is None:
            return None
        self.settle()
        self._forget_logs()
        # Where no regular one is healthy, any healthy one will do.
        for good in (lambda facts: facts["healthy"] and facts["regular"], lambda facts: facts["healthy"]):
            try:
                step, tree, facts = self.checkpoints.load_newest(like, good)
            except NoCheckpointError:
                continue
            # They belong to a future that is undone: a kill now must resume before it.
            self.checkpoints.drop_after(step)
            return tree, facts
        self.checkpoints.newest = None
        return None

    def _forget_logs(self) -> None:
        """Sum up the logs from their beginnings again: what comes after a step is taken back."""
        assert self.dir is not None
        self._logs = LogSums(self.dir.path)

    def load_best(self, like: PyTree) -> Best | None:
        """Load the best policy on disk, if there is one; warn if it is damaged."""
        if self.dir is None or not self.best.steps():
            return None
        try:
            step, params, facts = self.best.load_newest(like)
        except NoCheckpointError:
            return None
        # The facts are sealed, but a stranger may have sealed them.
        score = facts.get("score")
        if not isinstance(score, int | float) or not math.isfinite(score):
            warnings.warn(
                f"best policy {self.best.directory / str(step)} is passed over: it has no score", stacklevel=2
            )
            return None
        if (problem := self._foreign(facts)) is not None:
            warnings.warn(f"best policy {self.best.directory / str(step)} is passed over: {problem}", stacklevel=2)
            return None
        if measured_otherwise(changes(facts.get("settings", self._settings), self._settings)):
            return None  # no score to beat; the first one under these settings takes its place
        self.best_score = score
        return Best(step, score, params, facts)

    def _foreign(self, facts: Mapping[str, Any]) -> str | None:
        """Say why the best policy with these `facts` is another run's; the seed is what no resumption changes."""
        settings, own = facts.get("settings"), self._settings.get("seed")
        seed = settings.get("seed", own) if isinstance(settings, dict) else own
        return None if seed == own else f"it is of a run with seed {str(seed)[:20]}, not {own}"


def never_saved(path: Path, checkpoints: Store) -> bool:
    """Say whether the run in `path` ended before its first checkpoint was written, so that nothing can be lost."""
    if checkpoints.steps():
        return False
    if metadata := read_metadata(path):
        return metadata.get("saved_opt_steps") is None
    return not any((path / name).exists() for name in (METRICS, EPISODES, BEST))


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed version of each of `packages`; of jaxrl that of the code, which an install may be behind."""
    whole = sys.modules["jaxrl"]  # it is a front door, and not imported from here
    return {name: whole.__version__ if name == "jaxrl" else _installed(name) for name in packages}


@functools.cache  # looked up in files, which each of many members would read again
def _installed(package: str) -> str:
    return version(package)

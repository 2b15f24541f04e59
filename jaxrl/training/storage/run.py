"""Storage of a run: its directory, checkpoints and best policy. Without a directory nothing is written."""

import contextlib
import functools
import math
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl.errors import NoCheckpointError, SettingsError, StorageError
from jaxrl.paths import reason_of_path, writing
from jaxrl.training.settings import CHANGEABLE, Change, changes, evaluation_changes, unused_settings
from jaxrl.training.storage.checkpoints import Facts, Good, OtherVersionError, Store, standing
from jaxrl.training.storage.files import plain
from jaxrl.training.storage.fork import Fork, copy_checkpoint, resolve_fork
from jaxrl.training.storage.logs import RowLog, damage, log_sums
from jaxrl.training.storage.members import POPULATION
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.population_files import Log, MemberDir, MemberFiles
from jaxrl.training.storage.run_dir import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    DIR_FORMAT,
    EPISODES,
    MEMBERS_FILE,
    METADATA,
    METRICS,
    RunDir,
    holds_run,
    make_dir,
    member_dir,
    require_empty,
    timestamp,
)
from jaxrl.trees import PyTree
from jaxrl.xla.contexts import product_precision

VERSIONS = ("jaxrl", "jax", "jaxlib", "flax", "optax", "gymnax")
"""Packages whose version may change the training bit for bit."""
MIN_SAVE_GAP_S, MAX_SAVE_GAP_S, MAX_SAVE_SHARE = 10.0, 600.0, 0.025
"""Bounds in seconds on the gap between saves of a run without a `save_interval`. Within them, saving takes at most this
share of the time."""
START_OVER = "use --start-over (start_over=True in Python)"
PENDING_BOUNDARY = "owes_boundary"
"""The fact of a checkpoint whose rows and evaluation are still to be made, as the evaluation failed."""
OTHER_VERSIONS = ("orbax-checkpoint", "chex", "numpy")


class Resume(NamedTuple):
    """Whether and how to resume the run in a directory."""

    enabled: bool = False
    """Whether to resume, and not to begin."""
    allow_changes: bool = False
    """Resume despite changed settings or versions that affect the training."""
    start_over: bool = False
    """Start afresh, whatever the settings of an existing run, which is moved aside."""
    fork: Fork | None = None
    """Start a new run from a checkpoint of another."""


def resolve_resume(
    resume: bool | str | os.PathLike[str],
    from_step: int | str | None,
    run_dir: str | None,
    allow_changes: bool,
    start_over: bool,
) -> tuple[str | None, Resume]:
    """Return the directory of a run, and whether and how to resume it; see `resolve_fork`.

    Raises:
      SettingsError: the arguments contradict each other.
    """
    run_dir, fork = resolve_fork(resume, from_step, run_dir)
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
    """The files of a run. Write errors are reported and training continues; the latest attempts decide how it ends."""

    def __init__(
        self,
        path: str | None,
        keep: int,
        settings: Mapping[str, Any],
        resume: Resume,
        check: Callable[[Store, int, Facts], None] = lambda checkpoints, step, facts: None,
        member: MemberFiles | None = None,
    ) -> None:
        """Open and lock the run directory `path`; if it is `None`, nothing is written.

        `check(checkpoints, step, facts)`, given the newest of the checkpoints, raises `SettingsError` unless it can be
        resumed under these settings. A `member` of a population has its files among the population's; other runs open
        their own.

        Raises:
          SettingsError: the directory is not a run or has other settings, or cannot be written; or `check` raises it.
          RunDirInUseError: another process holds the lock.
          NoCheckpointError: `resume` is set, and no checkpoint is valid.
          StorageError: the disk is full.
        """
        self.report: Callable[[str], None] = lambda line: None
        """Called with one line when writing starts to fail and when it recovers."""
        self.on_saved: Callable[[int], None] = lambda opt_steps: None
        """Called once a checkpoint is complete on disk."""
        self.dir: RunDir | MemberDir | None = None
        self.best_score: float | None = None
        """Score of the best policy on disk."""
        self.resumes = False
        """Whether there is a checkpoint to resume from."""
        self.changes: list[Change] = []
        """Differences of settings and versions from those of the checkpoint."""
        self.training_changes: list[Change] = []
        """The subset of `changes` that affects the training."""
        self._new_fork_dir: Path | None = None
        """The directory of a new fork that has not been resumed yet."""
        self._fork_step = 0
        """The step from which it was forked."""
        self._good: Good | None = None
        """Restricts resumption to healthy checkpoints if the run diverged in an earlier process."""
        self._failures: dict[str, StorageError] = {}
        self._pending: float | None = None
        self._settings, self._resume, self._check = plain(settings), resume, check
        if path is None:
            return
        self._versions = versions(VERSIONS)
        # From here on the directory is locked against other writers.
        if member is not None:
            self.dir = member.dir
        elif resume.fork:
            self.dir = self._new_fork(resume.fork, Path(path))
        else:
            self.dir = RunDir(path, resume.enabled or self._replaces(path))
        # The best policy has its own store, which the pruning of checkpoints does not touch.
        self.checkpoints = member.store(CHECKPOINTS) if member else Store(self.dir / CHECKPOINTS, keep)
        self.best = member.store(BEST) if member else Store(self.dir / BEST, 1)
        self._log_sums = self._new_log_sums()
        # Compare existing files with the settings before overwriting any of them.
        try:
            self._find_checkpoint()
            self.dir.write_owner()
            if not self.resumes:
                self._write_description()
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError(f"cannot write the run directory {self.dir.path}: {reason_of_path(error)}") from error

    def _new_fork(self, fork: Fork, path: Path) -> RunDir:
        """Create the run in `path` as a fork of another; `close` removes it again unless the run is resumed."""
        if path.exists():
            require_empty(path)
        else:
            make_dir(path)
        self._new_fork_dir = path
        try:
            self._fork_step = copy_checkpoint(fork, path)
            directory = RunDir(path, resume=True)
            directory.write_metadata(
                format=DIR_FORMAT,
                created=timestamp(),
                opt_steps=self._fork_step,
                saved_opt_steps=self._fork_step,
                forked_from={"run": str(fork.run.absolute()), "opt_steps": self._fork_step},
            )
            return directory
        except OSError as error:
            self.close()
            raise StorageError(f"cannot write the run directory {path}: {reason_of_path(error)}") from error
        except BaseException:
            self.close()
            raise

    def _find_checkpoint(self) -> None:
        """Find a checkpoint to resume from, and compare its settings and versions."""
        assert self.dir is not None
        if not (self._resume.enabled or self._replaces(self.dir.path)):
            return
        if self._is_population():
            raise SettingsError(
                f"{self.path} is a population, and this trains one run; give its Population to the Trainer, or go on "
                f"with one of the members, as {member_dir(self.dir.path, 0)}"
            )
        # The old run is moved aside, never deleted.
        if self._resume.start_over:
            assert isinstance(self.dir, RunDir)
            self.dir.discard()
            return
        if never_saved(self.dir, self.checkpoints):
            step, old = 0, {"settings": self.dir.settings()}
        else:
            try:
                self._good = self._healthy_after_divergence()
                step, old = self.checkpoints.newest_facts(self._good)
            except OtherVersionError:
                raise
            except NoCheckpointError as error:
                # Checkpoints exist, but none is valid: starting afresh abandons them, so the user must ask for it.
                raise NoCheckpointError(f"{error}; begin the run again with --start-over") from error
            self.resumes = True
            if 0 < (most := self._settings.get("max_opts", step)) < step:
                raise SettingsError(
                    f"max_opts is {most}, but {self.path} has made {step} optimisation steps; expected at least as many"
                )
        self._compare(step, old)

    def _healthy_after_divergence(self) -> Good | None:
        """Return which checkpoints are healthy, if the run has diverged and has any; otherwise `None`."""
        assert self.dir is not None
        is_healthy = lambda facts: standing(facts).healthy
        if self.dir.metadata().get("status") == "diverged":
            with contextlib.suppress(NoCheckpointError):
                self.checkpoints.newest_facts(is_healthy)
                return is_healthy
        return None

    def _is_population(self) -> bool:
        """Return whether the directory is a population's; damaged settings matter only where they are needed."""
        assert self.dir is not None
        try:
            return POPULATION in self.dir.settings()
        except SettingsError:
            return (self.dir / MEMBERS_FILE).exists()

    def _replaces(self, path: str | Path) -> bool:
        """Return whether `start_over` replaces an existing run in `path`."""
        return self._resume.start_over and holds_run(path)

    def _compare(self, step: int, old: Facts) -> None:
        """Record how settings and versions differ from `old`, the facts of the checkpoint `step` if there is one.

        Raises:
          SettingsError: a change that affects the training is not allowed or possible, or the checkpoint does not fit.
        """
        settings, installed = self._settings, self._versions
        self.changes = changes(old.get("settings"), settings)
        self.changes += changes(old.get("versions", installed), installed, "versions")
        harmless = CHANGEABLE | unused_settings(self._settings)
        free = lambda name: name in harmless or name.partition(".")[0] in harmless
        self.training_changes = [change for change in self.changes if not free(change.name)]
        changed = lambda: "; ".join(map(str, self.training_changes))
        said = lambda: f"{self.path} was trained with other settings or versions ({changed()})"
        # `allow_changes` does not apply: every random number so far depends on the seed.
        if any(change.name == "seed" for change in self.training_changes):
            raise SettingsError(f"{said()}; the seed decided all of it: go on with its own, or {START_OVER}")
        # Changed settings may still fit the saved state; only the checkpoint itself can answer that.
        if self.resumes:
            try:
                self._check(self.checkpoints, step, old)
            except SettingsError as error:
                if not self.training_changes:
                    raise
                one = len(self.training_changes) == 1
                which = f"{self.training_changes[0].name} cannot change" if one else "not all of these can change"
                raise SettingsError(
                    f"{said()}; {which}, for what was saved would not fit: go on with its own, or {START_OVER}"
                ) from error
            self.training_changes = [change for change in self.training_changes if not change.only_names]
        if self.training_changes and not self._resume.allow_changes:
            raise SettingsError(
                f"{said()}; go on with its own, or allow the change with --allow-changes (allow_changes=True in Python)"
            )

    def _write_description(self) -> None:
        """Write `config.yaml` and `metadata.json`."""
        assert self.dir is not None
        created = {} if self.resumes else {"created": timestamp(), "opt_steps": 0}
        self.dir.write_config(self._settings)
        self.dir.write_metadata(format=DIR_FORMAT, **created, **self._machine(), status="running")

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

    def log(self, name: str) -> Log | None:
        """Return a log for writing, if there is a directory."""
        if self.dir is None:
            return None
        return RowLog(self.dir / name) if isinstance(self.dir, RunDir) else self.dir.log(name)

    @property
    def error(self) -> StorageError | None:
        """A failure that has not recovered since, if any."""
        return next(iter(self._failures.values()), None)

    # --- writing ---

    def describe_resume(self, opt_steps: int, restart_note: str) -> str:
        """Describe how the run was resumed, with `restart_note` if from a checkpoint, and what has changed."""
        how = f"resumed at {opt_steps} optimisation steps{restart_note}" if self.resumes else "began again"
        changed = "; ".join(map(str, self.changes))
        return f"{how}; changed: {changed}" if changed else how

    @property
    def eval_changes(self) -> str | None:
        """The changes that make scores incomparable with those of the checkpoint, if any."""
        other = evaluation_changes(self.changes)
        return "; ".join(map(str, other)) if other and self.resumes else None

    def describe_origin(self) -> str | None:
        """Describe the origin of the run if it is a fork."""
        if (fork := self._resume.fork) is None:
            return None
        left = any(best > self._fork_step for best in open_store(fork.run, BEST).steps())
        left_behind = "; its best policy came later, and was not taken along" if left else ""
        return f"branched off from {fork.run.absolute()} at {self._fork_step} optimisation steps{left_behind}"

    def replace_settings(self, settings: Mapping[str, Any]) -> None:
        """Replace the settings, in `config.yaml` and in all later saves.

        Raises:
          StorageError: `config.yaml` cannot be written.
        """
        settings = plain(settings)
        self.training_changes, self._settings = changes(self._settings, settings), settings
        if self.dir is not None:
            with writing(self.dir / CONFIG, StorageError):
                self.dir.write_config(settings)

    def save(
        self, opt_steps: int, tree: PyTree, facts: Mapping[str, Any], best: Best | None, again: bool = False
    ) -> None:
        """Start saving a checkpoint once the pending one is done; the `best` policy reaches the disk before it.

        A resumed run does not repeat the evaluation that found that policy. An existing step is not rewritten unless
        `again` is set, for a state that changed without an optimisation step.
        """
        if self.dir is not None:
            # The best policy first: as `after`, its save reaches the disk before the checkpoint that has seen it.
            self.keep_best(best)
            self.collect_saves()
            # Otherwise the store would skip this step as already saved.
            if again:
                self.checkpoints.newest = None
            facts = {**facts, "settings": self._settings, "versions": self._versions}
            if "logs" not in facts:
                facts["logs"] = self._log_sums()
            self.checkpoints.save(opt_steps, tree, facts, after=self.best)

    def is_time_to_save(self, seconds: float, held_s: float, runs_per_worker: float = 1.0) -> bool:
        """Return whether a run without a `save_interval` is due to save, `seconds` after its last save.

        Args:
          seconds: of training since then.
          held_s: seconds for which that save held up the run, before it was written in a thread of its own.
          runs_per_worker: number of runs that share a worker, and so wait for each other's saves.
        """
        if self.dir is None or self.checkpoints.is_writing:
            return False
        spent = (held_s + self.checkpoints.write_s) * runs_per_worker
        return seconds >= min(max(MIN_SAVE_GAP_S, spent / MAX_SAVE_SHARE), MAX_SAVE_GAP_S)

    def collect_saves(self, block: bool = True) -> None:
        """Record the outcome of the pending save; without `block`, only if it is done."""
        step = self._settle("checkpoint", self.checkpoints, block) if self.dir is not None else None
        if step is not None:
            self.update_metadata(saved_opt_steps=step)
            self.on_saved(step)

    def keep_best(self, best: Best | None) -> None:
        """Start saving the best policy, unless one as good is on disk: a resumed run repeats part of its past."""
        if self.dir is None or best is None:
            return
        # The score on disk is known only once the previous save is done.
        self._settle_best()
        # A failed save leaves `best_score` unchanged, so the next call retries.
        if self.best_score is None or best.score > self.best_score:
            self._pending = best.score
            self.best.newest = None  # the same step may be another policy: scored differently, or before a rollback
            self.best.save(best.opt_steps, best.params, best.facts)

    def update_metadata(self, **facts: Any) -> None:
        """Merge `facts` into `metadata.json`."""
        if self.dir is None:
            return
        try:
            self.dir.write_metadata(**facts)
            self._record_recovery("metadata")
        except OSError as error:
            failure = StorageError(f"{self.dir / METADATA} could not be written: {reason_of_path(error)}")
            self._record_failure("metadata", failure)

    def describe(self, entries: Mapping[str, Any]) -> None:
        """Merge user-defined entries into `about` in `metadata.json`."""
        if self.dir is not None:
            there = self.dir.metadata().get("about")
            self.update_metadata(about={**(there if isinstance(there, dict) else {}), **entries})

    def finish(self) -> None:
        """Wait for pending saves."""
        if self.dir is None:
            return
        try:
            self._settle_best()
            self.collect_saves()
        finally:
            self.best.close()
            self.checkpoints.close()

    def close(self) -> None:
        """Release the directory, and remove a fork that was never resumed."""
        if self.dir is not None:
            self.dir.release()
        if self._new_fork_dir is not None:
            shutil.rmtree(self._new_fork_dir, ignore_errors=True)

    def _settle_best(self) -> None:
        if self._settle("best policy", self.best, block=True) is not None:
            self.best_score = self._pending

    def _settle(self, what: str, store: Store, block: bool) -> int | None:
        try:
            step = store.wait(block)
        except StorageError as error:
            self._record_failure(what, error)
            return None
        if step is not None:
            self._record_recovery(what)
        return step

    def _record_failure(self, what: str, error: StorageError) -> None:
        # Report the first failure, not every attempt.
        if what not in self._failures:
            self.report(f"warning: {error}; training goes on")
        self._failures[what] = error

    def _record_recovery(self, what: str) -> None:
        if self._failures.pop(what, None):
            self.report(f"the {what} could be written again")

    # --- reading ---

    def load(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """Load the newest valid checkpoint; return its step, state and facts.

        Raises:
          NoCheckpointError: no checkpoint is valid.
          SettingsError: the checkpoint has another structure; the error names the leaf.
        """
        step, tree, facts = self.checkpoints.load_newest(like, self._good)
        self._compare(step, facts)  # again: it may be older than the one compared first
        self._log_sums = self._new_log_sums()  # anew: rows after this step are about to be removed
        assert self.dir is not None
        # Training does not depend on the logs, so damage is only a warning.
        for problem in damage(self.dir.open_log, facts):
            warnings.warn(f"{self.path}: {problem}", stacklevel=2)
        return step, tree, facts

    def commit_resume(self) -> None:
        """Write `config.yaml` and `metadata.json` once all checks for resuming have passed."""
        if self._good is not None and self.checkpoints.newest is not None:
            self.checkpoints.drop_after(self.checkpoints.newest)  # from here on the status is another
        with writing(f"the run directory {self.path}", StorageError):
            self._write_description()
        # From here on `close` does not remove a fork.
        self._new_fork_dir = None

    def rollback(self, like: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
        """Load the newest healthy checkpoint and remove all later ones; `None` if there is none.

        Regular saves are preferred: the rollback point must not depend on when the run was interrupted.
        """
        if self.dir is None:
            return None
        self.collect_saves()
        # Anew: rows after the restored step are about to be removed.
        self._log_sums = self._new_log_sums()
        # Fall back to any healthy checkpoint if no regular one is.
        for good in (lambda facts: all(standing(facts)), lambda facts: standing(facts).healthy):
            try:
                step, tree, facts = self.checkpoints.load_newest(like, good)
            except NoCheckpointError:
                continue
            # Later steps are undone: if the process is killed now, it must not resume from them.
            self.checkpoints.drop_after(step)
            return tree, facts
        self.checkpoints.newest = None
        return None

    def save_start(self, tree: PyTree, facts: Mapping[str, Any]) -> None:
        """Save the start of a run that goes back there, in place of its checkpoints: they are of an undone future.

        So is what `facts` say of the logs, which are cut afterwards: a kill in between must not look like damage.
        """
        self.save(0, tree, {**facts, "unwritten": {}, "noted": {}, "logs": {}}, None)
        self.collect_saves()

    def _new_log_sums(self) -> Callable[[], dict[str, list[int]]]:
        """Return a function that returns size and CRC-32 of each log."""
        assert self.dir is not None
        return log_sums(self.dir.path) if isinstance(self.dir, RunDir) else self.dir.log_sums

    def explain_lost_best(self, best: Best | None, score: float | None, opt_steps: int | None) -> str | None:
        """Return a line if the policy that had the best `score`, after `opt_steps`, is gone; `best` is what is left.

        A fork need not have one: its origin keeps only the newest, which may be better than those up to the fork.
        """
        if score is None or opt_steps is None or self.dir is None or (best is not None and best.score >= score):
            return None
        if is_before_fork(self.dir.metadata(), opt_steps):
            return None
        if best is None:
            return "the best policy is lost: the next one to be evaluated is the best"
        return f"the best policy is lost: the best is now the one after {best.opt_steps:,} optimisation steps"

    def load_best(self, like: PyTree) -> Best | None:
        """Load the best policy on disk, if there is one; warn if it is damaged."""
        if self.dir is None or not self.best.steps():
            return None
        # The run starts from scratch: the policy is left over from an attempt under other settings.
        if not self.resumes and any(not change.name.startswith("versions.") for change in self.training_changes):
            if isinstance(self.dir, RunDir):
                self.best.drop_after(-1)
            return None
        try:
            step, params, facts = self.best.load_newest(like)
        except NoCheckpointError:
            return None
        # The seal proves integrity, not origin: the facts may come from anyone.
        score = facts.get("score")
        if not isinstance(score, int | float) or not math.isfinite(score):
            warnings.warn(f"best policy {self.best.directory / str(step)} is skipped: it has no score", stacklevel=2)
            return None
        if (problem := self._explain_other_run(facts)) is not None:
            warnings.warn(f"best policy {self.best.directory / str(step)} is skipped: {problem}", stacklevel=2)
            return None
        if evaluation_changes(changes(facts.get("settings", self._settings), self._settings)):
            return None  # its score is not comparable: the first one under these settings replaces it
        self.best_score = score
        return Best(step, score, params, facts)

    def _explain_other_run(self, facts: Mapping[str, Any]) -> str | None:
        """Explain why a best policy with these `facts` is another run's: resuming never changes the seed."""
        settings, own = facts.get("settings"), self._settings.get("seed")
        seed = settings.get("seed", own) if isinstance(settings, dict) else own
        return None if seed == own else f"it is of a run with seed {str(seed)[:20]}, not {own}"


def is_before_fork(metadata: Mapping[str, Any], opt_steps: int | None) -> bool:
    """Return whether a run with this `metadata` is a fork that began after `opt_steps`."""
    origin = metadata.get("forked_from")
    begun = origin.get("opt_steps") if isinstance(origin, Mapping) else None
    return type(begun) is int and type(opt_steps) is int and opt_steps <= begun


def find_missing_best(metadata: Mapping[str, Any], scores: Collection[object]) -> str | None:
    """Describe the loss of the policy that had the best score, according to the `metadata` of a run.

    Args:
      metadata: from `metadata.json`.
      scores: of the best policies on disk.
    """
    best, known = metadata.get("best_score"), [score for score in scores if isinstance(score, int | float)]
    # While a run goes on, or where it was killed, also at its end, its metadata may be ahead of what is saved.
    ahead = metadata.get("status") == "running" or metadata.get("saved_opt_steps") != metadata.get("opt_steps")
    if ahead or is_before_fork(metadata, metadata.get("best_opt_steps")):
        return None
    if not isinstance(best, int | float) or any(score >= best for score in known):
        return None
    there = f"; the one saved scored {known[-1]}" if known else ""
    return f"the policy with the best score, {best}, is gone{there}"


def never_saved(files: RunDir | MemberDir, checkpoints: Store) -> bool:
    """Return whether the run with these files ended before its first checkpoint, so that there is nothing to lose."""
    if checkpoints.steps():
        return False
    if metadata := files.metadata():
        return metadata.get("saved_opt_steps") is None
    return not any((files / name).exists() for name in (METRICS, EPISODES, BEST))


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions of `packages`; jaxrl's is that of the code, as package metadata may be outdated."""
    whole = sys.modules["jaxrl"]  # the facade, which modules of the package must not import
    return {name: whole.__version__ if name == "jaxrl" else _installed_version(name) for name in packages}


_installed_version = functools.cache(version)  # the lookup reads files, and every member of a population needs it

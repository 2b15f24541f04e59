"""Checkpoints: atomic saves, with every leaf verified on load.

Orbax writes and reads the arrays, but it has no checksums, casts a wrong dtype silently, and loses a save that is not
waited for. So every step has a sealed manifest with each leaf's path, shape, dtype and CRC-32, and a list of its files
with their checksums. A step is written under a temporary name, renamed once all of it is on disk and only then reported
as saved; a damaged step is skipped with a warning, in favour of the one before it.

    <opt_steps>/manifest.json    paths, shapes, dtypes and checksums of the leaves, and facts about the run
    <opt_steps>/files.json       size and checksum of every other file
    <opt_steps>/arrays/          the arrays, an Orbax PyTree checkpoint
"""

import contextlib
import hashlib
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.errors import NoCheckpointError, SettingsError, StorageError
from jaxrl.training.processes import is_spread, is_to_be_spread
from jaxrl.training.program import as_saved
from jaxrl.training.storage.arrays import (
    FAULTS,
    FILES,
    DamagedError,
    Leaves,
    check_visible,
    file_sums,
    own_leaves,
    read_arrays,
    read_sharded,
    reason,
    write_all,
)
from jaxrl.training.storage.files import read_text, sync_dir, write_atomically
from jaxrl.training.storage.layout import LayoutError, require_possible
from jaxrl.training.storage.leaves import (
    checksum,
    describe_leaf,
    flatten,
    host_leaves,
    is_path,
    mismatch,
    rebuild,
)
from jaxrl.trees import PyTree

FORMAT = 20
MANIFEST, ARRAYS = "manifest.json", "arrays"
UNFINISHED, REMOVED = ".unfinished", ".removed"
"""Suffixes of a step being written and of one being removed."""

Facts = dict[str, Any]
Good = Callable[[Facts], bool]
"""`good(facts)`: whether a checkpoint with these facts is one to take."""


class CheckpointError(Exception):
    """A damaged or unreadable checkpoint."""

    verdict = "is damaged"


class VersionError(CheckpointError):
    """A checkpoint in the format of another version of jaxrl."""

    verdict = "cannot be read"


class OtherVersionError(NoCheckpointError):
    """The newest checkpoint is intact but in the format of another version of jaxrl: no training is lost."""


class MismatchError(CheckpointError):
    """An intact checkpoint with a leaf that does not match the structure to load into."""


class Store:
    """The checkpoints in one directory, `<directory>/<opt_steps>/`; the newest `keep` are retained."""

    few_files = False
    """Whether arrays share files, see `write_all`."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Prepare to read or write `directory`, which the first save creates."""
        self.directory = directory.absolute()
        self.keep = keep
        self.newest: int | None = None
        """The step last saved or loaded."""
        self._write_s = 0.0
        self._bad: set[int] = set()
        self._whole: set[int] = set()
        """Steps whose files have been verified; their leaves are verified by each reading."""
        self._standings: dict[int, Standing] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[int] | None = None

    # --- writing ---

    def save(self, step: int, tree: PyTree, facts: Mapping[str, Any], after: "Store | None" = None) -> None:
        """Start saving `tree` and `facts` (JSON) as `step`; the save is complete once `wait` returns it.

        The arrays are copied before this returns (sharded over processes, they are written), so the caller may donate
        them. The step last saved or loaded is not written again. The pending save of the store `after` completes or
        fails before this one begins.

        Raises:
          StorageError: the previous save failed.
        """
        # One save at a time; a failure is reported before the next one starts.
        self.wait()
        if step == self.newest:
            return
        # Only the save that is pending in `after` now: later ones are not waited for.
        before = None if after is None else after._job
        if is_spread(tree):  # shards on other processes' devices cannot be copied to this host for a deferred write
            self._job = _write_now(partial(self.write, step, own_leaves(tree), dict(facts), before))
            return
        # Copy to the host in the caller's thread: its next call may donate the arrays.
        write = partial(self.write, step, host_leaves(tree), dict(facts), before)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            self._job = self._thread.submit(write)
        except RuntimeError:  # the interpreter is shutting down: no new work in threads
            self._job = _write_now(write)

    @property
    def write_s(self) -> float:
        """Duration of the last save in seconds, whether in its own thread or in the caller's."""
        return self._write_s

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress."""
        return self._job is not None and not self._job.done()

    def wait(self, block: bool = True) -> int | None:
        """Wait for the pending save to reach the disk and return its step; raise `StorageError` if it failed.

        Return `None` if no save is pending or, without `block`, if it is still in progress.
        """
        if self._job is None or not (block or self._job.done()):
            return None
        # Cleared before `result` may raise: a failed save is reported once.
        job, self._job = self._job, None
        return job.result()

    def close(self) -> int | None:
        """Wait for the pending save as `wait` does, and shut down the thread."""
        try:
            return self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def write(self, step: int, leaves: Leaves, facts: Facts, after: "Future[int] | None" = None) -> int:
        """Write `step` synchronously, once `after` has completed or failed; raise `StorageError` on failure."""
        path, unfinished = self._path(step), self._path(step, UNFINISHED)
        # Its result is not read: its own store reports a failure.
        if after is not None:
            wait([after])
        begun = time.monotonic()
        self._sweep()
        try:
            # Readers ignore this name, so no step is visible before all its files and directories are synced.
            unfinished.mkdir(parents=True)
            sums, theirs = write_all(unfinished / ARRAYS, leaves, self.few_files)
            entries = [{**describe_leaf(name, array), "crc32": sums[name]} for name, array in leaves.items()]
            manifest = seal({"format": FORMAT, "step": step, "facts": facts, "leaves": entries})
            (unfinished / MANIFEST).write_text(json.dumps(manifest))
            theirs = {f"{ARRAYS}/{name}": found for name, found in theirs.items()}
            check_visible(unfinished, theirs)
            own = file_sums(unfinished, sync=True, of=lambda name: name not in theirs)  # `theirs` are not read again
            # The list comes last: it holds the checksums of all other files.
            write_atomically(unfinished / FILES, json.dumps({**theirs, **own}))
            # An existing step of this number, such as a damaged one, is removed only once its replacement is complete.
            if path.exists():
                self._remove(step)
            # The atomic rename commits the step; syncing the directory makes it survive a power failure.
            unfinished.rename(path)
            sync_dir(self.directory)
        except FAULTS as error:
            self._sweep()  # free the space of the partial step for the next save
            raise StorageError(f"checkpoint {path} could not be written: {reason(error)}") from error
        self.newest = step
        self._bad.discard(step)
        self._whole.discard(step)
        self._standings[step] = standing(facts)
        # Prune only once the new step is complete: a kill never leaves fewer checkpoints than before.
        self._prune(step)
        self._write_s = time.monotonic() - begun
        return step

    def _prune(self, newest: int) -> None:
        """Remove the `surplus` steps."""
        for step in surplus({step: self._standing(step) for step in self.steps()}, self.keep, newest):
            self._remove(step)
        self._sweep()

    def _standing(self, step: int) -> "Standing":
        """Return the standing of a step, read once; of one that cannot be read the lowest."""
        if step not in self._standings:
            try:
                self._standings[step] = standing(self.read_manifest(step)["facts"])
            except CheckpointError:
                self._standings[step] = Standing(False, False)
        return self._standings[step]

    def _sweep(self) -> None:
        """Delete the remains of interrupted saves and removals."""
        with contextlib.suppress(OSError):
            for entry in self.directory.iterdir():
                if entry.suffix in (UNFINISHED, REMOVED) and is_step(entry.stem):
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Remove a step, renaming it first: partially removed, it must not look like a damaged one."""
        self._standings.pop(step, None)
        with contextlib.suppress(OSError):
            # Once renamed it is no longer a step; if the process is killed now, the next save sweeps the rest.
            self._path(step).rename(self._path(step, REMOVED))
        shutil.rmtree(self._path(step, REMOVED), ignore_errors=True)

    def copy(self, step: int, to: Path) -> None:
        """Copy `step` into the directory `to` of another store; raise `CheckpointError` if it is damaged."""
        shutil.copytree(self._path(step), to / str(step))
        # Verify the copy, not the source: this also detects damage done by copying.
        Store(to, 1).manifest(step)

    def drop_after(self, step: int) -> None:
        """Remove the steps after `step`, to which the run is rewound."""
        self.wait()
        for later in [s for s in self.steps() if s > step]:
            self._remove(later)

    # --- reading ---

    def steps(self) -> list[int]:
        """Return all completed steps in ascending order; they may have been damaged since."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if is_step(entry.name))

    def load_newest(self, like: PyTree, good: Good | None = None) -> tuple[int, PyTree, Facts]:
        """Load the newest valid step whose facts are `good`; warn of each newer step that is damaged.

        Raises:
          NoCheckpointError: there is no such step.
          SettingsError: the step is intact but has another structure; the error names the leaf.
        """
        found = self._newest(lambda step: (step, *self.load(step, like)), good)
        self.newest = found[0]
        return found

    def newest_facts(self, good: Good | None = None) -> tuple[int, Facts]:
        """Return the newest step with intact files whose facts are `good`, and its facts.

        Raises:
          NoCheckpointError: there is no such step.
        """
        return self._newest(lambda step: (step, self.manifest(step)["facts"]), good)

    def check_newest(self, like: PyTree) -> None:
        """Check that the newest step fits `like`, without reading arrays; raises what `load_newest` does."""
        self._newest(lambda step: self._fitting_manifest(step, like))

    def _newest(self, read: Callable[[int], Any], good: Good | None = None) -> Any:
        """Return `read(step)` of the newest valid step whose facts are `good`."""
        self.wait()
        for step in reversed(self.steps()):
            try:
                # Known damaged steps are neither read nor warned of again.
                if step not in self._bad and (good is None or good(self.manifest(step)["facts"])):
                    return read(step)
            except MismatchError as error:
                raise SettingsError(
                    f"checkpoint {self._path(step)} does not fit this program: {error}; "
                    "resume it with the settings and the version of jaxrl that made it"
                ) from error
            except CheckpointError as error:
                self._warn_skipped(self._path(step), error)
                self._bad.add(step)
        raise NoCheckpointError(f"{self.directory} holds no valid checkpoint; nothing was changed")

    def _warn_skipped(self, path: Path, error: CheckpointError) -> None:
        """Warn that a damaged step is skipped; raise `OtherVersionError` if another version of jaxrl can read it."""
        if isinstance(error, VersionError):  # falling back to an older step would lose the training since
            raise OtherVersionError(f"checkpoint {path} {error.verdict}: {error}") from error
        warnings.warn(f"checkpoint {path} is skipped: {error}", stacklevel=4)

    def load(self, step: int, like: PyTree) -> tuple[PyTree, Facts]:
        """Load `step` into the structure of `like` (arrays or shapes); return it with its facts.

        What the step was saved without, see `as_saved`, is empty in the result.

        Raises:
          CheckpointError: the step is damaged.
          MismatchError: the step has another structure; the error names the leaf.
        """
        if is_to_be_spread(like):
            return self._load_together(step, like)
        leaves, facts = self.read(step, like)
        return rebuild(as_saved(like, facts), list(leaves.values())), facts

    def _load_together(self, step: int, like: PyTree) -> tuple[PyTree, Facts]:
        """Load in all processes at once: each reads only the shards of its own devices."""
        manifest = self._fitting_manifest(step, like)
        try:
            sums = [entry["crc32"] for entry in manifest["leaves"]]
            return read_sharded(self._path(step) / ARRAYS, like, sums), manifest["facts"]
        except DamagedError as error:
            raise CheckpointError(f"the data of {error} is damaged: its checksum differs") from error
        except (*FAULTS, LayoutError) as error:
            raise CheckpointError(f"cannot be read: {reason(error)}") from error

    def read(self, step: int, like: PyTree | None = None) -> tuple[Leaves, Facts]:
        """Read the leaves of `step` by path, and its facts.

        Args:
          step: optimisation steps of the checkpoint.
          like: the tree (arrays or shapes) that it must match, see `as_saved`; if `None`, any is accepted.

        Raises:
          CheckpointError: the step is damaged.
          MismatchError: its leaves are not those of `like`.
        """
        manifest = self._fitting_manifest(step, like)
        try:
            # Allocates what the manifest states, which `manifest` has checked against the available memory.
            stated = {e["path"]: np.empty(e["shape"], jax.numpy.dtype(e["dtype"])) for e in manifest["leaves"]}
            arrays = read_arrays(self._path(step) / ARRAYS, stated)
        except LayoutError as error:
            raise CheckpointError(str(error)) from error
        except FAULTS as error:
            raise CheckpointError(f"cannot be read: {reason(error)}") from error
        leaves = {}
        for entry in manifest["leaves"]:
            array = np.asarray(arrays[entry["path"]])
            # Orbax casts a wrong dtype silently and has no checksums.
            if {**describe_leaf(entry["path"], array), "crc32": checksum(array)} != entry:
                raise CheckpointError(f"the data of {entry['path']} is damaged: its checksum differs")
            leaves[entry["path"]] = array
        return leaves, manifest["facts"]

    def manifest(self, step: int) -> dict[str, Any]:
        """Verify all files of `step` and return its manifest.

        Raises:
          CheckpointError: a file is damaged, or the manifest is unreadable or of another format or step.
        """
        self._require_whole(step)
        return self.read_manifest(step)

    def _require_whole(self, step: int) -> None:
        """Verify all files of `step`, unless that was done before; raise `CheckpointError` if one is damaged."""
        if step in self._whole:
            return
        path = self._path(step)
        try:
            # Before any checksum: files of an impossible size are not read at all.
            require_possible(path, stated_bytes(path))
        except (LayoutError, OSError) as error:
            raise CheckpointError(str(error) if isinstance(error, LayoutError) else reason(error)) from error
        check_files(path)
        self._whole.add(step)

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest of `step`; raise `CheckpointError` if it is invalid or of another format or step."""
        try:
            manifest = json.loads(read_text(self._path(step) / MANIFEST))
            sealed = seal(manifest) if isinstance(manifest, dict) else {}
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise CheckpointError(f"its manifest cannot be read: {reason(error)}") from error
        if not isinstance(manifest, dict) or not manifest.keys() >= {"format", "step", "facts", "leaves", "sha256"}:
            raise CheckpointError("its manifest cannot be read: it was not written by jaxrl")
        version = manifest["format"]
        if type(version) is not int:
            raise CheckpointError(f"it is of format {str(version)[:20]}; this version of jaxrl reads format {FORMAT}")
        if version != FORMAT:
            raise VersionError(_explain_version(version, manifest["facts"]))
        if manifest["sha256"] != sealed["sha256"]:
            raise CheckpointError("its manifest is damaged: its checksum differs")
        if manifest["step"] != step:
            raise CheckpointError(f"it was saved as step {manifest['step']!r}")
        _check_types(manifest)
        return manifest

    def _fitting_manifest(self, step: int, like: PyTree | None) -> dict[str, Any]:
        """Return the manifest of `step`; raise `MismatchError` if its leaves are not those of `like`."""
        manifest = self.manifest(step)
        if like is not None:
            wanted = dict(flatten(as_saved(like, manifest["facts"])))
            if different := mismatch(manifest["leaves"], wanted):
                raise MismatchError(different)
        return manifest

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"


def is_step(name: str) -> bool:
    """Return whether `name` is that of a checkpoint: a decimal number without leading zeros."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


class Standing(NamedTuple):
    """What decides whether a run can roll back to a checkpoint."""

    healthy: bool
    """Whether the last update was applied, not skipped."""
    regular: bool
    """Whether it was saved at an interval, rather than where the run was interrupted: interruptions must not decide
    to which steps a run can roll back."""


def standing(facts: Mapping[str, Any]) -> Standing:
    """Return the standing of a checkpoint with these facts, which those of a best policy leave out."""
    return Standing(bool(facts.get("healthy", True)), bool(facts.get("regular", True)))


def surplus(steps: Mapping[int, Standing], keep: int, newest: int) -> set[int]:
    """Return the `steps` to remove once `newest` is known to be valid: all but the `keep` latest regular ones up to it.

    A step beyond `newest` is damaged, or was undone by a rollback: counted, it would evict a valid one. Irregular steps
    before `newest` are removed first. If no kept step is healthy, the newest healthy one is kept too, for a rollback.
    """
    there = [step for step in steps if step <= newest]
    # The last `keep` stay, of irregular steps (see `Standing`) by age, then regular ones by age, then `newest`.
    stay = {*sorted(there, key=lambda step: (step == newest, steps[step].regular, step))[-keep:]}
    healthy = [step for step in there if steps[step].healthy]
    if healthy and stay.isdisjoint(healthy):
        stay.add(max(healthy, key=lambda step: (steps[step].regular, step)))
    return {*steps} - stay


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return `manifest` with `sha256`, the digest of all its other entries."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_files(directory: Path) -> None:
    """Verify the files of a checkpoint; raise `CheckpointError` naming the first one that has changed.

    A missing list is not damage: the seal of the manifest and the checksums of the leaves remain. Names in the list are
    compared, never opened, so it cannot refer to files outside the directory.
    """
    try:
        if not (directory / FILES).exists():
            return
        wanted, found = json.loads(read_text(directory / FILES)), file_sums(directory)
        names = sorted({*wanted, *found})
        wrong = [name for name in names if wanted.get(name) != found.get(name)]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"its list of files cannot be read: {reason(error)}") from error
    if wrong:
        what = "missing" if wrong[0] not in found else "damaged" if wrong[0] in wanted else "not one of its own"
        raise CheckpointError(f"its file {wrong[0][:200]} is {what}")


def stated_bytes(directory: Path) -> int:
    """Return the size in bytes of a checkpoint's arrays, as its manifest states it; 0 if that is invalid."""
    try:
        leaves = json.loads(read_text(directory / MANIFEST))["leaves"]
        return sum(math.prod(map(int, leaf["shape"])) * jax.numpy.dtype(leaf["dtype"]).itemsize for leaf in leaves)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError):
        return 0  # reading the manifest raises the specific error


def _check_types(manifest: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless the parts of a manifest have the types that all readers rely on."""
    entries = manifest["leaves"]
    good = isinstance(manifest["facts"], dict) and isinstance(entries, list)
    kinds = {"path": str, "shape": list, "dtype": str, "crc32": int}
    if not good or not all(isinstance(e, dict) and {k: type(v) for k, v in e.items()} == kinds for e in entries):
        raise CheckpointError("its manifest was not written by jaxrl")
    if len({e["path"] for e in entries}) != len(entries):
        raise CheckpointError("its manifest lists a leaf more than once")
    for entry in entries:
        if not is_path(entry["path"]):
            raise CheckpointError(f"its manifest has a leaf {entry['path'][:200]!r}, which is no path")
        if not all(type(n) is int and n >= 0 for n in entry["shape"]):
            raise CheckpointError(f"{entry['path'][:200]} has shape {str(entry['shape'])[:60]}, which is no array's")
        try:
            is_array = not jax.numpy.dtype(entry["dtype"]).hasobject
        except (TypeError, ValueError):
            is_array = False
        if not is_array:
            raise CheckpointError(f"{entry['path'][:200]} has dtype {entry['dtype'][:60]}, which is no array's")


def _explain_version(version: int, facts: Any) -> str:
    """Describe a checkpoint of another format: the version of jaxrl that wrote it, if recorded, and what to do."""
    age, advice = ("a newer", "update jaxrl") if version > FORMAT else ("an earlier", "go on with that version")
    writer = _writer(facts)
    which = f"jaxrl {writer[:20]}, {age} version" if isinstance(writer, str) else f"{age} version of jaxrl"
    return f"it was written by {which} (format {version}; this one reads {FORMAT}); {advice}"


def _writer(facts: Any) -> Any:
    """Return the version of jaxrl in the facts of a checkpoint of any format; `None` if there is none."""
    try:
        # Members of a population share it; those of format 19 and before have it in every row.
        shared = facts["common"] if "common" in facts else facts["rows"][0]["facts"] if "rows" in facts else facts
        return shared["versions"]["jaxrl"]
    except (KeyError, TypeError, IndexError):
        return None


def _write_now(write: Callable[[], int]) -> "Future[int]":
    """Write synchronously; return a completed future with the step or the `StorageError`."""
    job: Future[int] = Future()
    try:
        job.set_result(write())
    except StorageError as error:
        job.set_exception(error)
    return job

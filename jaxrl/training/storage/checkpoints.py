"""Checkpoints: written whole, checked leaf by leaf on the way back.

Orbax writes and reads the arrays; but it has no checksums, casts a wrong dtype silently, and loses a save that nobody
waits for. So every step carries a sealed manifest with each leaf's path, shape, dtype and CRC-32, and a list of its
files with their checksums; it is written under another name and renamed when all of it is on the disk, "saved" is said
only then, and a damaged step is named and passed over for the one before it.

    <opt_steps>/manifest.json    what the leaves are, and facts about the run
    <opt_steps>/files.json       size and checksum of every other file
    <opt_steps>/arrays/          the arrays, as a tree of Orbax's
"""

import contextlib
import hashlib
import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.errors import NoCheckpointError, SettingsError, StorageError
from jaxrl.training.processes import LostError, is_spread, is_to_be_spread
from jaxrl.training.storage import run_dir
from jaxrl.training.storage.arrays import (
    FILES,
    DamagedError,
    Leaves,
    check_seen,
    file_sums,
    own_leaves,
    read_arrays,
    read_together,
    reason,
    write_all,
)
from jaxrl.training.storage.layout import LayoutError, require_possible
from jaxrl.training.storage.leaves import (
    checksum,
    describe_leaf,
    host_leaves,
    is_path,
    like_leaves,
    mismatch,
    rebuild,
)
from jaxrl.trees import PyTree

FORMAT = 14
MANIFEST, ARRAYS = "manifest.json", "arrays"
UNFINISHED, REMOVED = ".unfinished", ".removed"
"""Added to the name of a step that is being written, and of one that is being removed."""

Facts = dict[str, Any]


FAULTS = (OSError, ValueError, MemoryError, StorageError)
"""What says that a disk or what is on it is at fault: errors of the system, and those that Orbax and TensorStore raise
where they cannot write or read. Any other is one of a program, and is not taken for damage."""


class CheckpointError(Exception):
    """Say what is wrong with one checkpoint."""

    verdict = "is damaged"


class VersionError(CheckpointError):
    """Say that a checkpoint was written by another version of jaxrl."""

    verdict = "cannot be read"


class OtherVersionError(NoCheckpointError):
    """Say that the newest checkpoint is whole, but of another version of jaxrl: nothing needs to be trained anew."""


class MismatchError(CheckpointError):
    """Say which leaf of a whole checkpoint does not fit what it is to be loaded into."""


class Store:
    """The checkpoints in one directory, `<directory>/<opt_steps>/`; the newest `keep` stay."""

    def __init__(self, directory: Path, keep: int, regular: Callable[[int], bool] = lambda step: True) -> None:
        """Prepare to read or write `directory`, which is made when first written to; see `surplus` for `regular`."""
        self.directory = directory.absolute()
        self.keep, self.regular = keep, regular
        self.newest: int | None = None
        """The step that was last saved or loaded."""
        self.forms: Sequence[Callable[[PyTree], PyTree]] = ()
        """Each makes of the structure to be loaded another that may have been saved, such as one without the replay."""
        self._write_s = 0.0
        self._bad: set[int] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[int] | None = None

    # --- writing ---

    def save(self, step: int, tree: PyTree, facts: Mapping[str, Any], after: "Store | None" = None) -> None:
        """Begin to write `tree` and `facts` (JSON) as `step`; it is saved when `wait` says so.

        The arrays are copied before this returns, or written where they are spread over processes: the caller may
        donate them. A step that was just saved or loaded is not written again. What is being written to the store
        `after` is on disk, or has failed, before any of it.

        Raises:
          StorageError: the save before this one failed.
        """
        # One save at a time, and one that failed is reported before another begins.
        self.wait()
        if step == self.newest:
            return
        # The save that `after` has in progress now; a later one is not waited for.
        before = None if after is None else after._job
        if is_spread(tree):  # what is on devices of other processes cannot be copied and written later
            self._job = _done(partial(self.write, step, own_leaves(tree), dict(facts), before))
            return
        # The copy to the host is made here, in the caller's thread: its next call may donate the arrays.
        write = partial(self.write, step, host_leaves(tree), dict(facts), before)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            self._job = self._thread.submit(write)
        except RuntimeError:  # the interpreter is ending, and starts no more work in threads
            self._job = _done(write)

    @property
    def write_s(self) -> float:
        """Seconds that the last save took, in its thread or in the caller's."""
        return self._write_s

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress."""
        return self._job is not None and not self._job.done()

    def wait(self, block: bool = True) -> int | None:
        """Wait until the save in progress is on disk and return its step; raise `StorageError` if it failed.

        Return `None` if none was in progress, or, without `block`, if it still is.
        """
        if self._job is None or not (block or self._job.done()):
            return None
        # Taken before its result is: a save that failed is reported once.
        job, self._job = self._job, None
        return job.result()

    def close(self) -> int | None:
        """Wait as `wait` does, and let go of the thread."""
        try:
            return self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def write(self, step: int, leaves: Leaves, facts: Facts, after: "Future[int] | None" = None) -> int:
        """Write `step` now, once `after` has come to its end; raise `StorageError` if it could not be written."""
        path, unfinished = self._path(step), self._path(step, UNFINISHED)
        # Only waited for: whether it failed is for its own store to tell.
        if after is not None:
            wait([after])
        begun = time.monotonic()
        self._sweep()
        try:
            # Under a name that no reader takes for a step, until every file and its directory have reached the disk.
            unfinished.mkdir(parents=True)
            sums, theirs = write_all(unfinished / ARRAYS, leaves)
            entries = [{**describe_leaf(name, array), "crc32": sums[name]} for name, array in leaves.items()]
            manifest = seal({"format": FORMAT, "step": step, "facts": facts, "leaves": entries})
            (unfinished / MANIFEST).write_text(json.dumps(manifest))
            theirs = {f"{ARRAYS}/{name}": found for name, found in theirs.items()}
            check_seen(unfinished, theirs)
            own = file_sums(unfinished, sync=True, of=lambda name: name not in theirs)  # theirs are not read again
            # The list comes last: it has the checksums of all other files.
            run_dir.write_atomically(unfinished / FILES, json.dumps({**theirs, **own}))
            # An older step of this number, such as a damaged one, goes only now that its successor is whole.
            if path.exists():
                self._remove(step)
            # This makes it a checkpoint; the sync of the directory makes the name outlive a loss of power.
            unfinished.rename(path)
            run_dir.sync_dir(self.directory)
        except LostError:
            raise
        except FAULTS as error:
            self._sweep()  # what is half there takes the room of the next
            raise StorageError(f"checkpoint {path} could not be written: {reason(error)}") from error
        self.newest = step
        self._bad.discard(step)
        # Older steps are removed only after the new one is whole, so a kill never leaves fewer than there were.
        self._prune(step)
        self._write_s = time.monotonic() - begun
        return step

    def _prune(self, newest: int) -> None:
        """Remove what `surplus` says."""
        for step in surplus(self.steps(), self.keep, newest, self.regular):
            self._remove(step)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what a save or a removal that was cut short has left half there."""
        with contextlib.suppress(OSError):
            for entry in self.directory.iterdir():
                if entry.suffix in (UNFINISHED, REMOVED) and is_step(entry.stem):
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Remove a step, by another name: half removed, it must not look like a damaged one."""
        with contextlib.suppress(OSError):
            # From the rename on it is no step. What a kill leaves of it is swept at the next save.
            self._path(step).rename(self._path(step, REMOVED))
        shutil.rmtree(self._path(step, REMOVED), ignore_errors=True)

    def copy(self, step: int, to: Path) -> None:
        """Copy `step` into the directory `to` of another store; raise `CheckpointError` if it is damaged."""
        shutil.copytree(self._path(step), to / str(step))
        # The copy is what is checked, so damage is found whether it was there before or came by copying.
        Store(to, 1).manifest(step)

    def drop_after(self, step: int) -> None:
        """Remove the steps after `step`: the run is going back behind them."""
        self.wait()
        for later in [s for s in self.steps() if s > step]:
            self._remove(later)

    # --- reading ---

    def steps(self) -> list[int]:
        """Return the steps that were written to their end, in order; they may have been damaged since."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if is_step(entry.name))

    def load_newest(self, like: PyTree, good: Callable[[Facts], bool] | None = None) -> tuple[int, PyTree, Facts]:
        """Load the newest step that is whole, and whose facts are `good`, warning of each newer one that is not whole.

        Raises:
          NoCheckpointError: there is none.
          SettingsError: it is whole, but was made for another structure; the leaf is named.
        """

        def load(step: int) -> tuple[int, PyTree, Facts] | None:
            if good is not None and not good(self.manifest(step)["facts"]):
                return None
            return step, *self.load(step, like)

        found = self._newest(load)
        self.newest = found[0]
        return found

    def newest_facts(self) -> tuple[int, Facts]:
        """Return the newest step whose files are whole, and its facts; raise `NoCheckpointError` if there is none."""
        found: tuple[int, Facts] = self._newest(lambda step: (step, self.manifest(step)["facts"]))
        return found

    def check_newest(self, like: PyTree) -> None:
        """Raise as `load_newest` does if the newest step cannot be loaded into `like`; its arrays are not read."""
        self._newest(lambda step: self._either(like, lambda like: self._fitting_manifest(step, like_leaves(like))))

    def _newest(self, read: Callable[[int], Any]) -> Any:
        """Return the first that is not `None` of what `read` makes of the steps, from the newest on."""
        self.wait()
        for step in reversed(self.steps()):
            try:
                # A step that was found damaged is neither read nor warned of again.
                found = None if step in self._bad else read(step)
                if found is not None:
                    return found
            except MismatchError as error:
                raise SettingsError(
                    f"checkpoint {self._path(step)} does not fit this program: {error}; "
                    "resume it with the settings and the version of jaxrl that made it"
                ) from error
            except CheckpointError as error:
                self._pass_over(self._path(step), error)
                self._bad.add(step)
        raise NoCheckpointError(f"{self.directory} holds no valid checkpoint; nothing was changed")

    def _pass_over(self, path: Path, error: CheckpointError) -> None:
        """Warn of a step that is not whole; raise `OtherVersionError` if another version of jaxrl can read it."""
        if isinstance(error, VersionError):  # going on from an older one would lose what came after it
            raise OtherVersionError(f"checkpoint {path} {error.verdict}: {error}") from error
        warnings.warn(f"checkpoint {path} is passed over: {error}", stacklevel=4)

    def load(self, step: int, like: PyTree) -> tuple[PyTree, Facts]:
        """Read `step` into the structure of `like` (arrays or shapes); return it and the facts saved with it.

        Raises:
          CheckpointError: it is damaged.
          MismatchError: it was made for another structure; the leaf is named.
        """

        def load(like: PyTree) -> tuple[PyTree, Facts]:
            if is_to_be_spread(like):
                return self._load_together(step, like)
            leaves, facts = self.read(step, like_leaves(like))
            return rebuild(like, list(leaves.values())), facts

        tree, facts = self._either(like, load)
        return tree, facts

    def _load_together(self, step: int, like: PyTree) -> tuple[PyTree, Facts]:
        """Do as `load` does in all processes, of which each reads only what its devices have."""
        manifest = self._fitting_manifest(step, like_leaves(like))
        try:
            sums = [entry["crc32"] for entry in manifest["leaves"]]
            return read_together(self._path(step) / ARRAYS, like, sums), manifest["facts"]
        except DamagedError as error:
            raise CheckpointError(f"the data of {error} is damaged: its checksum differs") from error
        except LostError:
            raise
        except (*FAULTS, LayoutError) as error:
            raise CheckpointError(f"cannot be read: {reason(error)}") from error

    def read_like(self, step: int, like: PyTree | None) -> Leaves:
        """Read the leaves of `step` by path, which must be those of `like`, or of one of its other `forms`.

        Raises:
          CheckpointError: as `load` does; without `like`, any structure will do.
        """
        if like is None:
            return self.read(step)[0]
        leaves: Leaves = self._either(like, lambda like: self.read(step, like_leaves(like))[0])
        return leaves

    def _either(self, like: PyTree, read: Callable[[PyTree], Any]) -> Any:
        """Return `read(like)`, or where that does not fit, of another form of `like`."""
        try:
            return read(like)
        except MismatchError:
            for form in self.forms:
                with contextlib.suppress(MismatchError):
                    # The first form that fits; if none does, the error is that of the plain one.
                    return read(form(like))
            raise

    def read(self, step: int, wanted: Mapping[str, Any] | None = None) -> tuple[Leaves, Facts]:
        """Read the leaves of `step` by path, and the facts saved with it.

        Args:
          step: which.
          wanted: shapes and dtypes by path, as of `like_leaves`, that it must have; left out, its own are believed.

        Raises:
          CheckpointError: it is damaged.
          MismatchError: it has other leaves than `wanted`.
        """
        manifest = self._fitting_manifest(step, wanted)
        try:
            # What is allocated is what the manifest states, and `manifest` has compared that with the memory there is.
            like = {entry["path"]: _empty(entry) for entry in manifest["leaves"]}
            arrays = read_arrays(self._path(step) / ARRAYS, like)
        except LayoutError as error:
            raise CheckpointError(str(error)) from error
        except FAULTS as error:
            raise CheckpointError(f"cannot be read: {reason(error)}") from error
        leaves = {}
        for entry in manifest["leaves"]:
            array = np.asarray(arrays[entry["path"]])
            # Orbax casts a wrong dtype silently, and has no checksums.
            if {**describe_leaf(entry["path"], array), "crc32": checksum(array)} != entry:
                raise CheckpointError(f"the data of {entry['path']} is damaged: its checksum differs")
            leaves[entry["path"]] = array
        return leaves, manifest["facts"]

    def manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest of `step`, after a check of all its files.

        Raises:
          CheckpointError: a file is damaged, or the manifest cannot be read, or is of another format or step.
        """
        path = self._path(step)
        try:
            # Before any checksum is computed: files of a size that cannot be are not even read.
            require_possible(path, stated_bytes(path))
        except (LayoutError, OSError) as error:
            raise CheckpointError(str(error) if isinstance(error, LayoutError) else reason(error)) from error
        check_files(path)
        return self.stated(step)

    def stated(self, step: int) -> dict[str, Any]:
        """Read the manifest of `step`; raise `CheckpointError` if it is none, or of another format or step."""
        try:
            manifest = json.loads(run_dir.read_text(self._path(step) / MANIFEST))
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise CheckpointError(f"its manifest cannot be read: {reason(error)}") from error
        if not isinstance(manifest, dict) or not manifest.keys() >= {"format", "step", "facts", "leaves", "sha256"}:
            raise CheckpointError("its manifest cannot be read: it is none of jaxrl's")
        version = manifest["format"]
        if type(version) is not int:
            raise CheckpointError(f"it is of format {str(version)[:20]}; this version of jaxrl reads format {FORMAT}")
        if version != FORMAT:
            raise VersionError(_explain_version(version, manifest["facts"]))
        if manifest["sha256"] != seal(manifest)["sha256"]:
            raise CheckpointError("its manifest is damaged: its checksum differs")
        if manifest["step"] != step:
            raise CheckpointError(f"it was saved as step {manifest['step']!r}")
        _check_types(manifest)
        return manifest

    def _fitting_manifest(self, step: int, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the manifest of `step`; raise `MismatchError` if it has other leaves than `wanted`."""
        manifest = self.manifest(step)
        if wanted is not None and (different := mismatch(manifest["leaves"], wanted)):
            raise MismatchError(different)
        return manifest

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"{step}{suffix}"


def is_step(name: str) -> bool:
    """Say whether a directory of this name can be a checkpoint."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def surplus(
    steps: Iterable[int], keep: int, newest: int, regular: Callable[[int], bool] = lambda step: True
) -> set[int]:
    """Return which of `steps` to remove once `newest` is known to be whole: all but the `keep` latest up to it.

    A step beyond `newest` was damaged and passed over, or belongs to a past that the run has gone back behind: were it
    counted, it would cost a whole one its place. Steps before `newest` that are not `regular`, because the run was
    interrupted there, go first: whether a run was interrupted must not decide where it can go back to.
    """
    steps = set(steps)
    # By rank: irregular steps, then regular ones, each by age, then the newest, whatever it is. The last `keep` stay.
    ranked = sorted((step == newest, regular(step), step) for step in steps if step <= newest)
    return steps - {step for *_, step in ranked[-keep:]}


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return `manifest` with the sha256 of all the rest of it as `sha256`."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_files(directory: Path) -> None:
    """Raise `CheckpointError` naming the first file of a checkpoint that is not as it was written.

    A missing list is no damage by itself: the manifest's seal and the checksums of the leaves remain. Names in the list
    are compared, never opened: what it says cannot lead out of the directory.
    """
    try:
        if not (directory / FILES).exists():
            return
        wanted, found = json.loads(run_dir.read_text(directory / FILES)), file_sums(directory)
        names = sorted({*wanted, *found})
        wrong = [name for name in names if wanted.get(name) != found.get(name)]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"its list of files cannot be read: {reason(error)}") from error
    if wrong:
        what = "missing" if wrong[0] not in found else "damaged" if wrong[0] in wanted else "not one of its own"
        raise CheckpointError(f"its file {wrong[0][:200]} is {what}")


def stated_bytes(directory: Path) -> int:
    """Return what the arrays of a checkpoint take by its manifest; 0 where that says nothing that could be."""
    try:
        leaves = json.loads(run_dir.read_text(directory / MANIFEST))["leaves"]
        return sum(math.prod(map(int, leaf["shape"])) * jax.numpy.dtype(leaf["dtype"]).itemsize for leaf in leaves)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError):
        return 0  # whoever reads it says what is wrong


def _check_types(manifest: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless a manifest's parts have the types that all else relies on."""
    entries = manifest["leaves"]
    good = isinstance(manifest["facts"], dict) and isinstance(entries, list)
    kinds = {"path": str, "shape": list, "dtype": str, "crc32": int}
    if not good or not all(isinstance(e, dict) and {k: type(v) for k, v in e.items()} == kinds for e in entries):
        raise CheckpointError("its manifest is none of jaxrl's")
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
    """Say which version of jaxrl reads a checkpoint of another format, as far as it tells."""
    age, advice = ("a newer", "update jaxrl") if version > FORMAT else ("an earlier", "go on with that version")
    versions = facts.get("versions") if isinstance(facts, dict) else None
    writer = versions.get("jaxrl") if isinstance(versions, dict) else None
    which = f"jaxrl {writer[:20]}, {age} version" if isinstance(writer, str) else f"{age} version of jaxrl"
    return f"it was written by {which} (format {version}; this one reads {FORMAT}); {advice}"


def _empty(entry: Mapping[str, Any]) -> np.ndarray:
    return np.empty(entry["shape"], jax.numpy.dtype(entry["dtype"]))


def _done(write: Callable[[], int]) -> "Future[int]":
    """Write now, and return how that has ended as `Store.wait` is to find it."""
    job: Future[int] = Future()
    try:
        job.set_result(write())
    except StorageError as error:
        job.set_exception(error)
    return job

"""Checkpoints of a population: members' saves at about the same time are batched into one checkpoint on disk.

    runs/lr/checkpoints/<n>/    the n-th save, a step of a `Store`; its facts have a row for each member in it
    runs/lr/best/<n>/           likewise, the members' best policies

Members' arrays are stacked: restored with `orbax.checkpoint` alone, `tree["0"]["state"]["agent"]` holds the agents of
all members with equal shapes and dtypes, along the first axis in the order of the rows. Members with other shapes are
in `tree["1"]`, and so on.

To a member its rows look like its own `Store` (`MemberStore`). Submitted rows are written once all running members have
submitted theirs (`SaveBatcher`); a member that needs its row on disk sooner flushes the batch.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import StorageError
from jaxrl.training.storage.arrays import FAULTS, Leaves, reason
from jaxrl.training.storage.checkpoints import (
    CheckpointError,
    Facts,
    Good,
    Store,
    standing,
    stated_bytes,
    surplus,
)
from jaxrl.training.storage.files import common_entries, with_common, without_common
from jaxrl.training.storage.leaves import Entry, host_leaves
from jaxrl.training.storage.run_dir import BEST, CHECKPOINTS
from jaxrl.trees import PyTree, tree_bytes

MAX_WAIT_S = 10.0
"""Approximate time in seconds that a submitted row waits for other members."""
FLUSH_WAIT_S = 0.25
"""Seconds that a member with a save due waits for others before it flushes its previous one."""
MAX_BYTES = 1 << 28
"""Size of pending rows in bytes above which they are written."""
MAX_CACHED_BYTES = 1 << 28
"""Maximum size of the arrays of several saves that stay in memory once they are read."""
MAX_ROWS = 1_000
"""Maximum rows of a save, whose manifest is read into memory."""
MAX_SAVES = 2
"""Saves retained beyond `keep` for the sake of a few members; rows in older ones are rewritten into the next save."""


def has_valid_save(population: Path) -> bool:
    """Return whether the population in this directory has a valid save, or has made none yet."""
    store = Store(population / CHECKPOINTS, 1)

    def is_whole(save: int) -> bool:
        try:
            return bool(store.manifest(save))
        except CheckpointError:
            return False

    return not store.steps() or any(map(is_whole, store.steps()))


class MemberCheckpoint(NamedTuple):
    """A checkpoint submitted by a member, to become a row of a save."""

    order: int
    """Sequence number among all rows submitted. A row replaces earlier ones of its member at the same or later steps,
    which the member has rolled back."""
    member: int
    step: int
    facts: Facts
    leaves: Leaves


class RowLocation(NamedTuple):
    """Location of a row on disk."""

    order: int
    save: int
    stack: str
    """Key of the subtree with its arrays."""
    row: int
    """Index along the first axis of each array."""
    facts: Facts


class SaveManifest(NamedTuple):
    """The manifest of a save, parsed."""

    rows: Sequence[tuple[int, int, RowLocation]]
    """`(member, step, location)` of each row."""
    entries: Mapping[str, Sequence[Entry]]
    """Manifest entries of a row's arrays, by stack."""
    keep: int
    """Rows retained for each member."""


class PopulationStore(Store):
    """The saves of a population in one directory."""

    few_files = True

    def __init__(self, directory: Path, keep: int) -> None:
        """Prepare to read or write `directory`; the newest `keep` rows of each member are retained."""
        super().__init__(directory, keep)
        self._lock = threading.RLock()
        self._found: dict[int, SaveManifest | CheckpointError] = {}
        self._known: dict[int, dict[int, RowLocation]] = {}
        """Rows by member and step, derived from `_found`."""
        self.row_s = 0.0
        """Seconds that the last save took for each of its rows."""
        self._arrays: dict[int, Leaves] = {}
        """Arrays of the saves last read, which members read in turn."""

    def rows(self, member: int) -> dict[int, RowLocation]:
        """Return the locations of a member's rows by step."""
        return self._rows().get(member, {})

    def newest_steps(self, members: Iterable[int]) -> dict[int, int]:
        """Return the step of each member's newest row that is undamaged, or else of its newest; -1 if it has none."""
        damaged: set[int] = set()

        def is_whole(location: RowLocation) -> bool:
            if location.save not in damaged:
                try:
                    self.entries(location)
                except CheckpointError:
                    damaged.add(location.save)
            return location.save not in damaged

        found = {}
        for member in members:
            rows = self.rows(member)
            steps = sorted(rows, reverse=True) or [-1]
            found[member] = next((step for step in steps if step in rows and is_whole(rows[step])), steps[0])
        return found

    def _rows(self) -> dict[int, dict[int, RowLocation]]:
        """Return the locations of all members' rows, without those that are replaced or no longer retained."""
        with self._lock:
            self._refresh()
            return self._known

    def _visible(self) -> dict[int, dict[int, RowLocation]]:
        found = [save for _, save in sorted(self._found.items()) if isinstance(save, SaveManifest)]
        rows: dict[int, dict[int, RowLocation]] = {}
        every = (row for save in found for row in save.rows)
        # In order of submission: a row replaces those of its member at the same or later steps.
        for member, step, location in sorted(every, key=lambda row: (row[2].order, row[2].save)):
            before = rows.get(member, {})
            rows[member] = {**{s: p for s, p in before.items() if s < step}, step: location}
        return {member: _rows_to_keep(steps, found[-1].keep) for member, steps in rows.items()}

    def newest_order(self) -> int:
        """Return the `order` of the newest row; 0 if there is none."""
        return max((p.order for steps in self._rows().values() for p in steps.values()), default=0)

    def unreadable(self) -> dict[int, CheckpointError]:
        """Return the saves whose manifests are invalid, with the errors."""
        with self._lock:
            self._refresh()
            return {save: found for save, found in self._found.items() if isinstance(found, CheckpointError)}

    def _refresh(self) -> None:
        """Read the manifests of new saves, and forget removed ones."""
        there, before = self.steps(), {*self._found}
        self._found = {save: found for save, found in self._found.items() if save in there}
        for save in there:
            if save not in self._found:
                try:
                    self._found[save] = _contents(save, self.read_manifest(save))
                except CheckpointError as error:
                    if save in self.steps():  # otherwise a running process has just removed it
                        self._found[save] = error
        if before != {*self._found}:
            self._known = self._visible()

    def entries(self, location: RowLocation) -> Sequence[Entry]:
        """Return the manifest entries of a row's arrays; raise `CheckpointError` if a file of its save has changed."""
        with self._lock:
            self._require_whole(location.save)
            found = self._found.get(location.save)
            if not isinstance(found, SaveManifest):
                raise CheckpointError("it has been removed")
            return found.entries[location.stack]

    def leaves(self, location: RowLocation) -> Leaves:
        """Return the arrays of a row; raise `CheckpointError` if its save is damaged."""
        with self._lock:
            arrays = self._read(location.save)
        prefix = f"{location.stack}/"
        stacks = {name: stack for name, stack in arrays.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): np.array(stack[location.row]) for name, stack in stacks.items()}

    def _read(self, save: int) -> Leaves:
        """Return all arrays of a save, and drop those of others for which there is no room."""
        found = self._arrays.pop(save, None)
        if found is None:
            size = stated_bytes(self._path(save))
            while self._arrays and size + sum(map(tree_bytes, self._arrays.values())) > MAX_CACHED_BYTES:
                self._arrays.pop(next(iter(self._arrays)))
            found = self.read(save)[0]
        self._arrays[save] = found  # as the last one read
        return found

    def write_rows(self, rows: Sequence[MemberCheckpoint]) -> None:
        """Write `rows` as one save; raise `StorageError` on failure."""
        begun = time.monotonic()
        stacks: dict[tuple[Any, ...], list[MemberCheckpoint]] = {}
        # Only rows with equal paths, shapes and dtypes can be stacked.
        ordered = sorted((*self._rows_to_rewrite(), *rows), key=lambda row: (row.member, row.order))
        for row in ordered:
            form = tuple((name, leaf.shape, leaf.dtype) for name, leaf in row.leaves.items())
            stacks.setdefault(form, []).append(row)
        # Most facts are the same for all members: they are written once.
        common = common_entries([row.facts for row in ordered], nested=True)
        described, leaves = list[dict[str, Any]](), Leaves()
        for stack, alike in enumerate(stacks.values()):
            for row in alike:
                about = {"member": row.member, "step": row.step, "order": row.order, "stack": str(stack)}
                described.append({**about, "facts": without_common(row.facts, common)})
            for name in alike[0].leaves:
                leaves[f"{stack}/{name}"] = np.stack([row.leaves[name] for row in alike])
        with self._lock:
            self._arrays.clear()
        facts = {"keep": self.keep, "common": common, "rows": described}
        self.write(max(self.steps(), default=0) + 1, leaves, facts)
        self.row_s = (time.monotonic() - begun) / len(described)

    def _rows_to_rewrite(self) -> list[MemberCheckpoint]:
        """Return rows to rewrite from old saves, too many of which would otherwise be retained for few members each."""
        rows = self._rows()
        old = sorted(_saves_of(rows))[: -(self.keep + MAX_SAVES)]
        every = [(member, step, location) for member, steps in rows.items() for step, location in steps.items()]
        found = []
        for member, step, location in [row for row in every if row[2].save in old]:
            with contextlib.suppress(CheckpointError):  # a damaged row is left in its save
                found.append(MemberCheckpoint(location.order, member, step, location.facts, self.leaves(location)))
        return found

    def _prune(self, newest: int) -> None:
        needed = {newest, *_saves_of(self._rows())}
        for save in [save for save in self.steps() if save not in needed]:
            self._remove(save)
        self._sweep()


def _rows_to_keep(steps: Mapping[int, RowLocation], keep: int) -> dict[int, RowLocation]:
    """Return the retained rows of a member, given all its rows by step."""
    gone = surplus({step: standing(location.facts) for step, location in steps.items()}, keep, max(steps))
    return {step: location for step, location in steps.items() if step not in gone}


def _saves_of(rows: Mapping[int, Mapping[int, RowLocation]]) -> set[int]:
    """Return the saves that hold `rows`."""
    return {location.save for steps in rows.values() for location in steps.values()}


def _contents(save: int, manifest: Mapping[str, Any]) -> SaveManifest:
    """Parse and validate the manifest of a save, which may come from anyone.

    Raises:
      CheckpointError: it was not written by `PopulationStore.write_rows`.
    """
    entries: dict[str, list[Entry]] = {}
    lengths: dict[str, set[int]] = {}
    for entry in manifest["leaves"]:
        stack, _, path = entry["path"].partition("/")
        lengths.setdefault(stack, set()).update(entry["shape"][:1] or [-1])
        entries.setdefault(stack, []).append({**entry, "path": path, "shape": entry["shape"][1:]})
    rows, counts = [], dict.fromkeys(lengths, 0)
    try:
        keep, common = manifest["facts"]["keep"], manifest["facts"]["common"]
        if type(keep) is not int or keep < 1 or not isinstance(common, dict):
            raise ValueError
        for row in manifest["facts"]["rows"]:
            stack, numbers = row["stack"], (row["member"], row["step"], row["order"])
            if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(row["facts"], dict):
                raise ValueError
            facts = with_common(common, row["facts"])
            location = RowLocation(row["order"], save, stack, counts[stack], facts)
            rows.append((row["member"], row["step"], location))
            counts[stack] += 1
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError("it does not say which members it is of") from error
    if any(found != {counts[stack]} for stack, found in lengths.items()):
        raise CheckpointError("it has other members than it says")
    return SaveManifest(rows, entries, keep)


class MemberStore(Store):
    """The rows of one member, with the interface of its own `Store`."""

    def __init__(self, saves: PopulationStore, member: int, batcher: "SaveBatcher | None" = None) -> None:
        """Read the rows of `member` in `saves`; write through `batcher`, without which it is read-only."""
        super().__init__(saves.directory, saves.keep)
        self._saves, self._member, self._batcher = saves, member, batcher

    def save(self, step: int, tree: PyTree, facts: Mapping[str, Any], after: Store | None = None) -> None:
        """Submit `tree` and `facts`, see `Store.save`; `after` is unused: best policies always precede checkpoints."""
        self.wait()
        if step != self.newest:
            self._submit(step, host_leaves(tree), dict(facts))

    def _submit(self, step: int, leaves: Leaves, facts: Facts) -> None:
        assert self._batcher is not None
        self._bad.discard(step)
        self._job = self._batcher.submit(self._saves, self._member, step, leaves, facts)

    def wait(self, block: bool = True) -> int | None:
        """Wait as `Store.wait` does; with `block`, have the pending row written instead of waiting for all members."""
        if self._job is not None and self._batcher is not None:
            self._batcher.flush(self._member, self._job) if block else self._batcher.flush_if_due()
        step = super().wait(block)
        self.newest = self.newest if step is None else step
        return step

    @property
    def write_s(self) -> float:
        """Share of a row in the duration of the last save, in seconds."""
        return self._saves.row_s

    def copy(self, step: int, to: Path) -> None:
        """Write a row into the directory `to` as a checkpoint of a single run."""
        Store(to, 1).write(step, *self.read(step))

    def drop_after(self, step: int) -> None:
        """Rewind the member to `step`: its row is written again and so replaces those after it."""
        self.wait()
        if any(later > step for later in self.steps()):
            self._submit(step, *self.read(step))
            self.wait()

    def steps(self) -> list[int]:
        """Return the steps of the rows in ascending order."""
        return sorted(self._saves.rows(self._member))

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a row; raises what `Store.manifest` does."""
        location = self._location(step)
        return {"step": step, "facts": location.facts, "leaves": list(self._saves.entries(location))}

    def read(self, step: int, like: PyTree | None = None) -> tuple[Leaves, Facts]:
        """Read a row, see `Store.read`."""
        facts: Facts = self._fitting_manifest(step, like)["facts"]
        return self._saves.leaves(self._location(step)), facts

    def _location(self, step: int) -> RowLocation:
        try:
            return self._saves.rows(self._member)[step]
        except KeyError:
            raise CheckpointError("it has been removed") from None

    def _newest(self, read: Callable[[int], Any], good: Good | None = None) -> Any:
        rows = self._saves.rows(self._member)
        newest = max((location.save for location in rows.values()), default=0)
        for save, error in sorted(self._saves.unreadable().items(), reverse=True):
            if save > newest:
                self._warn_skipped(self.directory / str(save), error)
        return super()._newest(read, good)

    def _path(self, step: int, suffix: str = "") -> Path:
        rows = self._saves.rows(self._member)
        return self.directory / (str(rows[step].save) if step in rows else f"{step} of member {self._member}")


class SaveBatcher:
    """Batches the rows that members of a population submit, and writes each batch as one save."""

    def __init__(
        self,
        population: Path,
        keep: int,
        members: Iterable[int],
        first: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Expect rows of `members`; the newest `keep` checkpoints of each are retained.

        `first` is called before each save, to write what must be on disk before it; if that fails, so does the save.
        `report` is called with one line when saves start to fail and when one succeeds again.
        """
        self._first, self._report = first, report
        self._failing: set[PopulationStore] = set()
        self.checkpoints = PopulationStore(population / CHECKPOINTS, keep)
        self.best = PopulationStore(population / BEST, 1)
        self._condition = threading.Condition(threading.RLock())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._waiting: dict[PopulationStore, list[tuple[MemberCheckpoint, Future[int]]]] = {
            self.best: [],
            self.checkpoints: [],
        }
        """Pending rows in writing order: best policies first, as a member resumed from a checkpoint does not come
        across them again."""
        self._oldest, self._bytes, self._order = 0.0, 0, 0
        self._expected, self._ending = set(members), False
        self._blocked: set[int] = set()
        """Members blocked until their rows are written."""

    def store(self, name: str, member: int) -> MemberStore:
        """Return the store of a member under `name`."""
        return MemberStore(self.checkpoints if name == CHECKPOINTS else self.best, member, self)

    def submit(self, saves: PopulationStore, member: int, step: int, leaves: Leaves, facts: Facts) -> "Future[int]":
        """Enqueue a row of a member; the future completes once the row is on disk."""
        job: Future[int] = Future()
        with self._condition:
            self._order = 1 + (self._order or max(self.checkpoints.newest_order(), self.best.newest_order()))
            if not any(self._waiting.values()):
                self._oldest, self._bytes = time.monotonic(), 0
            self._waiting[saves].append((MemberCheckpoint(self._order, member, step, facts, leaves), job))
            self._bytes += sum(leaf.nbytes for leaf in leaves.values())
            complete = bool(self._expected) and self._expected <= self._members_pending()
            if (complete and not self._ending) or self._bytes > MAX_BYTES:
                self._write()
        self.flush_if_due()
        return job

    def join(self, member: int) -> None:
        """Have batches wait for `member`."""
        with self._condition:
            self._expected.add(member)

    def leave(self, member: int) -> None:
        """Stop waiting for `member`."""
        with self._condition:
            self._expected.discard(member)
            self._condition.notify_all()

    def flush_if_due(self) -> None:
        """Flush the batch if it has been pending for too long."""
        with self._condition:
            if any(self._waiting.values()) and time.monotonic() - self._oldest > MAX_WAIT_S:
                self._write()

    def flush(self, member: int, job: "Future[int]") -> None:
        """Flush a pending `job`, with rows submitted within `FLUSH_WAIT_S`; while `ending`, once all have submitted."""
        with self._condition:
            until = time.monotonic() + FLUSH_WAIT_S
            self._blocked.add(member)
            self._condition.notify_all()
            while any(job is other for jobs in self._waiting.values() for _, other in jobs):
                there = self._blocked if self._ending else self._blocked | self._members_pending()
                late = not self._ending and time.monotonic() > until
                if self._expected <= there or late:
                    self._write()
                else:
                    self._condition.wait(None if self._ending else FLUSH_WAIT_S)
            self._blocked.discard(member)

    def _members_pending(self) -> set[int]:
        """Return the members with a pending checkpoint."""
        return {row.member for row, _ in self._waiting[self.checkpoints]}

    @contextlib.contextmanager
    def ending(self, members: Iterable[int]) -> Iterator[None]:
        """Batch the final saves of `members`: inside, each ends in its own thread, which calls `leave` last."""
        ends = set(members)
        with self._condition:
            others, self._expected, self._ending = self._expected - ends, ends, True
        try:
            yield
        finally:
            with self._condition:
                self._expected, self._ending = others, False

    def _write(self) -> None:
        """Start writing all pending rows."""
        with self._condition:
            for saves, jobs in self._waiting.items():
                self._waiting[saves] = []
                for first in range(0, len(jobs), MAX_ROWS):
                    part = jobs[first : first + MAX_ROWS]
                    try:
                        self._thread.submit(self._put, saves, part)
                    except RuntimeError:  # the interpreter is shutting down: no new work in threads
                        self._put(saves, part)
            self._blocked.clear()
            self._condition.notify_all()

    def close(self) -> None:
        """Flush all pending rows to disk."""
        self._write()
        self._thread.shutdown()

    def _put(self, saves: PopulationStore, jobs: Sequence[tuple[MemberCheckpoint, "Future[int]"]]) -> None:
        """Write a save, and complete the futures of its rows with the step or the error."""
        try:
            self._first()
            saves.write_rows([row for row, _ in jobs])
        except BaseException as error:
            said: BaseException = error
            if isinstance(error, FAULTS) and not isinstance(error, StorageError):
                said = StorageError(f"a checkpoint in {saves.directory} could not be written: {reason(error)}")
            for _, job in jobs:
                job.set_exception(said)
            if saves not in self._failing and isinstance(said, StorageError):
                self._failing.add(saves)
                self._report(f"warning: {said}; training goes on")
        else:
            for row, job in jobs:
                job.set_result(row.step)
            if saves in self._failing:
                self._failing.discard(saves)
                self._report(f"{saves.directory} could be written again")

"""The checkpoints of a population: what its members save at about the same time is one checkpoint on disk.

    runs/lr/checkpoints/<n>/    the n-th save, a step of a `Store`; its facts have a row for each member in it
    runs/lr/best/<n>/           likewise, of the members' best policies

The arrays of members are stacked: restored with `orbax.checkpoint` alone, `tree["0"]["state"]["agent"]` has the agents
of all members whose arrays are alike, along the first axis in the order of the rows. Members with arrays of other
shapes are in `tree["1"]`, and so on.

To a member its part looks like a `Store` of its own (`MemberStore`). What it hands in is written when all members that
are on their way have handed in theirs (`Collector`); whoever needs it on the disk sooner has what is there written.
"""

import contextlib
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError, StorageError
from jaxrl.paths import local
from jaxrl.training.storage.arrays import Leaves, reason
from jaxrl.training.storage.checkpoints import FAULTS, CheckpointError, Facts, Store, surplus
from jaxrl.training.storage.leaves import Entry, host_leaves
from jaxrl.training.storage.members import group_of, require_no_member, resolve
from jaxrl.training.storage.run_dir import new_directory
from jaxrl.trees import PyTree

CHECKPOINTS, BEST = "checkpoints", "best"
"""What a run keeps: the names of the two folders."""
LONGEST_WAIT_S = 10.0
"""Seconds that what a member has handed in waits for others, about."""
PATIENCE_S = 0.25
"""Seconds that a member which needs its last save on the disk, for it comes to the next, waits for the others."""
MOST_BYTES = 1 << 28
"""Bytes of what waits beyond which it is written."""
MOST_ROWS = 1_000
"""Rows of a save, for its manifest is read whole."""
MOST_SAVES = 4
"""Saves that stay although few members need them; what older ones hold is written once more, with the next."""


def open_store(run: Path, name: str, opened: "dict[Path, Saves] | None" = None) -> Store:
    """Return what a run keeps under `name`, for reading: its own store, or the part of a member in its population's.

    What was `opened` before is read once for all members.
    """
    population = group_of(run)
    # Members that earlier versions wrote have folders of their own, which say so when they are read.
    if population is None or not run.name.isdecimal() or (run / name).is_dir():
        return Store(run / name, 1)
    opened = {} if opened is None else opened
    saves = opened.setdefault(population / name, Saves(population / name, 1))
    return MemberStore(saves, int(run.name))


def any_whole(member: Path) -> bool:
    """Return whether a save of the population that the run in `member` belongs to is whole, or none was made yet."""
    store = Store(member.parent.parent / CHECKPOINTS, 1)

    def is_whole(save: int) -> bool:
        try:
            return bool(store.manifest(save))
        except CheckpointError:
            return False

    return not store.steps() or any(map(is_whole, store.steps()))


def require_no_own(members: Iterable[Path]) -> None:
    """Raise `NoCheckpointError` if members in these directories have checkpoints of their own: of earlier versions."""
    for path in members:
        if (path / CHECKPOINTS).is_dir():
            Store(path / CHECKPOINTS, 1).newest_facts()  # which says what version reads them


def extract(run_dir: str | Path, member: int, to: str | Path) -> Path:
    """Copy a member of a population to a directory of its own, as a run that can be resumed; return that.

    Raises:
      SettingsError: there is no such member, or something is at `to` already.
      StorageError: the copy cannot be written; nothing of it stays.
    """
    path, target = resolve(run_dir, member), Path(local(to))
    if target.resolve().is_relative_to(Path(local(run_dir)).resolve()):
        raise SettingsError(f"{target} lies inside {run_dir}, which stays as it is; choose another directory")
    if os.path.lexists(target):
        raise SettingsError(f"{target} exists already; choose another directory")
    require_no_member(target)
    try:
        with new_directory(target) as made:
            # No links but that which `require_inside` allows.
            shutil.copytree(path, made, symlinks=True, dirs_exist_ok=True)
            for name in (CHECKPOINTS, BEST):
                _take_out(open_store(path, name), made / name)
    except (OSError, shutil.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first(error)
        raise StorageError(f"cannot write {target}: {reason}; nothing of it stays") from error
    return target


def _take_out(store: Store, to: Path) -> None:
    """Copy into `to` what a member has in the store of its population; warn of what is damaged."""
    for step in store.steps() if isinstance(store, MemberStore) else ():
        try:
            store.copy(step, to)
        except CheckpointError as error:
            warnings.warn(f"{store.directory}: step {step} of the member is left out: {error}", stacklevel=3)


def _first(error: Exception) -> str:
    """Return the reason of the first of the failures that `shutil` has collected."""
    failures = error.args[0] if error.args else ""
    return str(failures[0][2] if isinstance(failures, list) and failures else failures)


class Row(NamedTuple):
    """What a member has handed in."""

    order: int
    """Its place among all that was handed in. It replaces earlier rows of the member that have as many steps or more:
    the member has gone back behind them."""
    member: int
    step: int
    facts: Facts
    leaves: Leaves


class Place(NamedTuple):
    """Where on disk a row is."""

    order: int
    save: int
    stack: str
    """The part of the tree that has the arrays."""
    row: int
    """Along the first axis of each."""
    facts: Facts


class Save(NamedTuple):
    """What a save says of itself."""

    rows: Sequence[tuple[int, int, Place]]
    """With member and step."""
    entries: Mapping[str, Sequence[Entry]]
    """What the arrays of a row are, by stack."""
    keep: int
    """Rows of each member that stay."""


class Saves(Store):
    """The saves of a population in one directory."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Prepare to read or write `directory`; of each member the newest `keep` rows stay."""
        super().__init__(directory, keep)
        self._lock = threading.RLock()
        self._found: dict[int, Save | CheckpointError] = {}
        self._known: dict[int, dict[int, Place]] = {}
        """The rows of all members by member and step, as `_found` has them."""
        self._whole: set[int] = set()
        """Saves whose files this process has checked."""
        self._arrays: tuple[int, Leaves] | None = None
        """Those of the save that was last read: members that begin read the same one, one after the other."""

    def rows(self, member: int) -> dict[int, Place]:
        """Return where a member's rows are, by step."""
        return self._rows().get(member, {})

    def _rows(self) -> dict[int, dict[int, Place]]:
        """Return where the rows of all members are, but those that a later one has replaced or that need not stay."""
        with self._lock:
            self._look()
            return self._known

    def _visible(self) -> dict[int, dict[int, Place]]:
        found = [save for _, save in sorted(self._found.items()) if isinstance(save, Save)]
        rows: dict[int, dict[int, Place]] = {}
        every = (row for save in found for row in save.rows)
        for member, step, place in sorted(every, key=lambda row: (row[2].order, row[2].save)):
            before = rows.get(member, {})
            rows[member] = {**{s: p for s, p in before.items() if s < step}, step: place}
        return {member: _kept(steps, found[-1].keep) for member, steps in rows.items()}

    def newest_order(self) -> int:
        """Return the place of the newest row among all."""
        return max((p.order for steps in self._rows().values() for p in steps.values()), default=0)

    def unreadable(self) -> dict[int, CheckpointError]:
        """Return the saves that do not tell whose they are, with the reasons."""
        with self._lock:
            self._look()
            return {save: found for save, found in self._found.items() if isinstance(found, CheckpointError)}

    def _look(self) -> None:
        """Learn what the saves say that are there now."""
        there, before = self.steps(), {*self._found}
        self._found = {save: found for save, found in self._found.items() if save in there}
        for save in there:
            if save not in self._found:
                try:
                    self._found[save] = _contents(save, self.stated(save))
                except CheckpointError as error:
                    if save in self.steps():  # else a running process has just removed it
                        self._found[save] = error
        if before != {*self._found}:
            self._known = self._visible()

    def entries(self, place: Place) -> Sequence[Entry]:
        """Return what the arrays of a row are; raise `CheckpointError` if a file of its save is not as it was."""
        with self._lock:
            if place.save not in self._whole:
                self.manifest(place.save)
                self._whole.add(place.save)
            found = self._found.get(place.save)
            if not isinstance(found, Save):
                raise CheckpointError("it has been removed")
            return found.entries[place.stack]

    def leaves(self, place: Place) -> Leaves:
        """Return the arrays of a row; raise `CheckpointError` if its save is damaged."""
        with self._lock:
            if self._arrays is None or self._arrays[0] != place.save:
                self._arrays = None
                self._arrays = place.save, self.read(place.save)[0]
            prefix = f"{place.stack}/"
            stacks = {name: stack for name, stack in self._arrays[1].items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): np.array(stack[place.row]) for name, stack in stacks.items()}

    def put(self, rows: Sequence[Row]) -> None:
        """Write a save of these rows; raise `StorageError` if that fails."""
        stacks: dict[tuple[Any, ...], list[Row]] = {}
        for row in sorted((*self._carried(), *rows), key=lambda row: (row.member, row.order)):
            form = tuple((name, leaf.shape, str(leaf.dtype)) for name, leaf in row.leaves.items())
            stacks.setdefault(form, []).append(row)
        told, leaves = [], Leaves()
        for stack, alike in enumerate(stacks.values()):
            told += [{**row._replace(leaves={})._asdict(), "stack": str(stack)} for row in alike]
            for name in alike[0].leaves:
                leaves[f"{stack}/{name}"] = np.stack([row.leaves[name] for row in alike])
        self._arrays = None
        self.write(max(self.steps(), default=0) + 1, leaves, {"keep": self.keep, "rows": told})

    def _carried(self) -> list[Row]:
        """Return the rows of old saves that are still needed, of which too many would stay for a few members each."""
        rows = self._rows()
        old = sorted(_saves_of(rows))[: -(self.keep + MOST_SAVES)]
        every = [(member, step, place) for member, steps in rows.items() for step, place in steps.items()]
        found = []
        for member, step, place in [row for row in every if row[2].save in old]:
            with contextlib.suppress(CheckpointError):  # damaged, it stays where it is as long as it is needed
                found.append(Row(place.order, member, step, place.facts, self.leaves(place)))
        return found

    def _prune(self, newest: int) -> None:
        needed = {newest, *_saves_of(self._rows())}
        for save in [save for save in self.steps() if save not in needed]:
            self._remove(save)
        self._sweep()


def _kept(steps: Mapping[int, Place], keep: int) -> dict[int, Place]:
    """Return the rows of a member that stay, of all its rows by step."""
    gone = surplus(steps, keep, max(steps), lambda step: bool(steps[step].facts.get("regular", True)))
    return {step: place for step, place in steps.items() if step not in gone}


def _saves_of(rows: Mapping[int, Mapping[int, Place]]) -> set[int]:
    """Return the saves that rows are in."""
    return {place.save for steps in rows.values() for place in steps.values()}


def _contents(save: int, manifest: Mapping[str, Any]) -> Save:
    """Return what the manifest of a save says, which a stranger may have written.

    Raises:
      CheckpointError: it is not what `Saves.put` writes.
    """
    entries: dict[str, list[Entry]] = {}
    lengths: dict[str, set[int]] = {}
    for entry in manifest["leaves"]:
        stack, _, path = entry["path"].partition("/")
        lengths.setdefault(stack, set()).update(entry["shape"][:1] or [-1])
        entries.setdefault(stack, []).append({**entry, "path": path, "shape": entry["shape"][1:]})
    rows, counts = [], dict.fromkeys(lengths, 0)
    try:
        keep = manifest["facts"]["keep"]
        if type(keep) is not int or keep < 1:
            raise ValueError
        for row in manifest["facts"]["rows"]:
            stack, numbers = row["stack"], (row["member"], row["step"], row["order"])
            if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(row["facts"], dict):
                raise ValueError
            rows.append((row["member"], row["step"], Place(row["order"], save, stack, counts[stack], row["facts"])))
            counts[stack] += 1
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("it does not say which members it is of") from error
    if any(found != {counts[stack]} for stack, found in lengths.items()):
        raise CheckpointError("it has other members than it says")
    return Save(rows, entries, keep)


class MemberStore(Store):
    """The rows of one member, as if they were checkpoints of its own."""

    def __init__(self, saves: Saves, member: int, collector: "Collector | None" = None) -> None:
        """Read the rows of `member` in `saves`; write by way of `collector`, if there is one."""
        super().__init__(saves.directory, saves.keep)
        self._saves, self._member, self._collector = saves, member, collector

    def save(self, step: int, tree: PyTree, facts: Mapping[str, Any], after: Store | None = None) -> None:
        """Hand in `tree` and `facts`, see `Store.save`; best policies are written before checkpoints in any case."""
        self.wait()
        if step != self.newest:
            self._hand_in(step, host_leaves(tree), dict(facts))

    def _hand_in(self, step: int, leaves: Leaves, facts: Facts) -> None:
        assert self._collector is not None
        self._bad.discard(step)
        self._job = self._collector.take(self._saves, self._member, step, leaves, facts)

    def wait(self, block: bool = True) -> int | None:
        """Wait as a `Store` does; what waits for other members is written, if this one cannot go on without."""
        if self._job is not None and self._collector is not None:
            self._collector.hurry(self._member, self._job) if block else self._collector.look()
        step = super().wait(block)
        self.newest = self.newest if step is None else step
        return step

    @property
    def write_s(self) -> float:
        """Seconds that the last save took, of all members that it is of."""
        return self._saves.write_s

    def copy(self, step: int, to: Path) -> None:
        """Write a row into the directory `to` as a checkpoint of a run of its own."""
        Store(to, 1).write(step, *self.read(step))

    def drop_after(self, step: int) -> None:
        """Have the member stand at `step` again: its row is written once more, and replaces those after it."""
        self.wait()
        if any(later > step for later in self.steps()):
            self._hand_in(step, *self.read(step))
            self.wait()

    def steps(self) -> list[int]:
        """Return the steps of the rows, in order."""
        return sorted(self._saves.rows(self._member))

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a row; raises what `Store.manifest` does."""
        place = self._place(step)
        return {"step": step, "facts": place.facts, "leaves": list(self._saves.entries(place))}

    def read(self, step: int, wanted: Mapping[str, Any] | None = None) -> tuple[Leaves, Facts]:
        """Read a row, see `Store.read`."""
        facts: Facts = self._fitting_manifest(step, wanted)["facts"]
        return self._saves.leaves(self._place(step)), facts

    def _place(self, step: int) -> Place:
        try:
            return self._saves.rows(self._member)[step]
        except KeyError:
            raise CheckpointError("it has been removed") from None

    def _newest(self, read: Callable[[int], Any]) -> Any:
        rows = self._saves.rows(self._member)
        newest = max((place.save for place in rows.values()), default=0)
        for save, error in sorted(self._saves.unreadable().items(), reverse=True):
            if save > newest:
                self._pass_over(self.directory / str(save), error)
        return super()._newest(read)

    def _path(self, step: int, suffix: str = "") -> Path:
        rows = self._saves.rows(self._member)
        return self.directory / (str(rows[step].save) if step in rows else f"{step} of member {self._member}")


class Collector:
    """Collects what members of a population hand in, and writes what came together as one save."""

    def __init__(self, population: Path, keep: int, members: Iterable[int]) -> None:
        """Expect these members; of each the newest `keep` checkpoints stay."""
        self.checkpoints, self.best = Saves(population / CHECKPOINTS, keep), Saves(population / BEST, 1)
        self._turn = threading.Condition(threading.RLock())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._waiting: dict[Saves, list[tuple[Row, Future[int]]]] = {self.best: [], self.checkpoints: []}
        """In the order in which they are written: best policies first, for a member that goes on from a checkpoint does
        not meet them again."""
        self._oldest, self._bytes, self._order = 0.0, 0, 0
        self._expected, self._ending = set(members), False
        self._stuck: set[int] = set()
        """Members that wait until what they have handed in is written."""

    def store(self, name: str, member: int) -> MemberStore:
        """Return what a member keeps under `name`."""
        return MemberStore(self.checkpoints if name == CHECKPOINTS else self.best, member, self)

    def take(self, saves: Saves, member: int, step: int, leaves: Leaves, facts: Facts) -> "Future[int]":
        """Take in what a member hands in; it is on the disk once the answer has a result."""
        job: Future[int] = Future()
        with self._turn:
            self._order = 1 + (self._order or max(self.checkpoints.newest_order(), self.best.newest_order()))
            if not any(self._waiting.values()):
                self._oldest, self._bytes = time.monotonic(), 0
            self._waiting[saves].append((Row(self._order, member, step, facts, leaves), job))
            self._bytes += sum(leaf.nbytes for leaf in leaves.values())
            complete = bool(self._expected) and self._expected <= self._here()
            if (complete and not self._ending) or self._bytes > MOST_BYTES:
                self._write()
        self.look()
        return job

    def join(self, member: int) -> None:
        """Expect a member to hand in its part."""
        with self._turn:
            self._expected.add(member)

    def leave(self, member: int) -> None:
        """Expect no more of a member."""
        with self._turn:
            self._expected.discard(member)
            self._turn.notify_all()

    def look(self) -> None:
        """Write what has waited for long."""
        with self._turn:
            if any(self._waiting.values()) and time.monotonic() - self._oldest > LONGEST_WAIT_S:
                self._write()

    def hurry(self, member: int, job: "Future[int]") -> None:
        """Have `job` written, if it waits: with what others hand in within a moment, or while many end, with all."""
        with self._turn:
            until = time.monotonic() + PATIENCE_S
            self._stuck.add(member)
            self._turn.notify_all()
            while self._is_waiting(job):
                there = self._stuck if self._ending else self._stuck | self._here()
                late = not self._ending and time.monotonic() > until
                if self._expected <= there or late:
                    self._write()
                else:
                    self._turn.wait(None if self._ending else PATIENCE_S)
            self._stuck.discard(member)

    def _is_waiting(self, job: "Future[int]") -> bool:
        return any(job is other for jobs in self._waiting.values() for _, other in jobs)

    def _here(self) -> set[int]:
        """Return the members that have handed in a checkpoint."""
        return {row.member for row, _ in self._waiting[self.checkpoints]}

    @contextlib.contextmanager
    def ending(self, members: Iterable[int]) -> Iterator[None]:
        """Let these members end inside, each in a thread of its own that calls `leave` at last: together they save."""
        ends = set(members)
        with self._turn:
            others, self._expected, self._ending = self._expected - ends, ends, True
        try:
            yield
        finally:
            with self._turn:
                self._expected, self._ending = others, False

    def _write(self) -> None:
        """Begin to write what is here."""
        with self._turn:
            for saves, jobs in self._waiting.items():
                self._waiting[saves] = []
                for first in range(0, len(jobs), MOST_ROWS):
                    part = jobs[first : first + MOST_ROWS]
                    try:
                        self._thread.submit(_put, saves, part)
                    except RuntimeError:  # the interpreter is ending, and starts no more work in threads
                        _put(saves, part)
            self._stuck.clear()
            self._turn.notify_all()

    def close(self) -> None:
        """Write what is here, and wait until it is on the disk."""
        self._write()
        self._thread.shutdown()


def _put(saves: Saves, jobs: Sequence[tuple[Row, "Future[int]"]]) -> None:
    """Write a save, and tell each who waits for it how that has ended."""
    try:
        saves.put([row for row, _ in jobs])
    except BaseException as error:
        said: BaseException = error
        if isinstance(error, FAULTS) and not isinstance(error, StorageError):
            said = StorageError(f"a checkpoint in {saves.directory} could not be written: {reason(error)}")
        for _, job in jobs:
            job.set_exception(said)
    else:
        for row, job in jobs:
            job.set_result(row.step)

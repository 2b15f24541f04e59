"""The files of a population in training: one with its members' settings and metadata, and logs that they share.

To a member they look like a run directory of its own (`MemberDir`). `run_dir` says how they are named and read.
"""

import contextlib
import io
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jaxrl.training.storage.logs as logs
from jaxrl.errors import print_stderr
from jaxrl.training.schedule import MAX_COUNT
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.files import common_entries, plain, without_common, write_atomically
from jaxrl.training.storage.run_dir import (
    MEMBER_LINE,
    MEMBERS_FILE,
    METRICS,
    MemberFacts,
    by_member,
    member_dir,
    read_members,
)


class PopulationFiles:
    """The files of a population, open for its members."""

    def __init__(self, directory: Path, saved: Callable[[Iterable[int]], Mapping[int, int]] | None) -> None:
        """Begin the files in `directory`, or continue them if there is `saved`.

        `saved` returns the optimisation steps of the newest checkpoints of members, -1 for none. They will repeat the
        rows after that, which are dropped, except for those that have diverged.

        Raises:
          SettingsError: the file of members is damaged or of another version.
        """
        self.directory, self.resumed = directory, saved is not None
        self._lock = threading.RLock()
        self._members = {} if saved is None else dict(read_members(directory))
        self._changed = False
        if saved is None:
            write_atomically(directory / METRICS, "")  # there from the first moment on, for those who watch it
        diverged = [number for number in self._members if self.metadata(number).get("status") == "diverged"]
        steps = None if saved is None else {**saved(self._members), **dict.fromkeys(diverged, MAX_COUNT)}
        self._logs = {name: PopulationLog(directory / name, steps) for name in logs.LOGS}

    def __contains__(self, number: int) -> bool:
        """Return whether the member has begun."""
        return number in self._members

    def settings(self, number: int) -> dict[str, Any]:
        """Return the settings of a member."""
        return self._members[number].settings

    def metadata(self, number: int) -> dict[str, Any]:
        """Return the metadata of a member."""
        return self._members[number].metadata if number in self._members else {}

    def change(self, number: int, settings: Mapping[str, Any] | None = None, **metadata: Any) -> None:
        """Replace the settings of a member, or merge facts into its metadata; `flush` writes them."""
        with self._lock:
            before = self._members.get(number, MemberFacts({}, {}))
            now = before.settings if settings is None else plain(settings)
            self._members[number] = MemberFacts(now, {**before.metadata, **plain(metadata)})
            self._changed = True

    def log(self, name: str) -> "PopulationLog":
        """Return a log that all members share."""
        return self._logs[name]

    def flush(self) -> None:
        """Write what has changed about members; raise `OSError` on failure."""
        with self._lock:
            if not self._changed:
                return
            members = dict(sorted(self._members.items()))
            common = {
                part: common_entries([getattr(one, part) for one in members.values()]) for part in MemberFacts._fields
            }
            lines: list[Mapping[str, Any]] = [{"common": common}]
            for number, one in members.items():
                own = {part: without_common(getattr(one, part), common[part]) for part in MemberFacts._fields}
                lines.append({"member": number, **own})
            write_atomically(self.directory / MEMBERS_FILE, "".join(json.dumps(line) + "\n" for line in lines))
            self._changed = False

    def close(self) -> None:
        """Write what has changed, and close the logs; raise `OSError` on failure, when the others are closed."""
        with contextlib.ExitStack() as stack:
            for log in self._logs.values():
                stack.callback(log.close)
            self.flush()


class MemberFiles(NamedTuple):
    """Directory and stores of a member."""

    dir: "MemberDir"
    store: Callable[[str], Store]
    """Returns its part of the population's checkpoints or best policies."""


class MemberDir:
    """The files of one member, with the interface of a `RunDir`."""

    def __init__(self, files: PopulationFiles, number: int) -> None:
        self._files, self._number = files, number
        self.path = member_dir(files.directory, number)
        """Its name; a directory only once something is written there that the population's files have no place for."""
        self._is_read = False

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def make(self) -> None:
        """Make a directory of that name, for recorders of its own."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._is_read = True

    def write_owner(self) -> None:
        """Do nothing: the lock is the population's."""

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Replace the settings."""
        self._files.change(self._number, settings)

    def write_metadata(self, **facts: Any) -> None:
        """Merge `facts` into the metadata; raise `OSError` on failure."""
        self._files.change(self._number, **facts)
        # Services read how a run has ended from the disk.
        if self._is_read and facts.get("status", "running") != "running":
            self._files.flush()

    def settings(self) -> dict[str, Any]:
        """Return the settings."""
        return self._files.settings(self._number)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        return self._files.metadata(self._number)

    def log(self, name: str) -> "MemberLog":
        """Return a log for writing."""
        return MemberLog(self._files.log(name), self._number)

    def log_sums(self) -> dict[str, list[int]]:
        """Return size and CRC-32 of each existing log, which are kept as it is written."""
        sums = {name: self._files.log(name).sum_of(self._number) for name in logs.LOGS}
        return {name: [size, crc] for name, (size, crc) in sums.items() if size}

    def open_log(self, name: str) -> IO[bytes]:
        """Open a log for reading; raise `FileNotFoundError` if it is empty."""
        return self.log(name).open()

    def release(self) -> None:
        """Do nothing: the lock is the population's."""


class PopulationLog:
    """A log that all members of a population share.

    A row goes to `_pending`, and to the file at once unless the disk is full. For each member there are either its
    rows (`_held`: after a rewind, until its next append) or only their size and checksum (`_sums`). A log to be
    continued waits for the first rewind or row of a member (`_saved`), with the population's own rows in `_early`.
    """

    def __init__(self, path: Path, saved: Mapping[int, int] | None) -> None:
        """Begin a log, or with `saved` continue one.

        The file is not changed before the first member rewinds, as the resume may still be refused. Then all members
        are rewound to the optimisation steps in `saved`, in one pass, and the population's own rows, which are written
        anew, are dropped.
        """
        self.path = path
        self._file, self._lock = logs.LogFile(path), threading.RLock()
        self._saved = saved if saved is not None and path.exists() else None
        self._early: list[bytes] = []
        """Rows of the population from before the members are rewound."""
        self._held: dict[int, bytes] = {}
        """Rows of members that have appended none yet, as in a log of their own."""
        self._sums: dict[int, tuple[int, int]] = {}
        """Size and CRC-32 of the rows on disk of the other members, as in a log of their own."""
        self._pending: list[tuple[int | None, bytes]] = []
        """Records that a full disk has not taken yet, with their members; those of the population have none."""
        if self._saved is not None:
            # A last line without a newline is whole, or no row. Its member must not find it changed, whether or not
            # another one has rewound the log before.
            self._held = by_member(map(logs.with_newline, self._lines()))

    def resumed_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each member's number and rows up to where it is resumed, before any of them rewinds."""
        for number, last in sorted((self._saved or {}).items()):
            for line in self._held.get(number, b"").splitlines():
                if (row := logs.parse(line)) is not None and row["opt_steps"] <= last:
                    yield number, row

    def append(self, number: int, lines: bytes) -> None:
        """Append rows of a member."""
        with self._lock:
            self._settle()
            self._append(number, lines)

    def append_own(self, lines: bytes) -> None:
        """Append rows of the population."""
        with self._lock:
            if self._saved is None:
                self._append(None, lines)
            else:
                self._early.append(lines)

    def _append(self, number: int | None, lines: bytes) -> None:
        if lines:
            self._pending.append((number, lines))
        self._file.append(_mark_rows(number, lines))
        self._count()

    def _count(self) -> None:
        """Count what has reached the disk."""
        if not self._file.pending:
            for number, lines in self._pending:
                if number is None:
                    continue
                size, crc = self.sum_of(number)
                self._held.pop(number, None)
                self._sums[number] = size + len(lines), zlib.crc32(lines, crc)
            self._pending.clear()

    def sum_of(self, number: int) -> tuple[int, int]:
        """Return size and CRC-32 of a member's rows on disk."""
        with self._lock:
            if number in self._held:
                return len(self._held[number]), zlib.crc32(self._held[number])
            return self._sums.get(number, (0, 0))

    def read(self, number: int) -> bytes:
        """Return a member's rows on disk."""
        with self._lock:
            if number in self._held or number not in self._sums:
                return self._held.get(number, b"")
            return by_member(line for line in self._lines() if line.startswith(_mark(number))).get(number, b"")

    def pending(self, number: int) -> list[bytes]:
        """Return a member's records that a full disk has not taken yet."""
        with self._lock:
            return [lines for whose, lines in self._pending if whose == number]

    def rewind(self, number: int, opt_steps: int) -> None:
        """Remove a member's rows after `opt_steps`."""
        with self._lock:
            self._settle()
            found, mark = self.read(number), _mark(number)
            kept = b"".join(line for line in found.splitlines(keepends=True) if logs.is_row_up_to(line, opt_steps))
            self._held[number] = kept
            self._sums.pop(number, None)
            if waiting := self.pending(number):
                others = [one for one in self._pending if one[0] != number]
                self._pending = others + [(number, line) for line in logs.rewind_records(waiting, opt_steps)]
                self._file.pending = [_mark_rows(whose, lines) for whose, lines in self._pending]
            if kept != found:
                lines = self._lines()
                self._replace([x for x in lines if not x.startswith(mark) or logs.is_row_up_to(x, opt_steps)])

    def _settle(self) -> None:
        """Rewind all members to their checkpoints, unless that is done; warn of invalid lines."""
        if self._saved is None:
            return
        before, kept, damaged = self._lines(), [], []
        for i, line in enumerate(before, start=1):
            about = MEMBER_LINE.match(line)
            if (row := logs.parse(line)) is None:
                damaged += [i] if line.endswith(b"\n") else []  # otherwise its writer was killed
            elif about and row["opt_steps"] <= self._saved.get(int(about[1]), -1):
                kept.append(logs.with_newline(line))
        if kept != before:
            self._replace(kept)
        if damaged:
            print_stderr(f"warning: {self.path} was damaged: {logs.describe_lines(damaged)}")
        self._held, self._saved = by_member(kept), None
        for lines in self._early:
            self._append(None, lines)

    def _replace(self, lines: Sequence[bytes]) -> None:
        """Write the log anew; on a full disk, that waits."""
        self._file.replace(lambda: lines)
        self._count()

    def _lines(self) -> list[bytes]:
        """Return the lines of the log, without pending ones."""
        return self._file.read().splitlines(keepends=True)

    def close(self) -> None:
        """Flush everything to disk and close the file; raise `OSError` on failure."""
        with self._lock:
            self._file.close()

    def flush(self) -> None:
        """Write the pending records; raise `OSError` on failure."""
        with self._lock:
            if self._file.pending:
                self._file.close()
                self._count()


class MemberLog:
    """A member's part of a `PopulationLog`, with the interface of a log of its own."""

    def __init__(self, log: PopulationLog, number: int) -> None:
        self.path = log.path
        self._log, self._number = log, number

    @property
    def pending(self) -> list[bytes]:
        """Records that a full disk has not taken yet."""
        return self._log.pending(self._number)

    def append(self, record: bytes) -> None:
        """Append whole lines; empty ones only retry the pending records."""
        self._log.append(self._number, record)

    def rewind(self, opt_steps: int) -> list[int]:
        """Remove the rows after `opt_steps`; of invalid lines the population's log warns."""
        self._log.rewind(self._number, opt_steps)
        return []

    def open(self) -> IO[bytes]:
        """Open it for reading; raise `FileNotFoundError` if it is empty."""
        if not (found := self._log.read(self._number)):
            raise FileNotFoundError(2, "No such file or directory", str(self.path))
        return io.BytesIO(found)

    def restore_pending(self, unwritten: Sequence[str], held: bytes) -> None:
        """Append the records that an earlier process could not, except those in `held`, the content of the log.

        Lines that are no rows are left out: a checkpoint may come from anyone, and the file has rows of other members.
        """
        for record in logs.missing(unwritten, held):
            lines = [line for line in record.splitlines() if line.startswith(b"{") and logs.parse(line) is not None]
            self.append(b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """Write the pending records; raise `OSError` on failure. The population flushes the file to disk, once."""
        self._log.flush()


Log = logs.RowLog | MemberLog
"""A log of rows: a file of its own, or a member's part of its population's."""


def _mark(number: int) -> bytes:
    """Return the beginning of a member's lines."""
    return b'{"member": %d, ' % number


def _mark_rows(number: int | None, lines: bytes) -> bytes:
    """Return rows with the member's number before their columns, if they are a member's.

    Text in JSON has no line breaks.
    """
    return lines if number is None else (b"\n" + lines).replace(b"\n{", b"\n" + _mark(number))[1:]

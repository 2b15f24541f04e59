"""Append-only logs that survive a full disk, logs of rows in JSON Lines, and their checksums."""

import base64
import contextlib
import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from jaxrl.errors import print_stderr
from jaxrl.paths import reason_of_path
from jaxrl.training.storage.files import new_file
from jaxrl.training.storage.run_dir import EPISODES, MEMBER_LINE, METRICS, TRAIN_EPISODES, open_log

LOGS = (METRICS, EPISODES, TRAIN_EPISODES)
KINDS = ("train", "eval")
"""Kinds of rows with metrics."""
PIECE = 1 << 20
"""Bytes read at a time for a checksum."""


Pieces = Callable[[], Iterable[bytes]]
"""Returns the content of a file in pieces, anew at each call: a log may be larger than the memory."""


class LogFile:
    """Appends records atomically and unbuffered: each has been passed to the operating system when `append` returns.

    Records that a full disk rejects stay pending in memory, with one warning, and are written with a later record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: list[bytes] = []
        """Pending records, not in the file yet."""
        self._content: Pieces | None = None
        """Pending content, which replaces that of the file before any record is written."""
        self._descriptor: int | None = None
        self._failing = False

    def append(self, record: bytes) -> None:
        """Append `record` to the file; an empty one only retries the pending records."""
        self.pending += [record] if record else []
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                print_stderr(f"warning: cannot write {self.path}: {reason_of_path(error)}; its rows wait")
            self._failing = True
        else:
            self._failing = False

    def replace(self, content: Pieces) -> None:
        """Replace the content of the file; on a full disk, that waits as records do."""
        self._content = content
        self.append(b"")

    def read(self) -> bytes:
        """Return the content of the file, without pending records."""
        if self._content is not None:
            return b"".join(self._content())
        return self.path.read_bytes() if self.path.exists() else b""

    def close(self) -> None:
        """Flush everything to disk and close the file; raise `OSError` on failure."""
        try:
            self._flush()
            if self._descriptor is not None:
                os.fsync(self._descriptor)
        finally:
            self.close_file()

    def restore_pending(self, unwritten: Sequence[str], held: bytes) -> None:
        """Append the records that an earlier process could not, except those in `held`, the content of the file."""
        for record in missing(unwritten, held):
            self.append(record)

    def close_file(self) -> None:
        """Close the file; the next record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _flush(self) -> None:
        if self._content is not None:
            self._rewrite(self._content)
            self._content = None
        if not self.pending:
            return
        descriptor = self._open_file()
        data, written = b"".join(self.pending), 0
        try:
            while written < len(data):
                written += os.write(descriptor, memoryview(data)[written:])
        except OSError:
            # Truncate a partial write: all records stay pending.
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise
        self.pending.clear()

    def _rewrite(self, content: Pieces) -> None:
        self.close_file()  # the descriptor of a file that is replaced
        try:
            with new_file(self.path) as file:
                file.writelines(content())
        except OSError:
            # A full disk has no room for another file, but to shorten this one takes none.
            with self.path.open("rb") as held:
                if any(held.read(len(piece)) != piece for piece in content()):
                    raise
                os.ftruncate(self._open_file(), held.tell())

    def _open_file(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o666)
        return self._descriptor


def in_base64(records: Sequence[bytes]) -> list[str]:
    """Return records as JSON takes them."""
    return [base64.b64encode(record).decode() for record in records]


def describe_lines(numbers: Sequence[int]) -> str:
    """Say which lines of a log were invalid."""
    return f"{len(numbers)} of its lines are no rows and left out ({list_lines(numbers)})"


def list_lines(numbers: Sequence[int]) -> str:
    """Return the numbers of lines as text, the first few of many."""
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def missing(unwritten: Sequence[str], held: bytes) -> Iterator[bytes]:
    """Yield the records of an earlier process, in base64, that are not in `held`, the content of the file."""
    for text in unwritten:
        record = base64.b64decode(text)
        # It may have been written after the checkpoint was made.
        if record not in held:
            yield record


# --- rows ---------------------------------------------------------------------------------------------------------


class RowLog(LogFile):
    """A log of rows in a file of its own."""

    def open(self) -> IO[bytes]:
        """Open it for reading; raise `FileNotFoundError` if there is none."""
        return open(self.path, "rb") if self._content is None else io.BytesIO(self.read())

    def rewind(self, opt_steps: int) -> list[int]:
        """Remove the rows after `opt_steps`, a truncated last line, and invalid lines; return the numbers of these."""
        self.close_file()
        self.pending = rewind_records(self.pending, opt_steps)
        lines = self._content or partial(_lines_of, self.path)
        is_kept, damaged = True, []
        for number, line in enumerate(lines(), start=1):
            row, whole = parse(line), line.endswith(b"\n")
            is_kept &= row is not None and row["opt_steps"] <= opt_steps and whole
            damaged += [number] if row is None and whole else []
        if not is_kept:
            self.replace(partial(_rows_up_to, lines, opt_steps))
        return damaged


def _lines_of(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from file


def _rows_up_to(lines: Pieces, opt_steps: int) -> Iterator[bytes]:
    """Yield those of `lines` that are rows up to `opt_steps`; a last one without a newline gets it."""
    for line in lines():
        if is_row_up_to(line, opt_steps):
            yield with_newline(line)


def with_newline(line: bytes) -> bytes:
    """Return a line with its newline, which the last one of a file may lack."""
    return line if line.endswith(b"\n") else line + b"\n"


def rewind_records(records: Sequence[bytes], opt_steps: int) -> list[bytes]:
    """Return the lines of `records` that are rows up to `opt_steps`."""
    lines = [line for record in records for line in record.splitlines(keepends=True)]
    return [line for line in lines if is_row_up_to(line, opt_steps)]


def copy_logs(run: Path, to: Path) -> None:
    """Copy all logs of a run or a member into a directory."""
    for name in LOGS:
        with contextlib.suppress(FileNotFoundError), open_log(run, name) as log, (to / name).open("wb") as copy:
            shutil.copyfileobj(log, copy)


def rows_of(run: Path, kinds: Collection[str] = KINDS) -> Iterator[dict[str, Any]]:
    """Return the rows of these kinds in the log of a run or a member, skipping invalid lines."""
    return rows_in(partial(open_log, run, METRICS), kinds)


def rows_in(opened: Callable[[], IO[bytes]], kinds: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of these kinds in a log, skipping invalid lines; it is opened by `opened`."""
    with contextlib.suppress(OSError), opened() as file:
        for line in file:
            if (row := parse(line)) is not None and row.get("kind") in kinds:
                yield row


def log_problems(run: Path, name: str) -> list[str]:
    """Return the problems in a log of a run or a member, except for a truncated last line, which resuming repairs."""
    problems, seen, last = [], set(), 0
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError), open_log(run, name) as file:
        lines = file.read().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        row = parse(line)
        if row is None:
            problems.append(f"line {number} is no row")
            continue
        where = (row["env"], row.get("env_steps")) if isinstance(row.get("env"), int) else row.get("episode")
        what = (row.get("kind"), row["opt_steps"], where)
        # A session's scores, given by its user, have no episodes and may repeat at a step.
        repeats = row.get("kind") != "event" and (row.get("kind") != "eval" or "episodes" in row)
        if what in seen and repeats:
            problems.append(f"line {number} repeats a row of optimisation step {row['opt_steps']}")
        if row["opt_steps"] < last:
            problems.append(f"line {number} goes back from optimisation step {last} to {row['opt_steps']}")
        seen.add(what)
        last = row["opt_steps"]
    return problems


def lines_of_nobody(population: Path, name: str) -> list[int]:
    """Return the numbers of the lines in a population's log that are neither a member's nor rows."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError), open_log(population, name) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and not MEMBER_LINE.match(line) and parse(line) is None:
                found.append(number)
    return found


def is_row_up_to(line: bytes, opt_steps: int) -> bool:
    row = parse(line)
    return row is not None and row["opt_steps"] <= opt_steps


def to_float(value: object) -> float:
    """Return a number of a row as a float; NaN for anything else, as a row on disk may come from anyone."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.nan


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the row in `line`, or `None` if it is not a valid one."""
    try:
        row: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str | None):
        return None
    steps, episode = row.get("opt_steps"), row.get("episode")
    return row if type(steps) is int and steps >= 0 and isinstance(episode, int | None) else None


# --- checksums: logs are append-only, so the part written before a checkpoint must not change ---------------------


def log_sums(directory: Path) -> Callable[[], dict[str, list[int]]]:
    """Return a function that returns size and CRC-32 of each existing log in `directory`.

    Each call reads only the bytes appended since the last.
    """
    known: dict[str, tuple[int, int, int]] = {}
    """Inode, size and CRC-32 of what has been read of a log."""

    def read_on(name: str) -> tuple[int, int, int]:
        inode, size, crc = known.get(name, (0, 0, 0))
        with open(directory / name, "rb") as file:
            info = os.fstat(file.fileno())
            if inode != info.st_ino or size > info.st_size:
                size = crc = 0
            file.seek(size)
            while part := file.read(PIECE):
                size, crc = size + len(part), zlib.crc32(part, crc)
        return info.st_ino, size, crc

    def sums() -> dict[str, list[int]]:
        for name in LOGS:
            try:
                known[name] = read_on(name)
            except OSError:
                known.pop(name, None)
        return {name: [size, crc] for name, (_, size, crc) in known.items()}

    return sums


def damage(opened: Callable[[str], IO[bytes]], facts: Mapping[str, Any]) -> list[str]:
    """Describe the logs, opened by name, whose content before the checkpoint with these `facts` has changed since."""
    sums = facts.get("logs")
    problems = []
    for name in LOGS:
        saved = sums.get(name) if isinstance(sums, dict) else None
        if isinstance(saved, list) and len(saved) == 2 and all(type(number) is int for number in saved):
            problem = _damage(partial(opened, name), *saved)
            problems += [f"{name}: {problem}"] if problem else []
    return problems


def _damage(opened: Callable[[], IO[bytes]], size: int, crc: int) -> str | None:
    found = left = 0
    try:
        with opened() as file:
            left = size
            while left > 0 and (part := file.read(min(left, PIECE))):
                left, found = left - len(part), zlib.crc32(part, found)
    except OSError as error:
        return f"cannot be read: {reason_of_path(error)}"
    if left > 0:
        return f"has lost rows: it is shorter than the {size} bytes recorded in the newest checkpoint"
    if found != crc:
        return f"was changed: its first {size} bytes are not those recorded in the newest checkpoint"
    return None

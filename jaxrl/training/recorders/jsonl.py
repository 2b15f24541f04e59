"""Logs in JSON Lines: writing, rewinding, reading and checking."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import print_stderr
from jaxrl.training.recorders.base import KINDS, Recorder, Row
from jaxrl.training.recorders.log_file import LogFile
from jaxrl.training.storage.run_dir import plain, write_atomically

MAX_PENDING = 1 << 20
"""Maximum bytes of rows given by `extend` that wait on a full disk: they are kept in memory and in checkpoints."""
_ENCODER = json.JSONEncoder(allow_nan=False)


class JSONLRecorder(Recorder):
    """Appends every row to a file, without buffering in the process."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.lost = 0
        """Number of rows dropped."""
        self._log = LogFile(path)

    def write(self, row: Row) -> None:
        self.write_all([row])

    def write_all(self, rows: Sequence[Row]) -> None:
        """Write several rows in one call, which is faster; either all of them are written or all stay pending."""
        self._log.append("".join([f"{line_of(row)}\n" for row in rows]).encode())

    def extend(self, lines: bytes) -> None:
        """Append many rows in one call; on a full disk, they are dropped beyond `MAX_PENDING` pending bytes."""
        waiting = sum(map(len, self._log.pending))
        if waiting + len(lines) > max(MAX_PENDING, len(lines)):
            self.lost += lines.count(b"\n")
            print_stderr(f"warning: {self._log.path} cannot be written: {self.lost} of its rows are lost")
            lines = b""
        self._log.append(lines)

    def rewind(self, opt_steps: int) -> None:
        """Remove the rows after `opt_steps`, and a truncated last line."""
        self._log.close_file()
        if damaged := trim(self._log.path, opt_steps):
            lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
            said = f"{len(damaged)} of its lines are no rows and left out ({lines})"
            print_stderr(f"warning: {self._log.path} was damaged: {said}")
        waiting = [line for record in self._log.pending for line in record.splitlines(keepends=True)]
        self._log.pending = [line for line in waiting if _is_row_up_to(line, opt_steps)]

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Add the lines that are not written yet to `waiting`."""
        if self._log.pending:
            waiting[self.name] = self._log.unwritten()

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Append the lines that an earlier process could not write."""
        if unwritten := waiting.get(self.name):
            held = self._log.path.read_bytes() if self._log.path.exists() else b""
            self._log.restore_pending(unwritten, held)

    def close(self) -> None:
        self._log.close()


def line_of(row: Row) -> str:
    """Return a row as JSON, with `null` for numbers that are not finite."""
    try:
        return _ENCODER.encode(row)
    except (TypeError, ValueError):  # rare, so that checking every value first would cost more
        return json.dumps(plain(row))


def trim(path: Path, opt_steps: int) -> list[int]:
    """Rewind the log `path` to `opt_steps`: remove later rows and a truncated last line.

    Invalid lines are removed too; return their numbers.
    """
    if not path.exists():
        return []
    held = path.read_bytes()
    *lines, torn = held.split(b"\n")
    # A last line without a newline is kept if it is a complete row.
    kept = [line for line in (*lines, torn) if _is_row_up_to(line, opt_steps)]
    mended = b"".join(line + b"\n" for line in kept)
    if mended != held:
        write_atomically(path, mended.decode())
    return [number for number, line in enumerate(lines, start=1) if _parse(line) is None]


def rows_of(path: Path, kinds: Collection[str] = KINDS) -> Iterator[Row]:
    """Yield the rows of these kinds in a log, skipping invalid lines."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and row.get("kind") in kinds and type(row.get("opt_steps")) is int:
                    yield row


def log_problems(path: Path) -> list[str]:
    """Return the problems in the log `path`, except for a truncated last line, which resuming repairs."""
    problems, seen, last = [], set(), 0
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
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


def _is_row_up_to(line: bytes, opt_steps: int) -> bool:
    row = _parse(line)
    return row is not None and row["opt_steps"] <= opt_steps


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row in `line`, or `None` if it is not a valid one."""
    try:
        row: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str | None):
        return None
    steps, episode = row.get("opt_steps"), row.get("episode")
    return row if type(steps) is int and steps >= 0 and isinstance(episode, int | None) else None

"""One JSON object a line."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import print_stderr
from jaxrl.training.recorders.base import KINDS, Recorder, Row
from jaxrl.training.recorders.log_file import LogFile
from jaxrl.training.storage.run_dir import plain, write_atomically

MOST_WAITING = 1 << 20
"""Bytes of rows given by `extend` that may wait for a disk: they are kept in memory, and in checkpoints."""
_ENCODER = json.JSONEncoder(allow_nan=False)


class JSONLRecorder(Recorder):
    """Append every row to a file, in the system's hands as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.lost = 0
        """Rows that were given up."""
        self._log = LogFile(path)

    def write(self, row: Row) -> None:
        self.write_all([row])

    def write_all(self, rows: Sequence[Row]) -> None:
        """Write several rows at once, which is faster; all of them reach the file, or none does yet."""
        self._log.append("".join([f"{line_of(row)}\n" for row in rows]).encode())

    def extend(self, lines: bytes) -> None:
        """Append many rows at once; those that a full disk has not taken are given up beyond `MOST_WAITING`."""
        waiting = sum(map(len, self._log.waiting))
        if waiting + len(lines) > max(MOST_WAITING, len(lines)):
            self.lost += lines.count(b"\n")
            print_stderr(f"warning: {self._log.path} cannot be written: {self.lost} of its rows are lost")
            lines = b""
        self._log.append(lines)

    def rewind(self, opt_steps: int) -> None:
        """Drop the rows after `opt_steps`, and a torn last line."""
        self._log.release()
        if damaged := trim(self._log.path, opt_steps):
            lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
            said = f"{len(damaged)} of its lines are no rows and left out ({lines})"
            print_stderr(f"warning: {self._log.path} was damaged: {said}")
        waiting = [line for record in self._log.waiting for line in record.splitlines(keepends=True)]
        self._log.waiting = [line for line in waiting if _belongs(line, opt_steps)]

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Tell which lines the disk has not taken."""
        if self._log.waiting:
            waiting[self.name] = self._log.unwritten()

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Append the lines that an earlier process could not write."""
        if unwritten := waiting.get(self.name):
            held = self._log.path.read_bytes() if self._log.path.exists() else b""
            self._log.take_up(unwritten, held)

    def close(self) -> None:
        self._log.close()


def line_of(row: Row) -> str:
    """Return a row as JSON, with `None` for numbers that are not finite."""
    try:
        return _ENCODER.encode(row)
    except (TypeError, ValueError):  # what JSON does not know is seldom in a row, and to look for it takes longer
        return json.dumps(plain(row))


def trim(path: Path, opt_steps: int) -> list[int]:
    """Mend the log `path` for a run that goes on at `opt_steps`: drop a torn last line, and rows from the future.

    Lines that are no rows go too; return their numbers.
    """
    if not path.exists():
        return []
    held = path.read_bytes()
    *lines, torn = held.split(b"\n")
    # A last line without a line end stays if it is a whole row.
    kept = [line for line in (*lines, torn) if _belongs(line, opt_steps)]
    mended = b"".join(line + b"\n" for line in kept)
    if mended != held:
        write_atomically(path, mended.decode())
    return [number for number, line in enumerate(lines, start=1) if _parse(line) is None]


def rows_of(path: Path, kinds: Collection[str] = KINDS) -> Iterator[Row]:
    """Yield the rows of these kinds in a log; what is no row is passed over."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and row.get("kind") in kinds and type(row.get("opt_steps")) is int:
                    yield row


def log_problems(path: Path) -> list[str]:
    """Say what is wrong with the rows of the log `path`; a torn last line is not, as a resume mends it."""
    problems, seen, last = [], set(), 0
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None:
            problems.append(f"line {number} is no row")
            continue
        where = (row["env"], row.get("env_steps")) if isinstance(row.get("env"), int) else row.get("episode")
        what = (row.get("kind"), row["opt_steps"], where)
        # A score that a user has given to a session has no episodes; several may be given at one step.
        repeats = row.get("kind") != "event" and (row.get("kind") != "eval" or "episodes" in row)
        if what in seen and repeats:
            problems.append(f"line {number} repeats a row of optimisation step {row['opt_steps']}")
        if row["opt_steps"] < last:
            problems.append(f"line {number} goes back from optimisation step {last} to {row['opt_steps']}")
        seen.add(what)
        last = row["opt_steps"]
    return problems


def _belongs(line: bytes, opt_steps: int) -> bool:
    row = _parse(line)
    return row is not None and row["opt_steps"] <= opt_steps


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row of a log in `line`, or `None` if there is none."""
    try:
        row: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str | None):
        return None
    steps, episode = row.get("opt_steps"), row.get("episode")
    return row if type(steps) is int and steps >= 0 and isinstance(episode, int | None) else None

"""The run's own logs, in JSON Lines."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl.errors import print_stderr
from jaxrl.training.recorders.base import Recorder, Row
from jaxrl.training.storage.files import plain
from jaxrl.training.storage.logs import RowLog, describe_lines, in_base64
from jaxrl.training.storage.population_files import Log

MAX_PENDING = 1 << 20
"""Maximum bytes of rows given by `extend` that wait on a full disk: they are kept in memory and in checkpoints."""
_ENCODER = json.JSONEncoder(allow_nan=False)


class JSONLRecorder(Recorder):
    """Appends every row to a file, without buffering in the process."""

    def __init__(self, path: Path, log: Log | None = None) -> None:
        """Append to the file `path`, or through `log`, which writes there."""
        self.name = path.name
        self.lost = 0
        """Number of rows dropped."""
        self._log: Log = RowLog(path) if log is None else log

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
        if damaged := self._log.rewind(opt_steps):
            print_stderr(f"warning: {self._log.path} was damaged: {describe_lines(damaged)}")

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Add the lines that are not written yet to `waiting`."""
        if self._log.pending:
            waiting[self.name] = in_base64(self._log.pending)

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Append the lines that an earlier process could not write."""
        if unwritten := waiting.get(self.name):
            held = b""
            with contextlib.suppress(FileNotFoundError), self._log.open() as file:
                held = file.read()
            self._log.restore_pending(unwritten, held)

    def close(self) -> None:
        self._log.close()


def line_of(row: Row) -> str:
    """Return a row as JSON, with `null` for numbers that are not finite."""
    try:
        return _ENCODER.encode(row)
    except (TypeError, ValueError):  # rare, so that checking every value first would cost more
        return json.dumps(plain(row))

"""One JSON object a line."""

import json
from pathlib import Path
from typing import Any

from jaxrl.training.recorders.base import Progress, Row
from jaxrl.training.recorders.log_file import LogFile
from jaxrl.training.run_dir import plain, write_atomically


class JSONLRecorder:
    """Append every row to a file, in the system's hands as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._log = LogFile(path)

    def write(self, row: Row) -> None:
        self._log.append(json.dumps(plain(row)).encode() + b"\n")

    def tick(self, progress: Progress) -> None:
        pass

    def rewind(self, opt_steps: int) -> None:
        """Drop the rows after `opt_steps`, and a torn last line."""
        self._log.release()
        trim(self._log.path, opt_steps)
        self._log.waiting = [line for line in self._log.waiting if _belongs(line.decode(), opt_steps)]

    def close(self) -> None:
        self._log.close()


def trim(path: Path, opt_steps: int) -> None:
    """Mend the log `path` for a run that goes on at `opt_steps`: drop a torn last line, and rows from the future."""
    if not path.exists():
        return
    text = path.read_text(errors="replace")
    kept = [line for line in text.split("\n") if _belongs(line, opt_steps)]
    mended = "".join(line + "\n" for line in kept)
    if mended != text:
        write_atomically(path, mended)


def _belongs(line: str, opt_steps: int) -> bool:
    steps = row_step(line)
    return steps is not None and steps <= opt_steps


def row_step(line: str) -> int | None:
    """Return the optimisation step of a row of a log, or `None` if the line is no row."""
    try:
        row: Any = json.loads(line)
        steps = row["opt_steps"] if isinstance(row, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
    return steps if type(steps) is int and steps >= 0 else None

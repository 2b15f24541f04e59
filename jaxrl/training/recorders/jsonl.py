"""One JSON object a line."""

import json
import os
from pathlib import Path
from typing import Any

from jaxrl.training.recorders.base import Progress, Row
from jaxrl.training.run_dir import plain, write_atomically


class JSONLRecorder:
    """Append every row to a file, in the system's hands as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a")  # noqa: SIM115

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(plain(row)) + "\n")
        self._file.flush()

    def tick(self, progress: Progress) -> None:
        pass

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def trim(path: Path, opt_steps: int) -> None:
    """Mend the log `path` for a run that goes on at `opt_steps`: drop a torn last line, and rows from the future."""
    if not path.exists():
        return
    text = path.read_text(errors="replace")
    kept = [line for line in text.splitlines() if _belongs(line, opt_steps)]
    mended = "".join(line + "\n" for line in kept)
    if mended != text:
        write_atomically(path, mended)


def _belongs(line: str, opt_steps: int) -> bool:
    try:
        row: Any = json.loads(line)
        return isinstance(row, dict) and int(row["opt_steps"]) <= opt_steps
    except (ValueError, KeyError, TypeError):
        return False

"""The rows of metrics as a table, for spreadsheets and pandas."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.training.recorders.base import KINDS, Recorder, Row, RunInfo
from jaxrl.training.recorders.jsonl import rows_of
from jaxrl.training.recorders.log_file import LogFile
from jaxrl.training.storage.run_dir import CSV, METRICS, plain, write_atomically


class CSVRecorder(Recorder):
    """Write the rows of `train` and `eval` into `metrics.csv` of the run directory, a column for each name.

    The log `metrics.jsonl` has the same rows, and the table is made of it anew wherever it must change otherwise than
    by another line: for a new column, and where the run goes back or goes on.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._log: LogFile | None = None
        self._source = Path()

    def begin(self, run: RunInfo) -> None:
        if run.directory is None:
            raise SettingsError("CSVRecorder needs a run_dir")
        self._source, self._log = run.directory / METRICS, LogFile(run.directory / CSV)

    def write(self, row: Row) -> None:
        if row["kind"] not in KINDS or self._log is None:
            return
        # The columns are known: one more line will do.
        if row.keys() <= set(self._columns):
            self._log.append(_line(row, self._columns))
        else:
            self._make_anew(row)

    def rewind(self, opt_steps: int) -> None:
        """Make the table of the log, which has been taken back already."""
        self._make_anew()

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Make the table of the log, which has got what an earlier process could not write."""
        self._make_anew()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _make_anew(self, row: Row | None = None) -> None:
        """Write the table of all rows in the log, and of `row` if the disk has not taken it there."""
        assert self._log is not None
        self._log.release()
        rows = list(rows_of(self._source))
        # The log is written first, so it usually has the row already.
        if row is not None and (not rows or rows[-1] != plain(row)):
            rows.append(row)
        self._log.waiting.clear()
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        head = _line({name: name for name in self._columns}, self._columns) if rows else b""
        write_atomically(self._log.path, (head + b"".join(_line(row, self._columns) for row in rows)).decode())


def _line(row: Mapping[str, Any], columns: list[str]) -> bytes:
    """Return a line of the table; what a row lacks, and what is no finite number, is left empty."""
    text = io.StringIO()
    values = plain(row)
    csv.writer(text, lineterminator="\n").writerow([values.get(name) for name in columns])
    return text.getvalue().encode()

"""Metrics as a CSV table, for spreadsheets and pandas."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.training.recorders.base import Recorder, Row, RunInfo
from jaxrl.training.storage.logs import KINDS, LogFile, rows_of
from jaxrl.training.storage.run_dir import CSV, plain, write_atomically


class CSVRecorder(Recorder):
    """Writes `train` and `eval` rows to `metrics.csv` in the run directory, with a column for each name.

    For any change but an appended row, which is a new column, a rollback or a resume, the table is rebuilt from the
    same rows in `metrics.jsonl`.
    """

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._log: LogFile | None = None
        self._source = Path()

    def begin(self, run: RunInfo) -> None:
        if run.directory is None:
            raise SettingsError("CSVRecorder needs a run_dir")
        self._source, self._log = run.directory, LogFile(run.directory / CSV)

    def write(self, row: Row) -> None:
        if row["kind"] not in KINDS or self._log is None:
            return
        # Without new columns, append a line.
        if row.keys() <= set(self._columns):
            self._log.append(_line(row, self._columns))
        else:
            self._make_anew(row)

    def rewind(self, opt_steps: int) -> None:
        """Rebuild the table from the log, which was rewound before."""
        self._make_anew()

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Rebuild the table from the log, which now has the rows that an earlier process could not write."""
        self._make_anew()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _make_anew(self, row: Row | None = None) -> None:
        """Rebuild the table from all rows in the log, and `row` if a full disk kept it out of the log."""
        assert self._log is not None
        self._log.close_file()
        rows: list[Row] = list(rows_of(self._source))
        # The log is written first, so it usually contains the row.
        if row is not None and (not rows or rows[-1] != plain(row)):
            rows.append(row)
        self._log.pending.clear()
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        head = _line({name: name for name in self._columns}, self._columns) if rows else b""
        write_atomically(self._log.path, head + b"".join(_line(row, self._columns) for row in rows))


def _line(row: Mapping[str, Any], columns: list[str]) -> bytes:
    """Return a line of the table; missing values and non-finite numbers are left empty."""
    text = io.StringIO()
    values = plain(row)
    csv.writer(text, lineterminator="\n").writerow([values.get(name) for name in columns])
    return text.getvalue().encode()

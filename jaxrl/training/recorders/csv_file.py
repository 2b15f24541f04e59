"""Metrics as a CSV table, for spreadsheets and pandas."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.training.recorders.base import Recorder, Row, RunInfo
from jaxrl.training.storage.files import plain
from jaxrl.training.storage.logs import KINDS, LogFile, rows_of
from jaxrl.training.storage.run_dir import CSV


class CSVRecorder(Recorder):
    """Writes `train` and `eval` rows to `metrics.csv` in the run directory, with a column for each name.

    A row with new columns rewrites the table. After a rollback or a resume it is rebuilt from `metrics.jsonl`.
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
        if not row.keys() <= set(self._columns):
            self._add_columns(row)
        self._log.append(_line(row, self._columns))

    def rewind(self, opt_steps: int) -> None:
        """Rebuild the table from the log, which was rewound before."""
        self._rebuild()

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Rebuild the table from the log, which now has the rows that an earlier process could not write."""
        self._rebuild()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _add_columns(self, names: Iterable[str]) -> None:
        """Add the missing columns among `names`, from the table itself: a full disk may keep rows out of the log."""
        assert self._log is not None
        table = csv.DictReader(io.StringIO((self._log.read() + b"".join(self._log.pending)).decode(), newline=""))
        self._replace(list(table), [*(table.fieldnames or ()), *names])

    def _rebuild(self) -> None:
        rows = list(rows_of(self._source))
        self._replace(rows, [name for row in rows for name in row])

    def _replace(self, rows: Sequence[Row], columns: Iterable[str]) -> None:
        """Replace the table, pending lines included; on a full disk, that waits as rows do."""
        assert self._log is not None
        self._columns = list(dict.fromkeys(columns))
        self._log.pending.clear()
        head = _line({name: name for name in self._columns}, self._columns) if self._columns else b""
        lines = [head, *(_line(row, self._columns) for row in rows)]
        self._log.replace(lambda: lines)


def _line(row: Mapping[str, Any], columns: list[str]) -> bytes:
    """Return a line of the table; missing values and non-finite numbers are left empty."""
    text = io.StringIO()
    values = plain(row)
    csv.writer(text, lineterminator="\n").writerow([values.get(name) for name in columns])
    return text.getvalue().encode()

"""Rows in memory."""

from typing import Any

from jaxrl.training.recorders.base import Recorder, Row


class MemoryRecorder(Recorder):
    """Keeps every row in the list `rows`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Row) -> None:
        self.rows.append(dict(row))

    def rewind(self, opt_steps: int) -> None:
        self.rows = [row for row in self.rows if row["opt_steps"] <= opt_steps]

"""The interface of recorders, one that keeps rows in memory, and a group that isolates failures."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import describe_error, print_stderr

Row = Mapping[str, Any]
"""One line of `metrics.jsonl`: `kind`, `opt_steps`, `env_steps`, `wall_s`, and the fields of its kind."""


NUMBER = (int, float)


class Progress(NamedTuple):
    """Progress of a run after a chunk."""

    opt_steps: int
    env_steps: int
    max_opts: int
    opt_steps_per_sec: float
    seconds_left: float


class RunInfo(NamedTuple):
    """Description of a run, given to recorders before its first row."""

    name: str
    directory: Path | None
    settings: Mapping[str, Any]
    """Values by path, such as `agent.lr`."""
    tags: tuple[str, ...]
    """Algorithm and environment, then the user's tags."""
    opt_steps: int
    """The step resumed from, up to which rows were recorded before; 0 for a new run."""
    changed: bool = False
    """Whether rows after the step resumed from may differ from those recorded before.

    Settings or versions that affect the training have changed at this resume, or the run does not repeat its past: a
    session, or one with environments on the host, actors or a replay that was filled again."""
    group: Path | None = None
    """Directory of the population of which the run is a member."""
    notes: str = ""


class Video(NamedTuple):
    """A filmed episode of the latest policy, recorded after an evaluation."""

    opt_steps: int
    env_steps: int
    path: Path
    """A GIF or MP4 in the directory of the run."""
    episode_return: float
    height: int
    width: int


class Histogram(NamedTuple):
    """A distribution over the episodes of an evaluation."""

    opt_steps: int
    env_steps: int
    name: str
    """`eval/returns` or `eval/lengths`."""
    values: np.ndarray
    """Float64 `[n]`, finite, at least one."""

    def bins(self, most: int = 30) -> tuple[np.ndarray, np.ndarray]:
        """Return the counts `[most]` and the edges `[most + 1]` of `most` bins of equal width.

        Values that are all equal fall into the middle.
        """
        low, high = float(self.values.min()), float(self.values.max())
        size = max(abs(low), abs(high))
        if high - low <= 1e-9 * size:  # too close for distinct float edges
            low, high = low - max(0.5, 1e-6 * size), high + max(0.5, 1e-6 * size)
        return np.histogram(self.values, most, (low, high))


def histograms(opt_steps: int, env_steps: int, **values: Any) -> list[Histogram]:
    """Return the histograms of an evaluation from keyword arguments, without values not finite in float32."""
    found = {name: np.asarray(x, np.float64).ravel() for name, x in values.items()}
    kept = {name: x[np.abs(x) <= np.finfo(np.float32).max] for name, x in found.items()}
    return [Histogram(opt_steps, env_steps, f"eval/{name}", x) for name, x in kept.items() if len(x)]


class Recorder:
    """Base class of recorders, which receive a run's rows; override the methods needed, the others do nothing.

    All methods are called in the training thread; anything that may block belongs in a `ServiceRecorder`.
    """

    def begin(self, run: RunInfo) -> None:
        """Prepare for `run`, before its first row."""

    def write(self, row: Row) -> None:
        """Record one row."""

    def scored(self, row: Row, histograms: Sequence[Histogram]) -> None:
        """Record the row of an evaluation and its histograms; by default, with `write` and `histogram`."""
        self.write(row)
        for histogram in histograms:
            self.histogram(histogram)

    def histogram(self, histogram: Histogram) -> None:
        """Record the returns or lengths of the episodes of an evaluation, after its row."""

    def video(self, video: Video) -> None:
        """Record a filmed episode."""

    def tick(self, progress: Progress) -> None:
        """Report progress; called often, so it must be cheap."""

    def rewind(self, opt_steps: int) -> None:
        """Discard all records after `opt_steps`: the run was rolled back, or resumed in a new process."""

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Add records that a full disk has not accepted to `waiting`, a JSON object saved in checkpoints."""

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Write the records that an earlier process added to `waiting` in `unwritten`."""

    def close(self) -> None:
        """Flush everything and release resources; no call follows."""


class MemoryRecorder(Recorder):
    """Keeps every row in the list `rows`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Row) -> None:
        self.rows.append(dict(row))

    def rewind(self, opt_steps: int) -> None:
        self.rows = [row for row in self.rows if row["opt_steps"] <= opt_steps]


class Recorders:
    """Several recorders as one. A recorder that fails is reported and disabled."""

    def __init__(self, recorders: Sequence[Any]) -> None:
        """Group `recorders`; `write_all` and `extend` require all of them to have these, as `JSONLRecorder` does."""
        self._live = list(recorders)

    def begin(self, run: RunInfo) -> None:
        self._each(lambda recorder: recorder.begin(run))

    def write(self, row: Row) -> None:
        self._each(lambda recorder: recorder.write(row))

    def write_all(self, rows: Sequence[Row]) -> None:
        self._each(lambda recorder: recorder.write_all(rows))

    def extend(self, lines: bytes) -> None:
        self._each(lambda recorder: recorder.extend(lines))

    def tick(self, progress: Progress) -> None:
        self._each(lambda recorder: recorder.tick(progress))

    def video(self, video: Video) -> None:
        self._each(lambda recorder: recorder.video(video))

    def scored(self, row: Row, histograms: Sequence[Histogram]) -> None:
        self._each(lambda recorder: recorder.scored(row, histograms))

    def rewind(self, opt_steps: int) -> None:
        self._each(lambda recorder: recorder.rewind(opt_steps))

    def unwritten(self) -> dict[str, list[str]]:
        """Return the records not written yet, by recorder name, in base64."""
        waiting: dict[str, list[str]] = {}
        self._each(lambda recorder: recorder.unwritten(waiting))
        return waiting

    def take_up(self, unwritten: Mapping[str, list[str]]) -> None:
        """Write the records that an earlier process could not write."""
        self._each(lambda recorder: recorder.take_up(unwritten))

    def close(self) -> None:
        self._each(lambda recorder: recorder.close())

    def _each(self, call: Callable[[Any], None]) -> None:
        # Iterate over a copy, as failing recorders are removed.
        for recorder in list(self._live):
            try:
                call(recorder)
            except (Exception, SystemExit) as error:  # rich raises SystemExit on a broken pipe
                self._live.remove(recorder)
                print_stderr(f"recorder {type(recorder).__name__} failed and is left out: {describe_error(error)}")


def numbers_of(row: Row) -> dict[str, float]:
    """Return the finite numbers of a row without `opt_steps`, by `kind/name`."""
    kind = row["kind"]
    return {f"{kind}/{name}": float(value) for name, value in row.items() if _is_number(value) and name != "opt_steps"}


def _is_number(value: object) -> bool:
    if type(value) is float:  # fast path for nearly all values
        return math.isfinite(value)
    return isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def check_unwritten(unwritten: Any) -> None:
    """Raise `ValueError` or `TypeError` unless `unwritten` has the form that `Recorders.unwritten` returns."""
    if not all(isinstance(text, str) for texts in dict(unwritten).values() for text in list(texts)):
        raise ValueError("what is unwritten is no text")

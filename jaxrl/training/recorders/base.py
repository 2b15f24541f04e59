"""What takes in a run's rows, and a group of them of which none can stop the others."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import describe_error, print_stderr

Row = Mapping[str, Any]
"""One line of `metrics.jsonl`: `kind`, `opt_steps`, `env_steps`, `wall_s`, and what belongs to the kind."""


KINDS = ("train", "eval")
"""The rows of numbers."""
NUMBER = (int, float)


class Progress(NamedTuple):
    """Where a run is, after every chunk."""

    opt_steps: int
    env_steps: int
    max_opts: int
    opt_steps_per_sec: float
    seconds_left: float


class RunInfo(NamedTuple):
    """What recorders are told of a run before its first row."""

    name: str
    directory: Path | None
    settings: Mapping[str, Any]
    """By their paths, such as `agent.lr`."""
    tags: tuple[str, ...]
    """Algorithm and environment, then those that the user gave."""
    opt_steps: int
    """Where the run goes on: the rows up to this step were told before; 0 at the beginning."""
    changed: bool = False
    """Whether it goes on under other settings or versions that decide the training, so that rows may differ."""
    group: Path | None = None
    """Directory of the population that it is a member of."""
    notes: str = ""


class Video(NamedTuple):
    """An episode of the latest policy, filmed after an evaluation."""

    opt_steps: int
    env_steps: int
    path: Path
    """A GIF or MP4 in the directory of the run."""
    episode_return: float
    height: int
    width: int


class Histogram(NamedTuple):
    """Numbers that are more than their mean: one of each episode of an evaluation."""

    opt_steps: int
    env_steps: int
    name: str
    """`eval/returns` or `eval/lengths`."""
    values: np.ndarray
    """Float64 `[n]`, finite, at least one."""

    def bins(self, most: int = 30) -> tuple[np.ndarray, np.ndarray]:
        """Return how many values are in each of `most` bins of one width, `[most]`, and the edges, `[most + 1]`.

        Values that are all the same stand in the middle.
        """
        low, high = float(self.values.min()), float(self.values.max())
        size = max(abs(low), abs(high))
        if high - low <= 1e-9 * size:  # of numbers so close NumPy finds no edges between them
            low, high = low - max(0.5, 1e-6 * size), high + max(0.5, 1e-6 * size)
        # As `numpy.histogram` has them, in a quarter of its time: what it may be given otherwise it checks in Python.
        edges = np.arange(most + 1) * ((high - low) / most) + low
        edges[-1] = high
        return np.bincount(edges[1:-1].searchsorted(self.values, side="right"), minlength=most), edges


def histograms(opt_steps: int, env_steps: int, **values: Any) -> list[Histogram]:
    """Return the histograms of an evaluation by their names, without what is no finite number of float32."""
    found = {name: np.asarray(x, np.float64).ravel() for name, x in values.items()}
    kept = {name: x[np.abs(x) <= np.finfo(np.float32).max] for name, x in found.items()}
    return [Histogram(opt_steps, env_steps, f"eval/{name}", x) for name, x in kept.items() if len(x)]


class Recorder:
    """What takes in a run's rows; override what is needed, the rest does nothing.

    All methods are called in the thread that trains; whatever may block there belongs in a `ServiceRecorder`.
    """

    def begin(self, run: RunInfo) -> None:
        """Take note of the run, before its first row."""

    def write(self, row: Row) -> None:
        """Take in one row."""

    def scored(self, row: Row, histograms: Sequence[Histogram]) -> None:
        """Take in the row of an evaluation and its histograms: by default, one after the other."""
        self.write(row)
        for histogram in histograms:
            self.histogram(histogram)

    def histogram(self, histogram: Histogram) -> None:
        """Take in the returns or the lengths of the episodes of an evaluation, after its row."""

    def video(self, video: Video) -> None:
        """Take in an episode that was filmed."""

    def tick(self, progress: Progress) -> None:
        """Take note of how far the run is; called often, must be cheap."""

    def rewind(self, opt_steps: int) -> None:
        """Take back what came after this step: the run goes back there, or goes on from an earlier process."""

    def unwritten(self, waiting: dict[str, list[str]]) -> None:
        """Put what a full disk did not take into `waiting`, a dict of JSON, which is kept in the checkpoints."""

    def take_up(self, waiting: Mapping[str, list[str]]) -> None:
        """Write what an earlier process could not, as `unwritten` has put it there."""

    def close(self) -> None:
        """Bring everything to where it belongs; nothing follows."""


class Recorders:
    """Several recorders as one. A recorder that fails is left out from then on, and reported once."""

    def __init__(self, recorders: Sequence[Any]) -> None:
        """Take objects of `Recorder`; `write_all` and `extend` are for those that have them, as `JSONLRecorder`."""
        self._live = list(recorders)
        self.failures: list[str] = []

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
        """Return the records that could not be written yet, by the names of the recorders, in base64."""
        waiting: dict[str, list[str]] = {}
        self._each(lambda recorder: recorder.unwritten(waiting))
        return waiting

    def take_up(self, unwritten: Mapping[str, list[str]]) -> None:
        """Write what an earlier process could not."""
        self._each(lambda recorder: recorder.take_up(unwritten))

    def close(self) -> None:
        self._each(lambda recorder: recorder.close())

    def _each(self, tell: Callable[[Any], None]) -> None:
        # A copy, since one that fails is taken out while the others are told.
        for recorder in list(self._live):
            try:
                tell(recorder)
            except (Exception, SystemExit) as error:  # rich ends the process when nobody reads its pipe
                self._live.remove(recorder)
                line = f"recorder {type(recorder).__name__} failed and is left out: {describe_error(error)}"
                self.failures.append(line)
                print_stderr(line)


def numbers_of(row: Row) -> dict[str, float]:
    """Return the finite numbers of a row but its step, by `kind/name`."""
    kind = row["kind"]
    return {f"{kind}/{name}": float(value) for name, value in row.items() if _is_number(value) and name != "opt_steps"}


def _is_number(value: object) -> bool:
    if type(value) is float:  # nearly all are, and to ask for more takes longer
        return math.isfinite(value)
    return isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def check_unwritten(unwritten: Any) -> None:
    """Raise `ValueError` or `TypeError` unless this is what `Recorders.unwritten` returns."""
    if not all(isinstance(text, str) for texts in dict(unwritten).values() for text in list(texts)):
        raise ValueError("what is unwritten is no text")

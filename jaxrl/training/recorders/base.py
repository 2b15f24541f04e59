"""What takes in a run's rows, and a group of them of which none can stop the others."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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


class Recorder(Protocol):
    """Anything with these three methods records a run.

    One that also has `begin(run)` is given a `RunInfo` before its first row; one that has `video(video)` each `Video`,
    and one that has `histogram(histogram)` the `Histogram`s of each evaluation, after its row; or, if it has
    `scored(row, histograms)`, both in one call. One that has `rewind(opt_steps)` is told when the run goes back, or
    goes on from an earlier process: what it holds after that step is no longer so. One that has `unwritten(waiting)`,
    to put what a full disk did not take into a dict of JSON, and `take_up(waiting)`, has it kept in the checkpoints, so
    that it is not lost with the process.

    All of them are called in the thread that trains; whatever may block there belongs into a `ServiceRecorder`.
    """

    def write(self, row: Row, /) -> None:
        """Take in one row."""
        ...

    def tick(self, progress: Progress, /) -> None:
        """Take note of how far the run is; called often, must be cheap."""
        ...

    def close(self) -> None:
        """Bring everything to where it belongs; nothing follows."""
        ...


class Recorders:
    """Several recorders as one. A recorder that fails is left out from then on, and reported once."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._live = list(recorders)
        self.failures: list[str] = []

    def begin(self, run: RunInfo) -> None:
        self._each("begin", run)

    def write(self, row: Row) -> None:
        self._each("write", row)

    def write_all(self, rows: Sequence[Row]) -> None:
        self._each("write_all", rows)

    def extend(self, lines: bytes) -> None:
        self._each("extend", lines)

    def tick(self, progress: Progress) -> None:
        self._each("tick", progress)

    def video(self, video: Video) -> None:
        self._each("video", video)

    def scored(self, row: Row, histograms: Sequence[Histogram]) -> None:
        """Tell a row, and then the histograms of its episodes; both in one call where a recorder has one for them."""
        for recorder in list(self._live):
            told = getattr(recorder, "scored", None) if _takes_both(recorder) else None
            self._tell(recorder, told or partial(_one_by_one, recorder), row, histograms)

    def rewind(self, opt_steps: int) -> None:
        self._each("rewind", opt_steps)

    def unwritten(self) -> dict[str, list[str]]:
        """Return the records that could not be written yet, by the names of the recorders, in base64."""
        waiting: dict[str, list[str]] = {}
        self._each("unwritten", waiting)
        return waiting

    def take_up(self, unwritten: Mapping[str, list[str]]) -> None:
        """Write what an earlier process could not."""
        self._each("take_up", unwritten)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any) -> None:
        for recorder in list(self._live):
            self._tell(recorder, getattr(recorder, method, _nothing), *args)

    def _tell(self, recorder: Recorder, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except (Exception, SystemExit) as error:  # rich ends the process when nobody reads its pipe
            self._live.remove(recorder)
            line = f"recorder {type(recorder).__name__} failed and is left out: {describe_error(error)}"
            self.failures.append(line)
            print_stderr(line)


def _takes_both(recorder: Recorder) -> bool:
    """Say whether its `scored` is as near as its `write`: a subclass that changes `write` alone is told by that."""
    nearest = next((each for each in type(recorder).__mro__ if {"write", "scored"} & vars(each).keys()), object)
    return "scored" in vars(nearest)


def _one_by_one(recorder: Recorder, row: Row, histograms: Sequence[Histogram]) -> None:
    recorder.write(row)
    for histogram in histograms:
        getattr(recorder, "histogram", _nothing)(histogram)


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


def _nothing(*args: Any) -> None:
    pass

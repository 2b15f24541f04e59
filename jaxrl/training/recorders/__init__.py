"""Recorders: where a run's rows go."""

from collections.abc import Sequence
from pathlib import Path

from jaxrl.training.recorders.base import Progress, Recorder, Recorders, Row, check_unwritten
from jaxrl.training.recorders.console import ConsoleRecorder
from jaxrl.training.recorders.jsonl import JSONLRecorder, log_problems, trim
from jaxrl.training.recorders.memory import MemoryRecorder
from jaxrl.training.recorders.tensorboard import TensorBoardRecorder
from jaxrl.training.storage.run_dir import EPISODES, METRICS


def console_of(given: Sequence[Recorder] | None, quiet: bool) -> ConsoleRecorder | None:
    """Return the console of a run, one of those `given` or a new one; `None` if nobody is to be shown anything."""
    if given is None:
        return None if quiet else ConsoleRecorder()
    return next((recorder for recorder in given if isinstance(recorder, ConsoleRecorder)), None)


def default_recorders(
    given: Sequence[Recorder] | None, directory: Path | None, console: ConsoleRecorder | None = None
) -> list[Recorder]:
    """Return the recorders of a run: its own log always, and those `given`, or else `console` and TensorBoard."""
    own: list[Recorder] = [] if directory is None else [JSONLRecorder(directory / METRICS)]
    if given is not None:
        return [*own, *given]
    shown: list[Recorder] = [] if console is None else [console]
    board = [] if directory is None else [TensorBoardRecorder(directory / "tensorboard")]
    return [*own, *shown, *board]


def episode_recorder(directory: Path | None) -> list[Recorder]:
    """Return the recorder of evaluation episodes."""
    return [] if directory is None else [JSONLRecorder(directory / EPISODES)]

"""Recorders: where a run's rows go."""

from collections.abc import Sequence
from pathlib import Path

from jaxrl.training.recorders.base import Progress, Recorder, Recorders, Row, check_unwritten
from jaxrl.training.recorders.console import ConsoleRecorder
from jaxrl.training.recorders.jsonl import JSONLRecorder, log_problems, trim
from jaxrl.training.recorders.memory import MemoryRecorder
from jaxrl.training.recorders.tensorboard import TensorBoardRecorder
from jaxrl.training.run_dir import EPISODES, METRICS

__all__ = [
    "ConsoleRecorder",
    "JSONLRecorder",
    "MemoryRecorder",
    "Progress",
    "Recorder",
    "Recorders",
    "Row",
    "TensorBoardRecorder",
    "check_unwritten",
    "default_recorders",
    "episode_recorder",
    "log_problems",
    "trim",
]


def default_recorders(given: Sequence[Recorder] | None, directory: Path | None, quiet: bool) -> list[Recorder]:
    """Return the recorders of a run: its own log always, and those `given`, or else console and TensorBoard."""
    own: list[Recorder] = [] if directory is None else [JSONLRecorder(directory / METRICS)]
    if given is not None:
        return [*own, *given]
    console: list[Recorder] = [] if quiet else [ConsoleRecorder()]
    board = [] if directory is None else [TensorBoardRecorder(directory / "tensorboard")]
    return [*own, *console, *board]


def episode_recorder(directory: Path | None) -> list[Recorder]:
    """Return the recorder of evaluation episodes."""
    return [] if directory is None else [JSONLRecorder(directory / EPISODES)]

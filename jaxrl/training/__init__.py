"""The host's side of training."""

from jaxrl.training.evaluator import Evaluation, Evaluator, mean_return
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import (
    ConsoleRecorder,
    JSONLRecorder,
    MemoryRecorder,
    Progress,
    Recorder,
    TensorBoardRecorder,
)
from jaxrl.training.report import Report, Result
from jaxrl.training.schedule import Schedule, next_boundary
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.trainer import Hooks, Trainer

__all__ = [
    "ConsoleRecorder",
    "Evaluation",
    "Evaluator",
    "GreedyPolicy",
    "Hooks",
    "Interrupt",
    "JSONLRecorder",
    "MemoryRecorder",
    "Progress",
    "Recorder",
    "Report",
    "Result",
    "Schedule",
    "TensorBoardRecorder",
    "Trainer",
    "TrainerConfig",
    "mean_return",
    "next_boundary",
]

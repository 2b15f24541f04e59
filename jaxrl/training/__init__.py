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
from jaxrl.training.runs import find_runs
from jaxrl.training.schedule import Schedule, next_boundary
from jaxrl.training.session import Session
from jaxrl.training.session_parts import Episode, Learnt, SessionHooks
from jaxrl.training.settings import SessionConfig, TrainerConfig
from jaxrl.training.statistics import Statistics
from jaxrl.training.trainer import Hooks, Trainer

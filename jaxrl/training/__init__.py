"""Host-side training: loops, evaluation, logging and storage."""

from jaxrl.training.evaluator import Evaluation, Evaluator, mean_return
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.loop import Trainer
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import (
    ConsoleRecorder,
    Histogram,
    JSONLRecorder,
    MemoryRecorder,
    Progress,
    Recorder,
    RunInfo,
    Service,
    ServiceRecorder,
    TensorBoardRecorder,
    Video,
)
from jaxrl.training.report import Hooks, Report, Result
from jaxrl.training.schedule import Schedule, next_boundary
from jaxrl.training.session.session import Session
from jaxrl.training.session.state import Learnt, SessionHooks
from jaxrl.training.session.statistics import Episode, Statistics
from jaxrl.training.settings import SessionConfig, TrainerConfig
from jaxrl.training.storage.find import find_runs

"""What a run tells of itself: at each boundary, and at its end."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl.training.evaluator import Evaluation
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import Progress, Row
from jaxrl.trees import PyTree


class Report(NamedTuple):
    """What happened at a boundary."""

    opt_steps: int
    env_steps: int
    train: Row | None
    """The row of metrics, if it was time to record."""
    eval: Row | None
    """The row of the evaluation, if it was time for one."""
    saved: bool
    """Whether a checkpoint was begun here, if the run has a directory."""
    stop: str | None
    """Why the run ends here, or `None` if it goes on."""


class Result(NamedTuple):
    """What a run leaves."""

    policy: GreedyPolicy | None
    """The best policy, or the last where nothing was evaluated; `None` if the strategy has no policy."""
    best_score: float | None
    summary: dict[str, Any]
    """Counters, speed, how the time was spent, and why the run stopped."""
    state: PyTree
    """The final training state."""


class Hooks(NamedTuple):
    """Functions called as a run goes on; each gets the `Trainer` first."""

    start: Callable[[Any], None] | None = None
    """Before training."""
    chunk: Callable[[Any, Progress], None] | None = None
    """After each call of the compiled program."""
    evaluation: Callable[[Any, Evaluation, bool], None] | None = None
    """After each evaluation, and whether it is the best."""
    save: Callable[[Any, int], None] | None = None
    """When a checkpoint is whole on the disk, given its optimisation step."""

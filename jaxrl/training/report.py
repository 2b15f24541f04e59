"""What a run tells of itself: at each boundary, and at its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.parsing import format_repr
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import Row
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

    def __repr__(self) -> str:
        summary = self.summary
        return format_repr(
            "Result", summary.get("trained"), *progress_parts(summary), run_dir_part(summary.get("run_dir"))
        )


def progress_parts(summary: Mapping[str, Any]) -> list[str]:
    """Return how far a run came, its best score and why it stopped, for a person to read."""
    parts = [f"{summary['opt_steps']:,} optimisation steps", f"{summary['env_steps']:,} environment steps"]
    if (score := summary.get("best_score")) is not None:
        parts.append(f"best score {score:.6g} at {summary['best_opt_steps']:,}")
    return parts + ([f"stopped by {summary['stop']}"] if summary.get("stop") else [])


def run_dir_part(run_dir: str | None) -> str | None:
    """Return the run directory as it is given in Python, if there is one."""
    return run_dir and f"run_dir={run_dir!r}"


Hook = Callable[..., object] | Sequence[Callable[..., object]] | None
"""One function, several, or none."""


class Hooks(NamedTuple):
    """Functions called as a run goes on; each gets the `Trainer` first. Each field takes one, or a list of several.

    All but `chunk`, `save` and `episode` are called at exact optimisation steps, so that they may change the training,
    and the run can be repeated. When the other three are called depends on the clock.
    """

    start: Hook = None
    """`(trainer)`, before training."""
    chunk: Hook = None
    """`(trainer, progress)`, after each call of the compiled program, some four times a second."""
    before_evaluation: Hook = None
    """`(trainer)`, before each evaluation."""
    evaluation: Hook = None
    """`(trainer, evaluation, is_best)`, after each evaluation."""
    record: Hook = None
    """`(trainer, row)`, after each interval of metrics; `trainer.note` then goes into the next row."""
    save: Hook = None
    """`(trainer, opt_steps)`, when a checkpoint is whole on the disk, given its optimisation step."""
    episode: Hook = None
    """`(trainer, row)`, for each episode of the training that has ended, in order; soon after its end, with a row as of
    `train_episodes.jsonl`."""
    end: Hook = None
    """`(trainer, result)`, after all is written, also of a run that was interrupted, but not of one that failed."""


def call(hook: Hook, *args: Any) -> None:
    """Call a hook, or all of several, in order."""
    for one in hook if isinstance(hook, Sequence) else (hook,):
        if one is not None:
            one(*args)

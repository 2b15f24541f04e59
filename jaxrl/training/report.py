"""What a run tells of itself: at each boundary, and at its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.errors import SettingsError
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


class Point(NamedTuple):
    """An evaluation as a point of the learning curve."""

    opt_steps: int
    env_steps: int
    score: float | None
    """`None` if it was not finite."""
    train_return: float | None
    """Mean return of the training episodes since the point before; `None` if none has ended."""


class Result(NamedTuple):
    """What a run leaves."""

    policy: GreedyPolicy | None
    """The best policy, or the last where nothing was evaluated; `None` if the strategy has no policy."""
    best_score: float | None
    summary: dict[str, Any]
    """Counters, speed, how the time was spent, and why the run stopped."""
    state: PyTree
    """The final training state."""
    curve: tuple[Point, ...] = ()
    """Every evaluation so far, those before a resumption included."""

    def plot(self, axes: Any = None) -> Any:
        """Draw the scores of evaluations, and the returns of training beside them, over environment steps.

        Args:
          axes: matplotlib axes to draw into; left out, those of a new figure, which a notebook shows by itself.

        Returns:
          The axes.

        Raises:
          SettingsError: nothing was evaluated, or matplotlib is not installed.
        """
        axes = axes_for(self.curve, axes)
        draw(axes, self.curve, "score", label="evaluation score", marker="o", markersize=3)
        draw(axes, self.curve, "train_return", label="training return", alpha=0.6)
        axes.legend()
        return axes

    def __repr__(self) -> str:
        summary = self.summary
        return format_repr(
            "Result", summary.get("trained"), *progress_parts(summary), run_dir_part(summary.get("run_dir"))
        )


def axes_for(points: Sequence[Point], axes: Any = None) -> Any:
    """Return matplotlib axes for a learning curve: `axes`, or those of a new figure.

    Raises:
      SettingsError: there is no point, or matplotlib is not installed.
    """
    if not points:
        raise SettingsError("nothing was evaluated, so there is no curve; set eval_interval, or train for longer")
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise SettingsError("pictures need the extra `report`: pip install 'jaxrl[report]'") from None
        axes = pyplot.subplots(figsize=(6, 3), layout="constrained")[1]
    axes.set_xlabel("environment steps")
    axes.grid(alpha=0.3)
    return axes


def draw(axes: Any, points: Sequence[Point], what: str, **style: Any) -> None:
    """Draw a field of `points` over environment steps, where it is there."""
    there = [(point.env_steps, y) for point in points if (y := getattr(point, what)) is not None]
    if there:
        axes.plot(*zip(*there, strict=True), **style)


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

"""Reports at boundaries, the result of a run, hooks, and the lines that end a run."""

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxrl.errors import SettingsError, check_callable, check_type, print_stderr, require_extra
from jaxrl.parsing import format_repr
from jaxrl.terminal import print_folded
from jaxrl.training import processes
from jaxrl.training.interrupt import Interrupt, raise_signal
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.recorders import Row
from jaxrl.training.settings import TrainerConfig
from jaxrl.trees import PyTree


class Report(NamedTuple):
    """What happened at a boundary."""

    opt_steps: int
    env_steps: int
    train: Row | None
    """The row of metrics, if one was due."""
    eval: Row | None
    """The row of the evaluation, if one was due."""
    saved: bool
    """Whether a save was started here (without a run directory, nothing is written)."""
    stop: str | None
    """Why the run ends here, or `None` if it continues."""


class Point(NamedTuple):
    """An evaluation, as a point of the learning curve."""

    opt_steps: int
    env_steps: int
    score: float | None
    """`None` if it was not finite."""
    train_return: float | None
    """Mean return of the training episodes that ended since the last `train` row; `None` if none has."""


class Result(NamedTuple):
    """The result of a run."""

    policy: GreedyPolicy | None
    """The best policy, or the last if nothing was evaluated; `None` if the strategy has no policy."""
    best_score: float | None
    summary: dict[str, Any]
    """Counters, speeds, timings by part, and the stop reason."""
    state: PyTree
    """The final training state."""
    curve: tuple[Point, ...] = ()
    """All evaluations so far, including those before a resumption."""

    def plot(self, axes: Any = None) -> Any:
        """Plot evaluation scores and training returns over environment steps.

        Args:
          axes: matplotlib axes to draw into (default: those of a new figure, which a notebook displays).

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


def axes_for(points: Sequence[Point], axes: Any) -> Any:
    """Return matplotlib axes for a learning curve: `axes`, or those of a new figure.

    Raises:
      SettingsError: there are no points, or matplotlib is not installed.
    """
    if not points:
        raise SettingsError("nothing was evaluated, so there is no curve; set eval_interval, or train for longer")
    if axes is None:
        pyplot = require_extra("matplotlib.pyplot", "pictures", "report")
        axes = pyplot.subplots(figsize=(6, 3), layout="constrained")[1]
    axes.set_xlabel("environment steps")
    axes.grid(alpha=0.3)
    return axes


def draw(axes: Any, points: Sequence[Point], what: str, **style: Any) -> None:
    """Plot a field of `points` over environment steps, skipping `None`."""
    there = [(point.env_steps, y) for point in points if (y := getattr(point, what)) is not None]
    if there:
        axes.plot(*zip(*there, strict=True), **style)


def progress_parts(summary: Mapping[str, Any]) -> list[str]:
    """Return the progress, best score and stop reason of a run as text."""
    parts = [f"{summary['opt_steps']:,} optimisation steps", f"{summary['env_steps']:,} environment steps"]
    if (score := summary.get("best_score")) is not None:
        parts.append(f"best score {score:.6g} at {summary['best_opt_steps']:,}")
    return parts + ([f"stopped by {summary['stop']}"] if summary.get("stop") else [])


def run_dir_part(run_dir: str | None) -> str | None:
    """Return the run directory as a Python argument, if there is one."""
    return run_dir and f"run_dir={run_dir!r}"


Hook = Callable[..., object] | Sequence[Callable[..., object]] | None
"""One function, several, or none."""


class Hooks(NamedTuple):
    """Callbacks of a run, a function each or a list; the first argument is the `Trainer`.

    All but `chunk`, `save` and `episode` are called at exact optimisation steps, so they may change the training and
    the run stays reproducible. The timing of these three depends on the clock.
    """

    start: Hook = None
    """`(trainer)`, before training."""
    chunk: Hook = None
    """`(trainer, progress)`, after each call of the compiled program, about four times a second."""
    before_evaluation: Hook = None
    """`(trainer)`, before each evaluation."""
    evaluation: Hook = None
    """`(trainer, evaluation, is_best)`, after each evaluation."""
    record: Hook = None
    """`(trainer, row)`, after each interval of metrics; a `trainer.note` here goes into the next row."""
    save: Hook = None
    """`(trainer, opt_steps)`, when a checkpoint is complete on disk, with its optimisation step."""
    episode: Hook = None
    """`(trainer, row)`, for each finished training episode, in order, soon after its end; the row is as in
    `train_episodes.jsonl`."""
    end: Hook = None
    """`(trainer, result)`, after all is written; also for an interrupted run, but not for a failed one."""


def check_callbacks(hooks: Hooks | None, interrupt: Interrupt | None, **functions: object) -> None:
    """Raise `SettingsError` for hooks, an interrupt or named functions of another type."""
    check_type("hooks", hooks, Hooks, "jaxrl.Hooks(...)")
    check_hooks(hooks or Hooks())
    check_type("interrupt", interrupt, Interrupt, "jaxrl.Interrupt()")
    for name, function in functions.items():
        check_callable(name, function)


def check_hooks(hooks: NamedTuple) -> None:
    """Raise `SettingsError` unless each of `hooks` is a function, or several."""
    for name, hook in hooks._asdict().items():
        for one in hook if isinstance(hook, Sequence) else (hook,):
            check_callable(f"hooks: {name}", one)


def require_idle(is_training: bool) -> None:
    """Raise `SettingsError` if a trainer `is_training`."""
    if is_training:
        raise SettingsError("this trainer is training already; end that loop before another begins")


def call(hook: Hook, *args: Any) -> None:
    """Call a hook, or each of several in order."""
    for one in hook if isinstance(hook, Sequence) else (hook,):
        if one is not None:
            one(*args)


# --- the end of a run ---------------------------------------------------------------------------------------------


def print_summary(result: Result, run_dir: str | None, following: Mapping[str, str]) -> None:
    """Print the summary of a run, with an entry per line.

    The directory and the suggested commands, `following`, are for copying, and are not folded in a narrow terminal.
    """
    for name, text in _lines(result.summary).items():
        print_folded(f"  {name:<12}{text}", indent=14)
    for name, text in {**({} if run_dir is None else {"run": run_dir}), **following}.items():
        with contextlib.suppress(OSError):  # the reader may be gone
            print(f"  {name:<12}{text}", flush=True)


def print_table(table: str, following: Mapping[str, str]) -> None:
    """Print the results of a population as a table, and the suggested commands, `following`."""
    lines = [f"  {name:<12}{text}" for name, text in following.items()]
    with contextlib.suppress(OSError):  # the reader may be gone
        print("\n".join([table, *lines]), flush=True)


def _lines(summary: Mapping[str, Any]) -> dict[str, str]:
    seconds = "  ".join(f"{part}\N{NO-BREAK SPACE}{value:.1f}" for part, value in summary["seconds"].items())
    lines = {
        "stopped by": summary["stop"],
        "steps": f"{summary['opt_steps']:,} optimisation, {summary['env_steps']:,} environment",
    }
    if summary["opt_steps_per_sec"]:
        lines["speed"] = f"{summary['opt_steps_per_sec']:,.0f} optimisation steps/s while training"
    if summary["best_score"] is not None:
        lines["best"] = f"{summary['best_score']:.6g} at {summary['best_opt_steps']:,}"
    if summary["last_score"] is not None:
        lines["last"] = f"{summary['last_score']:.6g}"
    if summary.get("staleness") is not None:
        lines["staleness"] = f"{summary['staleness']:.4g} optimisation steps, at most {summary['staleness_max']:.4g}"
        lines["learner"] = f"waited {summary['learner_waited_s']:.1f} s"
    for i, actor in enumerate(summary.get("actors", [])):
        mean = "" if actor["mean_return"] is None else f", mean return {actor['mean_return']:.4g}"
        steps = f"{actor['env_steps']:,} steps, {actor['episodes']:,} episodes{mean}"
        lines[f"actor {i}"] = f"{steps}; waited {actor['waited_s']:.1f} s"
    lines["seconds"] = f"{summary['wall_s']:.1f}: {seconds}"
    return lines


def leave_by_signal(signalled: int, where: str, maker: str, config: TrainerConfig) -> NoReturn:
    """Print a message on the signal `signalled` that ended a closed run, and raise its exception.

    Args:
      signalled: the number of the signal.
      where: where the run has ended, as in " at 5,000 optimisation steps", or nothing.
      maker: the beginning of the call that continues the run, as in "Trainer(strategy".
      config: its settings.

    Raises:
      KeyboardInterrupt: after SIGINT.
      SystemExit: after SIGTERM, with 143.
    """
    again = "the trainer keeps its state: call train() again"
    if config.run_dir is not None:
        again = f"saved; continue with {maker}, ..., run_dir={config.run_dir!r}, resume=True)"
    if not config.quiet and not processes.number():
        print_stderr(f"stopped by {signal.Signals(signalled).name}{where}; {again}")
    raise_signal(signalled)

"""The closing lines of a run: stop reason, results, and how to continue."""

import contextlib
import signal
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxrl.agents.outside import made_by_hand
from jaxrl.errors import print_stderr
from jaxrl.terminal import print_folded
from jaxrl.training.interrupt import raise_signal
from jaxrl.training.processes import number
from jaxrl.training.report import Result

AGAIN = "the trainer keeps its state: call train() again"
LIMITS = {"max_opts": "opt_steps", "max_env_steps": "env_steps"}
"""The counter in the summary for each limit of a run."""


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


# --- in Python ----------------------------------------------------------------------------------------------------


def print_summary_in_python(trainer: Any, result: Result) -> None:
    """Print the summary of a run that was trained in Python, in process 0 only."""
    run_dir, settings = trainer.config.run_dir, trainer.strategy.info.settings
    custom = settings is None or made_by_hand(settings.get("algo"), settings.get("custom", []))
    following = {} if (again := _continuation(result.summary, run_dir)) is None else {"go on": again}
    # Loading the policy of a custom strategy needs the strategy.
    if run_dir is not None and result.policy is not None:
        following["load"] = f"policy = jaxrl.load_policy({run_dir!r}{', strategy=strategy' if custom else ''})"
    if not number():
        print_summary(result, run_dir, following)


def _continuation(summary: Mapping[str, Any], run_dir: str | None) -> str | None:
    """Return the call that continues a stopped run; `None` if none does."""
    stop = summary["stop"]
    if stop == "max_env_steps" and run_dir is not None:
        more = 2 * summary["env_steps"]
        return f"Trainer(strategy, ..., run_dir={run_dir!r}, resume=True, max_env_steps={more}).train()"
    if stop == "max_opts":
        return f"trainer.train(max_opts={2 * summary['opt_steps']})"
    return None if stop in (*LIMITS, "stop", "stop_reward", "patience") else "trainer.train()"


def print_table_in_python(trainer: Any, result: Any) -> None:
    """Print the results of a population that was trained in Python."""
    run_dir, lines = trainer.config.run_dir, {}
    if run_dir is not None:
        best = result.best_member().number
        lines = {"run": run_dir, "load": f"policy = jaxrl.load_policy({run_dir!r}, member={best})"}
    if any(member.status == "running" or member.status.startswith("SIG") for member in result.members):
        lines["go on"] = "trainer.train()"
    print_table(result.table(), lines)


def leave_by_signal(signalled: int, stop: str | None, opt_steps: int, run_dir: str | None, quiet: bool) -> NoReturn:
    """Print a message on the signal `signalled` that ended a closed run, and raise its exception.

    Raises:
      KeyboardInterrupt: after SIGINT.
      SystemExit: after SIGTERM, with 143.
    """
    name = signal.Signals(signalled).name
    where = f"{opt_steps:,} optimisation steps"
    where += f", at the end of the run ({stop})" if stop in LIMITS else ""
    again = AGAIN if run_dir is None else _saved_message(f"Trainer(strategy, ..., run_dir={run_dir!r}, resume=True)")
    if not quiet and not number():
        print_stderr(f"stopped by {name} at {where}; {again}")
    raise_signal(signalled)


def leave_population_by_signal(signalled: int, run_dir: str | None, quiet: bool) -> NoReturn:
    """Do the same as `leave_by_signal` for a population."""
    again = AGAIN if run_dir is None else _saved_message(f"Trainer(population, ..., run_dir={run_dir!r}, resume=True)")
    if not quiet:
        print_stderr(f"stopped by {signal.Signals(signalled).name}; {again}")
    raise_signal(signalled)


def report_exit(error: BaseException | None, terminated: bool, opt_steps: int, run_dir: str | None) -> None:
    """Print a message if SIGINT, or SIGTERM if `terminated`, has ended a closed session."""
    if terminated or isinstance(error, KeyboardInterrupt):
        name = "SIGTERM" if terminated else "SIGINT"
        saved = run_dir and _saved_message(f"Session(..., run_dir={run_dir!r}, resume=True)")
        print_stderr(
            f"stopped by {name} at {opt_steps:,} optimisation steps; {saved or 'nothing is saved without a run_dir'}"
        )


def _saved_message(continuation: str) -> str:
    return f"saved; continue with {continuation}"

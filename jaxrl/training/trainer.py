"""The public trainer of a strategy: `train()`, or one boundary at a time."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.agents.outside import needs_python
from jaxrl.env_process import exit_if_importing
from jaxrl.errors import check_count
from jaxrl.parsing import format_repr
from jaxrl.registry import import_name
from jaxrl.strategies.base import Strategy, format_name
from jaxrl.strategies.population import Population
from jaxrl.training import processes
from jaxrl.training.devices import on_devices
from jaxrl.training.evaluator import EvaluateFn, ScoreFn, evaluator_of, mean_return
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.loop import Run
from jaxrl.training.recorders import Recorder
from jaxrl.training.report import (
    Hooks,
    Report,
    Result,
    leave_by_signal,
    print_summary,
    progress_parts,
    run_dir_part,
)
from jaxrl.training.settings import TrainerConfig, check_strategy, config_for, extend, plan_run, with_recorders
from jaxrl.training.stops import FINISHED, LIMITS
from jaxrl.training.storage.run import resolve_resume
from jaxrl.training.storage.weights import require_same_start


class Trainer(Run):
    """Train a strategy: `train()` runs to the end, `for report in trainer:` stops at each boundary.

    For a `Population`, the constructor returns a `PopulationTrainer`.
    """

    def __new__(cls, strategy: Any, *args: Any, **settings: Any) -> Any:
        """Return a trainer, or a `PopulationTrainer` if `strategy` is a population."""
        if isinstance(strategy, Population):
            return import_name("jaxrl.training.population.trainer", "PopulationTrainer")(strategy, *args, **settings)
        return super().__new__(cls)

    def __init__(
        self,
        strategy: Strategy,
        config: TrainerConfig | None = None,
        *,
        evaluator: EvaluateFn | None = None,
        score: ScoreFn = mean_return,
        stop: Callable[[Report], bool] | None = None,
        recorders: Sequence[Recorder | str] | None = None,
        hooks: Hooks | None = None,
        resume: bool | str | os.PathLike[str] = False,
        from_step: int | str | None = None,
        allow_changes: bool = False,
        start_over: bool = False,
        interrupt: Interrupt | None = None,
        max_chunk: int | None = None,
        raise_on_signal: bool = True,
        console: bool = True,
        **settings: Any,
    ) -> None:
        """Validate the settings before anything compiles or is written.

        Args:
          strategy: the strategy to train.
          config: base settings (default: `TrainerConfig()`).
          evaluator: replaces the greedy episodes in the strategy's environment; with `confirm_best` it is called
            again, with another key, when the first score beats the best.
          score: maps an evaluation to the score that selects the best policy.
          stop: called at each boundary; ends the run by returning true.
          recorders: destinations of the rows besides the logs of the run directory: names, which override the setting
            `recorders` of `config`, and `Recorder` objects.
          hooks: callbacks.
          resume: resume the run in `run_dir`, or in the given directory, from its newest valid checkpoint.
          from_step: fork the run `resume` into a new one in `run_dir`, from this checkpoint or the `latest`; the
            original is unchanged.
          allow_changes: resume even if settings or versions that decide the training have changed.
          start_over: start from scratch in `run_dir`; an existing run is moved to `discarded-N` in it.
          interrupt: a handle to stop the run from another thread; also `trainer.interrupt`.
          max_chunk: maximum number of iterations in one call (default: about a quarter of a second's worth).
          raise_on_signal: raise `KeyboardInterrupt` after SIGINT, and `SystemExit(143)` after SIGTERM, once the run is
            saved and closed; otherwise `train` returns, and `result.summary["stop"]` is the name of the signal.
          console: show progress, and a summary at the end, unless `quiet`; never for members of a population.
          **settings: fields of `TrainerConfig`, as in `Trainer(strategy, max_opts=50_000)`.

        Raises:
          SettingsError: a setting is invalid, or settings contradict each other.
        """
        check_strategy(strategy)
        config, given = with_recorders(config_for(strategy, evaluator, config, settings), recorders)
        run_dir, how = resolve_resume(resume, from_step, config.run_dir, allow_changes, start_over)
        if run_dir is not None and how.run and not start_over:
            require_same_start(run_dir if how.fork is None else how.fork.run, config)
        config, schedule, notes = plan_run(strategy, config.changed(run_dir=run_dir))
        strategy = on_devices(strategy, config.devices, config.mesh)
        if max_chunk is not None:
            check_count("max_chunk", max_chunk)
        if evaluator is None and config.eval_episodes:
            evaluator = evaluator_of(strategy, config.eval_episodes, config.eval_actions == "sampled")
        super().__init__(
            strategy,
            config,
            schedule,
            evaluator=evaluator,
            score=score,
            stop=stop,
            recorders=given,
            hooks=hooks,
            resume=how,
            interrupt=interrupt,
            max_chunk=max_chunk,
            quiet=config.quiet or not console,
            notes=notes,
        )
        self.raise_on_signal = raise_on_signal

    def __repr__(self) -> str:
        summary = {**self.ledger.summary(self.schedule), "stop": self.stop_reason}
        most, run_dir = f"max_opts={self.config.max_opts}", run_dir_part(self.config.run_dir)
        return format_repr("Trainer", format_name(self.strategy), most, *progress_parts(summary), run_dir)

    def train(self, max_opts: int | None = None) -> Result:
        """Train to the end; return the result.

        Another call continues the run, or prints a message if nothing is left to do. A failed run resumes from its
        newest checkpoint, or starts over without a directory.

        Args:
          max_opts: new total length of the run, in optimisation steps.

        Raises:
          KeyboardInterrupt, SystemExit: received SIGINT or SIGTERM, see `raise_on_signal`. The run is saved;
            `result()` returns its result so far, and `train()` continues it.
          SettingsError: `max_opts` is not a valid length, or the run is longer already.
          StorageError: the last checkpoint could not be written; everything else was done.
          DivergedError: updates stayed non-finite, also after repeated rollbacks to the last good checkpoint.
        """
        if max_opts is not None:
            done = self.schedule.opt_steps(self.ledger.t)
            self.config, self.schedule, self._notes = extend(self.strategy, self.config, max_opts, done)
        trained = False
        for _ in self:
            trained = True
        result = self.result()
        if trained and not self._quiet and "console" in self.config.recorders:
            self._print_summary(result)
        return result

    def __iter__(self) -> Iterator[Report]:
        """Train, yielding a report at each boundary; leaving the loop early saves. Raises as `train` does."""
        exit_if_importing()
        yield from self.reports()
        if self.raise_on_signal and (number := self.interrupt.signal) is not None:
            where = f" at {self.schedule.opt_steps(self.ledger.t):,} optimisation steps"
            where += f", at the end of the run ({self.stop_reason})" if self.stop_reason in LIMITS else ""
            leave_by_signal(number, where, "Trainer(strategy", self.config.run_dir, self.config.quiet)

    def note(self, text: str | None = None, /, **values: float) -> None:
        """Add numbers to the next row, each as the mean of its noted values; log `text` as an event at once.

        Raises:
          SettingsError: nothing is being trained, a value is not a number, or the row has a column of that name.
        """
        self._log.log_note(text)
        self._log.note(values)

    def _print_summary(self, result: Result) -> None:
        """Print the summary of a run, in process 0 only."""
        run_dir, settings = self.config.run_dir, self.strategy.info.settings
        custom = settings is None or needs_python(settings)
        following = {} if (again := _continuation(result.summary, run_dir)) is None else {"go on": again}
        # Loading the policy of a custom strategy needs the strategy.
        if run_dir is not None and result.policy is not None:
            following["load"] = f"policy = jaxrl.load_policy({run_dir!r}{', strategy=strategy' if custom else ''})"
        if not processes.number():
            print_summary(result, run_dir, following)


def _continuation(summary: Mapping[str, Any], run_dir: str | None) -> str | None:
    """Return the call that continues a stopped run; `None` if none does."""
    stop = summary["stop"]
    if stop == "max_env_steps" and run_dir is not None:
        more = 2 * summary["env_steps"]
        return f"Trainer(strategy, ..., run_dir={run_dir!r}, resume=True, max_env_steps={more}).train()"
    if stop == "max_opts":
        return f"trainer.train(max_opts={2 * summary['opt_steps']})"
    return None if stop in FINISHED else "trainer.train()"

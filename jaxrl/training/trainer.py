"""What a user calls to train a strategy: `train()`, or one boundary at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jaxrl.training.closing as closing
from jaxrl.errors import check_count
from jaxrl.parsing import format_repr
from jaxrl.registry import import_name
from jaxrl.strategies.base import Strategy, format_name
from jaxrl.strategies.population import Population
from jaxrl.training.devices import on_devices
from jaxrl.training.evaluator import EvaluateFn, ScoreFn, evaluator_of, mean_return
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.loop import Run
from jaxrl.training.recorders import Recorder
from jaxrl.training.report import Hooks, Report, Result, progress_parts, run_dir_part
from jaxrl.training.settings import TrainerConfig, check_strategy, config_for, planned, prolonged, with_recorders
from jaxrl.training.storage.run import resumption


class Trainer(Run):
    """Train a strategy: `train()` runs to the end, `for report in trainer:` stops at each boundary.

    Of a `Population`, a `PopulationTrainer` is made instead.
    """

    def __new__(cls, strategy: Any, *args: Any, **settings: Any) -> Any:
        """Make the trainer of a strategy, or of a population."""
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
        """Check everything that can be checked before anything compiles or is written.

        Args:
          strategy: what to train.
          config: settings to start from; the defaults of `TrainerConfig` if left out.
          evaluator: evaluates in place of greedy episodes in the strategy's environment; with `confirm_best` it is
            called a second time, with another key, where the first score is better than the best.
          score: from an evaluation to the number by which the best is chosen.
          stop: asked at each boundary whether to end the run.
          recorders: what takes in the rows, beside the logs of the run directory: names, in place of the setting
            `recorders` of `config`, and objects of one's own.
          hooks: functions to call on the way.
          resume: go on with the run in `run_dir`, or in the directory given, from its newest valid checkpoint.
          from_step: begin a new run in `run_dir` from this checkpoint, or the `latest`, of the run `resume`, which
            stays as it is.
          allow_changes: resume although settings or versions differ that decide the training.
          start_over: begin in `run_dir` anew; a run that is there, if any, is moved aside, to `discarded-N` in it.
          interrupt: a handle by which another thread can stop the run; also found as `trainer.interrupt`.
          max_chunk: iterations in one call at most; left out, about a quarter of a second's worth.
          raise_on_signal: raise `KeyboardInterrupt` after SIGINT, and `SystemExit(143)` after SIGTERM, once the run is
            saved and closed; without it, `train` returns, and `result.summary["stop"]` is the name of the signal.
          console: show progress and a summary at the end, unless `quiet`; no member of a population does.
          **settings: fields of `TrainerConfig`, as in `Trainer(strategy, max_opts=50_000)`.

        Raises:
          SettingsError: what cannot be.
        """
        check_strategy(strategy)
        config, given = with_recorders(config_for(strategy, evaluator, config, settings), recorders)
        run_dir, how = resumption(resume, from_step, config.run_dir, allow_changes, start_over)
        config, schedule, notes = planned(strategy, config.changed(run_dir=run_dir))
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
        """Run to the end; return what it left.

        Called again, the run goes on from where it is, and where nothing is left to do says so. One that has failed
        goes on from its newest checkpoint, or without a directory begins again.

        Args:
          max_opts: from now on the optimisation steps of the whole run.

        Raises:
          KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came, see `raise_on_signal`. All is saved; `result()` returns
            what was trained, and `train()` goes on with it.
          SettingsError: `max_opts` is no length, or the run is longer already.
          StorageError: the last checkpoint could not be written; everything else was done.
          DivergedError: no finite update could be made for long, from the last good checkpoint on, again and again.
        """
        if max_opts is not None:
            done = self.schedule.opt_steps(self.ledger.t)
            self.config, self.schedule, self._notes = prolonged(self.strategy, self.config, max_opts, done)
        trained = False
        for _ in self:
            trained = True
        result = self.result()
        if trained and not self._quiet and "console" in self.config.recorders:
            closing.print_summary_in_python(self, result)
        return result

    def __iter__(self) -> Iterator[Report]:
        """Train, yielding at each boundary; leaving the loop early saves first. Raises what `train` raises."""
        yield from self.reports()
        if self.raise_on_signal and (number := self.interrupt.signal) is not None:
            opt_steps = self.schedule.opt_steps(self.ledger.t)
            closing.leave_by_signal(number, self.stop_reason, opt_steps, self.config.run_dir, self.config.quiet)

    def note(self, text: str | None = None, /, **values: float) -> None:
        """Take numbers into the next row, each as the mean of what was noted; a `text` becomes an event at once.

        Raises:
          SettingsError: nothing is being trained, a value is no number, or a column of that name is there already.
        """
        self._log.remark(text)
        self._log.note(values)

"""The training loop: train to a boundary, evaluate, log, save, until a limit or a request to stop.

The loop is thin on purpose: `schedule` decides when, `program` computes, `storage` writes; nothing here can change a
bit of the training. Read `Trainer._loop` first, then `_at_boundary`, one turn of it. Below them are the parts of a
turn, then start, resumption and shutdown, then what further processes of the run do, then state and results.
"""

import math
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxrl.agents.outside import needs_python
from jaxrl.env_process import exit_if_importing
from jaxrl.errors import (
    ActorError,
    DivergedError,
    JaxrlError,
    ProcessError,
    SettingsError,
    StorageError,
    check_count,
    describe_error,
    print_stderr,
)
from jaxrl.parsing import format_repr
from jaxrl.paths import require_free
from jaxrl.registry import import_name
from jaxrl.strategies.base import EpisodeEnds, Strategy, format_name
from jaxrl.strategies.guard import Health
from jaxrl.strategies.population import Population
from jaxrl.training import devices, processes, program
from jaxrl.training.actors.pool import ActorPool, pool_of
from jaxrl.training.divergence import explain, has_diverged
from jaxrl.training.episodes import episode_dicts, episodes_in, reports_episodes
from jaxrl.training.evaluator import (
    CompiledEvaluator,
    EvalRules,
    EvaluateFn,
    Evaluation,
    HostEvaluator,
    ScoreFn,
    eval_key,
    evaluate_and_confirm,
    evaluator_of,
    mean_return,
)
from jaxrl.training.film import LONGEST, film_player, save_video
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.ledger import Ledger, require_counters
from jaxrl.training.logbook import Logbook, reading_facts
from jaxrl.training.policy import GreedyPolicy, spec_facts
from jaxrl.training.program import Saved, compile_all, zero_sums
from jaxrl.training.recorders import Recorder, Row, require_recorders
from jaxrl.training.report import (
    Hooks,
    Report,
    Result,
    call,
    check_callbacks,
    leave_by_signal,
    print_summary,
    progress_parts,
    require_idle,
    run_dir_part,
)
from jaxrl.training.sanity import eval_kind_of, training_returns
from jaxrl.training.schedule import MAX_COUNT, Boundary, next_boundary
from jaxrl.training.settings import (
    TrainerConfig,
    check_strategy,
    config_for,
    extend,
    plan_run,
    settings_of_run,
    with_recorders,
)
from jaxrl.training.stops import BROKEN, FINISHED, LIMITS
from jaxrl.training.storage.arrays import read_part, write_part
from jaxrl.training.storage.checkpoints import Facts, Store
from jaxrl.training.storage.members import Membership, require_no_member
from jaxrl.training.storage.run import (
    PENDING_BOUNDARY,
    VERSIONS,
    Best,
    Resume,
    Storage,
    resolve_resume,
    versions,
)
from jaxrl.training.storage.weights import Weights, insert_leaves, require_same_start, weights_of
from jaxrl.trees import Key, PyTree, make_key
from jaxrl.xla import attempts


class Trainer:
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
        check_callbacks(hooks, interrupt, evaluator=evaluator, score=score, stop=stop)
        config, given = with_recorders(config_for(strategy, evaluator, config, settings), recorders)
        run_dir, how = resolve_resume(resume, from_step, config.run_dir, allow_changes, start_over)
        if run_dir is not None and how.enabled and not start_over:
            require_same_start(run_dir if how.fork is None else how.fork.run, config)
        config, schedule, notes = plan_run(strategy, config.changed(run_dir=run_dir))
        strategy = devices.on_devices(strategy, config.devices, config.mesh)
        if max_chunk is not None:
            check_count("max_chunk", max_chunk)
        if evaluator is None and config.eval_episodes:
            evaluator = evaluator_of(strategy, config.eval_episodes, config.eval_actions == "sampled")
        require_recorders(given)
        self.strategy, self.config, self.schedule, self._notes = strategy, config, schedule, notes
        self.evaluator, self.score, self.stop = evaluator, score, stop
        self.hooks, self._film_player = hooks or Hooks(), film_player(strategy, config)
        self.interrupt = Interrupt() if interrupt is None else interrupt
        self.resume, self.max_chunk, self.raise_on_signal = how, max_chunk, raise_on_signal
        self.ledger = Ledger()
        self.stop_reason: str | None = None
        self.latest: PyTree = None
        """Parameters of the latest policy, if the state is sharded over processes."""
        self.lane = Lane()
        """Where the state lives; replaced for a member of a population that trains in a team."""
        self.membership = Membership()
        """Replaced for any member of a population."""
        self._given_recorders, self._quiet = given, config.quiet or not console
        self._state: PyTree = None
        self._sums: Any = None
        self._best: Best | None = None
        self._actors: ActorPool | None = None
        self._log = Logbook(self.schedule, lambda: ({}, 0.0))
        self._with_episodes = reports_episodes(strategy, config, self.hooks)
        self._chunk, self._wall, self._least_return, self._refilled = 0, 0.0, math.nan, range(0)
        self._is_training = False
        self._lost_best: str | None = None
        """What the log is told if the best policy is gone."""
        self._boundary_pending = False
        """Whether the boundary at the present iteration is still to be made, as its evaluation failed."""

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
        require_idle(self._is_training)
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
            leave_by_signal(number, where, "Trainer(strategy", self.config)

    def note(self, text: str | None = None, /, **values: float) -> None:
        """Add numbers to the next row, each as the mean of its noted values; log `text` as an event at once.

        Raises:
          SettingsError: nothing is being trained, a value is not a number, or the row has a column of that name.
        """
        self._log.log_note(text)
        self._log.note(values)

    @property
    def state(self) -> PyTree:
        """The training state; `None` before initialisation."""
        return self.lane.whole(self._state)

    @state.setter
    def state(self, state: PyTree) -> None:
        self._state = state

    # --- the page -----------------------------------------------------------------------------------------------

    def reports(self) -> Generator[Report, None, None]:
        """Train, yielding a report at each boundary; closing the generator saves. Raises as `Trainer.train` does."""
        require_idle(self._is_training)
        self._is_training = True
        try:
            if self._reset_for_call() and not self._follow():
                with self._leading():
                    yield from self._loop()
        finally:
            self._is_training = False

    def _loop(self) -> Generator[Report, None, None]:
        """Train, as the only process or as the leader of several."""
        self._check_weights_and_memory()
        with self._opened() as storage:
            self._compile_and_restore()
            # A population search may pause a member here, before it trains any further.
            if self.membership.reports_before_training:
                yield from self._hand_over(self._report(None, None, saved=False))
            while self.stop_reason is None:
                boundary = next_boundary(self.schedule, self.ledger.t - (1 if self._boundary_pending else 0))
                self._boundary_pending = False
                self._advance_to(boundary.t)
                # Skip the boundary: a diverged state gets no row, evaluation or checkpoint.
                if has_diverged(self._health(), self.config.max_skips):
                    self._roll_back()
                    continue
                yield from self._hand_over(self._at_boundary(boundary))
        # Raised last: all else is written and closed, but the run must not pass for saved.
        if storage.error is not None:
            raise storage.error
        self._is_training = False  # a hook may train on from here
        call(self.hooks.end, self, self.result())

    def _hand_over(self, report: Report) -> Generator[Report, None, None]:
        """Yield `report`; if the caller leaves the loop there, without an error, save as at any other end."""
        try:
            yield report
        except GeneratorExit:
            self.stop_reason = self.stop_reason or "left"
            self._save()
            raise

    def _at_boundary(self, due: Boundary) -> Report:
        """Evaluate, record and save as due, and decide whether to stop."""
        if self.ledger.t < due.t:
            # Interrupted between boundaries: save, but record nothing, so that a resumed run logs the same rows.
            self.stop_reason = self.interrupt.reason
            self._save()
            return self._report(None, None, saved=True)
        evaluation = self._evaluate() if due.evaluate else None
        row = self._record() if due.record else None
        if evaluation is None and self.config.is_promising(row):
            evaluation = self._evaluate(row)
        # Save after evaluation and row: the checkpoint includes their effects, so a resumed run repeats neither.
        saves = due.save or self._is_time_to_save()
        self.stop_reason = self._find_stop_reason(due, self._report(row, evaluation, saves))
        if self.stop_reason and not self.interrupt:  # an uninterrupted run ends with both
            evaluation, row = evaluation or self._evaluate(row), row or self._record()
        saves = saves or self.stop_reason is not None
        if saves:
            self._save()
        if self.stop_reason and not self.interrupt:
            self._log.require_valid()
        return self._report(row, evaluation, saves)

    def _find_stop_reason(self, due: Boundary, report: Report) -> str | None:
        """Return the first that holds: a limit, the evaluation's rules, the user's `stop`, an interrupt."""
        if due.last:
            return self.schedule.limit(self.ledger.t)
        if report.eval and (reached := self.ledger.limit_reached(self.config, self._least_return)):
            return reached
        return "stop" if self.stop is not None and self.stop(report) else self.interrupt.reason

    # --- one turn -----------------------------------------------------------------------------------------------

    def _advance_to(self, end: int) -> None:
        """Call the compiled program until iteration `end`, a request to stop, or divergence."""
        most = program.max_iterations(self.strategy) if self._with_episodes else MAX_COUNT
        while (
            self.ledger.t < end
            and not processes.stops(self.interrupt)
            and not has_diverged(self._health(), self.config.max_skips)
        ):
            # A call ends at the boundary, after about `chunk_s`, or when the arrays of ended episodes are full.
            begun, t = time.perf_counter(), self.ledger.t
            stop = min(end, t + self._chunk, t + most)
            if (actors := self.lane.runner or self._actors) is not None:
                made = actors.run(self._state, self._sums, t, stop)
            else:
                state, sums, *ended = self._compiled.run(self._state, self._sums, np.uint32(t), np.uint32(stop))
                made = state, sums, stop, ended
            # The arguments were donated: replace the state at once. Dispatch is asynchronous: block to time the call.
            self._state, self._sums, stop, ended = jax.block_until_ready(made)
            seconds = max(time.perf_counter() - begun, 1e-9)
            self.ledger.record_training(stop, seconds)
            with self.ledger.timed("record"):
                self._report_episodes(ended, t, stop)
            if self._actors is not None and self._actors.failure is not None:
                self._fail("actor", "actor", *self._actors.failure)
            # At the speed of this call, the next one takes about `chunk_s`.
            self._chunk = self.max_chunk or max(1, int((stop - t) * self.lane.chunk_s / seconds))
            # Report saves that have finished or failed in the meantime.
            self._storage.collect_saves(block=False)
            if stop < end and self._is_time_to_save():  # at `end` the boundary saves, after all else due there
                self._save()
            call(self.hooks.chunk, self, self._log.tick(stop, (stop - t) / seconds))

    def _report_episodes(self, endings: Sequence[EpisodeEnds], t: int, stop: int) -> None:
        """Pass the episodes that ended in iterations `t .. stop-1` to the log and to the hook."""
        if not endings or stop == t:
            return
        found = episodes_in(endings, t, stop, self.schedule)
        if self.config.train_episodes:
            self._log.log_episodes(found)
        for row in episode_dicts(found) if self.hooks.episode is not None else ():
            call(self.hooks.episode, self, row)

    def _fail(self, reason: str, event: str, error: Exception, trace: str) -> NoReturn:
        """Log and raise `error`, after which the state is still good: save it."""
        self.stop_reason = reason
        self._log.event(event, str(error), traceback=trace)
        self._save()
        raise error

    def _evaluate(self, recorded: Row | None = None) -> Row | None:
        if self.evaluator is None:
            return None
        call(self.hooks.before_evaluation, self)
        config, opt_steps = self.config, self.schedule.opt_steps(self.ledger.t)
        rules = EvalRules(self._play_evaluation, self.score, config.confirm_best)
        # Fold in the optimisation step, not the number of evaluations, which a resumption may change.
        key = jax.random.fold_in(self._eval_key, 0 if config.eval_starts == "fixed" else opt_steps)
        on_disk, params = self._best.score if self._best else None, self._params(self._state)
        try:
            found = evaluate_and_confirm(rules, params, key, opt_steps, self.ledger, on_disk)
        except Exception as error:
            # Nothing of this boundary is made yet, unless its row came first: a resumed run makes it.
            self._boundary_pending = recorded is None and self.ledger.t > 0
            self._fail(stop_reason_for(error, None), "evaluation", error, "".join(traceback.format_exception(error)))
        self._least_return = found.least_return
        self.membership.record_score(opt_steps, found.score)
        if found.should_save:
            self._keep_best(found.kept)
        with self.ledger.timed("record"):
            training = training_returns(recorded or program.summarise(self._compiled.metrics, self._sums))
            row = self._log.log_eval(found, training, eval_kind_of(self.strategy, self.evaluator), self.ledger)
        self._film_if_due()  # before the user's hook, which may read the film
        call(self.hooks.evaluation, self, found.evaluation, found.is_best)
        return row

    def _play_evaluation(self, params: PyTree, key: Key) -> Evaluation:
        """Call the evaluator; raise the error of an environment on the host as one line."""
        assert self.evaluator is not None
        try:
            return self.evaluator(params, key)
        except (JaxrlError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if not isinstance(self.evaluator, HostEvaluator):
                raise
            raise ActorError(f"the evaluation failed: {describe_error(error)}") from error

    def _film_if_due(self) -> None:
        """Film the latest policy, if due; a failure is logged, and the run continues."""
        config, counters = self.config, self.ledger.counters(self.schedule)
        earlier = self._log.curve[:-1]  # the last point is this evaluation
        before = earlier[-1].opt_steps if earlier else None
        if self._film_player is None or not config.films_at(counters["opt_steps"], before):
            return
        assert config.run_dir is not None
        play, policy = self._film_player
        with self.ledger.timed("record"):
            take = partial(play, policy.at(self._params(self.state)), config.seed, LONGEST)
            self._log.log_video(save_video(take, config.run_dir, config.video_format, **counters))

    def _keep_best(self, score: float) -> None:
        # A copy: the state is donated to the next call, while a thread writes the best policy.
        params = jax.device_put(self._params(self._state), may_alias=False)
        self._best = self._log.best(score, params, self.strategy.policy, self.settings())
        if not self.membership.defers_best:
            with self.ledger.timed("save"):
                self._storage.keep_best(self._best)

    def _record(self) -> Row:
        ledger = self.ledger
        with ledger.timed("record"):
            done = ledger.t - ledger.interval_start
            rates = ledger.rates(self.schedule, done, ledger.interval_s)
            waits = self._actors.columns() if self._actors is not None else {}
            agent = (self.strategy.info.settings or {}).get("agent") or {}
            steps = done * self.schedule.env_steps_per_step
            row = self._log.log_train(
                {**rates, **waits, **program.summarise(self._compiled.metrics, self._sums)}, ledger, agent, steps
            )
            # Start the next interval.
            self._sums = zero_sums(len(self._compiled.metrics))
            ledger.interval_start, ledger.interval_s = ledger.t, 0.0
        call(self.hooks.record, self, row)
        return row

    def _save(self) -> None:
        spent = self.ledger.seconds["save"]
        with self.ledger.timed("save"):
            self._storage.save(self.schedule.opt_steps(self.ledger.t), self._tree_to_save(), self._facts(), self._best)
            self._storage.update_metadata(**self._summary(), status=self.stop_reason or "running")
        self.ledger.unsaved_s, self.lane.held_s = 0.0, self.ledger.seconds["save"] - spent

    def _is_time_to_save(self) -> bool:
        """Return whether to save now, in a run without a `save_interval`."""
        if self.config.save_interval is not None:
            return False
        return self.lane.is_time_to_save(self._storage, self.ledger.t, self.ledger.unsaved_s)

    def _roll_back(self) -> None:
        """Roll back to the last good state, and continue with another random stream.

        Raises:
          DivergedError: `max_rollbacks` is exhausted.
        """
        health = self._health()
        assert health is not None
        what = explain(health, self._compiled.metrics)
        self._log.require_rollback_left(self.ledger, self.config.max_rollbacks, what)
        self.state, self._sums, self._refilled = None, None, range(0)  # free memory before loading
        found = self._storage.rollback(self._compiled.like)
        self.ledger = self.ledger.roll_back(found[1]["ledger"] if found else None)
        state, self._sums = found[0] if found else self._fresh()
        if found:
            state = self._adapt_loaded(state, self.ledger)
        elif self.membership.adopted_at:  # the program was made for the settings from before
            state = devices.apply_in_all(self.strategy, "set_hyperparams", state)
        self.state = state
        if self._actors is not None:
            self._actors = self._actors.restart()
        if not found:
            self._storage.save_start(self._tree_to_save(), self._facts(self.ledger.before_rollback()))
        self._log.go_back(self.schedule.opt_steps(self.ledger.t), found[1] if found else None)
        self._log.log_rollback(what, describe_restart(self._refilled, self.strategy))
        self.state = devices.apply_in_all(self.strategy, "reseed", self.state, self.ledger.rollbacks)

    # --- beginning and ending -----------------------------------------------------------------------------------

    def _reset_for_call(self) -> bool:
        """Prepare to start or continue; print a message and return `False` if nothing is left to do."""
        reason, self.stop_reason, self.latest = self.stop_reason, None, None
        # The run was stopped by request; calling it again withdraws the request.
        if reason is not None and (reason == self.interrupt.reason or self.interrupt.signal is not None):
            self.interrupt.clear()
        sound = self._state is not None and reason is not None and not reason.startswith(BROKEN)
        if sound and self.ledger.t >= self.schedule.last:
            self.stop_reason = reason
            if not self._quiet:
                print_stderr(self.schedule.nothing_left(self.ledger.t))
            return False
        if sound and self.config.run_dir is None:
            self.ledger = self.ledger.for_next_call(self._wall)
            # Copy: the state will be donated, and results already returned still refer to it.
            self.state, self._sums = devices.copy((self.state, self._sums))
        # Start from the newest checkpoint or from scratch: release the state in memory.
        else:
            self.ledger, self._best, self.state, self._sums = Ledger(), None, None, None
            self._boundary_pending = False
        return True

    def _check_weights_and_memory(self) -> None:
        """Check the initial weights and that the run fits into memory; nothing is written yet."""
        config = self.config
        if config.run_dir is not None:
            if self.membership.number is None:
                require_no_member(config.run_dir)
            require_free(config.run_dir)
        fresh = not self.resume.enabled and self._state is None
        self._weights = self._initial_weights() if fresh else Weights({})
        where = lambda: (self.ledger.counters(self.schedule), self.ledger.wall)
        before = self._log
        self._log = Logbook(self.schedule, where, (*config.recorders, *self._given_recorders), self._quiet)
        if self._state is not None:
            self._log.continue_from(before)
        with self._log.staged("tracing"), self.ledger.timed("compile"):
            self._memory = program.check_step(self.strategy, self.evaluator, self._params)

    def _initial_weights(self) -> Weights:
        return weights_of(self.config.init_from, self.config.init_parts, lambda: program.state_shapes(self.strategy))

    def _fresh(self) -> Saved:
        """Return a fresh state with the initial weights, and its sums."""
        if not self._weights.leaves:  # a run that goes on has not read them
            self._weights = self._initial_weights()
        key = make_key(self.config.seed)
        made: Saved = self._weights.after(self._compiled.init)(key)
        return program.rerun_warm_up(self.strategy, made, key) if self._weights.leaves else made

    @contextmanager
    def _opened(self) -> Iterator[Storage]:
        """Hold the resources of the run: its directory, logs and signal handlers."""
        config = self.config
        with self.interrupt.signals(None if config.quiet else lambda: self.ledger.activity):
            storage = self._storage = Storage(
                config.run_dir,
                config.keep,
                self.settings(),
                self.resume,
                check=self._check_checkpoint,
                member=self.membership.files,
            )
            storage.report = lambda line: self._log.event("storage", line)
            storage.on_saved = lambda opt_steps: call(self.hooks.save, self, opt_steps)
            try:
                yield storage
            except BaseException as error:
                self.stop_reason = stop_reason_for(error, self.stop_reason)
                # Finish pending writes before the error propagates.
                self._close(storage)
                report_unsaved(error, storage.error)
                raise
            else:
                self._close(storage)

    def _compile_and_restore(self) -> None:
        """Compile, initialise or restore, and open the logs."""
        strategy, config = self.strategy, self.config
        key, self._eval_key = make_key(config.seed), eval_key(config.seed)
        # A single iteration first: of slow environments a few hundred would take minutes, in which no signal is heard.
        self._chunk, goes_on = self.max_chunk or 1, self._storage.resumes or self._state is not None
        self._log.stage("compiling")
        with self.ledger.timed("compile"):
            if not goes_on and not self._weights.leaves:  # the run to resume has no checkpoint
                self._weights = self._initial_weights()
            self._compiled = compile_all(
                strategy, key, self.evaluator, self._params, goes_on, self._with_episodes, self.lane.runner is None
            )
            before = self._actors
            self._actors = pool_of(strategy, self._compiled.run, self.interrupt, self._log.event, self.schedule.last)
        warmup = 0 if goes_on or self._actors is not None else self.schedule.warmup_env_steps
        self._log.stage(f"warming up: {warmup:,} environment steps" if warmup else "getting ready")
        with self.ledger.timed("init"):
            # Restore a checkpoint, initialise, or keep the state already in memory and what its actors have counted.
            if self._storage.resumes:
                self._restore()
            elif self._state is None:
                self.state, self._sums = jax.block_until_ready(self._fresh())
            elif self._actors is not None and before is not None:
                self._actors.restore(before.facts())
            evaluated = self.ledger.has_scores
            if self.resume.enabled:
                self._load_best()
        self._open_logs()
        self._log.stage("training")
        call(self.hooks.start, self)
        if self.ledger.t >= self.schedule.last and not self._boundary_pending:
            self.stop_reason = self.schedule.limit(self.ledger.t)
        elif config.eval_at_start and self.ledger.t == 0 and not evaluated and not self.interrupt:
            self._evaluate()

    def _check_checkpoint(self, checkpoints: Store, step: int, facts: Facts) -> None:
        """Raise `SettingsError` unless the newest of `checkpoints`, `step`, can be resumed; nothing is compiled yet."""
        checkpoints.check_newest(program.state_shapes(self.strategy))
        # Under other settings the same iteration would mean other counts.
        with reading_facts(f"{step} of {self.config.run_dir}", "jaxrl"):
            counted = self.ledger.restore(facts["ledger"]).counters(self.schedule)
        require_counters(f"{step} of {self.config.run_dir}", step, facts, counted)

    def _restore(self) -> None:
        step, (state, sums), facts = self._storage.load(self._compiled.like)
        self.membership.restore(facts, self._storage.path)
        self._boundary_pending = facts.get(PENDING_BOUNDARY) is True
        with reading_facts(f"{step} of {self.config.run_dir}", "jaxrl"):
            ledger = self._log.restore_ledger(facts, self.ledger, bool(self._storage.eval_changes))
        self.state, self._sums, self.ledger = self._adapt_loaded(state, ledger), sums, ledger
        if self._actors is not None:
            self._actors.restore(facts.get("actors"))
        self._storage.commit_resume()

    def _load_best(self) -> None:
        """Load the best policy on disk.

        Its score becomes the one to beat. A run that resumes bit for bit keeps the score of its checkpoint instead: it
        will find this policy again by itself. If the policy is lost, so is its score, and patience counts from 0; an
        older one that is left is then the one to beat.
        """
        self._best = best = self._storage.load_best(jax.eval_shape(self._params, self._compiled.like[0]))
        ledger = self.ledger
        self._lost_best = self._storage.explain_lost_best(best, ledger.best_score, ledger.best_opt_steps)
        if self._lost_best:
            ledger.forget_scores()
        compiled = self.evaluator is self.lane or isinstance(self.evaluator, CompiledEvaluator)
        if best is not None and (self._lost_best or not (compiled and self._repeats_past())):
            self.ledger = self.ledger.with_best(best.score, best.opt_steps)

    def _repeats_past(self) -> bool:
        """Return whether a resumed run trains from its checkpoint as it did before, bit for bit."""
        anew = self._refilled or self._actors is not None or self.strategy.host_env is not None
        return not anew and not self._storage.training_changes

    def _adapt_loaded(self, state: PyTree, ledger: Ledger) -> PyTree:
        """Apply changed settings to a loaded state and refill a replay buffer it was saved without; note both."""
        if ledger.t == 0 and program.lacks_replay(self.strategy, state):
            return self._fresh().state  # of the start, the buffer is that of the warm-up
        # Also settings that nothing reads under the others are in the state.
        changed = any(change.name.startswith("agent.") for change in self._storage.changes)
        changed = changed or bool(self._storage.training_changes)
        state, self._refilled = refill_buffer(self.strategy, state, ledger.t, changed)
        if self._storage.training_changes or self._refilled:
            ledger.changed_at = self.schedule.opt_steps(ledger.t)
        if self._actors is not None:
            self._actors.refill = self._refilled
        return state

    def _open_logs(self) -> None:
        without = attempts.failures()
        self._storage.update_metadata(memory=self._memory.facts(), **({"without": without} if without else {}))
        of_programs = (*self._memory.notes(), *self.strategy.info.notes, *attempts.notes())
        lost = [self._lost_best] if self._lost_best else []
        notes = (*self._notes, *self._weights.notes, *of_programs, *lost)
        restart_note = describe_restart(self._refilled, self.strategy)
        self._log.open(self._storage, self.resume.enabled, self._repeats_past(), notes, restart_note)
        if (beginning := self._storage.describe_origin()) is not None:
            self._log.event("fork", beginning)

    def _close(self, storage: Storage) -> None:
        try:
            if self._actors is not None:
                self._actors.close()
            # Write a best policy that was deferred to the next checkpoint.
            with self.ledger.timed("save"):
                storage.keep_best(self._best)
                storage.finish()
            self._wall = self.ledger.wall
            if self._state is not None:
                # A diverged member is not loaded again, so its checkpoints are not asked for its scores at gates.
                own = self.membership.facts() if self.stop_reason == "diverged" else {}
                storage.update_metadata(**self._summary(), **own, status=self.stop_reason)
        finally:
            # Close the logs before releasing the lock: afterwards another process may write them.
            self._log.close()
            storage.close()
            if storage.path is not None and storage.path.exists():  # another call resumes from there
                self.resume = Resume(enabled=True, allow_changes=self.resume.allow_changes)

    def adopt(self, state: PyTree, strategy: Strategy, message: str) -> None:
        """Continue from another state with other settings of the same program; `message` becomes an event.

        Call `require_saved` before training continues: after a crash the run must not resume from its former state.
        """
        own = self.strategy.placement
        there = strategy.placement._replace(devices=own.devices, first_device=own.first_device)
        self.state, self.strategy = state, strategy._replace(placement=there)
        self._storage.replace_settings(self.settings())
        self.ledger.changed_at = self.schedule.opt_steps(self.ledger.t)
        self._log.event("adopted", message)
        # Regular at any step: a rollback must not go back to a state from before.
        facts = {**self._facts(), "regular": True}
        self._storage.save(self.ledger.changed_at, self._tree_to_save(), facts, self._best, again=True)

    def require_saved(self) -> None:
        """Wait for the save in progress; raise `StorageError` if it could not be written."""
        self._storage.collect_saves()
        if self._storage.error is not None:
            raise self._storage.error

    # --- several processes --------------------------------------------------------------------------------------

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Synchronise the other processes with the start and end of the loop in the block, which only process 0 runs.

        Raises:
          SettingsError: one of them has different settings or versions, or failed to start.
        """
        try:
            if processes.several():
                self._agree()
            yield
        # A loop that the caller left has ended like any other.
        except GeneratorExit:
            self._send_end()
            raise
        # The followers must not wait for orders that never come.
        except BaseException as error:
            processes.broadcast(processes.END, {"failed": describe_error(error)})
            raise
        self._send_end()

    def _agree(self) -> None:
        """Raise `SettingsError` unless all processes have the same settings and versions."""
        processes.agree({**self.settings(), "versions": versions(VERSIONS)})

    def _send_end(self) -> None:
        """Gather the parameters of the policy in each process, and send the last order."""
        if processes.several():
            self.state, self._sums = devices.shard_local(self.strategy, self.state, self._sums)
            self.latest = devices.params_of(self.strategy, self.state) if self.strategy.policy else None
            how = {"stop": self.stop_reason, "signal": self.interrupt.signal, "ledger": self.ledger.facts()}
            processes.broadcast(processes.END, how)

    def _follow(self) -> bool:
        """Execute the orders of process 0 until the run ends; return `False` at once in process 0 or a single process.

        Raises:
          SettingsError: process 0 has different settings or versions.
          ProcessError: process 0 has failed, or is gone.
        """
        if not processes.number():
            return False
        self._agree()
        with self.interrupt.signals():
            self._obey()
        return True

    def _obey(self) -> None:
        """Execute orders until the last."""
        strategy, key = self.strategy, make_key(self.config.seed)
        compiled, state, sums, latest = None, self._state, self._sums, None  # type: Any, Any, Any, Any
        self._state = self._sums = None
        for order, *given in processes.orders(self.interrupt):
            if order == "compile":
                compiled = compile_all(strategy, key, None, self._params, *given)
            elif order == "init":
                state, sums = compiled.init(key)
            elif order == "insert_weights":
                state, sums = program.rerun_warm_up(strategy, insert_leaves(Saved(state, sums), *given), key)
            elif order == "distribute":
                state, sums = devices.distribute(strategy, *compiled.like)
            elif order == "load":
                state, sums = None, None  # free memory before loading
                path, checksums = given
                found, said = read_part(Path(path), compiled.like, checksums)
                state, sums = found or (None, None)
                del found  # or it would keep these arrays until the next load
                processes.answer(said)
            elif order == "apply":
                state = devices.apply_in_all(strategy, given[0], state, *given[1:])
            elif order == "run":
                start, stop, fresh = given
                sums = zero_sums(len(compiled.metrics)) if fresh else sums
                state, sums = compiled.run(state, sums, np.uint32(start), np.uint32(stop))
            elif order == "params":
                latest = devices.params_of(strategy, state)
            elif order == "save":
                processes.answer(write_part(Path(*given), Saved(state, sums)))
            elif order == "gather":
                # A collective: all processes take part, and process 0 keeps the result.
                processes.whole((state, sums))
            elif order == processes.END:
                self._adopt_end(state, sums, latest, *given)
            else:
                raise AssertionError(f"process 0 gave an order {order!r} that no process knows")

    def _adopt_end(self, state: Any, sums: Any, latest: Any, how: dict[str, Any]) -> None:
        """Adopt the outcome of the run from process 0."""
        if "failed" in how:
            raise ProcessError(f"process 0 has ended the run: {how['failed']}")
        self.state, self._sums, self.latest, self.stop_reason = state, sums, latest, how["stop"]
        self.ledger = self.ledger.restore(how["ledger"])
        if how["signal"] is not None:
            self.interrupt.receive(how["signal"])

    # --- state and results --------------------------------------------------------------------------------------

    def result(self) -> Result:
        """Return the result so far; raise `SettingsError` before the first training."""
        if self._state is None:
            raise SettingsError("nothing has been trained yet; call train(), or iterate, first")
        # Copy while the run is in progress: the next call of the compiled program donates the state.
        state = self.state if self.stop_reason else devices.copy(self.state)
        policy, best = self.strategy.policy, self._best
        latest = lambda: self._params(self.state) if self.latest is None else self.latest
        params, score = (best.params, best.score) if best else (policy and latest(), self.ledger.best_score)
        step = best.opt_steps if best else self.schedule.opt_steps(self.ledger.t)
        greedy = policy and GreedyPolicy(policy, params, {"score": score, "opt_steps": step})
        about = {"stop": self.stop_reason, "trained": format_name(self.strategy), "run_dir": self.config.run_dir}
        return Result(greedy, score, {**self._summary(), **about}, state, tuple(self._log.curve))

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

    def settings(self) -> dict[str, Any]:
        """Return all settings of the run, as in `config.yaml`."""
        return settings_of_run(self.strategy, self.config)

    def _tree_to_save(self) -> PyTree:
        saved = Saved(self.lane.to_save(self._state), self._sums)
        return saved if self.config.save_replay else program.without_replay(saved)

    def _facts(self, ledger: Ledger | None = None) -> dict[str, Any]:
        """Return the facts of a checkpoint of the present state, with its ledger or another."""
        left_out = {} if self.config.save_replay else {"left_out": program.LEFT_OUT}
        actors = {} if self._actors is None else {"actors": self._actors.facts()}
        pending = {PENDING_BOUNDARY: True} if self._boundary_pending else {}
        own = {**left_out, **actors, **pending, **self.membership.facts()}
        return self._log.facts(ledger or self.ledger, self._health(), spec=spec_facts(self.strategy.policy), **own)

    def _summary(self) -> dict[str, Any]:
        return {**self.ledger.summary(self.schedule), **({} if self._actors is None else self._actors.summary())}

    def _health(self) -> Health | None:
        """Return the health counters of the updates, if the strategy keeps them."""
        return self.strategy.state_fns.health and jax.device_get(
            self.lane.part(self._state, self.strategy.state_fns.health)
        )

    def _params(self, state: PyTree) -> PyTree:
        return self.lane.params(self.strategy, state)

    def _report(self, train: Row | None, evaluation: Row | None, saved: bool) -> Report:
        at = self.ledger.counters(self.schedule)
        return Report(**at, train=train, eval=evaluation, saved=saved, stop=self.stop_reason)


class Lane:
    """The lane of a run that trains by itself; the trainer holds its state."""

    runner: Any = None
    """What runs the iterations in place of the run's own program, with a method `run` like `ActorPool.run`."""
    chunk_s = 0.25
    """Target duration of one compiled call: the latency of a signal and the interval of progress updates."""
    held_s = 0.0
    """Seconds for which the last save held up the training."""

    def whole(self, state: PyTree) -> PyTree:
        """Return the complete state."""
        return state

    def to_save(self, state: PyTree) -> PyTree:
        """Return the complete state, on the device or on the host, for a checkpoint."""
        return state

    def part(self, state: PyTree, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return the part of a state that `choose` selects."""
        return choose(state)

    def params(self, strategy: Strategy, state: PyTree) -> PyTree:
        """Return the parameters of the policy."""
        return devices.params_of(strategy, state)

    def is_time_to_save(self, storage: Storage, t: int, seconds: float) -> bool:
        """Return whether to save at iteration `t`, `seconds` after the last save, see `Storage.is_time_to_save`."""
        return storage.is_time_to_save(seconds, self.held_s)


def refill_buffer(strategy: Strategy, state: PyTree, t: int, changed: bool) -> tuple[PyTree, range]:
    """Return a state saved after `t` iterations, its buffer refilled if it was saved without; and the refilled range.

    If settings have `changed`, the state takes the current ones. The range has the numbers of the blocks pushed again
    (by actors: later), and is empty if the buffer was saved.
    """
    if changed and strategy.state_fns.set_hyperparams is not None:
        state = devices.apply_in_all(strategy, "set_hyperparams", state)
    refill = strategy.state_fns.refill
    if refill is None or not program.lacks_replay(strategy, state):
        return state, range(0)
    blocks = refill.blocks(t)
    first, stop = np.uint32(blocks.start), np.uint32(blocks.stop)
    return program.jit_refill(strategy)(state, first, stop), blocks


def describe_restart(refilled: range, strategy: Strategy) -> str:
    """Return the text on what a resumed run starts anew; `refilled` is the range from `refill_buffer`."""
    steps = len(refilled) * strategy.env_steps_per_step
    parts = ["environments that start anew"] if strategy.host_env is not None else []
    parts += [f"replay filled anew by {steps} environment steps, which no counter counts"] if steps else []
    return f" with {', and '.join(parts)}" if parts else ""


def stop_reason_for(error: BaseException, reason: str | None) -> str:
    """Return the stop reason of a run that ended by `error`; an earlier `reason` takes precedence over a failure."""
    if isinstance(error, DivergedError):
        return "diverged"
    return f"failed: {type(error).__name__}" if reason is None else reason


def report_unsaved(error: BaseException, unsaved: StorageError | None) -> None:
    """Report that the last save of a run failed, if the `error` that ended it would hide that."""
    if isinstance(error, SystemExit) and unsaved is not None:
        raise unsaved from error  # an exit code of 0 would mean that all is saved
    if isinstance(error, GeneratorExit) and unsaved is not None:
        print_stderr(f"error: {unsaved}")  # no exception can propagate from a closed generator


def _continuation(summary: Mapping[str, Any], run_dir: str | None) -> str | None:
    """Return the call that continues a stopped run; `None` if none does."""
    stop = summary["stop"]
    if stop == "max_env_steps" and run_dir is not None:
        more = 2 * summary["env_steps"]
        return f"Trainer(strategy, ..., run_dir={run_dir!r}, resume=True, max_env_steps={more}).train()"
    if stop == "max_opts":
        return f"trainer.train(max_opts={2 * summary['opt_steps']})"
    return None if stop in FINISHED else "trainer.train()"

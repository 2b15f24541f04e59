"""The host loop: advance the compiled program to the next boundary; there evaluate, record, save, and perhaps stop.

The loop is thin on purpose. When things happen is decided by `schedule`, what is computed by `program`, what is written
by `storage`; nothing here can change a bit of the training.
"""

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

import jaxrl.training.closing as closing
from jaxrl.errors import SettingsError, check_count, print_stderr
from jaxrl.parsing import format_repr
from jaxrl.registry import import_name
from jaxrl.strategies.base import Strategy, format_name
from jaxrl.strategies.guard import Health
from jaxrl.strategies.population import Population
from jaxrl.training.actors.pool import ActorPool, advance, facts_of, go_on_counting, pool_of, summary_of
from jaxrl.training.devices import Alone, altered, apart, on_devices
from jaxrl.training.divergence import diverged, explain
from jaxrl.training.episodes import teller_of
from jaxrl.training.evaluator import EvaluateFn, ScoreFn, eval_key, evaluator_of, mean_return
from jaxrl.training.film import with_videos
from jaxrl.training.following import follow, led
from jaxrl.training.gap import judged_by, training_returns
from jaxrl.training.interrupt import Interrupt, ended_by, tell_unsaved
from jaxrl.training.judging import Judge, judge
from jaxrl.training.ledger import Ledger
from jaxrl.training.logbook import Logbook, unpacking
from jaxrl.training.policy import GreedyPolicy, spec_facts
from jaxrl.training.processes import stops
from jaxrl.training.program import Saved, check_step, compile_all, summarise, without_replay, zero_sums
from jaxrl.training.recorders import Recorder, Row
from jaxrl.training.report import Hooks, Report, Result, call, progress_parts, run_dir_part
from jaxrl.training.schedule import Boundary, next_boundary
from jaxrl.training.settings import TrainerConfig, check_strategy, config_for, settings_of_run, with_recorders
from jaxrl.training.stopping import after_evaluation, log_rollback, require_try, require_valid, rolled_back_ledger
from jaxrl.training.storage.members import Membership
from jaxrl.training.storage.run import Best, Resume, Storage
from jaxrl.training.taking_up import (
    BROKEN,
    anew,
    check_run,
    compiled_for,
    fits,
    notes_of,
    planned,
    prolonged,
    replenished,
    require_counters,
    resumption,
)
from jaxrl.trees import PyTree, make_key

CHUNK_S = 0.25
"""Seconds of training in one call, about: how long a signal waits, and how often progress is shown."""


class Trainer:
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
        config = config_for(strategy, evaluator, config, settings)
        config, self._given_recorders = with_recorders(config, recorders)
        run_dir, self.resume = resumption(resume, from_step, config.run_dir, allow_changes, start_over)
        self.config, self.schedule, self._rounding = planned(strategy, config.changed(run_dir=run_dir))
        strategy = on_devices(strategy, self.config.devices, self.config.mesh)
        if max_chunk is not None:
            check_count("max_chunk", max_chunk)
        if evaluator is None and self.config.eval_episodes:
            evaluator = evaluator_of(strategy, self.config.eval_episodes, self.config.eval_actions == "sampled")
        self.strategy, self.evaluator, self.score, self.stop = strategy, evaluator, score, stop
        self.hooks, self.interrupt = with_videos(self, hooks), Interrupt() if interrupt is None else interrupt
        self.max_chunk, self._quiet, self.raise_on_signal = max_chunk, self.config.quiet or not console, raise_on_signal
        self.ledger, self.stop_reason, self.best_s = Ledger(), None, 0.0  # type: Ledger, str | None, float
        self._best: Best | None = None
        self._state = self._run = self._sums = self.latest = None  # type: Any
        self.lane: Any = Alone()  # that of a team, for a member of a population that trains together with others
        self._actors: ActorPool | None = None
        self._log = Logbook(self.schedule, lambda: ({}, 0.0))
        self._chunk, self._wall, self._least_return, self._refilled = 0, 0.0, math.nan, range(0)
        self._teller = teller_of(strategy, self.config, self.hooks)
        self.membership = Membership()  # that of a member of a population

    def __repr__(self) -> str:
        summary = {**self.ledger.summary(self.schedule), "stop": self.stop_reason}
        most, run_dir = f"max_opts={self.config.max_opts}", run_dir_part(self.config.run_dir)
        return format_repr("Trainer", format_name(self.strategy), most, *progress_parts(summary), run_dir)

    @property
    def state(self) -> PyTree:
        """The training state; `None` before there is one."""
        return self.lane.whole(self._state)

    @state.setter
    def state(self, state: PyTree) -> None:
        self._state = state

    # --- what a user calls ---

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
            self.config, self.schedule, self._rounding = prolonged(self.strategy, self.config, max_opts, done)
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

    def reports(self) -> Generator[Report, None, None]:
        """Return the training as a generator, whose `close()` saves."""
        if self._take_up() and not follow(self):
            with led(self):
                yield from self._lead()

    def _lead(self) -> Generator[Report, None, None]:
        """Train, as the only process or the one that decides for others."""
        fresh, is_member = not self.resume.run and self._state is None, self.membership.number is not None
        self._weights = check_run(self.strategy, self.config, fresh, is_member)
        where = lambda: (self.ledger.counters(self.schedule), self.ledger.wall)
        self._log = Logbook(self.schedule, where, (*self.config.recorders, *self._given_recorders), self._quiet)
        with self._log.staged("tracing"), self.ledger.timed("compile"):
            self._plan = check_step(self.strategy, self.evaluator, self._params)
        with self._opened() as storage:
            self._begin()
            if self.membership.announces:
                yield self._report(None, None, saved=False)
            while self.stop_reason is None:
                boundary = next_boundary(self.schedule, self.ledger.t)
                self._advance(boundary.t)
                if diverged(self._health(), self.config.max_skips):
                    self._roll_back()
                    continue
                report = self._at(boundary)
                try:
                    yield report
                except GeneratorExit:
                    self.stop_reason = self.stop_reason or "left"
                    self._save()
                    raise
        if storage.error is not None:
            raise storage.error
        call(self.hooks.end, self, self.result())

    def result(self) -> Result:
        """Return what the run has left so far; raise `SettingsError` before it has begun."""
        if self._state is None:
            raise SettingsError("nothing has been trained yet; call train(), or iterate, first")
        # A run that goes on donates its state to the next call of the compiled program.
        state = self.state if self.stop_reason else apart(self.state)
        policy, best = self.strategy.policy, self._best
        latest = lambda: self._params(self.state) if self.latest is None else self.latest
        params, score = (best.params, best.score) if best else (policy and latest(), self.ledger.best_score)
        step = self.ledger.best_opt_steps if best else self.schedule.opt_steps(self.ledger.t)
        greedy = policy and GreedyPolicy(policy, params, {"score": score, "opt_steps": step})
        about = {"stop": self.stop_reason, "trained": format_name(self.strategy), "run_dir": self.config.run_dir}
        return Result(greedy, score, {**self._summary(), **about}, state)

    def adopt(self, state: PyTree, strategy: Strategy, told: str) -> None:
        """Go on from another state and with other settings of the same program; `told` becomes an event.

        Raises:
          StorageError: it could not be written.
        """
        own = self.strategy.placement
        there = strategy.placement._replace(devices=own.devices, first_device=own.first_device)
        self.state, self.strategy = state, strategy._replace(placement=there)
        self._storage.renew(self.settings())
        self.ledger.changed_at = self.schedule.opt_steps(self.ledger.t)
        self._log.event("adopted", told)
        self._storage.save(self.ledger.changed_at, self._saved(), self._facts(), self._best, again=True)
        self._storage.settle()
        if self._storage.error is not None:
            raise self._storage.error

    def note(self, text: str | None = None, /, **values: float) -> None:
        """Take numbers into the next row, each as the mean of what was noted; a `text` becomes an event at once.

        Raises:
          SettingsError: nothing is being trained, a value is no number, or a column of that name is there already.
        """
        self._log.remark(text)
        self._log.note(values)

    def settings(self) -> dict[str, Any]:
        """Return all settings of the run, as `config.yaml` holds them."""
        return settings_of_run(self.strategy, self.config)

    # --- one boundary ---

    def _at(self, boundary: Boundary) -> Report:
        """Do what is due at `boundary`, or before it if the run was interrupted on the way."""
        if self.ledger.t < boundary.t:
            # Interrupted on the way: save, but record nothing, so that the rows of the resumed run stay the same.
            self.stop_reason = self.interrupt.reason
            self._save()
            return self._report(None, None, saved=True)
        evaluation = self._evaluate() if boundary.evaluate else None
        row = self._record() if boundary.record else None
        if evaluation is None and self.config.is_promising(row):
            evaluation = self._evaluate(row)
        saves = boundary.save and (self.config.save_interval is not None or boundary.last or self._is_time_to_save())
        self.stop_reason = self._why_stop(boundary, self._report(row, evaluation, saves))
        if self.stop_reason and not self.interrupt:
            evaluation, row = evaluation or self._evaluate(row), row or self._record()
        if saves or self.stop_reason:
            self._save()
        if self.stop_reason and not self.interrupt:
            require_valid(self._log, self._log.validity)
        return self._report(row, evaluation, saved=bool(saves or self.stop_reason))

    def _advance(self, end: int) -> None:
        """Call the compiled program until iteration `end`, or until someone asks to stop, or it diverges."""
        while self.ledger.t < end and not stops(self.interrupt) and not diverged(self._health(), self.config.max_skips):
            begun, t = time.perf_counter(), self.ledger.t
            stop = min(end, t + self._chunk, t + self._teller.most)
            made = advance(self._run, self.lane.others or self._actors, self._state, self._sums, t, stop)
            self._state, self._sums, stop, told = jax.block_until_ready(made)
            seconds = max(time.perf_counter() - begun, 1e-9)
            self.ledger.trained(stop, seconds)
            with self.ledger.timed("record"):
                self._teller.tell(told, t, stop, self.schedule, self._log.ended, self)
            self._fail_with_actors()
            self._chunk = self.max_chunk or max(1, int((stop - t) * CHUNK_S / seconds))
            self._storage.settle(block=False)
            call(self.hooks.chunk, self, self._log.tick(stop, (stop - t) / seconds))

    def _fail_with_actors(self) -> None:
        """Save and raise if an actor has failed."""
        if self._actors is not None and self._actors.failure is not None:
            error, trace = self._actors.failure
            self.stop_reason = "actor"
            self._log.event("actor", str(error), traceback=trace)
            self._save()
            raise error

    def _evaluate(self, recorded: Row | None = None) -> Row | None:
        if self.evaluator is None:
            return None
        call(self.hooks.before_evaluation, self)
        config, opt_steps = self.config, self.schedule.opt_steps(self.ledger.t)
        own = Judge(self.evaluator, self.score, self._eval_key, config.eval_starts == "fixed", config.confirm_best)
        found = judge(own, self._params(self._state), opt_steps, self.ledger, self._best.score if self._best else None)
        self._least_return = found.least_return
        self.membership.evaluated(opt_steps, found.score)
        if found.is_to_keep:
            self._keep_best(found.kept)
        with self.ledger.timed("record"):
            training = training_returns(recorded or summarise(self._metrics, self._sums))
            row = self._log.evaluated(found, training, judged_by(self.strategy, self.evaluator), self.ledger)
        call(self.hooks.evaluation, self, found.evaluation, found.is_best)
        return row

    def _record(self) -> Row:
        ledger = self.ledger
        with ledger.timed("record"):
            done = ledger.t - ledger.interval_start
            rates = ledger.rates(self.schedule, done, ledger.interval_s)
            waits = self._actors.columns() if self._actors is not None else {}
            agent = (self.strategy.info.settings or {}).get("agent") or {}
            steps = done * self.schedule.env_steps_per_step
            row = self._log.trained({**rates, **waits, **summarise(self._metrics, self._sums)}, ledger, agent, steps)
            self._sums = zero_sums(len(self._metrics))
            ledger.interval_start, ledger.interval_s = ledger.t, 0.0
        call(self.hooks.record, self, row)
        return row

    def _why_stop(self, boundary: Boundary, report: Report) -> str | None:
        if boundary.last:
            return self.schedule.limit(self.ledger.t)
        if report.eval and (reached := after_evaluation(self.config, self.ledger, self._least_return)):
            return reached
        return "stop" if self.stop is not None and self.stop(report) else self.interrupt.reason

    def _save(self) -> None:
        with self.ledger.timed("save"):
            self._storage.save(self.schedule.opt_steps(self.ledger.t), self._saved(), self._facts(), self._best)
            self._storage.note(**self._summary(), status=self.stop_reason or "running")
            self.ledger.unsaved_s = 0.0

    def _is_time_to_save(self) -> bool:
        return self._storage.is_time_to_save(self.ledger.unsaved_s)

    def _keep_best(self, score: float) -> None:
        params = jax.device_put(self._params(self._state), may_alias=False)
        self._best = self._log.best(score, params, self.strategy.policy, self.settings())
        if not self.membership.saves_best_late:
            with self.ledger.timed("save"):
                self._storage.keep_best(self._best)

    def _roll_back(self) -> None:
        """Return to the last good state, and take another stream of randomness from there.

        Raises:
          DivergedError: that has been tried often enough.
        """
        health = self._health()
        assert health is not None
        what = explain(health, self._metrics)
        require_try(self._log, self.ledger, self.config.max_rollbacks, what)
        self.state, self._sums, self._refilled = None, None, range(0)  # make room for what is loaded
        found = self._storage.rollback(self._compiled.like)
        self.ledger = rolled_back_ledger(self.ledger, found)
        state, self._sums = found[0] if found else self._compiled.init(make_key(self.config.seed))
        state = self._taken_up(state, self.ledger) if found else state
        self.state = altered(self.strategy, "reseed", state, self.ledger.rollbacks)
        if self._actors is not None:
            self._actors = self._actors.renewed()
        log_rollback(self._log, self.schedule.opt_steps(self.ledger.t), what, anew(self._refilled, self.strategy))

    # --- beginning and ending ---

    @contextmanager
    def _opened(self) -> Iterator[Storage]:
        """Hold everything that lives while the run does: directory, recorders, signal handlers."""
        config, regular = self.config, self.schedule.is_regular_save
        can = partial(fits, self.strategy, self.schedule, self.ledger)
        with self.interrupt.signals(None if config.quiet else lambda: self.ledger.activity):
            storage = self._storage = Storage(config.run_dir, config.keep, self.settings(), self.resume, regular, can)
            storage.report = lambda line: self._log.event("storage", line)
            storage.on_saved = lambda opt_steps: call(self.hooks.save, self, opt_steps)
            try:
                yield storage
            except BaseException as error:
                self.stop_reason = ended_by(error, self.stop_reason)
                self._close(storage)
                tell_unsaved(error, storage.error)
                raise
            else:
                self._close(storage)

    def _close(self, storage: Storage) -> None:
        try:
            if self._actors is not None:
                self._actors.close()
            with self.ledger.timed("save"):
                storage.keep_best(self._best)
                storage.finish()
            self._wall = self.ledger.wall
            if self._state is not None:
                storage.note(**self._summary(), status=self.stop_reason)
        finally:
            self._log.close()
            storage.close()
            if storage.path is not None and storage.path.exists():  # whoever calls again goes on there
                self.resume = Resume(run=True, allow_changes=self.resume.allow_changes)

    def _take_up(self) -> bool:
        """Prepare to begin, or to go on from where the run is; say so and return `False` if nothing is left to do."""
        reason, self.stop_reason, self.latest = self.stop_reason, None, None
        if reason is not None and (reason == self.interrupt.reason or self.interrupt.signal is not None):
            self.interrupt.clear()
        sound = self._state is not None and reason is not None and not reason.startswith(BROKEN)
        if sound and self.ledger.t >= self.schedule.last:
            self.stop_reason = reason
            if not self._quiet:
                print_stderr(self.schedule.nothing_left(self.ledger.t))
            return False
        if sound and self.config.run_dir is None:
            self.ledger = self.ledger.taken_up(self._wall)
            # The results that were returned keep theirs: what goes on is donated.
            self.state, self._sums = apart((self.state, self._sums))
        else:
            self.ledger, self._best, self.state, self._sums = Ledger(), None, None, None
        return True

    def _begin(self) -> None:
        """Compile, initialise or restore, and open the logs."""
        key, self._eval_key = make_key(self.config.seed), eval_key(self.config.seed)
        self._chunk, goes_on = self.max_chunk or 256, self._storage.resumes or self._state is not None
        self._log.stage("compiling")
        with self.ledger.timed("compile"):
            how = self._params, goes_on, self._teller.tells, self.lane.others is None
            made = partial(compile_all, self.strategy, key, self.evaluator, *how)
            now = self.strategy, self.config, self._storage, self._weights, goes_on
            self._compiled, self._weights = compiled_for(made, *now)
            self._run, self._metrics = self._compiled.run, self._compiled.metrics
            self._actors = pool_of(self.strategy, self._run, self.interrupt, self._log.event, self.schedule.last)
        warmup = 0 if goes_on or self._actors is not None else self.schedule.warmup_env_steps
        self._log.stage(f"warming up: {warmup:,} environment steps" if warmup else "getting ready")
        with self.ledger.timed("init"):
            if self._storage.resumes:
                self._restore()
            elif self._state is None:
                self.state, self._sums = jax.block_until_ready(self._compiled.init(key))
            if self.resume.run:
                self._best = self._storage.load_best(jax.eval_shape(self._params, self._compiled.like[0]))
        self._open_logs()
        self._log.stage("training")
        call(self.hooks.start, self)
        if self.ledger.t >= self.schedule.last:
            self.stop_reason = self.schedule.limit(self.ledger.t)
        elif self.config.eval_at_start and self.ledger.t == 0 and not self.ledger.has_scores and not self.interrupt:
            self._evaluate()

    def _restore(self) -> None:
        step, (state, sums), facts = self._storage.load(self._compiled.like)
        self.membership.restore(facts, self._storage.path)
        with unpacking(f"{step} of {self.config.run_dir}", "none of jaxrl's"):
            ledger = self._log.restored_ledger(facts, self.ledger, bool(self._storage.measured_anew))
        saved = {"opt_steps": step, "env_steps": facts.get("env_steps")}
        require_counters(f"{step} of {self.config.run_dir}", ledger.counters(self.schedule), saved)
        self.state, self._sums, self.ledger = self._taken_up(state, ledger), sums, ledger
        go_on_counting(self._actors, facts)
        self._storage.go_on()

    def _taken_up(self, state: PyTree, ledger: Ledger) -> PyTree:
        """Give a state that was loaded what was allowed to change, and the replay it was saved without; note it."""
        state, self._refilled = replenished(self.strategy, state, ledger.t, bool(self._storage.decisive))
        if self._storage.decisive or self._refilled:
            ledger.changed_at = self.schedule.opt_steps(ledger.t)
        if self._actors is not None:
            self._actors.refill = self._refilled
        return state

    def _open_logs(self) -> None:
        notes = (*self._rounding, *self._weights.told, *notes_of(self._plan, self.strategy, self._storage))
        self._log.open(self._storage, self.resume.run, notes, anew(self._refilled, self.strategy))
        if (beginning := self._storage.beginning()) is not None:
            self._log.event("fork", beginning)

    def _saved(self) -> PyTree:
        saved = Saved(self.state, self._sums)
        return saved if self.config.save_replay else without_replay(saved)

    def _facts(self) -> dict[str, Any]:
        left_out = {} if self.config.save_replay else {"left_out": ["buffer"]}
        own = {**left_out, **facts_of(self._actors), **self.membership.facts()}
        return self._log.facts(self.ledger, self._health(), spec=spec_facts(self.strategy.policy), **own)

    def _summary(self) -> dict[str, Any]:
        return {**self.ledger.summary(self.schedule), **summary_of(self._actors)}

    def _health(self) -> Health | None:
        """Return how updates have been going, if the strategy says so."""
        return self.strategy.state_fns.health and jax.device_get(
            self.lane.part(self._state, self.strategy.state_fns.health)
        )

    def _params(self, state: PyTree) -> PyTree:
        return self.lane.params(self.strategy, state)

    def _report(self, train: Row | None, evaluation: Row | None, saved: bool) -> Report:
        at = self.ledger.counters(self.schedule)
        return Report(**at, train=train, eval=evaluation, saved=saved, stop=self.stop_reason)

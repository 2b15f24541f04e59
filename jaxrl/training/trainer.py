"""The host loop: advance the compiled program to the next boundary; there evaluate, record, save, and perhaps stop.

The loop is thin on purpose. When things happen is decided by `schedule`, what is computed by `program`, what is written
by `storage`; nothing here can change a bit of the training.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.strategies.base import Strategy
from jaxrl.training.evaluator import EvaluateFn, Evaluation, ScoreFn, evaluator_of, mean_return
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.ledger import Ledger
from jaxrl.training.policy import GreedyPolicy, describe
from jaxrl.training.program import check_step, compile_all, summarise, zero_sums
from jaxrl.training.recorders import Progress, Recorder, Recorders, Row, default_recorders, episode_recorder
from jaxrl.training.rows import episode_rows, eval_columns
from jaxrl.training.schedule import Boundary, Schedule, next_boundary
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage import Storage
from jaxrl.types import PyTree

CHUNK_S = 0.25
"""Seconds of training in one call, about: how long a signal waits, and how often progress is shown."""
EVAL_STREAM = 2**32 - 1
"""Folded into the seed's key for evaluation: no iteration has this number."""


class Hooks(NamedTuple):
    """Functions called as a run goes on; each gets the trainer first."""

    start: Callable[["Trainer"], None] | None = None
    """Before training."""
    chunk: Callable[["Trainer", Progress], None] | None = None
    """After each call of the compiled program."""
    evaluation: Callable[["Trainer", Evaluation, bool], None] | None = None
    """After each evaluation, told whether it is the best."""
    save: Callable[["Trainer", int], None] | None = None
    """When a checkpoint has been begun, told its optimisation step."""


class Report(NamedTuple):
    """What happened at a boundary."""

    opt_steps: int
    env_steps: int
    train: Row | None
    """The row of metrics, if it was time to record."""
    eval: Row | None
    """The row of the evaluation, if it was time for one."""
    saved: bool
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


class Trainer:
    """Train a strategy: `train()` runs to the end, `for report in trainer:` stops at each boundary."""

    def __init__(
        self,
        strategy: Strategy,
        config: TrainerConfig | None = None,
        *,
        evaluator: EvaluateFn | None = None,
        score: ScoreFn = mean_return,
        stop: Callable[[Report], bool] | None = None,
        recorders: Sequence[Recorder] | None = None,
        hooks: Hooks | None = None,
        resume: bool = False,
        interrupt: Interrupt | None = None,
        max_chunk: int | None = None,
        **settings: Any,
    ) -> None:
        """Check everything that can be checked before anything compiles or is written.

        Args:
          strategy: what to train.
          config: settings to start from; the defaults of `TrainerConfig` if left out.
          evaluator: what judges, in place of greedy episodes in the strategy's environment.
          score: from an evaluation to the number by which the best is chosen.
          stop: asked at each boundary whether to end the run.
          recorders: what takes in the rows, beside the logs of the run directory; left out, a console (unless `quiet`)
            and, with a run directory, TensorBoard.
          hooks: functions to call on the way.
          resume: go on with the run in `run_dir` from its newest valid checkpoint.
          interrupt: a handle by which another thread can stop the run; also found as `trainer.interrupt`.
          max_chunk: iterations in one call at most; left out, about a quarter of a second's worth.
          **settings: fields of `TrainerConfig`, as in `Trainer(strategy, max_opts=50_000)`.

        Raises:
          SettingsError: what cannot be.
        """
        if strategy.policy is None and evaluator is None and config is None:
            settings = {"eval_interval": 0, "eval_episodes": 0, **settings}
        self.config = (config or TrainerConfig()).changed(**settings)
        self.config.check()
        if resume and self.config.run_dir is None:
            raise SettingsError("resume needs the run_dir to go on with")
        self.schedule = _schedule(strategy, self.config)
        if evaluator is None and self.config.eval_episodes:
            evaluator = evaluator_of(strategy, self.config.eval_episodes)
        self.strategy, self.evaluator, self.score, self.stop = strategy, evaluator, score, stop
        self.hooks, self.interrupt = hooks or Hooks(), interrupt or Interrupt()
        self.resume, self.max_chunk = resume, max_chunk
        self.ledger, self.stop_reason = Ledger(), None  # type: Ledger, str | None
        self.state: PyTree = None
        self._given_recorders = recorders
        self._best: PyTree = None
        self._run: Any = None
        self._sums: Any = None
        self._chunk = 0

    # --- what a user calls ---

    def train(self) -> Result:
        """Run to the end; return what it left.

        Raises:
          StorageError: the last checkpoint could not be written; everything else was done.
        """
        for _ in self:
            pass
        return self.result()

    def __iter__(self) -> Iterator[Report]:
        """Train, yielding at each boundary; leaving the loop early saves first."""
        self.ledger, self.stop_reason = Ledger(), None
        with self.ledger.timed("compile"):
            check_step(self.strategy)
        with self._opened() as storage:
            self._begin()
            while self.stop_reason is None:
                report = self._to_boundary(next_boundary(self.schedule, self.ledger.t))
                try:
                    yield report
                except GeneratorExit:
                    self.stop_reason = self.stop_reason or "left"
                    self._save()
                    raise
        if storage.error is not None:
            raise storage.error

    def result(self) -> Result:
        """Return what the run has left so far."""
        policy = self.strategy.policy
        params = self._best if self._best is not None else self._params(self.state)
        greedy = policy and GreedyPolicy(policy, params, {"score": self.ledger.best_score})
        summary = {**self.ledger.summary(self.schedule), "stop": self.stop_reason}
        return Result(greedy, self.ledger.best_score, summary, self.state)

    def settings(self) -> dict[str, Any]:
        """Return all settings of the run, as `config.yaml` holds them."""
        settings = {**(self.strategy.settings or {"algo": "custom", "custom": ["strategy"]}), **asdict(self.config)}
        del settings["run_dir"]  # a run can be moved
        return settings

    # --- one boundary ---

    def _to_boundary(self, boundary: Boundary) -> Report:
        self._advance(boundary.t)
        if self.ledger.t < boundary.t:
            # Interrupted on the way: save, but record nothing, so that the rows of the resumed run stay the same.
            self.stop_reason = self.interrupt.reason
            self._save()
            return self._report(None, None, saved=True)
        evaluation = self._evaluate() if boundary.evaluate else None
        row = self._record() if boundary.record else None
        self.stop_reason = self._why_stop(boundary, self._report(row, evaluation, boundary.save))
        if self.stop_reason and not self.interrupt:
            evaluation, row = evaluation or self._evaluate(), row or self._record()
        if boundary.save or self.stop_reason:
            self._save()
        return self._report(row, evaluation, saved=bool(boundary.save or self.stop_reason))

    def _advance(self, target: int) -> None:
        """Call the compiled program until iteration `target`, or until someone asks to stop."""
        while self.ledger.t < target and not self.interrupt:
            begun, t = time.perf_counter(), self.ledger.t
            stop = min(target, t + self._chunk)
            self.state, self._sums = self._run(self.state, self._sums, np.uint32(t), np.uint32(stop))
            jax.block_until_ready((self.state, self._sums))
            seconds = max(time.perf_counter() - begun, 1e-9)
            self.ledger.trained(stop, seconds)
            self._chunk = self.max_chunk or max(1, int((stop - t) * CHUNK_S / seconds))
            progress = self._progress((stop - t) / seconds)
            self._recorders.tick(progress)
            if self.hooks.chunk:
                self.hooks.chunk(self, progress)

    def _evaluate(self) -> Row | None:
        if self.evaluator is None:
            return None
        counters = self.ledger.counters(self.schedule)
        with self.ledger.timed("evaluate"):
            key = jax.random.fold_in(self._eval_key, counters["opt_steps"])
            evaluation = self.evaluator(self._params(self.state), key)
            score = float(self.score(evaluation))
        is_best = self.ledger.judge(score, counters["opt_steps"])
        if is_best:
            self._save_best(score)
        row = self._row("eval", **eval_columns(evaluation, score), is_best=is_best)
        with self.ledger.timed("record"):
            self._recorders.write(row)
            for episode in episode_rows(counters, evaluation):
                self._episodes.write(episode)
        if self.hooks.evaluation:
            self.hooks.evaluation(self, evaluation, is_best)
        return row

    def _record(self) -> Row:
        ledger = self.ledger
        with ledger.timed("record"):
            rates = ledger.rates(self.schedule, ledger.t - ledger.interval_start, ledger.interval_s)
            row = self._row("train", **rates, **summarise(self._metrics, self._sums))
            self._recorders.write(row)
            self._sums = zero_sums(len(self._metrics))
            ledger.interval_start, ledger.interval_s = ledger.t, 0.0
        return row

    def _why_stop(self, boundary: Boundary, report: Report) -> str | None:
        config = self.config
        if boundary.last:
            return "max_opts" if report.opt_steps == config.max_opts else "max_env_steps"
        if report.eval and config.stop_reward is not None and report.eval["eval_reward"] >= config.stop_reward:
            return "stop_reward"
        if report.eval and config.patience and self.ledger.evals_without_best >= config.patience:
            return "patience"
        if self.stop is not None and self.stop(report):
            return "stop"
        return self.interrupt.reason

    def _save(self) -> None:
        opt_steps = self.schedule.opt_steps(self.ledger.t)
        with self.ledger.timed("save"):
            tree = {"state": self.state, "sums": self._sums}
            begun = self._storage.save(opt_steps, tree, self.ledger.facts())
            self._storage.note(**self.ledger.summary(self.schedule), status=self.stop_reason or "running")
        if begun and self.hooks.save:
            self.hooks.save(self, opt_steps)

    def _save_best(self, score: float) -> None:
        opt_steps = self.schedule.opt_steps(self.ledger.t)
        self._best = jax.tree.map(jnp.copy, self._params(self.state))
        facts = {"score": score, **self.ledger.counters(self.schedule), **describe(self.strategy, self.settings())}
        with self.ledger.timed("save"):
            self._storage.save_best(opt_steps, self._best, facts, score)

    # --- beginning and ending ---

    @contextmanager
    def _opened(self) -> Iterator[Storage]:
        """Hold everything that lives while the run does: directory, recorders, signal handlers."""
        storage = Storage(self.config.run_dir, self.config.keep, self.settings(), self.resume)
        self._storage, self._recorders, self._episodes = storage, Recorders([]), Recorders([])
        storage.report = lambda line: self._event("storage", line)
        try:
            with self.interrupt.signals():
                yield storage
        except BaseException as error:
            self.stop_reason = self.stop_reason or f"failed: {type(error).__name__}"
            raise
        finally:
            self._close(storage)

    def _close(self, storage: Storage) -> None:
        with self.ledger.timed("save"):
            storage.finish()
        if storage.error is None and self.state is not None:
            storage.note(**self.ledger.summary(self.schedule), status=self.stop_reason)
        self._recorders.close()
        self._episodes.close()
        storage.close()

    def _begin(self) -> None:
        """Compile, initialise or restore, and open the logs."""
        key = jax.random.key(self.config.seed)
        self._eval_key = jax.random.fold_in(key, EVAL_STREAM)
        self._chunk = self.max_chunk or 256
        with self.ledger.timed("compile"):
            compiled = compile_all(self.strategy, key, self.evaluator, self._params, self.resume)
            self._run, self._metrics = compiled.run, compiled.metrics
        with self.ledger.timed("init"):
            if self.resume:
                self._restore(compiled.like)
            else:
                self.state, self._sums = jax.block_until_ready(compiled.init(key))
        self._open_logs()
        if self.hooks.start:
            self.hooks.start(self)
        if self.ledger.t >= self.schedule.last:
            self.stop_reason = "max_opts"
        elif self.config.eval_at_start and self.ledger.t == 0:
            self._evaluate()

    def _restore(self, like: tuple[PyTree, PyTree]) -> None:
        state, sums = like
        params = jax.eval_shape(self._params, state)
        tree, self._best, facts = self._storage.load({"state": state, "sums": sums}, params)
        self.state, self._sums = tree["state"], tree["sums"]
        self.ledger = self.ledger.take_up(facts)

    def _open_logs(self) -> None:
        counters = self.ledger.counters(self.schedule)
        self._storage.start(counters, self.resume)
        resumed_at = counters["opt_steps"] if self.resume else None
        directory = self._storage.path
        self._recorders = Recorders(default_recorders(self._given_recorders, directory, self.config.quiet, resumed_at))
        self._episodes = Recorders(episode_recorder(directory))
        for note in self.strategy.notes:
            self._event("note", note)
        if self.resume:
            self._event("resume", f"resumed at {resumed_at} optimisation steps")

    # --- small things ---

    def _params(self, state: PyTree) -> PyTree:
        return state if self.strategy.policy is None else self.strategy.policy.params(state)

    def _row(self, kind: str, **columns: Any) -> dict[str, Any]:
        return {"kind": kind, **self.ledger.counters(self.schedule), "wall_s": round(self.ledger.wall, 3), **columns}

    def _event(self, event: str, message: str) -> None:
        self._recorders.write(self._row("event", event=event, message=message))

    def _report(self, train: Row | None, evaluation: Row | None, saved: bool) -> Report:
        counters = self.ledger.counters(self.schedule)
        return Report(**counters, train=train, eval=evaluation, saved=saved, stop=self.stop_reason)

    def _progress(self, rate: float) -> Progress:
        return Progress(
            **self.ledger.counters(self.schedule),
            max_opts=self.schedule.opt_steps(self.schedule.last),
            opt_steps_per_sec=rate * self.schedule.opt_steps_per_step,
            seconds_left=(self.schedule.last - self.ledger.t) / rate,
        )


def _schedule(strategy: Strategy, config: TrainerConfig) -> Schedule:
    return Schedule(
        max_opts=config.max_opts,
        opt_steps_per_step=strategy.opt_steps_per_step,
        env_steps_per_step=strategy.env_steps_per_step,
        warmup_env_steps=strategy.warmup_env_steps,
        eval_interval=config.eval_interval,
        record_interval=config.record_interval,
        save_interval=config.save_interval,
        max_env_steps=config.max_env_steps,
    )

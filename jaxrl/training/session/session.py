"""Training driven from a loop that the user owns: a script, a robot, a game engine."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.errors import DivergedError, SettingsError, check_count, print_stderr
from jaxrl.parsing import format_repr
from jaxrl.processors.base import Processor
from jaxrl.processors.n_step import one_step
from jaxrl.registry import algorithm_names, defaults_for, join_names
from jaxrl.spaces import EnvSpec, to_elements, to_indices
from jaxrl.strategies import interaction, replay
from jaxrl.strategies.off_policy import Replay
from jaxrl.strategies.on_policy import ROLLOUT_SETTINGS, make_minibatch_schedule, settings_of_schedule
from jaxrl.strategies.replay import UpdateSchedule
from jaxrl.strategies.stepwise import Stepwise, StepwiseState, count_iterations
from jaxrl.training import stopping
from jaxrl.training.closing import report_exit
from jaxrl.training.divergence import Validity, explain, skips_left
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.film import filmed
from jaxrl.training.interrupt import Interrupt, Termination, Undisturbed
from jaxrl.training.logbook import Logbook, unpacking
from jaxrl.training.policy import GreedyPolicy, spec_facts
from jaxrl.training.processes import require_alone
from jaxrl.training.program import summarise, zero_sums
from jaxrl.training.recorders import Recorder, require_recorders
from jaxrl.training.report import call, progress_parts, run_dir_part
from jaxrl.training.sanity import columns_to_write
from jaxrl.training.schedule import MAX_COUNT, Schedule, rounded_up
from jaxrl.training.session import inputs
from jaxrl.training.session.rows import Episode, Interval, columns_of_trial, score_columns
from jaxrl.training.session.shot import shot_of
from jaxrl.training.session.state import (
    Learnt,
    SessionHooks,
    SessionState,
    begun,
    episodes_of,
    facts_of,
    for_another_try,
    over,
    restored,
    shapes_of,
    tree_of,
    with_changes,
)
from jaxrl.training.session.statistics import Statistics
from jaxrl.training.session.stepper import Stepper, plan_of_session
from jaxrl.training.session.trial import Trial, after as after_step, cut as cut_trial, require_free
from jaxrl.training.settings import SessionConfig, rounding, with_recorders
from jaxrl.training.storage.members import require_no_member
from jaxrl.training.storage.run import Resume, Storage, resumption
from jaxrl.trees import PyTree
from jaxrl.xla import attempts


class Session:
    """Train by `act` and `observe`, from a loop of one's own.

        with jaxrl.Session(env, jaxrl.dqn(), buffer=jaxrl.uniform(10_000, batch_size=64), max_opts=5_000) as session:
            obs, _ = env.reset()
            while not session.is_done:
                next_obs, reward, terminated, truncated, _ = env.step(session.act(obs))
                session.observe(reward, next_obs, terminated, truncated)
                obs = env.reset()[0] if terminated or truncated else next_obs

    With one environment everything may come without the axis `[N]`, and actions then go without it. With several, `act`
    is given the observations of all of them: the first of a new episode where one ended, and elsewhere `next_obs`.
    `next_obs` itself is always the true successor, also of a last step. A Gymnasium vector returns it in its default
    autoreset mode `NEXT_STEP`, and its resets are no steps; in the mode `SAME_STEP` take it from `final_obs`.

    An exception, be it from a callback or Ctrl-C, leaves the session as it was before the call or after it, never in
    between; callbacks are called after it. In a `with` block SIGTERM is such an exception too, `SystemExit(143)`, and
    the session is saved before either leaves the block. One thread at a time may use it.
    """

    _now: SessionState
    _storage: Storage
    _greedy: GreedyPolicy

    def __init__(
        self,
        spec: Any,
        agent: AgentMaker,
        *,
        buffer: Buffer | None = None,
        processor: Processor | None = None,
        config: SessionConfig | None = None,
        resume: bool = False,
        allow_changes: bool = False,
        start_over: bool = False,
        recorders: Sequence[Recorder | str] | None = None,
        hooks: SessionHooks | None = None,
        statistics: Statistics | None = None,
        about: Mapping[str, Any] | None = None,
        interrupt: Interrupt | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings, and take hold of the run directory if there is one.

        Args:
          spec: an `EnvSpec`, an `Env`, or an environment of Gymnasium, stoa or envelope; only its spaces are used.
          agent: what `jaxrl.dqn(...)`, `jaxrl.ppo(...)` or another returns that learns as it goes.
          buffer: what `jaxrl.uniform(...)` returns; left out for an on-policy agent, and only there.
          processor: what makes transitions of steps. Left out, it is `one_step()`, for an on-policy agent behind what
            `jaxrl.on_policy` puts there.
          config: settings to start from; the defaults of `SessionConfig` if left out.
          resume: go on with the session in `run_dir` from its newest valid checkpoint.
          allow_changes: resume although versions, or settings of the agent or of the session, differ that decide the
            training.
          start_over: begin in `run_dir` from the very beginning; what is there is moved to `discarded-N` in it.
          recorders: what takes in the rows, beside the log of the run directory: names, in place of the setting
            `recorders` of `config`, and objects of one's own.
          hooks: functions to call on the way.
          statistics: which of them the summary gives; all over all episodes, and the mean of the last 100, if left out.
          about: entries of one's own in the description of the run, see `describe`.
          interrupt: a handle by which another thread can ask to stop; also found as `session.interrupt`.
          **settings: fields of `SessionConfig`, as in `Session(..., max_opts=50_000)`.

        Raises:
          SettingsError: what cannot be.
        """
        config = (config or SessionConfig()).changed(**settings)
        self.config, self._given_recorders = with_recorders(config, recorders)
        require_recorders(self._given_recorders)
        self.config.check()
        _, how = resumption(bool(resume), None, self.config.run_dir, allow_changes, start_over)
        self.hooks, self.interrupt = hooks or SessionHooks(), Interrupt() if interrupt is None else interrupt
        self._outside = inputs.outside(spec, self.config.num_envs)
        self._stepwise = put_together(self.config, self._outside.spec, agent, buffer, processor)
        self.config, self._rounding = rounded(self.config, self._stepwise)
        self._schedule = schedule_of(self.config, self._stepwise)
        self._closed, self._saves, self._termination = False, list[int](), Termination()
        self._saved: SessionState | None = None
        # Memory is checked here, before the run directory is touched.
        self._stepper = Stepper(self._stepwise, self.config.seed)
        self._open(how, statistics or Statistics())
        if about:
            self.describe(**about)

    # --- what a loop calls ---

    def act(self, obs: PyTree, explore: bool = True) -> Any:
        """Return actions for observations, as NumPy arrays.

        Uniformly random ones during warm-up, unless `random_warmup` is off. With `explore=False` the choice is greedy
        and nothing changes: not the episode, no counter, no stream of randomness. The observations, of any number of
        environments, then are first ones to the processor; over whole episodes with stacked frames use `policy`.

        Raises:
          SettingsError: observations that do not fit the space, or are not those that the last step led to.
        """
        space, num_envs = self._outside.spec.observation_space, self.config.num_envs
        # Greedy actions may be asked for any number of environments; those of training are for all of them.
        given = inputs.take_obs("act: obs", space, num_envs if explore else None, obs)
        if not explore:
            actions, greedy = self._outside.spec.action_space, self._greedy.at(self._stepper.params(self._now))
            return inputs.shown(self._outside, to_indices(actions, greedy(to_elements(space, given.obs))), given.single)
        self._require_going_on("act")
        # Replaced only once the actions are there: an error leaves the session as it was.
        self._now, actions = self._stepper.acting(self._now, given)
        return inputs.shown(self._outside, actions, given.single)

    def observe(self, reward: Any, next_obs: PyTree, terminated: Any, truncated: Any) -> Learnt | None:
        """Take in what the actions led to; return what was learnt, if an optimisation step was due.

        A reward or observation that is not finite cuts its episode, nothing is learnt from it, and it is counted
        (`summary()["invalid_steps"]`); the next observation begins another episode, as `ended` says. So do all of them
        once the session has gone back to its last good checkpoint (to its beginning, without one), for training
        diverged.

        Raises:
          SettingsError: no actions were given before, or what came does not fit them.
          DivergedError: `max_skips` updates in a row were skipped, for none was finite, and `max_rollbacks` returns to
            the last good checkpoint ended no better; or not one step was finite to the end. The session is saved, and
            done.
        """
        self._require_going_on("observe")
        if not self._now.acted:
            raise SettingsError("observe was called without an act before it; call act(obs), then observe, in turns")
        space, count, now = self._outside.spec.observation_space, self.config.num_envs, self._now
        # In an evaluation nothing is learnt, so no step has to be kept from it.
        spoilt = now.host.spoilt if now.trial is None else np.zeros(count, bool)
        result, reset, done = inputs.take_result(
            space, count, reward, next_obs, terminated, truncated, spoilt, now.resetting
        )
        now = now._replace(resetting=done if self._outside.resets_itself else None)
        if now.trial is not None:
            self._now = now
            self._examined(after_step(now.trial, result, reset))
            return None
        # The step donates arrays of the present state. Until the next one is in its place, no signal may raise.
        with Undisturbed():
            after, learnt = self._stepper.after(now, result, reset)
            episodes = list[Episode]()
            if np.count_nonzero(after.host.ended):
                t = count_iterations(self._stepwise.schedule, after.steps)
                episodes = episodes_of(now.host, result, reset, self._schedule.opt_steps(t), after.steps * count)
                after = after._replace(
                    statistics=over(after.statistics, episodes), interval=after.interval.over(episodes)
                )
            self._now = after
            due = self._schedule.is_regular_record(self.opt_steps) or (self.config.record_interval and self._at_end)
            if learnt is not None and due:
                self._record()
        if not (episodes or self._at_end):
            # Ahead, so that the device works while the loop comes round to `act`.
            self._now = self._stepper.chosen(self._now)
        if learnt is not None and self._is_time_to_save():
            self.save()
        # Hooks are called last: whatever they raise, the step is wholly done.
        self._storage.settle(block=False)
        self._call_hooks(learnt, episodes)
        if learnt is not None:
            self._require_updates()
            if self._at_end:
                self._require_valid()
        return learnt

    def cut(self) -> None:
        """Cut the running episodes where they stand: the next observations begin others. Nothing is learnt of it.

        For a loop that gives an episode up between two steps; a cut that comes with a step is given by `truncated`.
        """
        now = self._now
        # Both are cut: the episodes of training and those of an evaluation.
        trial = None if now.trial is None else cut_trial(now.trial)
        self._now = now._replace(host=begun(now.host, np.ones_like(now.host.ended)), acted=False, trial=trial)

    def note(self, text: str | None = None, /, **values: float | None) -> None:
        """Take numbers into the statistics of `summary` and into the next row as `info/NAME`; a text becomes an event.

        The row has their mean, least and largest, or what `statistics` has chosen for the name, over its interval.
        """
        self._log.remark(text)
        self._now = noted(self._now, values)

    def describe(self, **entries: Any) -> None:
        """Put entries of one's own into the description of the run: under `about` in its `metadata.json`.

        They may be numbers, text, and lists and dicts of these, or are refused. Others given before stay.
        """
        inputs.check_entry("about", entries)
        self._storage.describe(entries)

    def evaluate_score(self, score: float) -> bool:
        """Take the score of the present policy; keep it as the best if `score` is strictly greater than any before it.

        NaN and infinity are never best. Return whether it is. The session is done if the score reaches `stop_reward`,
        or is the last of `patience` without a new best.

        Raises:
          DivergedError: the session is done, and not one of its steps was finite.
        """
        return self._scored(float(score), self._stepper.params(self._now))

    def _scored(self, score: float, params: PyTree, evaluation: Evaluation | None = None) -> bool:
        """Take the score of the policy with `params`, the present one, of an `evaluation` or given by the user."""
        now = self._now
        # A copy of the ledger: nothing has changed until the session is replaced as a whole.
        ledger, best = dataclasses.replace(now.ledger), now.best
        # `params` are copies, which stay as they are while training goes on.
        if is_best := ledger.record_score(score, self.opt_steps):
            best = self._log.best(score, params, self._stepper.policy, self.settings())
        # A session that is done keeps the reason that it has.
        stop = None if self.is_done else stopping.after_evaluation(self.config, ledger, score)
        with Undisturbed():
            self._now = now._replace(ledger=ledger, best=best, stop=stop or now.stop)
            columns = {**columns_of_trial(evaluation), **score_columns(score, is_best, now.interval)}
            self._log.scored(columns, evaluation)
            if stop and self.config.record_interval and self.opt_steps > now.interval.opt_steps:
                self._record()
        # Written outside of the block above: a disk that is slow must not hold back a signal.
        self._storage.keep_best(best)
        if stop:
            self._require_valid()
        return is_best

    def evaluate_episodes(self, episodes: int = 20, film: Any = None, video_format: str = "gif") -> None:
        """Evaluate the present policy in this loop: the next `episodes` whole episodes are greedy, and teach nothing.

        `act` and `observe` are called as before, and no counter of steps moves. An episode that is running is played to
        its end by the policy, but does not count; of several environments each plays a fixed number of the episodes.
        Their mean return then is the score that `evaluate_score` is given, `hooks.evaluated` is called, and training
        goes on. `is_done` waits for it.

        `film()`, as `env.render`, draws the first of them, `[H, W, 3]` uint8, for `videos/` and for recorders.

        Raises:
          SettingsError: fewer than one episode, an evaluation is going on, or there is no `run_dir` for a film.
        """
        require_free(self._now.trial, self._closed, episodes)
        self._now = self._stepper.examined(self._now, episodes, shot_of(film, video_format, self.config.run_dir))

    def stop(self, reason: str = "asked") -> None:
        """Ask for the end: `is_done` is true from now on."""
        self.interrupt.stop(reason)

    def save(self) -> None:
        """Begin a checkpoint of the present state; it is on disk when `hooks.save` is called, or `close` returns."""
        facts, now = facts_to_save(self._now, self._stepper, self._log, self._iterations)
        self._now = now
        # The session is replaced as a whole, so one that is still the same object has been saved before.
        again, self._saved = now is not self._saved, now
        self._storage.save(self.opt_steps, tree_of(now), facts, now.best, again)
        scores = {"best_score": now.ledger.best_score, "last_score": now.ledger.last_score}
        self._storage.note(**self._counters(), **scores, status=self._status())
        self._saved_s = time.perf_counter()

    def _is_time_to_save(self) -> bool:
        if self.config.save_interval is None:
            return self._storage.is_time_to_save(time.perf_counter() - self._saved_s)
        return self._schedule.is_regular_save(self.opt_steps)

    def restore(self) -> None:
        """Go back to the newest valid checkpoint, as a session that is resumed; what came after it is forgotten.

        Raises:
          SettingsError: there is no run directory, or the session is closed.
          NoCheckpointError: no checkpoint is valid; nothing was changed.
        """
        if self.config.run_dir is None or self._closed:
            raise SettingsError("restore needs an open session with a run_dir")
        # What is being written must be on the disk before the newest is looked for.
        self._storage.settle()
        self._look_at = 0
        self._now = self._taken_up(self._stepper.first(self._now.statistics.fresh()))._replace(best=self._now.best)
        self._since = (self.env_steps, self._now.ledger.wall)
        self._log.rewind(self.opt_steps)
        self._log.event("restore", f"went back to {self.opt_steps} optimisation steps")

    def close(self) -> None:
        """Save, wait until all is on the disk, and let go of the run directory.

        Raises:
          StorageError: the last checkpoint could not be written.
        """
        if self._closed:
            return
        # First, so that a close that fails is not tried again by another.
        self._closed = True
        try:
            self.save()
            self._storage.keep_best(self._now.best)
            self._storage.finish()
        finally:
            self._log.close()
            self._storage.close()
        self._call_hooks(None, [])
        if self._storage.error is not None:
            raise self._storage.error

    def __repr__(self) -> str:
        known, name = self.summary(), self._outside.spec.name
        known["stop"] = None if known["stop"] == "running" else known["stop"]
        algo = self.settings().get("algo", "custom")
        return format_repr("Session", f"{algo} on {name}", *progress_parts(known), run_dir_part(self.config.run_dir))

    def __enter__(self) -> "Session":
        self._termination.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        finally:
            # SIGTERM is handled to the end of the save.
            self._termination.end()
        report_exit(error, self._termination.came, self.opt_steps, self.config.run_dir)

    # --- what a loop looks at ---

    @property
    def opt_steps(self) -> int:
        """Optimisation steps made."""
        return self._schedule.opt_steps(self._iterations)

    @property
    def env_steps(self) -> int:
        """Environment steps taken in, over all environments."""
        return self._now.steps * self.config.num_envs

    @property
    def is_done(self) -> bool:
        """Whether `max_opts`, `max_env_steps`, `stop_reward` or `patience` is reached, or someone has asked to stop.

        An evaluation that was begun is played to its end before, unless someone has asked to stop.
        """
        over = self._at_end or self._now.stop is not None
        return bool(self.interrupt) or (over and not self.is_evaluating)

    @property
    def is_evaluating(self) -> bool:
        """Whether the episodes of `evaluate_episodes` are being played."""
        return self._now.trial is not None

    @property
    def ended(self) -> np.ndarray:
        """Bool `[N]`: the next observation of this environment begins an episode."""
        trial = self._now.trial
        return (self._now.host if trial is None else trial).ended.copy()

    @property
    def steps_per_sec(self) -> float | None:
        """Environment steps a second since this process opened the session, the time of the loop counted.

        `None` before the first.
        """
        env_steps, wall = self._since
        steps, seconds = self.env_steps - env_steps, self._now.ledger.wall - wall
        return steps / seconds if steps > 0 and seconds > 0 else None

    @property
    def best_score(self) -> float | None:
        """The best score so far."""
        return self._now.ledger.best_score

    @property
    def policy(self) -> GreedyPolicy:
        """The present policy, greedy; it stays as it is while training goes on."""
        return self._greedy.at(self._stepper.params(self._now), opt_steps=self._counters()["opt_steps"])

    def summary(self) -> dict[str, Any]:
        """Return counters, speeds, scores, statistics of the episodes, and means of what was learnt, over all of it."""
        return summary_of(self._now, self._stepper, self._counters(), self._status())

    def settings(self) -> dict[str, Any]:
        """Return all settings of the session, as `config.yaml` holds them."""
        return settings_of_session(self.config, self._stepwise, self._outside.made)

    # --- beginning ---

    def _open(self, resume: Resume, statistics: Statistics) -> None:
        """Take hold of the run directory, and begin or go on."""
        config, regular = self.config, self._schedule.is_regular_save
        require_no_member(config.run_dir)
        self._storage = Storage(config.run_dir, config.keep, self.settings(), resume, regular)
        self._storage.report = self._report
        self._storage.on_saved = self._saves.append
        where = lambda: (self._counters(), self._now.ledger.wall)
        self._log = Logbook(self._schedule, where, (*config.recorders, *self._given_recorders), quiet=False)
        self._look_at = 0  # of the optimisation steps: when to look next whether updates are still made
        try:
            self._now = self._stepper.first(statistics)
            if self._storage.resumes:
                self._now = self._taken_up(self._now)
            self._greedy = GreedyPolicy(self._stepper.policy, self._stepper.params(self._now))
            if resume.run:
                best = self._storage.load_best(jax.eval_shape(lambda: self._stepper.params(self._now)))
                self._now = self._now._replace(best=best)
            self._since = (self.env_steps, self._now.ledger.wall)
            notes = notes_of(config, self._stepwise, self._now.state)
            self._log.open(self._storage, resume.run, (*notes, *self._rounding))
            self._saved_s = time.perf_counter()
        except BaseException:
            self._storage.close()
            raise

    def _taken_up(self, first: SessionState) -> SessionState:
        """Return what the newest valid checkpoint holds."""
        return taken_up(first, self._stepper, self._log, self._storage, self._schedule)

    # --- small things ---

    def _examined(self, trial: Trial) -> None:
        """Go on with an evaluation after a step; take its score if that was the last."""
        self._now = self._now._replace(trial=None if trial.over else trial, acted=False)
        if trial.over:
            self._scored(float(trial.evaluation.returns.mean()), trial.params, trial.evaluation)
            if (shot := trial.shot) is not None:
                self._log.filmed(filmed(shot.taken, str(self.config.run_dir), shot.form, **self._counters()))
            call(self.hooks.evaluated, trial.evaluation)

    def _call_hooks(self, learnt: Learnt | None, episodes: list[Episode]) -> None:
        # Saves are told of in the calls of the loop, not from where they are noticed.
        while self._saves:
            call(self.hooks.save, self._saves.pop(0))
        if learnt is not None:
            call(self.hooks.learnt, learnt)
        for episode in episodes:
            call(self.hooks.episode, episode)

    def _require_updates(self) -> None:
        """Go back to the last good state, or give up, if `max_skips` updates in a row were skipped."""
        if not self.config.max_skips or self.opt_steps < self._look_at:
            return  # To look means to wait for the device. There cannot have been so many yet.
        health = self._stepper.health(self._now)
        left = skips_left(health, self.config.max_skips)
        # No sooner can that many updates have been skipped.
        self._look_at = self.opt_steps + left
        if left == 0:
            what = explain(health, self._stepper.metrics)
            with self._saved_where_diverged():
                stopping.require_try(self._log, self._now.ledger, self.config.max_rollbacks, what)
            self._roll_back(what)

    def _roll_back(self, what: str) -> None:
        """Return to the last good state, or to the beginning, and take another stream of randomness from there."""
        back = gone_back(self._now, self._stepper, self._storage, self._schedule)
        with Undisturbed():
            self._now, self._look_at = back, 0
            self._since = (self.env_steps, self._now.ledger.wall)
            stopping.log_rollback(self._log, self.opt_steps, what)

    def _require_valid(self) -> None:
        """Raise `DivergedError` at the end of a session none of whose steps was valid."""
        if not self.interrupt:
            with self._saved_where_diverged():
                stopping.require_valid(self._log, Validity(self.env_steps, self._now.invalid))

    @contextmanager
    def _saved_where_diverged(self) -> Iterator[None]:
        """Save the session, done, before a `DivergedError` leaves it."""
        try:
            yield
        except DivergedError:
            self._now = self._now._replace(stop="diverged")
            self.save()
            self._storage.settle()
            self._call_hooks(None, [])
            raise

    @property
    def _iterations(self) -> int:
        return count_iterations(self._stepwise.schedule, self._now.steps)

    @property
    def _at_end(self) -> bool:
        return self._iterations >= self._schedule.last

    def _record(self) -> None:
        """Write the row of the interval that ends here, and begin another."""
        self._now = recorded(self._now, self._stepper, self._log, self.opt_steps, self.env_steps)

    def _report(self, line: str) -> None:
        print_stderr(line)
        self._log.event("storage", line)

    def _require_going_on(self, what: str) -> None:
        if self._closed:
            raise SettingsError(f"{what} was called on a session that is closed; resume it from its run_dir")
        if self._at_end and not self.is_evaluating:
            limit = self._schedule.limit(self._iterations)
            raise SettingsError(
                f"{what} was called after {limit} {getattr(self.config, limit)} was reached; "
                "loop while not session.is_done"
            )

    def _counters(self) -> dict[str, int]:
        return {"opt_steps": self.opt_steps, "env_steps": self.env_steps}

    def _status(self) -> str:
        limit = self._at_end and self._schedule.limit(self._iterations)
        return self._now.stop or limit or self.interrupt.reason or "running"


# --- between two calls --------------------------------------------------------------------------------------------


def summary_of(now: SessionState, stepper: Stepper, counters: Mapping[str, int], status: str) -> dict[str, Any]:
    """Return counters, speeds, scores, statistics of the episodes, and means of what was learnt, all over `now`."""
    ledger, wall = now.ledger, now.ledger.wall
    return {
        **counters,
        **{f"{name}_per_sec": steps / wall for name, steps in counters.items()},
        "best_score": ledger.best_score,
        "best_opt_steps": ledger.best_opt_steps,
        "last_score": ledger.last_score,
        "rollbacks": ledger.rollbacks,
        "invalid_steps": now.invalid,
        **now.statistics.summary(),
        **columns_to_write(summarise(stepper.metrics, stepper.add_up(now.past, now.sums))),
        "wall_s": wall,
        "stop": status,
    }


def noted(now: SessionState, values: Mapping[str, float | None]) -> SessionState:
    """Return the session with these numbers among its statistics, and in its next row."""
    return now._replace(statistics=now.statistics.note(values), interval=now.interval.noted(values))


def recorded(now: SessionState, stepper: Stepper, log: Logbook, opt_steps: int, env_steps: int) -> SessionState:
    """Write the row of the interval that ends here, and return the session at the beginning of another."""
    wall, ledger = now.ledger.wall, dataclasses.replace(now.ledger)
    own = now.interval.columns(opt_steps, env_steps, now.invalid, wall, now.statistics.chosen)
    columns = {**own, **summarise(stepper.metrics, now.sums)}
    log.trained(columns, ledger, stepper.stepwise.agent.info.settings or {}, env_steps - now.interval.env_steps)
    begun = Interval(opt_steps=opt_steps, env_steps=env_steps, invalid=now.invalid, wall=wall)
    past, sums = stepper.add_up(now.past, now.sums), zero_sums(len(stepper.metrics))
    return now._replace(past=past, sums=sums, interval=begun, ledger=ledger)


def facts_to_save(now: SessionState, stepper: Stepper, log: Logbook, t: int) -> tuple[dict[str, Any], SessionState]:
    """Return what a checkpoint after `t` iterations holds beside its arrays, and the session that has got further."""
    # `facts` may set the tries back in this copy; the session takes that over below.
    ledger = dataclasses.replace(now.ledger, t=t)
    own = {"spec": spec_facts(stepper.policy), **facts_of(now)}
    facts = log.facts(ledger, stepper.health(now), **own)
    if ledger.tries != now.ledger.tries:
        now = now._replace(ledger=dataclasses.replace(now.ledger, tries=ledger.tries))
    return facts, now


def taken_up(first: SessionState, stepper: Stepper, log: Logbook, storage: Storage, schedule: Schedule) -> SessionState:
    """Return what the newest valid checkpoint holds, in the structure of `first`."""
    like = tree_of(first)
    storage.check_fits(like)
    step, tree, facts = storage.load(like)
    with unpacking(f"{step} of {storage.path}", "no session's"):
        now = restored(tree, facts, log.restored_ledger(facts, first.ledger), first.statistics)
    now = with_changes(now, stepper.stepwise, schedule, storage.decisive)
    storage.go_on()
    return now


def gone_back(now: SessionState, stepper: Stepper, storage: Storage, schedule: Schedule) -> SessionState:
    """Return the last good state, or the beginning, with another stream of randomness to go on with."""
    fresh, found = now.statistics.fresh(), storage.rollback(shapes_of(now))
    ledger = stopping.rolled_back_ledger(now.ledger, found)
    if found is None:
        back = stepper.first(fresh)._replace(ledger=ledger)
    else:
        with unpacking(f"of {storage.path}", "no session's"):
            back = restored(*found, ledger, fresh)
        back = with_changes(back, stepper.stepwise, schedule, storage.decisive)
    return for_another_try(back)._replace(best=now.best, resetting=now.resetting)


# --- the parts that settings ask for ------------------------------------------------------------------------------


OF_REPLAY = ("opt_interval", "updates", "warmup", "random_warmup")
"""Settings that only agents read which learn from replay."""


def put_together(
    config: SessionConfig, spec: EnvSpec, agent: AgentMaker, buffer: Buffer | None, processor: Processor | None
) -> Stepwise:
    """Put the parts together; raise `SettingsError` for those that do not fit one another.

    A processor that is left out is one of single steps; of an on-policy agent, what suits it.
    """
    require_alone("a session")
    known = interaction.build_agent(agent, processor, spec)
    if known.prepare is None and known.info.offline:
        able = join_names([*algorithm_names("off_policy"), *algorithm_names("on_policy")], "or")
        raise SettingsError(f"a session learns from its own steps, and {known.name} from data; use {able}")
    if known.prepare is not None:
        require_default(config, OF_REPLAY, f"{known.name} learns from rollouts, and keeps no replay")
        if buffer is not None:
            raise SettingsError(f"{known.name} learns from rollouts, and keeps no replay; leave buffer out")
        suits = defaults_for(known.name, "on_policy")
        return _from_rollouts(
            config, spec, *interaction.connect(known, processor or interaction.make_default_processor(suits))
        )
    require_default(config, ROLLOUT_SETTINGS, f"{known.name} learns from replay, not from rollouts")
    if buffer is None:
        raise SettingsError(f"{known.name} learns from replay; give buffer, as in buffer=jaxrl.uniform(50_000)")
    return _from_replay(config, spec, *interaction.connect(known, (processor or one_step()).for_replay), buffer)


def rounded(config: SessionConfig, stepwise: Stepwise) -> tuple[SessionConfig, list[str]]:
    """Return settings whose `max_opts` is made of whole iterations, and what to say of it."""
    length = rounded_up(config.max_opts, stepwise.schedule.updates)
    return replace(config, max_opts=length), rounding(config.max_opts, length, stepwise.schedule.updates)


def _from_replay(config: SessionConfig, spec: EnvSpec, processor: Processor, agent: Agent, buffer: Buffer) -> Stepwise:
    buffer = replay.adapt_buffer(agent, replay.set_goal_fn(buffer, processor, spec.name), config.num_envs)
    schedule = replay.make_update_schedule(
        horizon=processor.horizon,
        least=replay.min_rows(buffer, config.num_envs),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        updates=config.updates,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
    )
    return Stepwise(spec, agent, processor, schedule, Replay(agent, processor, buffer, schedule))


def _from_rollouts(config: SessionConfig, spec: EnvSpec, processor: Processor, agent: Agent) -> Stepwise:
    check_count("num_envs", config.num_envs)
    asked = (getattr(config, name) for name in ROLLOUT_SETTINGS)
    passes = make_minibatch_schedule(agent, processor, config.num_envs, *asked)
    schedule = UpdateSchedule(config.num_envs, passes.rollout, passes.updates, horizon=0, fill=0, random_warmup=False)
    return Stepwise(spec, agent, processor, schedule, passes)


def require_default(config: SessionConfig, names: tuple[str, ...], why: str) -> None:
    """Raise `SettingsError`, saying `why`, if one of the settings `names` is not as it is left out."""
    for name in names:
        if getattr(config, name) != getattr(SessionConfig, name):
            raise SettingsError(f"{name} is {getattr(config, name)}, but {why}; leave it out")


def schedule_of(config: SessionConfig, stepwise: Stepwise) -> Schedule:
    schedule = stepwise.schedule
    return Schedule(
        max_opts=config.max_opts or _endless(schedule),
        opt_steps_per_step=schedule.updates,
        env_steps_per_step=schedule.rows,
        warmup_env_steps=schedule.warmup_env_steps,
        record_interval=config.record_interval,
        save_interval=config.save_interval,
        max_env_steps=config.max_env_steps,
    )


def _endless(schedule: UpdateSchedule) -> int:
    """Return how many optimisation steps can be counted, in whole iterations."""
    most = min(MAX_COUNT // schedule.updates, MAX_COUNT - schedule.warmup_env_steps // schedule.rows - 1)
    return most * schedule.updates


def notes_of(config: SessionConfig, stepwise: Stepwise, state: StepwiseState) -> list[str]:
    """Return what is said as a session begins."""
    more = (
        ()
        if stepwise.buffer is None
        else stepwise.schedule.notes(stepwise.buffer, stepwise.schedule.rows, config.warmup)
    )
    return [str(plan_of_session(stepwise, state)), *more, *attempts.notes()]


def settings_of_session(config: SessionConfig, stepwise: Stepwise, made: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of a session; `made` is what builds one of its environments, if anything does."""
    own = asdict(config)
    del own["run_dir"]  # a run can be moved
    for name in ROLLOUT_SETTINGS if stepwise.passes is None else OF_REPLAY:
        del own[name]
    if stepwise.passes is not None:
        own |= settings_of_schedule(stepwise.passes)
    if stepwise.buffer is not None:
        own["buffer"] = stepwise.buffer.settings
    settings = interaction.settings_of(stepwise.agent, stepwise.processor, stepwise.spec, made, **own)
    return {**settings, "custom": [*settings["custom"], "loop"], "driven": "from outside"}

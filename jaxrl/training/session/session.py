"""Training from the user's own loop: a script, a robot, a game engine."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.errors import DivergedError, SettingsError, check_count, check_number, check_type, print_stderr
from jaxrl.parsing import format_repr
from jaxrl.processors.base import Processor
from jaxrl.processors.n_step import one_step
from jaxrl.registry import algorithm_names, defaults_for, join_names
from jaxrl.spaces import EnvSpec, to_elements, to_indices
from jaxrl.strategies import interaction, replay
from jaxrl.strategies.off_policy import ReplayLearner
from jaxrl.strategies.on_policy import ROLLOUT_SETTINGS, make_minibatch_schedule, settings_of_schedule
from jaxrl.strategies.replay import UpdateSchedule
from jaxrl.strategies.stepwise import Stepwise, StepwiseState, count_iterations
from jaxrl.strategies.teacher import TrainedPolicy, carry_teacher, make_teacher, settings_of_teacher
from jaxrl.training.divergence import Validity, explain, skips_left
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.film import require_writer, save_video
from jaxrl.training.interrupt import DeferredSignals, Interrupt, Termination
from jaxrl.training.ledger import Ledger, require_counters
from jaxrl.training.logbook import Logbook, reading_facts
from jaxrl.training.policy import GreedyPolicy, spec_facts
from jaxrl.training.processes import require_alone
from jaxrl.training.program import summarise, zero_sums
from jaxrl.training.recorders import Recorder, require_recorders
from jaxrl.training.report import call, check_hooks, progress_parts, run_dir_part
from jaxrl.training.sanity import columns_to_write
from jaxrl.training.schedule import MAX_COUNT, Schedule
from jaxrl.training.session import inputs
from jaxrl.training.session.evaluation import EpisodeEvaluation, Recording
from jaxrl.training.session.state import (
    Learnt,
    Resets,
    SessionHooks,
    SessionState,
    episodes_of,
    reseed_after_rollback,
    restore_session,
    shapes_of,
    start_episodes,
    tree_of,
    with_best,
    with_changes,
)
from jaxrl.training.session.statistics import (
    OF_SESSION,
    Episode,
    Interval,
    Series,
    Statistics,
    add_episodes,
    score_columns,
)
from jaxrl.training.session.stepper import Stepper, plan_of_session
from jaxrl.training.settings import SessionConfig, check_format, round_length, with_recorders
from jaxrl.training.storage.checkpoints import Facts, Store
from jaxrl.training.storage.members import require_no_member
from jaxrl.training.storage.run import Resume, Storage, resolve_resume
from jaxrl.trees import PyTree
from jaxrl.xla import attempts


class Session:
    """Train from your own loop, by `act` and `observe`.

        with jaxrl.Session(env, jaxrl.dqn(), buffer=jaxrl.uniform(10_000, batch_size=64), max_opts=5_000) as session:
            obs, _ = env.reset()
            while not session.is_done:
                next_obs, reward, terminated, truncated, _ = env.step(session.act(obs))
                session.observe(reward, next_obs, terminated, truncated)
                obs = env.reset()[0] if terminated or truncated else next_obs

    With one environment, inputs may omit the axis `[N]`; actions then omit it too. With several, `act` takes the
    observations of all: the first of a new episode where one ended, `next_obs` elsewhere. `next_obs` itself is always
    the true successor, also at the last step of an episode. A Gymnasium vector returns it in its default autoreset mode
    `NEXT_STEP`, whose resets are counted as steps, but not learnt from; in mode `SAME_STEP` take it from `final_obs`.

    Calls are atomic: an exception, from a callback or Ctrl-C, leaves the session as before the call or as after it;
    callbacks run last. In a `with` block SIGTERM raises `SystemExit(143)`, and the session is saved before an exception
    leaves the block. Not thread-safe: use it from one thread at a time.
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
        teacher: TrainedPolicy | None = None,
        **settings: Any,
    ) -> None:
        """Validate the settings, and lock the run directory if there is one.

        Args:
          spec: an `EnvSpec`, an `Env`, or an environment of Gymnasium, stoa or envelope; only its spaces are used.
          agent: an online agent, from `jaxrl.dqn(...)`, `jaxrl.ppo(...)` or another.
          buffer: a replay buffer, as from `jaxrl.uniform(...)`; omit it for an on-policy agent, and only there.
          processor: turns steps into transitions (default: `one_step()`, for an on-policy agent after the default
            normalisation of `jaxrl.on_policy`).
          config: base settings (default: `SessionConfig()`).
          resume: resume the session in `run_dir` from its newest valid checkpoint.
          allow_changes: resume even if versions, or settings of the agent or the session, that decide the training
            have changed.
          start_over: start from scratch in `run_dir`; an existing run is moved to `discarded-N` in it.
          recorders: destinations of the rows besides the log of the run directory: names, which override the setting
            `recorders` of `config`, and `Recorder` objects.
          hooks: callbacks.
          statistics: statistics in the summary (default: all over all episodes, and the mean of the last 100).
          about: user-defined entries for the metadata of the run, see `describe`.
          interrupt: a handle to stop the session from another thread; also `session.interrupt`.
          teacher: a trained policy to learn from, as for `jaxrl.on_policy`.
          **settings: fields of `SessionConfig`, as in `Session(..., max_opts=50_000)`.

        Raises:
          SettingsError: a setting is invalid, or settings contradict each other.
        """
        config = (config or SessionConfig()).changed(**settings)
        self.config, self._given_recorders = with_recorders(config, recorders)
        require_recorders(self._given_recorders)
        check_type("hooks", hooks, SessionHooks, "jaxrl.SessionHooks(...)")
        check_hooks(hooks or SessionHooks())
        check_type("statistics", statistics, Statistics, "jaxrl.Statistics(...)")
        check_type("interrupt", interrupt, Interrupt, "jaxrl.Interrupt()")
        self.config.check()
        check_type("about", about, Mapping, "a dict")
        inputs.check_entry("about", about or {})
        _, how = resolve_resume(bool(resume), None, self.config.run_dir, allow_changes, start_over)
        self.hooks, self.interrupt = hooks or SessionHooks(), Interrupt() if interrupt is None else interrupt
        self._outside = inputs.describe_envs(spec, self.config.num_envs)
        self._stepwise = assemble(self.config, self._outside.spec, agent, buffer, processor, teacher)
        self._taught_by = settings_of_teacher(teacher)
        self.config, self._rounding = round_length(self.config, self._stepwise.schedule.updates)
        self._schedule = schedule_of(self.config, self._stepwise)
        self._closed, self._saves, self._termination = False, list[int](), Termination()
        self._closed_by: str | None = None
        """Why it was closed before it was done."""
        self._saved: SessionState | None = None
        # Checks memory, before the run directory is touched.
        self._stepper = Stepper(self._stepwise, self.config.seed)
        self._open(how, statistics or Statistics())
        if about:
            self._storage.describe(about)

    # --- the interface of the user's loop ---

    def act(self, obs: PyTree, explore: bool = True) -> Any:
        """Return actions for observations, as NumPy arrays.

        During warm-up they are uniformly random, unless `random_warmup` is off. With `explore=False` they are greedy,
        for any number of environments, and no episode, counter or random stream changes. The processor then treats each
        observation as the first of an episode; with stacked frames use `policy` over whole episodes instead.

        Raises:
          SettingsError: the observations do not fit the space, or are not those that the last step led to.
        """
        space, num_envs = self._outside.spec.observation_space, self.config.num_envs
        # Training acts in all environments at once; greedy actions are for any number of observations.
        given = inputs.take_obs("act: obs", space, num_envs if explore else None, obs)
        if not explore:
            actions, greedy = self._outside.spec.action_space, self._greedy.at(self._stepper.params(self._now))
            return inputs.format_action(
                self._outside, to_indices(actions, greedy(to_elements(space, given.obs))), given.single
            )
        self._require_going_on("act")
        # Assigned only after the actions are computed: an error leaves the session unchanged.
        self._now, actions = self._stepper.act(self._now, given)
        return inputs.format_action(self._outside, actions, given.single)

    def observe(self, reward: Any, next_obs: PyTree, terminated: Any, truncated: Any) -> Learnt | None:
        """Record the results of the actions; return the metrics if an optimisation step was due, else `None`.

        A step with a non-finite reward or observation truncates its episode, is not learnt from, and is counted in
        `summary()["invalid_steps"]`; the next observation begins another episode, see `ended`. If training diverges,
        the session rolls back to its last good checkpoint (without one, to its start), and all episodes begin anew.

        Raises:
          SettingsError: `act` was not called before, or an argument does not fit the spaces.
          DivergedError: `max_skips` updates in a row were non-finite and skipped, also after `max_rollbacks` rollbacks;
            or no step of the session was finite. The session is saved and done.
        """
        self._require_going_on("observe")
        if not self._now.acted:
            raise SettingsError("observe was called without an act before it; call act(obs), then observe, in turns")
        space, count, now = self._outside.spec.observation_space, self.config.num_envs, self._now
        # An evaluation learns nothing, so there is no step to exclude.
        spoilt = now.host.spoilt if now.evaluation is None else np.zeros(count, bool)
        resetting = None if now.resets is None else now.resets.due
        result, reset, done = inputs.take_result(
            space, count, reward, next_obs, terminated, truncated, spoilt, resetting
        )
        now = now._replace(resets=Resets(done, result.next_obs) if self._outside.resets_itself else None)
        if now.evaluation is not None:
            self._now = now
            self._update_evaluation(now.evaluation.after(result, reset))
            return None
        # The step donates arrays of the current state: no signal may raise before the new state replaces it.
        with DeferredSignals():
            after, learnt = self._stepper.step(now, result, reset)
            episodes = list[Episode]()
            if np.count_nonzero(after.host.ended):
                t = count_iterations(self._stepwise.schedule, after.steps)
                no_end = reset if now.unfinished is None else reset | now.unfinished
                episodes = episodes_of(now.host, result, no_end, self._schedule.opt_steps(t), after.steps * count)
                statistics, interval = add_episodes(after.statistics, after.interval, episodes)
                after = after._replace(statistics=statistics, interval=interval)
            self._now = after
            every = self.config.record_interval
            due = self._schedule.is_due(every, self.opt_steps) or (every and self._at_end)
            if learnt is not None and due:
                self._record()
        if not (episodes or self._at_end):
            # Choose ahead: the device works while the user's loop gets back to `act`.
            self._now = self._stepper.with_actions(self._now)
        if learnt is not None and self._is_time_to_save():
            self.save()
        # Hooks come last: whatever they raise, the step is complete.
        self._storage.collect_saves(block=False)
        self._call_hooks(learnt, episodes)
        if learnt is not None:
            self._require_updates()
            if self._at_end:
                self._require_valid()
        return learnt

    def cut(self) -> None:
        """Truncate the running episodes: the next observations begin new ones. Nothing is learnt from the cut itself.

        For a loop that abandons an episode between two steps; if it ends with a step, pass `truncated` instead.
        """
        self._require_open("cut")
        now = self._now
        # Truncate the episodes both of training and of an evaluation.
        host = start_episodes(now.host, np.ones_like(now.host.ended))
        evaluation = None if now.evaluation is None else now.evaluation.cut()
        self._now = now._replace(host=host, acted=False, evaluation=evaluation, unfinished=None)

    def note(self, text: str | None = None, /, **values: float | None) -> None:
        """Add numbers to the statistics of `summary` and, as `info/NAME`, to the next row; log `text` as an event.

        The row has their mean, minimum and maximum over its interval, or what `statistics` selects for the name.

        Raises:
          SettingsError: a value is no number, a name is one of the session's own series, or the session is closed.
        """
        self._require_open("note")
        if taken := OF_SESSION.intersection(values):
            raise SettingsError(f"note: a session has a series {min(taken)!r} of its own; take another name")
        for name, value in values.items():
            if value is not None:
                check_number(f"note: {name}", value)
        self._log.log_note(text)
        now = self._now
        self._now = now._replace(statistics=now.statistics.note(values), interval=now.interval.add_notes(values))

    def describe(self, **entries: Any) -> None:
        """Add entries under `about` in the `metadata.json` of the run; earlier ones stay.

        They are numbers, text, and lists and dicts of these; anything else is rejected.
        """
        self._require_open("describe")
        inputs.check_entry("about", entries)
        self._storage.describe(entries)

    def evaluate_score(self, score: float) -> bool:
        """Record the score of the current policy; return whether it is the best: finite and greater than all before.

        The best policy is kept. The session is done if the score reaches `stop_reward`, or is the last of `patience`
        without a new best.

        Raises:
          DivergedError: the session is done, and none of its steps was finite.
        """
        self._require_open("evaluate_score")
        return self._record_score(check_number("evaluate_score: score", score), self._stepper.params(self._now))

    def _record_score(self, score: float, params: PyTree, evaluation: Evaluation | None = None) -> bool:
        """Record the score of the current policy, with `params`; it is from an `evaluation` or from the user."""
        now = self._now
        # A copy: nothing changes before the session state is replaced at once.
        ledger, best = replace(now.ledger), now.best
        # `params` are copies, which training does not donate.
        if is_best := ledger.record_score(score, self.opt_steps):
            best = self._log.best(score, params, self._stepper.policy, self.settings())
        # A session that is done keeps its stop reason.
        stop = None if self.is_done else ledger.limit_reached(self.config, score)
        with DeferredSignals():
            self._now = now._replace(ledger=ledger, best=best, stop=stop or now.stop)
            self._log.log_score(score_columns(score, is_best, self._latest_returns(), evaluation), evaluation)
            if stop and self.config.record_interval and self.opt_steps > now.interval.opt_steps:
                self._record()
        # Written outside of the block above: a slow disk must not delay a signal.
        self._storage.keep_best(best)
        if stop:
            self._require_valid()
        return is_best

    def evaluate_episodes(self, episodes: int = 20, film: Any = None, video_format: str = "gif") -> None:
        """Evaluate the current policy in this loop: the next `episodes` episodes are greedy, and nothing is learnt.

        Call `act` and `observe` as before; no step counter moves. Running episodes are played to their ends by the
        policy, uncounted; each of several environments then plays a fixed number of episodes. Their mean return is
        passed to `evaluate_score`, `hooks.evaluated` is called, and training continues. `is_done` is false until then.

        `film()`, such as `env.render`, draws the first episode, `[H, W, 3]` uint8, for `videos/` and the recorders.

        Raises:
          SettingsError: fewer than one episode, an evaluation in progress, or a film without a `run_dir`.
        """
        check_count("episodes", episodes)
        self._require_open("evaluate_episodes")
        if self.is_evaluating:
            raise SettingsError("evaluate_episodes: an evaluation is going on; wait for is_evaluating to end")
        recording = None
        if film is not None:
            if self.config.run_dir is None:
                raise SettingsError("film writes into the directory of the run; set run_dir")
            check_format(video_format)
            require_writer(video_format)
            recording = Recording(film, video_format)
        self._now = self._stepper.start_evaluation(self._now, episodes, recording)

    def stop(self, reason: str = "asked") -> None:
        """Request the end of the session: `is_done` is true from now on."""
        self.interrupt.stop(reason)

    def save(self) -> None:
        """Start to save a checkpoint; it is complete on disk when `hooks.save` is called, or `close` returns."""
        self._require_open("save")
        begun, now = time.perf_counter(), self._now
        # `_facts` may reset the tries of this copy; the session adopts that.
        ledger = replace(now.ledger)
        facts = self._facts(ledger)
        if ledger.tries != now.ledger.tries:
            now = self._now = now._replace(ledger=replace(now.ledger, tries=ledger.tries))
        # Every change makes a new object: the same one has been saved before.
        again, self._saved = now is not self._saved, now
        self._storage.save(self.opt_steps, tree_of(now), facts, now.best, again)
        scores = {"best_score": now.ledger.best_score, "last_score": now.ledger.last_score}
        self._storage.update_metadata(**self._counters(), **scores, status=self._status())
        self._saved_s = time.perf_counter()
        self._held_s = self._saved_s - begun

    def _facts(self, ledger: Ledger) -> dict[str, Any]:
        """Return the facts of a checkpoint of the present state, with this ledger."""
        now, ledger.t = self._now, self._iterations
        own = {
            "spec": spec_facts(self._stepper.policy),
            "steps": now.steps,
            "invalid": now.invalid,
            "statistics": now.statistics.facts(),
            "interval": now.interval.facts(),
        }
        return self._log.facts(ledger, self._stepper.health(now), **own)

    def _is_time_to_save(self) -> bool:
        if self.config.save_interval is None:
            return self._storage.is_time_to_save(time.perf_counter() - self._saved_s, self._held_s)
        return self._schedule.is_regular_save(self.opt_steps)

    def restore(self) -> None:
        """Rewind to the newest valid checkpoint, as if the session were resumed; later progress is lost.

        Raises:
          SettingsError: there is no run directory, or the session is closed.
          NoCheckpointError: no checkpoint is valid; nothing was changed.
        """
        self._require_open("restore")
        if self.config.run_dir is None:
            raise SettingsError("restore needs a session with a run_dir")
        # A pending save may be the newest checkpoint: wait for it.
        self._storage.collect_saves()
        self._look_at = 0
        now = self._now
        loaded = self._load_newest(self._stepper.initial_state(now.statistics.fresh()))
        self._now = with_best(loaded, now.best)._replace(resets=now.resets)
        self._since = (self.env_steps, self._now.ledger.wall)
        self._log.rewind(self.opt_steps)
        self._log.event("restore", f"went back to {self.opt_steps} optimisation steps")

    def close(self) -> None:
        """Save, wait for all pending writes, and release the run directory; afterwards nothing is learnt or written.

        Raises:
          StorageError: the last checkpoint could not be written.
        """
        if self._closed:
            return
        error = sys.exc_info()[1]
        signalled = self._termination.came or isinstance(error, KeyboardInterrupt)
        if signalled:
            self._closed_by = "SIGTERM" if self._termination.came else "SIGINT"
        else:
            left = isinstance(error, GeneratorExit | None) or (isinstance(error, SystemExit) and not error.code)
            self._closed_by = "left" if left else f"failed: {type(error).__name__}"
        # A first signal waits for the save; the second ends the process at once.
        with DeferredSignals(limit=0 if signalled else 1):
            try:
                self.save()
                self._storage.keep_best(self._now.best)
                self._storage.finish()
            finally:
                self._closed = True  # also if it failed, so that the next call does not retry it
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
        except (KeyboardInterrupt, SystemExit) as late:  # deferred by the last save
            self._print_stop(late)
            raise
        finally:
            # Handle SIGTERM until the save is complete.
            self._termination.end()
        self._print_stop(error)

    def _print_stop(self, error: BaseException | None) -> None:
        """Print where and by which signal the session was stopped, if by any."""
        terminated, run_dir = self._termination.came, self.config.run_dir
        if terminated or isinstance(error, KeyboardInterrupt):
            where = f"stopped by {'SIGTERM' if terminated else 'SIGINT'} at {self.opt_steps:,} optimisation steps"
            saved = f"saved; continue with Session(..., run_dir={run_dir!r}, resume=True)"
            print_stderr(f"{where}; {saved if run_dir else 'nothing is saved without a run_dir'}")

    # --- progress and results ---

    @property
    def opt_steps(self) -> int:
        """Optimisation steps so far."""
        return self._schedule.opt_steps(self._iterations)

    @property
    def env_steps(self) -> int:
        """Environment steps observed, over all environments."""
        return self._now.steps * self.config.num_envs

    @property
    def is_done(self) -> bool:
        """Whether `max_opts`, `max_env_steps`, `stop_reward` or `patience` is reached, or a stop was requested.

        An evaluation in progress is finished first, unless a stop was requested.
        """
        ended = self._at_end or self._now.stop is not None
        return bool(self.interrupt) or (ended and not self.is_evaluating)

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation by `evaluate_episodes` is in progress."""
        return self._now.evaluation is not None

    @property
    def ended(self) -> np.ndarray:
        """Bool `[N]`: the next observation of this environment begins an episode."""
        now = self._now
        if now.evaluation is not None:
            return now.evaluation.ended.copy()
        # An evaluation may have left environments inside an episode.
        return now.host.ended.copy() if now.unfinished is None else now.host.ended & ~now.unfinished

    @property
    def steps_per_sec(self) -> float | None:
        """Environment steps per second since this process opened the session, including the time of the user's loop.

        `None` before the first step.
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
        """A snapshot of the current policy, greedy; training does not change it."""
        return self._greedy.at(self._stepper.params(self._now), opt_steps=self._counters()["opt_steps"])

    def summary(self) -> dict[str, Any]:
        """Return counters, speeds, scores, episode statistics and means of training metrics, of the whole session."""
        now, stepper, counters = self._now, self._stepper, self._counters()
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
            **columns_to_write(summarise(stepper.metrics, stepper.merge_sums(now.past, now.sums))),
            "wall_s": wall,
            "stop": self._status(),
        }

    def settings(self) -> dict[str, Any]:
        """Return all settings of the session, as in `config.yaml`."""
        return settings_of_session(self.config, self._stepwise, self._outside.made, self._taught_by)

    # --- beginning ---

    def _open(self, resume: Resume, statistics: Statistics) -> None:
        """Lock the run directory, and start or resume."""
        config = self.config
        if config.run_dir is not None:
            require_no_member(config.run_dir)
        self._storage = Storage(config.run_dir, config.keep, self.settings(), resume, self._check_checkpoint)
        self._storage.report = self._report
        self._storage.on_saved = self._saves.append
        where = lambda: (self._counters(), self._now.ledger.wall)
        self._log = Logbook(self._schedule, where, (*config.recorders, *self._given_recorders), quiet=False)
        self._look_at = 0  # optimisation step of the next health check
        lost: str | None = None
        try:
            self._now = self._stepper.initial_state(statistics)
            if self._storage.resumes:
                self._now = self._load_newest(self._now)
            self._greedy = GreedyPolicy(self._stepper.policy, self._stepper.params(self._now))
            if resume.enabled:
                best = self._storage.load_best(jax.eval_shape(lambda: self._stepper.params(self._now)))
                ledger = self._now.ledger
                if lost := self._storage.explain_lost_best(best, ledger.best_score, ledger.best_opt_steps):
                    ledger.forget_scores()
                self._now = with_best(self._now, best)
            self._since = (self.env_steps, self._now.ledger.wall)
            notes = [*notes_of(config, self._stepwise, self._now.state), *([lost] if lost else [])]
            # What its environments do after a checkpoint is never the same again.
            self._log.open(self._storage, resume.enabled, False, (*notes, *self._rounding))
            self._saved_s, self._held_s = time.perf_counter(), 0.0
        except BaseException:
            try:
                self._log.close()
            finally:
                self._storage.close()
            raise

    def _check_checkpoint(self, checkpoints: Store, step: int, facts: Facts) -> None:
        """Raise `SettingsError` unless the newest of `checkpoints`, `step`, can be resumed."""
        checkpoints.check_newest(self._stepper.shapes())
        # Under other settings the same steps would mean other counts.
        with reading_facts(f"{step} of {self.config.run_dir}", "a session"):
            opt_steps = self._schedule.opt_steps(count_iterations(self._stepwise.schedule, facts["steps"]))
            counted = {"opt_steps": opt_steps, "env_steps": facts["steps"] * self.config.num_envs}
        require_counters(f"{step} of {self.config.run_dir}", step, facts, counted)

    def _load_newest(self, first: SessionState) -> SessionState:
        """Load the newest valid checkpoint, in the structure of `first`."""
        storage, like = self._storage, tree_of(first)
        step, tree, facts = storage.load(like)
        with reading_facts(f"{step} of {storage.path}", "a session"):
            now = restore_session(tree, facts, self._log.restore_ledger(facts, first.ledger), first.statistics)
        now = with_changes(now, self._stepwise, self._schedule, storage.training_changes)
        storage.commit_resume()
        return now

    # --- helpers ---

    def _update_evaluation(self, evaluation: EpisodeEvaluation) -> None:
        """Update the evaluation after a step; record its score after the last."""
        now = self._now._replace(evaluation=evaluation, acted=False)
        if not evaluation.is_over:
            self._now = now
            return
        # Where other environments are inside an episode, training goes on from there.
        host = now.host._replace(seen=evaluation.seen)
        self._now = now._replace(evaluation=None, host=host, unfinished=~evaluation.ended)
        self._record_score(float(evaluation.result.returns.mean()), evaluation.params, evaluation.result)
        if (recording := evaluation.recording) is not None:
            run_dir = str(self.config.run_dir)
            self._log.log_video(save_video(recording.result, run_dir, recording.form, **self._counters()))
        call(self.hooks.evaluated, evaluation.result)

    def _call_hooks(self, learnt: Learnt | None, episodes: list[Episode]) -> None:
        # Finished saves are queued where they are noticed, and reported here, because hooks run last.
        while self._saves:
            call(self.hooks.save, self._saves.pop(0))
        if learnt is not None:
            call(self.hooks.learnt, learnt)
        for episode in episodes:
            call(self.hooks.episode, episode)

    def _require_updates(self) -> None:
        """Roll back, or raise `DivergedError`, if `max_skips` updates in a row were skipped."""
        if not self.config.max_skips or self.opt_steps < self._look_at:
            return  # too early for so many; reading the health waits for the device
        health = self._stepper.health(self._now)
        left = skips_left(health, self.config.max_skips)
        # The earliest step by which that many updates can have been skipped.
        self._look_at = self.opt_steps + left
        if left == 0:
            what = explain(health, self._stepper.metrics)
            with self._saved_where_diverged():
                self._log.require_rollback_left(self._now.ledger, self.config.max_rollbacks, what)
            self._roll_back(what)

    def _roll_back(self, what: str) -> None:
        """Roll back to the last good state, or to the start, and continue with another random stream."""
        now, storage = self._now, self._storage
        fresh, found = now.statistics.fresh(), storage.rollback(shapes_of(now))
        ledger = now.ledger.roll_back(found[1]["ledger"] if found else None)
        if found is None:
            back = self._stepper.initial_state(fresh)._replace(ledger=ledger)
        else:
            with reading_facts(f"of {storage.path}", "a session"):
                back = restore_session(*found, ledger, fresh)
            back = with_changes(back, self._stepwise, self._schedule, storage.training_changes)
        back = back._replace(best=now.best, resets=now.resets)
        with DeferredSignals():
            self._now, self._look_at = back, 0
            self._since = (self.env_steps, self._now.ledger.wall)
            if found is None:
                storage.save_start(tree_of(back), self._facts(ledger.before_rollback()))
            self._log.go_back(self.opt_steps, found[1] if found else None)
            self._log.log_rollback(what)
            self._now = reseed_after_rollback(back)

    def _require_valid(self) -> None:
        """Raise `DivergedError` at the end of a session without a single valid step."""
        if not self.interrupt:
            with self._saved_where_diverged():
                self._log.require_valid(Validity(self.env_steps, self._now.invalid))

    @contextmanager
    def _saved_where_diverged(self) -> Iterator[None]:
        """Mark the session as done and save it before a `DivergedError` propagates."""
        try:
            yield
        except DivergedError:
            self._now = self._now._replace(stop="diverged")
            self.save()
            self._storage.collect_saves()
            self._call_hooks(None, [])
            raise

    @property
    def _iterations(self) -> int:
        return count_iterations(self._stepwise.schedule, self._now.steps)

    @property
    def _at_end(self) -> bool:
        return self._iterations >= self._schedule.last

    def _record(self) -> None:
        """Log the row of the current interval, and start another."""
        now, stepper, opt_steps, env_steps = self._now, self._stepper, self.opt_steps, self.env_steps
        wall, ledger = now.ledger.wall, replace(now.ledger)
        own = now.interval.columns(opt_steps, env_steps, now.invalid, wall, now.statistics.chosen)
        columns, agent = {**own, **summarise(stepper.metrics, now.sums)}, self._stepwise.agent.info.settings or {}
        self._log.log_train(columns, ledger, agent, env_steps - now.interval.env_steps)
        statistics = now.interval.statistics.fresh()
        begun = Interval(statistics, opt_steps=opt_steps, env_steps=env_steps, invalid=now.invalid, wall=wall)
        past, sums = stepper.merge_sums(now.past, now.sums), zero_sums(len(stepper.metrics))
        self._now = now._replace(past=past, sums=sums, interval=begun, recorded=now.interval.returns, ledger=ledger)

    def _latest_returns(self) -> Series:
        """Return those of the current interval, or of the last row if it is of this step and none ended since."""
        interval = self._now.interval
        ended = interval.returns.count + interval.returns.not_finite
        is_of_row = interval.opt_steps == self.opt_steps and not ended
        return self._now.recorded if is_of_row else interval.returns

    def _report(self, line: str) -> None:
        print_stderr(line)
        self._log.event("storage", line)

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise SettingsError(f"{what} was called on a session that is closed; resume it from its run_dir")

    def _require_going_on(self, what: str) -> None:
        self._require_open(what)
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
        return self._now.stop or limit or self.interrupt.reason or self._closed_by or "running"


# --- parts from settings ------------------------------------------------------------------------------------------


OF_REPLAY = ("opt_interval", "updates", "warmup", "random_warmup")
"""Settings for replay-based agents only."""


def assemble(
    config: SessionConfig,
    spec: EnvSpec,
    agent: AgentMaker,
    buffer: Buffer | None,
    processor: Processor | None,
    teacher: TrainedPolicy | None,
) -> Stepwise:
    """Assemble the parts; raise `SettingsError` if they do not fit together.

    The default processor makes single-step transitions; for an on-policy agent, it is the agent's default.
    """
    require_alone("a session")
    known = interaction.build_agent(agent, processor, spec)
    taught = None if teacher is None else make_teacher(teacher, known, spec)
    if known.prepare is None and known.info.offline:
        able = join_names([*algorithm_names("off_policy"), *algorithm_names("on_policy")], "or")
        raise SettingsError(f"a session learns from its own steps, and {known.name} from data; use {able}")
    if known.fns.imitate is not None and (known.info.settings or {}).get("imitation_coef"):
        raise SettingsError(
            "agent.imitation_coef is set, but a session has no demonstrations; set it to 0, or use on_policy(..., "
            "demos=...)"
        )
    if known.prepare is not None:
        require_default(config, OF_REPLAY, f"{known.name} learns from rollouts, and keeps no replay")
        if buffer is not None:
            raise SettingsError(f"{known.name} learns from rollouts, and keeps no replay; leave buffer out")
        suits = defaults_for(known.name, "on_policy")
        processor = processor or interaction.make_default_processor(suits)
        if taught is not None:
            processor = carry_teacher(processor, taught, spec)
        return _from_rollouts(config, spec, *interaction.connect(processor, known))
    require_default(config, ROLLOUT_SETTINGS, f"{known.name} learns from replay, not from rollouts")
    check_type("buffer", buffer, Buffer, "what jaxrl.uniform(...) or another of jaxrl's buffers returns")
    if buffer is None:
        raise SettingsError(f"{known.name} learns from replay; give buffer, as in buffer=jaxrl.uniform(50_000)")
    return _from_replay(config, spec, *interaction.connect((processor or one_step()).for_replay, known), buffer)


def _from_replay(config: SessionConfig, spec: EnvSpec, processor: Processor, agent: Agent, buffer: Buffer) -> Stepwise:
    replay.check_frames(buffer, processor)
    buffer = replay.adapt_buffer(agent, replay.set_goal_fn(buffer, processor, spec.name), config.num_envs)
    schedule = replay.make_update_schedule(
        horizon=processor.horizon,
        min_transitions=replay.min_items(buffer, config.num_envs),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        updates=config.updates,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
    )
    return Stepwise(spec, agent, processor, schedule, ReplayLearner(agent, processor, buffer, schedule))


def _from_rollouts(config: SessionConfig, spec: EnvSpec, processor: Processor, agent: Agent) -> Stepwise:
    check_count("num_envs", config.num_envs)
    asked = (getattr(config, name) for name in ROLLOUT_SETTINGS)
    passes = make_minibatch_schedule(agent, processor, config.num_envs, *asked)
    schedule = UpdateSchedule(
        config.num_envs, passes.rollout, passes.updates, horizon=0, warmup_iterations=0, random_warmup=False
    )
    return Stepwise(spec, agent, processor, schedule, passes)


def require_default(config: SessionConfig, names: tuple[str, ...], why: str) -> None:
    """Raise `SettingsError`, with the reason `why`, if one of the settings `names` differs from its default."""
    for name in names:
        if getattr(config, name) != getattr(SessionConfig, name):
            raise SettingsError(f"{name} is {getattr(config, name)}, but {why}; leave it out")


def schedule_of(config: SessionConfig, stepwise: Stepwise) -> Schedule:
    schedule = stepwise.schedule
    return Schedule(
        max_opts=config.max_opts or _endless(schedule),
        opt_steps_per_step=schedule.updates,
        env_steps_per_step=schedule.transitions_per_iteration,
        warmup_env_steps=schedule.warmup_env_steps,
        record_interval=config.record_interval,
        save_interval=config.save_interval,
        max_env_steps=config.max_env_steps,
    )


def _endless(schedule: UpdateSchedule) -> int:
    """Return the largest number of optimisation steps, in whole iterations, that the counters hold."""
    most = min(
        MAX_COUNT // schedule.updates, MAX_COUNT - schedule.warmup_env_steps // schedule.transitions_per_iteration - 1
    )
    return most * schedule.updates


def notes_of(config: SessionConfig, stepwise: Stepwise, state: StepwiseState) -> list[str]:
    """Return the notes to log at the start of a session."""
    more = (
        ()
        if stepwise.buffer is None
        else (
            *stepwise.schedule.notes(stepwise.buffer, stepwise.schedule.transitions_per_iteration, config.warmup),
            *replay.note_of_frames(stepwise.buffer, stepwise.processor),
        )
    )
    return [str(plan_of_session(stepwise, state)), *more, *attempts.notes()]


def settings_of_session(
    config: SessionConfig, stepwise: Stepwise, made: Mapping[str, Any] | None, teacher: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all settings of a session; `made` are those that build one of its environments, if it can be built.

    `teacher` are those that say who its teacher is.
    """
    own = asdict(config)
    del own["run_dir"]  # a run directory can be moved
    for name in ROLLOUT_SETTINGS if stepwise.passes is None else OF_REPLAY:
        del own[name]
    if stepwise.passes is not None:
        own |= settings_of_schedule(stepwise.passes)
    if stepwise.buffer is not None:
        own["buffer"] = stepwise.buffer.settings
    own |= teacher
    custom = ("teacher",) if teacher else ()
    settings = interaction.settings_of(stepwise.agent, stepwise.processor, stepwise.spec, made, custom=custom, **own)
    return {**settings, "custom": [*settings["custom"], "loop"], "driven": "from outside"}

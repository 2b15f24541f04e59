"""The compiled programs of a session, as functions from one session state to the next."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.strategies import stepwise as programs
from jaxrl.strategies.guard import Health
from jaxrl.strategies.policy import make_policy
from jaxrl.strategies.stepwise import Last, Learner, StepResult, Stepwise, locate_step, steps_per_iteration, stream_keys
from jaxrl.training.ledger import Ledger
from jaxrl.training.memory import Plan, plan_of_state, require_fit
from jaxrl.training.program import jit_donating, merge_sums, zero_sums
from jaxrl.training.session.evaluation import EpisodeEvaluation, EpisodeEvaluator, Recording
from jaxrl.training.session.inputs import Observations, ends
from jaxrl.training.session.state import Host, Learnt, SessionState, differ, learn_and_sum, shapes_of, start_episodes
from jaxrl.training.session.statistics import Interval, Statistics
from jaxrl.trees import PyTree, make_key


class Stepper:
    """Computes the next state of a session; holds compiled programs, and nothing that belongs in a checkpoint."""

    def __init__(self, stepwise: Stepwise, seed: int) -> None:
        """Jit the programs; each is compiled when first called."""
        key = make_key(seed)
        self.stepwise, self._key, self._keys = stepwise, key, stream_keys(key, stepwise.passes)
        self.policy = make_policy(stepwise.agent, stepwise.processor, stepwise.spec)
        self.evaluator = EpisodeEvaluator(self.policy)
        self._init = jax.jit(partial(programs.init, stepwise))
        self._begin = jax.jit(partial(programs.begin, stepwise))
        self._restart_processor = jax.jit(partial(programs.restart_processor, stepwise))
        self._choose = {phase: jax.jit(partial(programs.act, stepwise, phase)) for phase in self._keys}
        self.process_step = [
            jax.jit(partial(programs.process_step, stepwise, push), donate_argnums=0) for push in (False, True)
        ]
        self._mark_ended = jax.jit(programs.mark_ended)
        self._fill = jax.jit(partial(programs.fill, stepwise), donate_argnums=0)
        self._learn = jit_donating(partial(learn_and_sum, stepwise))
        self.merge_sums = jax.jit(merge_sums)
        self._params = jax.jit(partial(programs.params, stepwise, self.policy))
        state = jax.eval_shape(self._init, key)
        require_fit(plan_of_session(stepwise, state), stepwise.schedule.num_envs)
        learner = Learner(state.agent, state.buffer, state.health)
        _, metrics = jax.eval_shape(
            partial(programs.learn_once, stepwise), learner, state.items, state.window, state.key, np.uint32(0)
        )
        self.metrics = dict(sorted(metrics.items()))
        """Shapes of the metrics of an optimisation step, by name."""

    def initial_state(self, statistics: Statistics) -> SessionState:
        """Return the initial state of a session."""
        state = self._init(self._key)
        first = self._with(state, jax.tree.map(np.array, state.last.result.next_obs))
        return first._replace(statistics=statistics, interval=Interval.of(statistics))

    def shapes(self) -> PyTree:
        """Return the shapes of the arrays of a checkpoint; no state is made."""
        state = jax.eval_shape(self._init, self._key)
        return shapes_of(self._with(state, state.last.result.next_obs))

    def _with(self, state: Any, seen: PyTree) -> SessionState:
        num_envs = self.stepwise.schedule.num_envs
        no = np.zeros(num_envs, bool)
        host = Host(np.zeros(num_envs, np.float32), np.zeros(num_envs, np.int32), seen, ~no, no)
        sums, past = zero_sums(len(self.metrics)), zero_sums(len(self.metrics))
        return SessionState(state, sums, past, host, Ledger())

    def with_observations(self, now: SessionState, given: Observations) -> SessionState:
        """Return the state after receiving the observations to act on."""
        state, host = now.state, now.host
        # Where a reset is due, nothing is chosen at the observation, the last one of an episode.
        obs_valid = given.valid if now.resets is None else given.valid & ~now.resets.due
        if now.steps == 0:
            window = self._begin(state.agent, given.obs, obs_valid)
            fresh = np.ones_like(host.ended)
        else:
            # An episode begins where one ended and, in a resumed session, where the observation is not the last one.
            other = differ(given.obs, host.seen, self.stepwise.schedule.num_envs)
            fresh = host.ended | other
            if not np.count_nonzero(fresh):
                return now._replace(resumed=False) if now.resumed else now
            odd = other & ~host.ended
            if odd.any() and not now.resumed:
                raise SettingsError(
                    f"act: obs of environment {int(np.argmax(odd))} is not the next_obs that observe was given, "
                    "though no episode ended there; pass next_obs, or call cut() before you reset"
                )
            window = self._restart_processor(state.last, given.obs, fresh, obs_valid)
        host = start_episodes(host, fresh)._replace(seen=given.obs, ended=np.zeros_like(fresh), spoilt=~given.valid)
        state = state._replace(window=window)
        # An episode abandoned between two steps: mark its last item as such afterwards.
        late = fresh & ~ends(state.last.result)
        if now.steps and late.any():
            *_, step = locate_step(self.stepwise.schedule, now.steps - 1)
            is_last = self._mark_ended(
                state.items.is_last, late, np.uint32(step)
            )  # not donated, as an exception may interrupt this call
            state = state._replace(items=state.items._replace(is_last=is_last))
        return now._replace(state=state, host=host, resumed=False, chosen=None, acted=False)

    def act(self, now: SessionState, given: Observations) -> tuple[SessionState, PyTree]:
        """Return the state after acting on these observations, and the actions `[N, ...]`."""
        if now.resets is not None:
            due = unless_reset(now.resets.due, now.resets.seen, given.obs)
            now = now._replace(resets=now.resets._replace(due=due))
        if now.evaluation is not None:
            evaluation = self._evaluating(now, now.evaluation, given)
            assert evaluation.chosen is not None
            return now._replace(evaluation=evaluation, acted=True), evaluation.chosen[1]
        if now.unfinished is not None:
            now = now._replace(unfinished=unless_reset(now.unfinished, now.host.seen, given.obs))
        now = self.with_actions(self.with_observations(now, given))
        assert now.chosen is not None
        return now._replace(acted=True), now.chosen[0]

    def _evaluating(self, now: SessionState, evaluation: EpisodeEvaluation, given: Observations) -> EpisodeEvaluation:
        """Return the evaluation with actions for these observations, unless they are already chosen."""
        other = differ(given.obs, evaluation.seen, len(evaluation.ended))
        if evaluation.chosen is None and now.unfinished is not None:
            # Where the user has reset since the evaluation before, an episode begins.
            begun = evaluation.ended | (now.unfinished & other)
            evaluation = evaluation._replace(ended=begun, counts=begun)
        elif evaluation.chosen is not None and now.acted and not np.count_nonzero(other):
            return evaluation
        return self.evaluator.act(evaluation, given)

    def start_evaluation(self, now: SessionState, episodes: int, recording: Recording | None) -> SessionState:
        """Return the state at the start of an evaluation of the current policy; running episodes are truncated."""
        seen, ended = now.host.seen, now.host.ended | (now.steps == 0)
        if now.unfinished is not None:  # of the evaluation before
            ended = ended & ~now.unfinished
        evaluation = self.evaluator.first(self.params(now), episodes, seen, ended)._replace(recording=recording)
        host = start_episodes(now.host, np.ones_like(ended))
        return now._replace(host=host, acted=False, chosen=None, evaluation=evaluation)

    def with_actions(self, now: SessionState) -> SessionState:
        """Return `now` with actions for its observations, unless they are already chosen.

        The same program chooses them ahead or on demand: another might round differently, and a resumed run diverge.
        """
        if now.chosen is not None:
            return now
        phase, t, step = locate_step(self.stepwise.schedule, now.steps)
        # After a rollback, the training stream is not that of the seed.
        key = now.state.key if phase == "train" else self._keys[phase]
        counters = np.array([t, step, t * self.stepwise.schedule.updates if phase == "train" else 0], np.uint32)
        return now._replace(chosen=self._choose[phase](now.state.agent, now.state.window.shown, key, counters))

    def step(self, now: SessionState, result: StepResult, reset: np.ndarray) -> tuple[SessionState, Learnt | None]:
        """Return the state after a step, and the metrics if it made an iteration complete. Donates arrays of `now`.

        Where `reset` `[N]`, there was no step, hence no invalid one.
        """
        assert now.chosen is not None
        state, schedule, reward = now.state, self.stepwise.schedule, result.numbers[0]
        # Kept for the next observation: where that begins an episode, the processor restarts from this step.
        last = Last(state.window, *now.chosen, result)
        phase, t, step = locate_step(schedule, now.steps)
        program = self.process_step[phase != "prime"]
        items, window = program(state.items, state.window, *now.chosen, result, np.uint32(step))
        state = state._replace(items=items, window=window, last=last)
        sums, learnt, whole = now.sums, None, step + 1 == steps_per_iteration(schedule, phase)
        # At the end of an iteration, its items fill the buffer or, in training, are learnt from.
        if whole and phase == "fill":
            state = state._replace(buffer=self._fill(state.buffer, items, np.uint32(t)))
        elif whole and phase == "train":
            learner = Learner(state.agent, state.buffer, state.health)
            learner, sums, means = self._learn(learner, sums, items, window, state.key, np.uint32(t))
            state = state._replace(agent=learner.agent, buffer=learner.buffer, health=learner.health)
            learnt = Learnt(list(self.metrics), means)
        host = now.host._replace(
            returns=now.host.returns + reward, lengths=now.host.lengths + 1, seen=result.next_obs, ended=ends(result)
        )
        invalid = now.invalid + int(np.count_nonzero((np.asarray(result.numbers[3]) == 0) & ~reset))
        unfinished = None if now.unfinished is None else now.unfinished & ~host.ended
        after = now._replace(
            state=state,
            sums=sums,
            host=host,
            steps=now.steps + 1,
            invalid=invalid,
            chosen=None,
            acted=False,
            unfinished=unfinished,
        )
        return after, learnt

    def params(self, now: SessionState) -> PyTree:
        """Return a copy of the parameters of the greedy policy, which training does not donate."""
        return self._params(now.state.agent, now.state.window)

    def health(self, now: SessionState) -> Health:
        """Return the health counters of the updates; blocks on the device."""
        return jax.device_get(now.state.health)


def unless_reset(flags: np.ndarray, seen: PyTree, obs: PyTree) -> np.ndarray:
    """Return `flags` `[N]` where `obs` are those last seen: elsewhere the user has reset the environment."""
    return flags & ~differ(obs, seen, len(flags)) if np.count_nonzero(flags) else flags


def plan_of_session(stepwise: Stepwise, state: PyTree) -> Plan:
    """Return the memory plan of a session from its `state` or the shapes of it."""
    capacity = (
        None if stepwise.buffer is None else stepwise.buffer.capacity(stepwise.schedule.transitions_per_iteration)
    )
    return plan_of_state(state, capacity)

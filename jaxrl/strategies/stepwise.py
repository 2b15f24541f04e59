"""Training one step at a time, for environments that the user drives.

The parts, counts and randomness are those of `off_policy` and `on_policy`, but in separate programs: act, process the
step, and after the last step of an iteration learn from all of them with the same functions.
"""

from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent
from jaxrl.buffers.base import Buffer
from jaxrl.metrics import Metrics
from jaxrl.processors.base import Processor
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.strategies import interaction
from jaxrl.strategies.base import Policy, fold
from jaxrl.strategies.guard import Health, init_health
from jaxrl.strategies.off_policy import ReplayLearner, init_buffer, learn as learn_from_replay, push
from jaxrl.strategies.on_policy import MinibatchSchedule, learn as learn_from_rollout
from jaxrl.strategies.replay import UpdateSchedule
from jaxrl.trees import Array, Key, PyTree, make_key, tree_where
from jaxrl.types import Step, Transition
from jaxrl.xla import packing
from jaxrl.xla.packing import Layout

Phase = Literal["prime", "fill", "train"]
"""Before the first complete transition; warm-up, which pushes; training."""


class Stepwise(NamedTuple):
    """Parts and schedule of stepwise training."""

    spec: EnvSpec
    agent: Agent
    processor: Processor
    schedule: UpdateSchedule
    """With rollouts, an iteration has the vector steps of one rollout."""
    learner: ReplayLearner | MinibatchSchedule
    """The learning half: replay, or the minibatch schedule of rollouts."""

    @property
    def buffer(self) -> Buffer | None:
        """The replay buffer; `None` with rollouts."""
        return self.learner.buffer if isinstance(self.learner, ReplayLearner) else None

    @property
    def passes(self) -> MinibatchSchedule | None:
        """The minibatch schedule of rollouts; `None` with replay."""
        return self.learner if isinstance(self.learner, MinibatchSchedule) else None


class PackedProcessor(NamedTuple):
    """A processor between two steps.

    Its state is packed into one row per dtype: with one array per leaf, a step of one environment takes twice as long
    on a CPU.
    """

    words: dict[str, Array]
    shown: PyTree
    """Processed observations, the input of the policy, `[N, ...]`."""


class StepResult(NamedTuple):
    """Result of one step of all environments, as reported by the user."""

    numbers: Array
    """Float32 `[4, N]`: reward, and terminated, truncated and valid as 0 or 1."""
    next_obs: PyTree


class Last(NamedTuple):
    """The last step, to be processed again once the first observation of the next episode is known."""

    before: PackedProcessor
    """The processor before the step."""
    action: PyTree
    extras: PyTree
    result: StepResult
    """Result of the step; checkpoints use this name."""


class StepwiseState(NamedTuple):
    """Complete state on the device between two steps."""

    key: Key
    """Stream of iterations, folded with their numbers."""
    agent: PyTree
    window: PackedProcessor
    items: Transition
    """Transitions of the current iteration, `[T, N, ...]`; entries past the current step are stale."""
    buffer: PyTree
    """`()` with rollouts."""
    health: Health
    last: Last


class Learner(NamedTuple):
    """The part of the state that learning reads or changes."""

    agent: PyTree
    buffer: PyTree
    health: Health
    processor: PyTree = ()
    """Only read."""


def init(stepwise: Stepwise, key: Key) -> StepwiseState:
    """Return the state before the first observation."""
    num_envs = stepwise.schedule.num_envs
    obs = space_zeros(stepwise.spec.observation_space, num_envs)
    stream = stream_keys(key, stepwise.passes)["train"]
    # The agent has the second subkey in `off_policy` and in `on_policy`, hence the same parameters here.
    agent_key = jax.random.split(key, _num_subkeys(stepwise.passes))[1]
    agent = stepwise.agent.init(agent_key)
    start = interaction.reset_processor(stepwise.agent, stepwise.processor, agent, obs)
    items = jax.eval_shape(_as_rollout, start.items, jax.ShapeDtypeStruct((num_envs,), bool))
    result = StepResult(jnp.zeros((4, num_envs), jnp.float32), obs)
    window = _pack_processor(stepwise, start.processor)
    return StepwiseState(
        key=stream,
        agent=agent,
        window=window,
        items=jax.tree.map(lambda x: jnp.zeros((stepwise.schedule.vector_steps, *x.shape[1:]), x.dtype), items),
        buffer=init_buffer(stepwise.learner, start.items) if isinstance(stepwise.learner, ReplayLearner) else (),
        health=init_health(),
        # Nothing to process again yet; the shapes are those of a step.
        last=Last(window, start.action, start.extras, result),
    )


def stream_keys(key: Key, passes: MinibatchSchedule | None) -> dict[Phase, Key]:
    """Return the key of each phase's stream.

    `key` of the seed is split as in `off_policy`, or with `passes` as in `on_policy`, for the same random numbers.
    """
    stream, _, _, *others = jax.random.split(key, _num_subkeys(passes))
    phases: tuple[Phase, ...] = ("prime", "fill")
    return {**dict(zip(phases, others, strict=False)), "train": stream}


def locate_step(schedule: UpdateSchedule, steps: int) -> tuple[Phase, int, int]:
    """Return phase, iteration and index in the iteration of vector step number `steps` (from 0)."""
    if steps < schedule.horizon:
        return "prime", steps, 0
    fill = steps < schedule.warmup_vector_steps
    return "fill" if fill else "train", *divmod(
        steps - (schedule.horizon if fill else schedule.warmup_vector_steps), schedule.vector_steps
    )


def steps_per_iteration(schedule: UpdateSchedule, phase: Phase) -> int:
    """Return the number of vector steps per iteration of `phase`."""
    return 1 if phase == "prime" else schedule.vector_steps


def count_iterations(schedule: UpdateSchedule, steps: int) -> int:
    """Return the number of completed training iterations after `steps` vector steps."""
    return max(0, steps - schedule.warmup_vector_steps) // schedule.vector_steps


# --- programs ---------------------------------------------------------------------------------------------------


def begin(stepwise: Stepwise, agent: PyTree, obs: PyTree, obs_valid: Array) -> PackedProcessor:
    """Initialise the processor at the very first observations; `obs_valid` `[N]` is as in `Step`."""
    return _pack_processor(
        stepwise, interaction.reset_processor(stepwise.agent, stepwise.processor, agent, obs, obs_valid).processor
    )


def restart_processor(stepwise: Stepwise, last: Last, obs: PyTree, ended: Array, obs_valid: Array) -> PackedProcessor:
    """Return the processor after the last step, with episodes that start at `obs` where `ended` `[N]`.

    The last step is processed again, now with the first observation of the next episode. `obs_valid` `[N]` is as in
    `Step`.
    """
    step = _step(last.action, last.extras, last.result)
    # An episode that the user cut off was not known to end when its step was processed. It ends as a truncation.
    cut = step._replace(
        truncated=step.truncated | (ended & ~step.terminated),
        obs=tree_where(ended, obs, last.result.next_obs),
        obs_valid=obs_valid,
    )
    return _pack_processor(stepwise, stepwise.processor.process(_unpack_processor(stepwise, last.before), cut)[0])


def act(
    stepwise: Stepwise, phase: Phase, agent: PyTree, shown: PyTree, key: Key, counters: Array
) -> tuple[PyTree, PyTree]:
    """Select actions; return them and extras.

    `key` is the stream of the phase; `counters` are uint32: iteration, step in it, and optimisation step.
    """
    t, step, opt_step = counters
    # The same keys as in `ComposedStep` and `take_steps`, so that a session acts as a strategy would.
    iteration = fold(key, t)
    acting_key = jax.random.split(iteration)[0] if phase == "train" else iteration
    step_key = jax.random.split(acting_key, steps_per_iteration(stepwise.schedule, phase))[step.astype(jnp.int32)]
    random = phase != "train" and stepwise.schedule.random_warmup
    act_key, _ = jax.random.split(step_key)  # the other key steps environments on the device
    return interaction.select_actions(stepwise.agent, stepwise.spec, agent, shown, act_key, opt_step, random)


def process_step(
    stepwise: Stepwise,
    complete: bool,
    items: Transition,
    window: PackedProcessor,
    action: PyTree,
    extras: PyTree,
    result: StepResult,
    index: Array,
) -> tuple[Transition, PackedProcessor]:
    """Process a step; if `complete`, write its transitions as step `index` of the iteration.

    Return the transitions of the iteration and the processor.
    """
    step = _step(action, extras, result)
    # No policy sees the last observation of an episode, so that it enters no statistics.
    step = step._replace(obs_valid=step.valid & ~(step.terminated | step.truncated))
    processor, new_items = stepwise.processor.process(_unpack_processor(stepwise, window), step)
    if complete:
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
            old, jnp.asarray(new, old.dtype), index.astype(jnp.int32), 0
        )
        items = jax.tree.map(write, items, _as_rollout(new_items, step.terminated | step.truncated))
    return items, _pack_processor(stepwise, processor)


def mark_ended(is_last: Array, ended: Array, step: Array) -> Array:
    """Return `is_last` `[T, N]` of an iteration, set also where `ended` `[N]` at `step`."""
    return is_last.at[step].set(is_last[step] | ended)


def _as_rollout(items: Transition, ended: Array) -> Transition:
    """Return the transitions `[N, ...]` of one step as a rollout `[1, N, ...]`."""
    return interaction.add_episode_bounds(jax.tree.map(lambda x: jnp.asarray(x)[None], items), ended[None])


def fill(stepwise: Stepwise, buffer: PyTree, items: Transition, t: Array) -> PyTree:
    """Push the transitions of warm-up iteration `t`; return the buffer."""
    assert isinstance(stepwise.learner, ReplayLearner)
    # A push reads and changes nothing but the buffer.
    return push(stepwise.learner, Learner((), buffer, init_health()), items, t).buffer


def params(stepwise: Stepwise, policy: Policy, agent: PyTree, window: PackedProcessor) -> PyTree:
    """Return a copy of the parameters of the greedy `policy`, since the state may be donated."""
    return jax.tree.map(jnp.copy, policy.params(_Trained(agent, _unpack_processor(stepwise, window))))


def learn_once(
    stepwise: Stepwise, learner: Learner, items: Transition, window: PackedProcessor, key: Key, t: Array
) -> tuple[Learner, Metrics]:
    """Run the optimisation steps of iteration `t` with its transitions `items`; `window` is the processor after it.

    `key` is the stream of training.
    """
    # The second half of the key, as in `ComposedStep`; the first was for acting.
    learn_key = jax.random.split(fold(key, t))[1]
    learner = learner._replace(processor=_unpack_processor(stepwise, window))
    if isinstance(stepwise.learner, ReplayLearner):
        learner, metrics = learn_from_replay(stepwise.learner, learner, items, learn_key, t)
    else:
        # Steps arrive one at a time. A custom processor that leaves `is_first` out marks no step after an end with it.
        first, last = cast(Array, items.is_first), cast(Array, items.is_last)
        items = items._replace(is_first=jnp.concatenate([first[:1], first[1:] | last[:-1]]))
        learner, metrics = learn_from_rollout(stepwise.learner, learner, items, learn_key, t)
    return learner._replace(processor=()), metrics


def _num_subkeys(passes: MinibatchSchedule | None) -> int:
    """Return the number of subkeys of a seed."""
    return 5 if passes is None else 3


def _step(action: PyTree, extras: PyTree, result: StepResult) -> Step:
    reward, (terminated, truncated, valid) = result.numbers[0], result.numbers[1:] > 0
    # For now, the successor is also the next observation. Where the episode ended, `restart_processor` replaces it by
    # the first observation of the next one.
    return Step(
        action, extras, reward, terminated, truncated, result.next_obs, result.next_obs, valid=valid, obs_valid=valid
    )


class _Trained(NamedTuple):
    agent: PyTree
    processor: PyTree


def _processor_layout(stepwise: Stepwise) -> Layout:
    """Return the layout of the packed processor state."""
    obs = space_zeros(stepwise.spec.observation_space, stepwise.schedule.num_envs)

    def opened(key: Key) -> PyTree:
        return interaction.reset_processor(stepwise.agent, stepwise.processor, stepwise.agent.init(key), obs).processor

    return packing.layout_of(jax.eval_shape(opened, make_key(0)))


def _pack_processor(stepwise: Stepwise, processor: PyTree) -> PackedProcessor:
    # One row for the whole state. The processed observations stay outside, so that acting unpacks nothing.
    row = jax.tree.map(lambda x: jnp.asarray(x)[None], processor)
    return PackedProcessor(
        packing.pack(_processor_layout(stepwise), row, packing.join_short), stepwise.processor.observe(processor)
    )


def _unpack_processor(stepwise: Stepwise, window: PackedProcessor) -> PyTree:
    return jax.tree.map(lambda x: x[0], packing.unpack(_processor_layout(stepwise), window.words))

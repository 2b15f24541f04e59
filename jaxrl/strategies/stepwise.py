"""Training one step at a time, for environments that are driven from outside.

The same parts, counts and randomness as in `off_policy` and `on_policy`, but as programs between which the host waits:
act, take in what the action led to, and once the steps of an iteration are there, learn from them with the same
functions.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent
from jaxrl.buffers.base import Buffer
from jaxrl.metrics import Metrics
from jaxrl.processors.base import Processor
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.strategies.base import Policy, fold
from jaxrl.strategies.guard import Health, init_health
from jaxrl.strategies.interaction import add_episode_bounds, open_processor, select_actions
from jaxrl.strategies.off_policy import Replay, init_buffer, learn as learn_from_replay, push
from jaxrl.strategies.on_policy import MinibatchSchedule, learn as learn_from_rollout
from jaxrl.strategies.replay import UpdateSchedule
from jaxrl.trees import Array, Key, PyTree, make_key, tree_where
from jaxrl.types import Step, Transition
from jaxrl.xla.packing import Layout, join_short, layout_of, pack, unpack

Phase = Literal["prime", "fill", "train"]
"""Before the first transition is complete; warm-up that pushes; training."""


class Stepwise(NamedTuple):
    """What is trained, and in which turns."""

    spec: EnvSpec
    agent: Agent
    processor: Processor
    schedule: UpdateSchedule
    """Of an agent that learns from rollouts, one iteration takes as many vector steps as a rollout has."""
    learner: Replay | MinibatchSchedule
    """What learns from the steps of an iteration: replay, or passes over a rollout."""

    @property
    def buffer(self) -> Buffer | None:
        """Replay; `None` of an agent that learns from rollouts."""
        return self.learner.buffer if isinstance(self.learner, Replay) else None

    @property
    def passes(self) -> MinibatchSchedule | None:
        """How it learns from rollouts; `None` of an agent that learns from replay."""
        return self.learner if isinstance(self.learner, MinibatchSchedule) else None


class PackedProcessor(NamedTuple):
    """A processor between two steps.

    Its state is one row of bits: with an array a leaf, a step of one environment takes twice as long on a CPU.
    """

    words: dict[str, Array]
    shown: PyTree
    """What the policy sees, `[N, ...]`."""


class StepResult(NamedTuple):
    """What one step of all environments led to, as the outside reports it."""

    numbers: Array
    """Float32 `[4, N]`: reward, and as 0 or 1 terminated, truncated and valid."""
    next_obs: PyTree


class Last(NamedTuple):
    """The last step, to be taken in again once it is known with what the next episode begins."""

    before: PackedProcessor
    """The processor before it."""
    action: PyTree
    extras: PyTree
    told: StepResult
    """Its result; checkpoints know it by this name."""


class StepwiseState(NamedTuple):
    """The whole truth on the device between two steps."""

    key: Key
    """The stream of iterations, folded with their numbers."""
    agent: PyTree
    window: PackedProcessor
    items: Transition
    """The transitions of this iteration, `[T, N, ...]`; those past the current step are stale."""
    buffer: PyTree
    """`()` of an agent that learns from rollouts."""
    health: Health
    last: Last


class Learner(NamedTuple):
    """What an optimisation step changes, and what it reads."""

    agent: PyTree
    buffer: PyTree
    health: Health
    processor: PyTree = ()
    """Only read."""


def init(stepwise: Stepwise, key: Key) -> StepwiseState:
    """Return the state before the first observation."""
    num_envs = stepwise.schedule.num_envs
    obs = space_zeros(stepwise.spec.observation_space, num_envs)
    stream, agent_key = (
        stream_keys(key, stepwise.passes)["train"],
        jax.random.split(key, _num_subkeys(stepwise.passes))[1],
    )
    agent = stepwise.agent.init(agent_key)
    opened = open_processor(stepwise.agent, stepwise.processor, agent, obs)
    items = jax.eval_shape(_as_rollout, opened.items, jax.ShapeDtypeStruct((num_envs,), bool))
    result, window = StepResult(jnp.zeros((4, num_envs), jnp.float32), obs), _pack_processor(stepwise, opened.processor)
    return StepwiseState(
        key=stream,
        agent=agent,
        window=window,
        items=jax.tree.map(lambda x: jnp.zeros((stepwise.schedule.vector_steps, *x.shape[1:]), x.dtype), items),
        buffer=init_buffer(stepwise.learner, opened.items) if isinstance(stepwise.learner, Replay) else (),
        health=init_health(),
        last=Last(window, opened.action, opened.extras, result),
    )


def stream_keys(key: Key, passes: MinibatchSchedule | None = None) -> dict[Phase, Key]:
    """Return the stream of randomness of each phase.

    The seed's `key` is split as `off_policy` splits it, or with `passes` as `on_policy` does.
    """
    stream, _, _, *others = jax.random.split(key, _num_subkeys(passes))
    phases: tuple[Phase, ...] = ("prime", "fill")
    return {**dict(zip(phases, others, strict=False)), "train": stream}


def locate_step(schedule: UpdateSchedule, steps: int) -> tuple[Phase, int, int]:
    """Return, for the vector step after `steps` of them, its phase, its iteration, and its place in that."""
    if steps < schedule.horizon:
        return "prime", steps, 0
    fill = steps < schedule.warmup_steps
    return "fill" if fill else "train", *divmod(
        steps - (schedule.horizon if fill else schedule.warmup_steps), schedule.vector_steps
    )


def steps_per_iteration(schedule: UpdateSchedule, phase: Phase) -> int:
    """Return the vector steps of one iteration."""
    return 1 if phase == "prime" else schedule.vector_steps


def count_iterations(schedule: UpdateSchedule, steps: int) -> int:
    """Return how many iterations have come to their end, optimisation and all, after `steps` vector steps."""
    return max(0, steps - schedule.warmup_steps) // schedule.vector_steps


# --- the programs -----------------------------------------------------------------------------------------------


def begin(stepwise: Stepwise, agent: PyTree, obs: PyTree, obs_valid: Array) -> PackedProcessor:
    """Start the processor at the very first observations; `obs_valid` `[N]` is that of `Step`."""
    return _pack_processor(
        stepwise, open_processor(stepwise.agent, stepwise.processor, agent, obs, obs_valid).processor
    )


def restart_processor(stepwise: Stepwise, last: Last, obs: PyTree, ended: Array, obs_valid: Array) -> PackedProcessor:
    """Return the processor after the last step, known that where `ended` `[N]` an episode begins with `obs`.

    `obs_valid` `[N]` is that of `Step`.
    """
    step = _step(last.action, last.extras, last.told)
    cut = step._replace(
        truncated=step.truncated | (ended & ~step.terminated),
        obs=tree_where(ended, obs, last.told.next_obs),
        obs_valid=obs_valid,
    )
    return _pack_processor(stepwise, stepwise.processor.process(_unpack_processor(stepwise, last.before), cut)[0])


def act(
    stepwise: Stepwise, phase: Phase, agent: PyTree, shown: PyTree, key: Key, place: Array
) -> tuple[PyTree, PyTree]:
    """Choose actions; return them and extras.

    `key` is the stream of the phase; `place` is uint32: the iteration, the step in it, and the optimisation step.
    """
    t, step, opt_step = place
    iteration = fold(key, t)
    acting_key = jax.random.split(iteration)[0] if phase == "train" else iteration
    step_key = jax.random.split(acting_key, steps_per_iteration(stepwise.schedule, phase))[step.astype(jnp.int32)]
    random = phase != "train" and stepwise.schedule.random_warmup
    act_key, _ = jax.random.split(step_key)  # the other one is for environments on the device
    return select_actions(stepwise.agent, stepwise.spec, agent, shown, act_key, opt_step, random)


def process_step(
    stepwise: Stepwise,
    complete: bool,
    items: Transition,
    window: PackedProcessor,
    action: PyTree,
    extras: PyTree,
    result: StepResult,
    place: Array,
) -> tuple[Transition, PackedProcessor]:
    """Process a step; where its transitions are `complete`, write them as step number `place` of the iteration.

    Return the transitions of the iteration and the processor.
    """
    step = _step(action, extras, result)
    processor, made = stepwise.processor.process(_unpack_processor(stepwise, window), step)
    if complete:
        write = lambda rows, row: jax.lax.dynamic_update_slice_in_dim(
            rows, jnp.asarray(row, rows.dtype), place.astype(jnp.int32), 0
        )
        items = jax.tree.map(write, items, _as_rollout(made, step.terminated | step.truncated))
    return items, _pack_processor(stepwise, processor)


def mark_ended(is_last: Array, ended: Array, place: Array) -> Array:
    """Return `is_last` `[T, N]` of an iteration, with episodes ended where `ended` `[N]` by its step number `place`."""
    return is_last.at[place].set(is_last[place] | ended)


def _as_rollout(items: Transition, ended: Array) -> Transition:
    """Return the transitions of one step, `[N, ...]`, as those of an iteration, `[1, N, ...]`."""
    return add_episode_bounds(jax.tree.map(lambda x: jnp.asarray(x)[None], items), ended[None])


def fill(stepwise: Stepwise, buffer: PyTree, items: Transition, t: Array) -> PyTree:
    """Write the transitions of iteration `t` of the warm-up; return the buffer."""
    assert isinstance(stepwise.learner, Replay)
    return push(stepwise.learner, Learner((), buffer, init_health()), items, t).buffer


def params(stepwise: Stepwise, policy: Policy, agent: PyTree, window: PackedProcessor) -> PyTree:
    """Return the parameters of the greedy `policy`, copied: what they are copied from may be donated."""
    copied: PyTree = jax.tree.map(jnp.copy, policy.params(_Trained(agent, _unpack_processor(stepwise, window))))
    return copied


def learn_once(
    stepwise: Stepwise, learner: Learner, items: Transition, window: PackedProcessor, key: Key, t: Array
) -> tuple[Learner, Metrics]:
    """Make the optimisation steps of iteration `t`, whose transitions are `items`, and the processor after it `window`.

    `key` is the stream of training.
    """
    learn_key = jax.random.split(fold(key, t))[1]
    learner = learner._replace(processor=_unpack_processor(stepwise, window))
    made: tuple[Learner, Metrics]
    if isinstance(stepwise.learner, Replay):
        made = learn_from_replay(stepwise.learner, learner, items, learn_key, t)
    else:
        made = learn_from_rollout(stepwise.learner, learner, items, learn_key, t)
    return made[0]._replace(processor=()), made[1]


def _num_subkeys(passes: MinibatchSchedule | None) -> int:
    """Return into how many the key of a seed is split."""
    return 5 if passes is None else 3


def _step(action: PyTree, extras: PyTree, result: StepResult) -> Step:
    reward, (terminated, truncated, valid) = result.numbers[0], result.numbers[1:] > 0
    return Step(
        action, extras, reward, terminated, truncated, result.next_obs, result.next_obs, valid=valid, obs_valid=valid
    )


class _Trained(NamedTuple):
    agent: PyTree
    processor: PyTree


def _processor_layout(stepwise: Stepwise) -> Layout:
    """Return how the processor's state lies in a row."""
    obs = space_zeros(stepwise.spec.observation_space, stepwise.schedule.num_envs)

    def opened(key: Key) -> PyTree:
        return open_processor(stepwise.agent, stepwise.processor, stepwise.agent.init(key), obs).processor

    return layout_of(jax.eval_shape(opened, make_key(0)))


def _pack_processor(stepwise: Stepwise, processor: PyTree) -> PackedProcessor:
    row = jax.tree.map(lambda x: jnp.asarray(x)[None], processor)
    return PackedProcessor(pack(_processor_layout(stepwise), row, join_short), stepwise.processor.observe(processor))


def _unpack_processor(stepwise: Stepwise, window: PackedProcessor) -> PyTree:
    return jax.tree.map(lambda x: x[0], unpack(_processor_layout(stepwise), window.words))

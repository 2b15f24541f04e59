"""Programs of an actor, which steps environments on the host.

Each call, and each array in or out of it, costs the host some microseconds. So there are few programs, with packed
arguments: one call processes the last step and selects the next actions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.processors.base import init_processor as begin_processor
from jaxrl.spaces import space_struct, space_zeros
from jaxrl.strategies import interaction
from jaxrl.strategies.base import fold
from jaxrl.strategies.interaction import Collector, StepInfo
from jaxrl.trees import Array, Key, PyTree, make_key, row_struct
from jaxrl.types import Step, Transition
from jaxrl.xla import packing
from jaxrl.xla.packing import Layout

Packed = dict[str, Array]
"""Items packed as rows of bits, by word type."""


class Choice(NamedTuple):
    """Actions of one step and the extras that the agent returned with them, `[N, ...]`."""

    action: PyTree
    extras: PyTree


class ActorState(NamedTuple):
    """State of an actor between two calls."""

    processor: PyTree
    new_stats: PyTree
    """Statistics of this round's steps alone, which the learner merges with those of other actors."""
    round: Array
    """Number of the round."""
    step: Array
    """Index in the round of the step whose actions come next."""
    opt_step: Array
    """Optimisation step at which the parameters were published."""


# --- layouts ----------------------------------------------------------------------------------------------------


class Layouts(NamedTuple):
    """Layouts of the packed arguments and results."""

    step: Layout
    state: Layout
    result: Layout


def make_step_layout(collector: Collector) -> Layout:
    """Return the layout of one environment's transition and `StepInfo`."""

    def one() -> tuple[Transition, StepInfo]:
        agent_key, env_key, key = jax.random.split(make_key(0), 3)
        agent = collector.agent.init(agent_key)
        loop, _ = interaction.reset_envs(collector, agent, env_key)
        return interaction.step_envs(collector, agent, jnp.uint32(0), False, loop, key)[1]

    return packing.layout_of(row_struct(jax.eval_shape(one)), flag="uint32")


def make_result_layout(collector: Collector) -> Layout:
    """Return the layout of a host environment's step, without action and extras."""
    obs, flag = space_struct(collector.env.spec.observation_space), jax.ShapeDtypeStruct((), bool)
    number, count = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    info: Any = {"episode_return": number, "episode_length": count}
    # The fields of a `Step` after action and extras, in their order.
    like: Any = (number, flag, flag, obs, obs, info, flag, flag)
    return packing.layout_of(Step((), (), *like), flag="uint32")


def make_state_layout(collector: Collector, stats: PyTree) -> Layout:
    """Return the layout of an `ActorState`; `stats` are those of a new processor."""

    def state(key: Key) -> ActorState:
        envs = collector.env.num_envs
        obs, obs_valid = space_zeros(collector.env.spec.observation_space, envs), jnp.ones(envs, bool)
        return _init_state(collector, collector.agent.init(key), stats, obs, obs_valid, key)

    return packing.layout_of(jax.eval_shape(state, make_key(0)), flag="uint32")


def _unpack_state(layout: Layout, packed: Packed) -> ActorState:
    # The whole state of an actor is a single row.
    return jax.tree.map(lambda x: x[0], packing.unpack(layout, packed))


def _pack_state(layout: Layout, state: ActorState) -> Packed:
    return packing.pack(layout, jax.tree.map(lambda x: jnp.asarray(x)[None], state), packing.join_short)


# --- programs ---------------------------------------------------------------------------------------------------


def begin(
    collector: Collector, layout: Layout, agent: PyTree, stats: PyTree, obs: PyTree, obs_valid: Array, key: Key
) -> Packed:
    """Return the state at the first observations, which `obs_valid` `[N]` marks, with all actors' merged `stats`."""
    return _pack_state(layout, _init_state(collector, agent, stats, obs, obs_valid, key))


def _init_state(
    collector: Collector, agent: PyTree, stats: PyTree, obs: PyTree, obs_valid: Array, key: Key
) -> ActorState:
    seen = collector.processor.observe(collector.processor.init(obs))
    # Windows of past steps hold actions and extras, whose shapes only the agent knows; it does not act here.
    shapes = jax.eval_shape(lambda: collector.agent.act(agent, seen, key, jnp.uint32(0), "explore"))
    action, extras = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    processor, numbers = collector.processor, (jnp.uint32(0),) * 3
    if not jax.tree.leaves(stats):
        return ActorState(begin_processor(processor, obs, action, extras, obs_valid), stats, *numbers)
    # The first observations count both in the merged statistics and in those of this round.
    zero_stats = jax.tree.map(jnp.zeros_like, stats)
    # The statistics are set by `init`, before the dummy step by which the first observations enter them.
    with_stats = processor._replace(init=lambda obs: processor.set_stats(processor.init(obs), stats))
    blank = processor._replace(init=lambda obs: processor.set_stats(processor.init(obs), zero_stats))
    return ActorState(
        begin_processor(with_stats, obs, action, extras, obs_valid),
        processor.get_stats(begin_processor(blank, obs, action, extras, obs_valid)),
        *numbers,
    )


def first(
    collector: Collector, layout: Layout, random: bool, agent: PyTree, packed: Packed, key: Key, counters: Array
) -> tuple[Packed, Choice]:
    """Begin a round: select the actions of its first step; `counters` are uint32: round and optimisation step."""
    state = _unpack_state(layout, packed)._replace(round=counters[0], step=jnp.uint32(0), opt_step=counters[1])
    return _pack_state(layout, state), _select_actions(collector, random, agent, state, key)


def next(
    collector: Collector,
    layouts: Layouts,
    random: bool,
    agent: PyTree,
    packed: Packed,
    choice: Choice,
    key: Key,
    result: Packed,
) -> tuple[Packed, Choice, Packed]:
    """Process the last step and select the next actions; return also the processed step, packed `[N, W]`."""
    state, words = _process_result(collector, layouts, packed, choice, result)
    return _pack_state(layouts.state, state), _select_actions(collector, random, agent, state, key), words


def last(
    collector: Collector, layouts: Layouts, packed: Packed, choice: Choice, result: Packed
) -> tuple[Packed, Packed, PyTree]:
    """Process the last step of a round; return also the round's statistics."""
    state, words = _process_result(collector, layouts, packed, choice, result)
    return _pack_state(layouts.state, state), words, state.new_stats


def replace_stats(collector: Collector, layout: Layout, packed: Packed, stats: PyTree) -> Packed:
    """Set the processor's statistics to `stats`, merged from all actors, before the next round."""
    state = _unpack_state(layout, packed)
    new_stats = jax.tree.map(jnp.zeros_like, state.new_stats)
    return _pack_state(
        layout, state._replace(processor=collector.processor.set_stats(state.processor, stats), new_stats=new_stats)
    )


def _select_actions(collector: Collector, random: bool, agent: PyTree, state: ActorState, key: Key) -> Choice:
    """Select actions; `key` is the actor's stream."""
    # Derived from round and step instead of carried in the state: a restarted actor draws the same numbers.
    step_key = fold(fold(key, state.round), state.step)
    obs = collector.processor.observe(state.processor)
    return Choice(
        *interaction.select_actions(collector.agent, collector.env.spec, agent, obs, step_key, state.opt_step, random)
    )


def _process_result(
    collector: Collector, layouts: Layouts, packed: Packed, choice: Choice, result: Packed
) -> tuple[ActorState, Packed]:
    """Process a step; return also its transitions and `StepInfo`, packed `[N, W]`."""
    # Action and extras stayed on the device; the host reports the rest of the step.
    state, step = (
        _unpack_state(layouts.state, packed),
        packing.unpack(layouts.result, result)._replace(**choice._asdict()),
    )
    new_stats = state.new_stats
    if jax.tree.leaves(new_stats):
        # Process the step again with the round's statistics alone; XLA drops all but the statistics of this call.
        round_state, _ = collector.processor.process(collector.processor.set_stats(state.processor, new_stats), step)
        new_stats = collector.processor.get_stats(round_state)
    processor, items = collector.processor.process(state.processor, step)
    words = packing.pack(layouts.step, (items, interaction.step_info(step)), packing.join_short)
    return state._replace(processor=processor, new_stats=new_stats, step=state.step + 1), words

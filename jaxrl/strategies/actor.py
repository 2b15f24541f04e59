"""What an actor computes: few programs, with few arrays in and out, since each costs the host some microseconds.

Between them the environments are asked to do what was chosen; one program takes in what that led to, and chooses again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.processors.base import init_processor as begin_processor
from jaxrl.spaces import space_struct, space_zeros
from jaxrl.strategies.base import fold
from jaxrl.strategies.interaction import Acting, StepInfo, choose, interact, open_envs, step_info
from jaxrl.trees import Array, Key, PyTree, make_key, row_struct
from jaxrl.types import Step, Transition
from jaxrl.xla.packing import Layout, join_short, layout_of, pack, unpack

Words = dict[str, Array]
"""Items packed as rows of bits, by type of word."""


class Choice(NamedTuple):
    """What an actor's environments are asked to do in a step, `[N, ...]`."""

    action: PyTree
    extras: PyTree


class Standing(NamedTuple):
    """Where an actor stands between two programs."""

    processor: PyTree
    fresh: PyTree
    """What the processor has learnt in this round."""
    round: Array
    """Number of the round."""
    step: Array
    """Step in the round that is chosen for next."""
    opt_step: Array
    """Optimisation step of the parameters."""


# --- how they are packed ----------------------------------------------------------------------------------------


class Layouts(NamedTuple):
    """How things are packed for an actor's programs, and by them."""

    step: Layout
    window: Layout
    told: Layout


def layout_of_steps(acting: Acting) -> Layout:
    """Return how a step of one environment is packed: its transition, and what is recorded of it."""

    def one() -> tuple[Transition, StepInfo]:
        agent_key, env_key, key = jax.random.split(make_key(0), 3)
        agent = acting.agent.init(agent_key)
        loop, _ = open_envs(acting, agent, env_key)
        return interact(acting, agent, jnp.uint32(0), False, loop, key)[1]

    return layout_of(row_struct(jax.eval_shape(one)), flag="uint32")


def layout_of_told(acting: Acting) -> Layout:
    """Return how an actor tells what a step of one environment led to, without what was chosen."""
    obs, flag = space_struct(acting.env.spec.observation_space), jax.ShapeDtypeStruct((), bool)
    number, count = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    info: Any = {"episode_return": number, "episode_length": count}
    like: Any = (number, flag, flag, obs, obs, info, flag, flag)
    return layout_of(Step((), (), *like), flag="uint32")


def layout_of_standing(acting: Acting, nothing: PyTree) -> Layout:
    """Return how a `Standing` is packed."""

    def standing(key: Key) -> Standing:
        obs = space_zeros(acting.env.spec.observation_space, acting.env.num_envs)
        return _standing(acting, acting.agent.init(key), nothing, obs, key)

    return layout_of(jax.eval_shape(standing, make_key(0)), flag="uint32")


def _open(layout: Layout, window: Words) -> Standing:
    standing: Standing = jax.tree.map(lambda x: x[0], unpack(layout, window))
    return standing


def _close(layout: Layout, standing: Standing) -> Words:
    return pack(layout, jax.tree.map(lambda x: jnp.asarray(x)[None], standing), join_short)


# --- the programs -----------------------------------------------------------------------------------------------


def begin(acting: Acting, layout: Layout, agent: PyTree, learnt: PyTree, obs: PyTree, key: Key) -> Words:
    """Start at the first observations, knowing what all have `learnt`."""
    return _close(layout, _standing(acting, agent, learnt, obs, key))


def _standing(acting: Acting, agent: PyTree, learnt: PyTree, obs: PyTree, key: Key) -> Standing:
    seen = acting.processor.observe(acting.processor.init(obs))
    shapes = jax.eval_shape(lambda: acting.agent.act(agent, seen, key, jnp.uint32(0), "explore"))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    processor, numbers = acting.processor, (jnp.uint32(0),) * 3
    if not jax.tree.leaves(learnt):
        return Standing(begin_processor(processor, obs, *zeros), learnt, *numbers)
    nothing = jax.tree.map(jnp.zeros_like, learnt)
    knowing = processor._replace(init=lambda obs: processor.set_stats(processor.init(obs), learnt))
    blank = processor._replace(init=lambda obs: processor.set_stats(processor.init(obs), nothing))
    return Standing(
        begin_processor(knowing, obs, *zeros), processor.get_stats(begin_processor(blank, obs, *zeros)), *numbers
    )


def first(
    acting: Acting, layout: Layout, random: bool, agent: PyTree, window: Words, key: Key, place: Array
) -> tuple[Words, Choice]:
    """Choose for the first step of a round; `place` is uint32: the number of the round, and the optimisation step."""
    standing = _open(layout, window)._replace(round=place[0], step=jnp.uint32(0), opt_step=place[1])
    return _close(layout, standing), _choose(acting, random, agent, standing, key)


def next(
    acting: Acting,
    layouts: Layouts,
    random: bool,
    agent: PyTree,
    window: Words,
    choice: Choice,
    key: Key,
    told: Words,
) -> tuple[Words, Choice, Words]:
    """Take in what a choice led to, and choose for the next step; return also the step taken in, packed `[N, W]`."""
    standing, words = _take(acting, layouts, window, choice, told)
    return _close(layouts.window, standing), _choose(acting, random, agent, standing, key), words


def last(acting: Acting, layouts: Layouts, window: Words, choice: Choice, told: Words) -> tuple[Words, Words, PyTree]:
    """Take in what the last choice of a round led to; return also what was learnt in the round."""
    standing, words = _take(acting, layouts, window, choice, told)
    return _close(layouts.window, standing), words, standing.fresh


def taught(acting: Acting, layout: Layout, window: Words, learnt: PyTree) -> Words:
    """Put what was `learnt` by all in place of what the processor has learnt, before another round."""
    standing = _open(layout, window)
    fresh = jax.tree.map(jnp.zeros_like, standing.fresh)
    return _close(
        layout, standing._replace(processor=acting.processor.set_stats(standing.processor, learnt), fresh=fresh)
    )


def _choose(acting: Acting, random: bool, agent: PyTree, standing: Standing, key: Key) -> Choice:
    """Choose actions; `key` is the actor's."""
    step_key = fold(fold(key, standing.round), standing.step)
    obs = acting.processor.observe(standing.processor)
    return Choice(*choose(acting.agent, acting.env.spec, agent, obs, step_key, standing.opt_step, random))


def _take(acting: Acting, layouts: Layouts, window: Words, choice: Choice, told: Words) -> tuple[Standing, Words]:
    """Take in what a choice led to; return also the step, packed `[N, W]`."""
    standing, step = _open(layouts.window, window), unpack(layouts.told, told)._replace(**choice._asdict())
    fresh = standing.fresh
    if jax.tree.leaves(fresh):
        # The same step once more, as if nothing had been learnt but this: of it, nothing else is computed.
        apart, _ = acting.processor.process(acting.processor.set_stats(standing.processor, fresh), step)
        fresh = acting.processor.get_stats(apart)
    processor, items = acting.processor.process(standing.processor, step)
    words = pack(layouts.step, (items, step_info(step)), join_short)
    return standing._replace(processor=processor, fresh=fresh, step=standing.step + 1), words

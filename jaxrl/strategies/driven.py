"""Off-policy training one step at a time, for environments that are driven from outside.

The same parts, counts and randomness as in `off_policy`, but as programs between which the host waits: act, take in
what the action led to, learn. A vector step is pushed as a block of its own, for nobody knows when the next one comes;
with a capacity that is a multiple of both blocks, the buffer holds the same items at the same places.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent
from jaxrl.buffers.base import Buffer
from jaxrl.processors.base import Processor
from jaxrl.strategies.base import fold
from jaxrl.strategies.guard import Health, healthy
from jaxrl.strategies.interaction import draw_acting, open_processor
from jaxrl.strategies.replay import Turns, draw_learning, learn
from jaxrl.types import Array, EnvSpec, Key, Metrics, PyTree, Step, row_struct, space_zeros, tree_where

Phase = Literal["prime", "fill", "train"]
"""Before the first transition is complete; warm-up that pushes; training."""


class Driven(NamedTuple):
    """What is trained, and in which turns."""

    spec: EnvSpec
    agent: Agent
    processor: Processor
    buffer: Buffer
    turns: Turns


class Told(NamedTuple):
    """What the outside told of one step of all environments."""

    numbers: Array
    """Float32 `[4, N]`: reward, and as 0 or 1 terminated, truncated and valid."""
    next_obs: PyTree


class Last(NamedTuple):
    """The last step, to be taken in again once it is known with what the next episode begins."""

    before: PyTree
    """The processor's state before it."""
    action: PyTree
    extras: PyTree
    told: Told


class DrivenState(NamedTuple):
    """The whole truth on the device between two steps."""

    key: Key
    """The stream of iterations, folded with their numbers."""
    agent: PyTree
    processor: PyTree
    buffer: PyTree
    health: Health
    last: Last


class Learner(NamedTuple):
    """What an optimisation step changes."""

    agent: PyTree
    buffer: PyTree
    health: Health


def init(driven: Driven, key: Key) -> DrivenState:
    """Return the state before the first observation."""
    num_envs = driven.turns.num_envs
    obs = space_zeros(driven.spec.observation_space, num_envs)
    stream, agent_key = stream_keys(key)["train"], jax.random.split(key, 5)[1]
    agent = driven.agent.init(agent_key)
    opened = open_processor(driven.agent, driven.processor, agent, obs)
    told = Told(jnp.zeros((4, num_envs)), obs)
    return DrivenState(
        key=stream,
        agent=agent,
        processor=opened.processor,
        buffer=driven.buffer.init(row_struct(opened.items), num_envs, driven.turns.lag),
        health=healthy(),
        last=Last(opened.processor, opened.action, opened.extras, told),
    )


def stream_keys(key: Key) -> dict[Phase, Key]:
    """Return the stream of randomness of each phase; the seed's `key` is split as `off_policy` splits it."""
    stream, _, _, prime_key, fill_key = jax.random.split(key, 5)
    return {"prime": prime_key, "fill": fill_key, "train": stream}


def place_of(turns: Turns, steps: int) -> tuple[Phase, int, int]:
    """Return, for the vector step after `steps` of them, its phase, its iteration, and its place in that."""
    if steps < turns.horizon:
        return "prime", steps, 0
    fill = steps < turns.warmup_steps
    return "fill" if fill else "train", *divmod(
        steps - (turns.horizon if fill else turns.warmup_steps), turns.vector_steps
    )


def iterations(turns: Turns, steps: int) -> int:
    """Return how many iterations have come to their end, optimisation and all, after `steps` vector steps."""
    return max(0, steps - turns.warmup_steps) // turns.vector_steps


# --- the programs -----------------------------------------------------------------------------------------------


def begin(driven: Driven, agent: PyTree, obs: PyTree) -> PyTree:
    """Start the processor at the very first observations."""
    return open_processor(driven.agent, driven.processor, agent, obs).processor


def begin_again(driven: Driven, last: Last, obs: PyTree, ended: Array) -> PyTree:
    """Return the processor's state after the last step, where `ended` `[N]` now that episodes begin with `obs`."""
    step = _step(last.action, last.extras, last.told)
    cut = step._replace(
        truncated=step.truncated | (ended & ~step.terminated), obs=tree_where(ended, obs, last.told.next_obs)
    )
    return driven.processor.process(last.before, cut)[0]


def act(
    driven: Driven, phase: Phase, agent: PyTree, processor: PyTree, key: Key, place: Array
) -> tuple[PyTree, PyTree]:
    """Choose actions; return them and extras. `place` is uint32: iteration, vector step in it, optimisation step."""
    turns, (t, at, opt_step) = driven.turns, place
    key = jax.random.split(fold(key, t))[0] if phase == "train" else fold(key, t)
    key = jax.random.split(key, 1 if phase == "prime" else turns.vector_steps)[at]
    random = phase != "train" and turns.random_warmup
    noise, actions, _ = draw_acting(driven.agent, driven.spec, turns.num_envs, key, random)
    action, extras = driven.agent.act(agent, driven.processor.observe(processor), noise, opt_step, "explore")
    return (actions if random else action), extras


def take_in(
    driven: Driven,
    push: bool,
    buffer: PyTree,
    processor: PyTree,
    action: PyTree,
    extras: PyTree,
    told: Told,
    pushes: Array,
) -> tuple[PyTree, PyTree]:
    """Process a step and, where `push`, write its transitions; return the buffer and the processor's state."""
    processor, items = driven.processor.process(processor, _step(action, extras, told))
    return (driven.buffer.push(buffer, items, pushes) if push else buffer), processor


def learn_once(driven: Driven, learner: Learner, key: Key, t: Array) -> tuple[Learner, Metrics]:
    """Make the optimisation steps of iteration `t`."""
    turns = driven.turns
    pushes = (turns.fill + t + 1) * turns.vector_steps
    update_key = jax.random.split(fold(key, t))[1]
    noise = draw_learning(driven.agent, driven.buffer, update_key, pushes, turns.num_envs, turns.updates)
    made: tuple[Learner, Metrics] = learn(driven.agent, driven.buffer, learner, noise, t * turns.updates, turns.updates)
    return made


def _step(action: PyTree, extras: PyTree, told: Told) -> Step:
    reward, (terminated, truncated, valid) = told.numbers[0], told.numbers[1:] > 0
    return Step(action, extras, reward, terminated, truncated, told.next_obs, told.next_obs, valid=valid)

"""What every strategy that samples from a buffer does: draw for an update, and make it."""

from typing import Any

import jax

from jaxrl.agents.base import Agent
from jaxrl.buffers.base import Buffer
from jaxrl.strategies.guard import guarded_update
from jaxrl.types import Array, Key, Metrics, PyTree


def draw_updates(agent: Agent, buffer: Buffer, key: Key, pushes: Array, rows: int, updates: int) -> PyTree:
    """Draw the randomness of `updates` updates made after `pushes` blocks of `rows` items; leaves `[updates, ...]`."""

    def draw(key: Key) -> PyTree:
        sample_key, agent_key = jax.random.split(key)
        learning = agent.draw_update(agent_key, buffer.batch_size)
        return buffer.draw(sample_key, pushes, rows), learning

    return jax.vmap(draw)(jax.random.split(key, updates))


def update_from(agent: Agent, buffer: Buffer, state: Any, noise: PyTree, opt_step: Array) -> tuple[Any, Metrics]:
    """Make one update on a batch from the buffer; `state` has fields `agent`, `buffer` and `health`."""
    sample_noise, agent_noise = noise
    batch = buffer.sample(state.buffer, sample_noise, opt_step)
    learnt, health, metrics, priorities = guarded_update(agent, state.agent, state.health, batch, agent_noise, opt_step)
    held = buffer.reprioritise(state.buffer, batch.index, priorities)
    return state._replace(agent=learnt, health=health, buffer=held), metrics

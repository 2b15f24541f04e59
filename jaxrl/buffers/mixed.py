"""Mix demonstrations into the batches of a replay buffer, as a fixed share of each batch (RLPD).

Ball et al. 2023, https://arxiv.org/abs/2302.02948, section 4.1, "symmetric sampling" with a share of one half.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.uniform import uniform
from jaxrl.trees import Array, Key, PyTree, require_same, row_struct
from jaxrl.types import Batch, Transition


class MixedState(NamedTuple):
    """States of the replay buffer and of the demonstrations; the latter follows from the settings alone."""

    ring: PyTree
    demos: PyTree


class _Parts(NamedTuple):
    ring: Buffer
    demos: Buffer
    make: Callable[[], Transition]
    rows: int


def mix(ring: Buffer, make: Callable[[], Transition], rows: int, count: int) -> Buffer:
    """Append `count` demonstrations to every batch of `ring`.

    Demonstrations are sampled uniformly with replacement and have weight 1. Pushes, capacity and priorities are those
    of `ring`.

    Args:
      ring: the buffer of experience.
      make: returns the demonstrations as transitions under the current settings, leaves `[rows, ...]`.
      rows: number of demonstrations.
      count: demonstrations per batch; may exceed `rows`.
    """
    parts = _Parts(ring, uniform(max(rows, count), count), make, rows)
    return Buffer(
        init=partial(_init, parts),
        push=lambda state, items, pushes: state._replace(ring=ring.push(state.ring, items, pushes)),
        sample=partial(_sample, parts),
        reprioritise=partial(_reprioritise, parts),
        capacity=ring.capacity,
        batch_size=ring.batch_size + count,
        settings=ring.settings,
        renew=partial(_renew, parts),
    )


def _init(parts: _Parts, example: PyTree, rows: int, lag: int = 0, stride: int = 0) -> MixedState:
    items = parts.make()
    # Data sets have no extras. An agent whose losses read none leaves them empty too, but its container may differ.
    if isinstance(example, Transition) and not jax.tree.leaves(example.extras):
        items = items._replace(extras=example.extras)
    require_same("demos: a demonstration", row_struct(items), "a transition of the environment", example)
    # All demonstrations are one block, written by a single push.
    empty = parts.demos.init(row_struct(items), parts.rows)
    return MixedState(parts.ring.init(example, rows, lag, stride), parts.demos.push(empty, items, jnp.uint32(0)))


def _renew(parts: _Parts, state: MixedState) -> MixedState:
    items = jax.tree.unflatten(jax.tree.structure(state.demos.items), jax.tree.leaves(parts.make()))
    empty = jax.tree.map(jnp.zeros_like, state.demos)
    return state._replace(demos=parts.demos.push(empty, items, jnp.uint32(0)))


def _sample(parts: _Parts, state: MixedState, key: Key, pushes: Array, opt_step: Array) -> Batch:
    ring_key, demo_key = jax.random.split(key)
    ring = parts.ring.sample(state.ring, ring_key, pushes, opt_step)
    # Their buffer has seen one push, however many went to the ring.
    demos = parts.demos.sample(state.demos, demo_key, jnp.uint32(1), opt_step)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), ring, demos)


def _reprioritise(parts: _Parts, state: MixedState, index: Array, priority: Array) -> MixedState:
    count = parts.ring.batch_size  # demonstrations come last in a batch, and have no priorities
    return state._replace(ring=parts.ring.reprioritise(state.ring, index[:count], priority[:count]))

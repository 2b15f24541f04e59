"""Sequences out of a ring of steps: which there are, and where their steps lie. Nothing is stored twice.

A ring holds vector steps one after the other, each of them a row for every environment. So a sequence of one
environment is every `stride`-th row from its first one on, around the ring's end if need be. It is known by that first
row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import SequenceSpec
from jaxrl.xla.shuffle import below


class Lanes(NamedTuple):
    """How sequences lie in a ring. They start at vector steps whose place in the ring is a multiple of `interval`."""

    length: int
    interval: int
    stride: int
    """Rows from one step of an environment to its next."""


def lanes_of(window: SequenceSpec, stride: int, capacity: int) -> Lanes:
    """Return how the sequences of `window` lie in a ring of at least `capacity` rows.

    Raises:
      SettingsError: the ring would at times hold no whole sequence.
    """
    least = (window.length + window.interval - 1) * stride
    if capacity < least:
        raise SettingsError(
            f"buffer.capacity is {capacity}, too few for a sequence of {window.length} steps of each of {stride} "
            f"environments; raise it to at least {least}"
        )
    return Lanes(window.length, window.interval, stride)


def rows_of(lanes: Lanes, start: Array, held: int) -> Array:
    """Return the rows of the sequences that start at the rows `start` `[B]` of a ring of `held`, `[B, L]`."""
    return (start[:, None] + jnp.arange(lanes.length, dtype=jnp.int32)[None] * lanes.stride) % held


def read(ring: Any, lanes: Lanes | None, index: Array) -> PyTree:
    """Return the items at the rows `index` `[B]`; with `lanes` the sequences that start there, leaves `[B, L, ...]`."""
    if lanes is None:
        return ring.read(index)
    rows = rows_of(lanes, index, len(ring))
    return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), ring.read(rows.reshape(-1)))


def draw_starts(lanes: Lanes, key: Key, count: int, pushes: Array, rows: int, held: int) -> Array:
    """Draw the first rows of `count` sequences uniformly, after `pushes` blocks of `rows`; int32. The key is consumed.

    A sequence starts with the oldest step at the earliest and ends with the newest at the latest, so it never crosses
    the place that is written next.
    """
    steps, blocks, per_push = held // lanes.stride, held // rows, rows // lanes.stride
    oldest = jnp.where(pushes < blocks, 0, pushes % blocks).astype(jnp.int32) * per_push
    last = oldest + jnp.minimum(pushes, blocks).astype(jnp.int32) * per_push - lanes.length
    # Starts lie between `oldest` and `last`, which may lie one lap further: then a part of them is at the ring's start.
    first = -(-oldest // lanes.interval)
    ahead = jnp.minimum(last, steps - 1) // lanes.interval + 1 - first
    behind = jnp.where(last >= steps, (last - steps) // lanes.interval + 1, 0)
    drawn = below(key, (count,), (ahead + behind) * lanes.stride).astype(jnp.int32)
    turn, lane = drawn // lanes.stride, drawn % lanes.stride
    place = jnp.where(turn < ahead, first + turn, turn - ahead) * lanes.interval
    return place * lanes.stride + lane


def completed(lanes: Lanes, held: int, rows: int, pushes: Array) -> tuple[Array, Array]:
    """Return the rows `[rows]` whose sequences block number `pushes` (from 0) may complete, and whether it does."""
    steps, per_push = held // lanes.stride, rows // lanes.stride
    block = (pushes % (held // rows)).astype(jnp.int32) * per_push
    start = block + jnp.arange(per_push, dtype=jnp.int32) - (lanes.length - 1)
    place = start % steps
    oldest = block + per_push - steps  # what began before it has been overwritten by the same block
    whole = ((start >= 0) | (pushes >= held // rows)) & (start >= oldest) & (place % lanes.interval == 0)
    index = place[:, None] * lanes.stride + jnp.arange(lanes.stride, dtype=jnp.int32)[None]
    return index.reshape(-1), jnp.repeat(whole, lanes.stride)

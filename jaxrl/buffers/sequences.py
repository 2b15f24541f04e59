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


class SequenceLayout(NamedTuple):
    """How sequences lie in a ring. They start at vector steps whose place in the ring is a multiple of `interval`."""

    length: int
    interval: int
    stride: int
    """Rows from one step of an environment to its next."""


def sequence_layout(window: SequenceSpec, stride: int, capacity: int) -> SequenceLayout:
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
    return SequenceLayout(window.length, window.interval, stride)


def sequence_rows(sequences: SequenceLayout, start: Array, held: int) -> Array:
    """Return the rows of the sequences that start at the rows `start` `[B]` of a ring of `held`, `[B, L]`."""
    return (start[:, None] + jnp.arange(sequences.length, dtype=jnp.int32)[None] * sequences.stride) % held


def read_items(ring: Any, sequences: SequenceLayout | None, index: Array) -> PyTree:
    """Return the items at rows `index` `[B]`, or the sequences that start there, leaves `[B, L, ...]`."""
    if sequences is None:
        return ring.read(index)
    rows = sequence_rows(sequences, index, len(ring))
    return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), ring.read(rows.reshape(-1)))


def sample_starts(sequences: SequenceLayout, key: Key, count: int, pushes: Array, rows: int, held: int) -> Array:
    """Draw the first rows of `count` sequences uniformly, after `pushes` blocks of `rows`; int32. The key is consumed.

    A sequence starts with the oldest step at the earliest and ends with the newest at the latest, so it never crosses
    the place that is written next.
    """
    steps, blocks, per_push = held // sequences.stride, held // rows, rows // sequences.stride
    oldest = jnp.where(pushes < blocks, 0, pushes % blocks).astype(jnp.int32) * per_push
    last = oldest + jnp.minimum(pushes, blocks).astype(jnp.int32) * per_push - sequences.length
    # Starts lie between `oldest` and `last`, which may lie one lap further: then a part of them is at the ring's start.
    first = -(-oldest // sequences.interval)
    ahead = jnp.minimum(last, steps - 1) // sequences.interval + 1 - first
    behind = jnp.where(last >= steps, (last - steps) // sequences.interval + 1, 0)
    drawn = below(key, (count,), (ahead + behind) * sequences.stride).astype(jnp.int32)
    turn, lane = drawn // sequences.stride, drawn % sequences.stride
    place = jnp.where(turn < ahead, first + turn, turn - ahead) * sequences.interval
    return place * sequences.stride + lane


def completed_sequences(sequences: SequenceLayout, held: int, rows: int, pushes: Array) -> tuple[Array, Array]:
    """Return the rows `[rows]` whose sequences block number `pushes` (from 0) may complete, and whether it does."""
    steps, per_push = held // sequences.stride, rows // sequences.stride
    block = (pushes % (held // rows)).astype(jnp.int32) * per_push
    start = block + jnp.arange(per_push, dtype=jnp.int32) - (sequences.length - 1)
    place = start % steps
    oldest = block + per_push - steps  # what began before it has been overwritten by the same block
    whole = ((start >= 0) | (pushes >= held // rows)) & (start >= oldest) & (place % sequences.interval == 0)
    index = place[:, None] * sequences.stride + jnp.arange(sequences.stride, dtype=jnp.int32)[None]
    return index.reshape(-1), jnp.repeat(whole, sequences.stride)

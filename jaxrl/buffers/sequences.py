"""Sequences of steps in a ring: their starts and their rows, without storing any step twice.

A ring holds consecutive vector steps, each with one row per environment. A sequence of one environment is thus every
`stride`-th row from its first row on, wrapping around the end of the ring. It is identified by its first row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import SequenceSpec
from jaxrl.xla.shuffle import below


class SequenceLayout(NamedTuple):
    """Layout of sequences in a ring: they start at vector steps whose index in the ring is a multiple of `interval`."""

    length: int
    interval: int
    stride: int
    """Rows from one step of an environment to its next: the number of environments."""


def sequence_layout(window: SequenceSpec, stride: int, capacity: int) -> SequenceLayout:
    """Return the layout of the sequences of `window` in a ring of at least `capacity` rows.

    Raises:
      SettingsError: the ring would at times hold no complete sequence.
    """
    # Just after a start has been overwritten, the next one is up to `interval - 1` steps later.
    least = (window.length + window.interval - 1) * stride
    if capacity < least:
        raise SettingsError(
            f"buffer.capacity is {capacity}, too few for a sequence of {window.length} steps of each of {stride} "
            f"environments; raise it to at least {least}"
        )
    return SequenceLayout(window.length, window.interval, stride)


def sequence_rows(sequences: SequenceLayout, start: Array, size: int) -> Array:
    """Return the rows `[B, L]` of the sequences that start at rows `start` `[B]` of a ring of `size` rows."""
    return (start[:, None] + jnp.arange(sequences.length, dtype=jnp.int32)[None] * sequences.stride) % size


def read_items(ring: Any, sequences: SequenceLayout | None, index: Array) -> PyTree:
    """Return the items at rows `index` `[B]`, or the sequences that start there, leaves `[B, L, ...]`."""
    if sequences is None:
        return ring.read(index)
    rows = sequence_rows(sequences, index, len(ring))
    return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), ring.read(rows.reshape(-1)))


def sample_starts(sequences: SequenceLayout, key: Key, count: int, pushes: Array, rows: int, size: int) -> Array:
    """Sample the first rows of `count` sequences uniformly, after `pushes` blocks of `rows`; int32.

    A sequence starts at the oldest step or later and ends at the newest or earlier, so it never crosses the next write
    position. The key is consumed.
    """
    steps, blocks, per_push = size // sequences.stride, size // rows, rows // sequences.stride
    # In a full ring, the block that is written next is the oldest.
    oldest = jnp.where(pushes < blocks, 0, pushes % blocks).astype(jnp.int32) * per_push
    last = oldest + jnp.minimum(pushes, blocks).astype(jnp.int32) * per_push - sequences.length
    # Starts are the multiples of `interval` from `oldest` to `last`. If `last` is beyond the end of the ring, those of
    # the second part wrap around to its beginning, where multiples are counted from 0 again.
    first = -(-oldest // sequences.interval)
    ahead = jnp.minimum(last, steps - 1) // sequences.interval + 1 - first
    behind = jnp.where(last >= steps, (last - steps) // sequences.interval + 1, 0)
    drawn = below(key, (count,), (ahead + behind) * sequences.stride).astype(jnp.int32)
    # Starts are the same in all environments, so the number of environments is only a factor.
    turn, env = drawn // sequences.stride, drawn % sequences.stride
    place = jnp.where(turn < ahead, first + turn, turn - ahead) * sequences.interval
    return place * sequences.stride + env


def completed_sequences(sequences: SequenceLayout, size: int, rows: int, pushes: Array) -> tuple[Array, Array]:
    """Return the rows `[rows]` whose sequences push number `pushes` (from 0) may complete, and whether it does."""
    steps, per_push = size // sequences.stride, rows // sequences.stride
    block = (pushes % (size // rows)).astype(jnp.int32) * per_push
    # Each new step may complete the sequence that began `length - 1` steps before it.
    start = block + jnp.arange(per_push, dtype=jnp.int32) - (sequences.length - 1)
    place = start % steps
    oldest = block + per_push - steps  # earlier starts have been overwritten by the same block
    # Negative starts are in the ring's previous round, which exists once all blocks have been written.
    whole = ((start >= 0) | (pushes >= size // rows)) & (start >= oldest) & (place % sequences.interval == 0)
    index = place[:, None] * sequences.stride + jnp.arange(sequences.stride, dtype=jnp.int32)[None]
    return index.reshape(-1), jnp.repeat(whole, sequences.stride)

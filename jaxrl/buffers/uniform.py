"""A ring of the newest items, sampled uniformly with replacement."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.compact import CompactRows, empty_compact
from jaxrl.buffers.sequences import SequenceLayout, read_items, sample_starts, sequence_layout
from jaxrl.errors import SettingsError, check_between, check_count, check_type
from jaxrl.parsing import as_int
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, SequenceSpec
from jaxrl.xla import host_memory, packing
from jaxrl.xla.packing import Rows
from jaxrl.xla.shuffle import below

Ring = Rows | CompactRows
"""The two storages of items; both write blocks and read rows."""
MEMORIES = ("device", "host")
"""Where a ring may lie."""


def uniform(
    capacity: int = 50_000,
    batch_size: int = 128,
    *,
    compact: bool = False,
    ends: float = 0.125,
    frames: int = 1,
    memory: str = "device",
) -> Buffer:
    """Keep the newest `capacity` items and sample batches of `batch_size` uniformly, with replacement.

    Items are written in blocks, each one contiguous update, so the capacity is rounded up to whole blocks
    (`buffer.capacity(rows)` returns the result).

    A `compact` buffer samples the same bits and, for large observations, takes little more than half the memory. It
    stores `next_obs` only for the newest items and at ends of episodes, `n` per episode for `n`-step transitions;
    elsewhere `next_obs` is the `obs` of a later item. There is room for `ends * capacity` of them. If more are needed,
    the oldest are dropped: their items get `weight` 0, unless the episode terminated, in which case the successor has
    no value and `obs` takes its place. Nothing is dropped if episodes are longer than `n / ends` steps on average.

    Args:
      capacity: number of items.
      batch_size: items per batch.
      compact: store each observation once; items must be `Transition`s.
      ends: room for the ends of episodes, as a share of the capacity.
      frames: frames per stacked observation, as made by `frame_stack`; a compact buffer stores each frame once.
      memory: `device`, or `host` for the memory of the host, from which each batch is read: of a compact buffer, its
        observations. Samples are the same.

    Raises:
      SettingsError: a count is below 1, the capacity is below the batch size, `ends` is outside `[0, 1]`, or the
        platform has no `memory` of that name.
    """
    capacity, batch_size = as_int(capacity), as_int(batch_size)
    check_count("buffer.capacity", capacity)
    check_count("buffer.batch_size", batch_size)
    if capacity >= 2**31 - batch_size:
        raise SettingsError(f"buffer.capacity is {capacity}; indices are int32, so it must be below 2^31")
    if capacity < batch_size:
        raise SettingsError(
            f"buffer.capacity is {capacity}, below buffer.batch_size {batch_size}; raise it to at least {batch_size}"
        )
    check_type("buffer.compact", compact, bool, "True or False")
    check_between("buffer.ends", ends, 0.0, 1.0)
    check_count("buffer.frames", frames)
    if frames > 1 and not compact:
        raise SettingsError("buffer.frames is for compact buffers; set buffer.compact as well, or buffer.frames to 1")
    if memory not in MEMORIES:
        raise SettingsError(f"buffer.memory is {memory!r}; expected device or host")
    on_host = memory == "host"
    if on_host:
        host_memory.sharding()  # raises where there is none
    buffer = Buffer(
        init=partial(_init, capacity, ends if compact else None, frames, on_host),
        push=_push,
        sample=partial(_sample, batch_size),
        reprioritise=lambda state, index, priority: state,
        capacity=partial(_round_up, capacity),
        batch_size=batch_size,
        settings={
            "capacity": capacity,
            "batch_size": batch_size,
            "compact": compact,
            "ends": ends,
            "frames": frames,
            "memory": memory,
            "prioritised": False,
        },
    )
    make = partial(uniform, compact=compact, ends=ends, frames=frames)
    return buffer._replace(
        as_sequence_buffer=partial(_as_sequence_buffer, buffer, capacity, frames),
        # The parts of a ring in the host's memory would have to lie beside the devices of their shards.
        shard=None if on_host else partial(_shard, make, capacity, batch_size),
    )


def _shard(make: Callable[[int, int], Buffer], capacity: int, batch_size: int, shards: int) -> Buffer:
    # The batch divides without a remainder, which strategies check; the capacity is rounded up.
    return make(-(-capacity // shards), batch_size // shards)


def _as_sequence_buffer(buffer: Buffer, capacity: int, frames: int, window: SequenceSpec, stride: int) -> Buffer:
    if frames > 1:
        raise SettingsError(
            f"buffer.frames is {frames}, but steps are stored with a recurrent memory, which is not stacked; "
            "set it to 1"
        )
    sequences = sequence_layout(window, stride, capacity)
    return buffer._replace(
        sample=partial(_sample_sequences, buffer.batch_size, sequences),
        as_sequence_buffer=None,
        window=window,
    )


def _round_up(capacity: int, rows: int) -> int:
    return -(-capacity // rows) * rows


def _init(
    capacity: int,
    ends: float | None,
    frames: int,
    on_host: bool,
    example: PyTree,
    rows: int,
    lag: int = 0,
    stride: int = 0,
) -> Ring:
    size = _round_up(capacity, rows)
    if ends is None:
        return packing.empty(packing.layout_of(example), size, rows, on_host)
    return empty_compact(example, size, lag, ends, frames, rows, stride, on_host)


def _push(ring: Ring, items: PyTree, pushes: Array) -> Ring:
    # First, since a wrong structure would make the number of rows meaningless.
    packing.check_items(ring.layout, items)
    rows = jax.tree.leaves(items)[0].shape[0]
    if rows != ring.block:
        raise SettingsError(
            f"buffer: pushed a block of {rows} rows; expected {ring.block}, the rows given to init, which tile the "
            f"{len(ring)} rows that the buffer holds"
        )
    return ring.write(items, block_start(len(ring), rows, pushes))


def block_start(size: int, rows: int, pushes: Array) -> Array:
    """Return the first row that push number `pushes` (from 0) of `rows` rows writes, in a ring of `size` rows."""
    return jnp.asarray(pushes % (size // rows), jnp.int32) * rows


def num_items(ring: Ring, pushes: Array) -> Array:
    """Return the number of items in a ring after `pushes` blocks, int32."""
    return jnp.minimum(pushes, len(ring) // ring.block).astype(jnp.int32) * ring.block


def _sample(batch_size: int, ring: Ring, key: Key, pushes: Array, opt_step: Array) -> Batch:
    # The ring fills from row 0 on, so the items are always the first rows.
    return read_batch(ring, below(key, (batch_size,), num_items(ring, pushes)).astype(jnp.int32))


def _sample_sequences(
    batch_size: int, sequences: SequenceLayout, ring: Ring, key: Key, pushes: Array, opt_step: Array
) -> Batch:
    return read_batch(ring, sample_starts(sequences, key, batch_size, pushes, ring.block, len(ring)), sequences)


def read_batch(ring: Ring, index: Array, sequences: SequenceLayout | None = None) -> Batch:
    """Return the batch of items at `index` `[B]`, or of the sequences that start there, with weight 1."""
    return Batch(read_items(ring, sequences, index), index, jnp.ones(index.shape, jnp.float32))

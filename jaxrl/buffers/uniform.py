"""A ring of the newest items, sampled uniformly with replacement."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.rows import Rows, empty, layout_of, pack, unpack
from jaxrl.errors import SettingsError, check_count
from jaxrl.types import Array, Batch, Key, PyTree, below


def uniform(capacity: int, batch_size: int) -> Buffer:
    """Keep the newest `capacity` items and sample batches of `batch_size` from them uniformly.

    Items are written in blocks, one contiguous update a block, so the capacity is rounded up to whole blocks
    (`buffer.capacity(rows)` says to what).

    Raises:
      SettingsError: a count below 1, or a capacity below the batch size.
    """
    check_count("buffer.capacity", capacity)
    check_count("buffer.batch_size", batch_size)
    if capacity >= 2**31 - batch_size:
        raise SettingsError(f"buffer.capacity is {capacity}; indices are int32, so it must be below 2^31")
    if capacity < batch_size:
        raise SettingsError(
            f"buffer.capacity is {capacity}, below buffer.batch_size {batch_size}; raise it to at least {batch_size}"
        )
    return Buffer(
        init=partial(_init, capacity),
        push=_push,
        draw=partial(_draw, capacity, batch_size),
        sample=_sample,
        reprioritise=lambda state, index, priority: state,
        size=partial(_size, capacity),
        capacity=partial(_rounded, capacity),
        batch_size=batch_size,
        settings={"capacity": capacity, "batch_size": batch_size},
    )


def _rounded(capacity: int, rows: int) -> int:
    return -(-capacity // rows) * rows


def _init(capacity: int, example: PyTree, rows: int) -> Rows:
    return empty(layout_of(example), _rounded(capacity, rows))


def _push(ring: Rows, items: PyTree, pushes: Array) -> Rows:
    block = pack(ring.layout, items)
    rows = jax.tree.leaves(items)[0].shape[0]
    if len(ring) % rows:
        raise SettingsError(
            f"buffer: pushed a block of {rows} rows, which does not tile the {len(ring)} rows that the buffer holds; "
            "push blocks of the rows given to init"
        )
    start = jnp.asarray(pushes % (len(ring) // rows), jnp.int32) * rows
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
    return replace(ring, words=jax.tree.map(write, ring.words, block))


def _size(capacity: int, pushes: Array, rows: int) -> Array:
    blocks = _rounded(capacity, rows) // rows
    return jnp.minimum(pushes, blocks).astype(jnp.int32) * rows


def _draw(capacity: int, batch_size: int, key: Key, pushes: Array, rows: int) -> Array:
    return below(key, (batch_size,), _size(capacity, pushes, rows)).astype(jnp.int32)


def _sample(ring: Rows, index: Array, opt_step: Array) -> Batch:
    return read(ring, index, jnp.ones(index.shape, jnp.float32))


def read(ring: Rows, index: Array, weight: Array) -> Batch:
    """Return the items at `index` `[B]` as a batch in which they have `weight` `[B]`."""
    words = jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), ring.words)
    return Batch(unpack(ring.layout, words), index, weight)

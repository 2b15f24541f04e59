"""A ring of the newest items, sampled uniformly with replacement."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.buffers.base import Buffer
from jaxrl.errors import SettingsError, check_count
from jaxrl.types import Array, Batch, Key, PyTree


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


def _init(capacity: int, example: PyTree, rows: int) -> PyTree:
    shapes = jax.eval_shape(lambda x: x, example)
    return jax.tree.map(lambda x: jnp.zeros((_rounded(capacity, rows), *x.shape), x.dtype), shapes)


def _push(ring: PyTree, items: PyTree, pushes: Array) -> PyTree:
    check_items(ring, items)
    rows = jax.tree.leaves(items)[0].shape[0]
    slots = jax.tree.leaves(ring)[0].shape[0] // rows
    start = jnp.asarray(pushes % slots, jnp.int32) * rows
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0), ring, items)


def _size(capacity: int, pushes: Array, rows: int) -> Array:
    blocks = _rounded(capacity, rows) // rows
    return jnp.minimum(pushes, blocks).astype(jnp.int32) * rows


def _draw(capacity: int, batch_size: int, key: Key, pushes: Array, rows: int) -> Array:
    return jax.random.randint(key, (batch_size,), 0, _size(capacity, pushes, rows))


def _sample(ring: PyTree, index: Array) -> Batch:
    items = jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), ring)
    return Batch(items, index, jnp.ones(index.shape, jnp.float32))


def check_items(ring: PyTree, items: PyTree) -> None:
    """Raise `SettingsError` at trace time unless `items` are blocks of what `ring` was made for.

    A dtype that differs would otherwise be cast silently, and a shape be an error from deep inside XLA.
    """
    wanted, came = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (ring, items))
    if wanted.keys() != came.keys():
        odd = min((jax.tree_util.keystr(path) for path in wanted.keys() ^ came.keys()), default="")
        raise SettingsError(f"buffer: pushed items do not have the structure of the example; they differ at {odd}")
    rows = {leaf.shape[:1] for leaf in came.values()}
    for path, leaf in came.items():
        like: Any = wanted[path]
        if leaf.dtype != like.dtype or leaf.ndim != like.ndim or leaf.shape[1:] != like.shape[1:] or len(rows) != 1:
            raise SettingsError(
                f"buffer: pushed {leaf.dtype}{list(leaf.shape)} at {jax.tree_util.keystr(path)}; "
                f"expected {like.dtype}, [rows, *{list(like.shape[1:])}], with the same rows in every leaf"
            )
    (block,), held = rows.pop(), next(iter(wanted.values())).shape[0]
    if held % block:
        raise SettingsError(
            f"buffer: pushed a block of {block} rows, which does not tile the {held} rows that the buffer holds; "
            "push blocks of the rows given to init"
        )

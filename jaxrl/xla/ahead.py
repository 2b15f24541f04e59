"""The loop over iterations, with random numbers drawn ahead for a block of iterations at once.

Plain: `jax.lax.fori_loop`. A draw takes many small kernels on a few numbers; for a block of iterations it takes as many
kernels on many numbers. The numbers are the same, bit by bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, Key, PyTree, tree_bytes
from jaxrl.xla.carry import loop_form, pack_rows
from jaxrl.xla.flat import cutting
from jaxrl.xla.hoist import hoist

BLOCK = 64
"""Largest number of iterations in a block."""
BLOCK_BYTES = 4 << 20
"""Largest size of a block's random numbers in bytes; a block has at least one iteration."""
_lengths: ContextVar[list[int] | None] = ContextVar("lengths", default=None)
_copies: ContextVar[int] = ContextVar("copies", default=1)


@contextmanager
def block_lengths() -> Iterator[list[int]]:
    """Record the block lengths of loops that are traced inside a `with` block."""
    lengths: list[int] = []
    token = _lengths.set(lengths)
    try:
        yield lengths
    finally:
        _lengths.reset(token)


@contextmanager
def mapped_over(copies: int) -> Iterator[None]:
    """Trace loops inside a `with` block for a `vmap` over `copies`, which share one block's bytes."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


def iterate_hoisted(
    body: Callable[[PyTree, Key, Array], PyTree],
    key_of: Callable[[Array], Key],
    carry: PyTree,
    start: Array,
    stop: Array,
) -> PyTree:
    """Run `carry = body(carry, key_of(t), t)` for `t` from `start` to `stop`, uint32.

    Blocks begin at multiples of their length, so that an iteration's randomness always comes from the same place of the
    same program: how a run is split into calls does not affect a bit of it.
    """
    form = loop_form(carry)

    def turn(held: PyTree, key: Key, t: Array) -> PyTree:
        with cutting():
            return form.hold(body(form.release(held), key, t))

    # Traced once, from shapes: for a single iteration, with the carry in its packed form.
    hoisted = hoist(turn, jax.eval_shape(form.hold, carry), jax.eval_shape(key_of, start), start)
    length = block_length(_copies.get() * tree_bytes(hoisted.drawn))
    if (lengths := _lengths.get()) is not None:
        lengths.append(length)

    def block(index: Array, carry: PyTree) -> PyTree:
        # Draws for the entire block, including iterations before `start` and after `stop`.
        first = index * length
        places = first + jnp.arange(length, dtype=jnp.uint32)
        keys = jax.vmap(key_of)(places)
        rows, row = pack_rows((keys, jax.vmap(hoisted.ahead)(keys, places)))

        def one(t: Array, held: PyTree) -> PyTree:
            # The block ends are below 2^32 because the first of them is at most `stop`.
            place = (t - first).astype(jnp.int32)
            key, drawn = row(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), rows))
            return hoisted.behind(held, drawn, key, t)

        # `first + length` is taken only if it is at most `stop`, so it cannot wrap around.
        low = jnp.maximum(start, first)
        high = jnp.where(stop - first < length, stop, first + length)
        return form.release(form.loop(low, high, one, form.hold(carry)))

    # Rounded up without adding to `stop`, which could wrap around. The loop over blocks carries the plain tree.
    blocks_end = stop // length + (stop % length > 0).astype(jnp.uint32)
    return jax.lax.fori_loop(start // length, blocks_end, block, carry)


def block_length(one: int) -> int:
    """Return the number of iterations in a block, a power of two, for `one` bytes per iteration."""
    length = BLOCK
    while length > 1 and length * one > BLOCK_BYTES:
        length //= 2
    return length

"""Batches of fixed data without replacement: every epoch is a new permutation of all items."""

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, Key
from jaxrl.xla.shuffle import permute


def epoch_indices(key: Key, opt_step: Array, batch_size: int, rows: int) -> Array:
    """Return the indices `[B]` of the batch of optimisation step `opt_step` (from 0), out of `rows >= B` items.

    The permutations of all epochs are concatenated and cut into batches, so a batch may span two epochs. The result
    depends on the arguments alone: there is no state to keep, and a resumed run gets the same batches.
    """
    epoch, first = mul_divmod(opt_step, batch_size, rows)
    place = first + jnp.arange(batch_size, dtype=jnp.uint32)
    inside = place < rows
    now = permute(jax.random.fold_in(key, epoch), jnp.where(inside, place, 0), rows)
    if rows % batch_size == 0:  # no batch spans two epochs
        return now
    then = permute(jax.random.fold_in(key, epoch + 1), jnp.where(inside, 0, place - rows), rows)
    return jnp.where(inside, now, then)


def mul_divmod(count: Array, size: int, rows: int) -> tuple[Array, Array]:
    """Return quotient and remainder of `count * size / rows` as uint32, though the product may exceed 32 bits.

    Long division, one bit of `count` at a time; requires `size <= rows < 2^31`, so that a doubled remainder fits.
    """
    count = jnp.asarray(count, jnp.uint32)

    def digit(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        whole, rest = done[0] * 2, done[1] * 2
        over = rest >= rows
        whole, rest = whole + over, rest - jnp.where(over, rows, 0).astype(jnp.uint32)
        rest = rest + jnp.where((count >> (31 - i)) & 1, size, 0).astype(jnp.uint32)
        over = rest >= rows
        return whole + over, rest - jnp.where(over, rows, 0).astype(jnp.uint32)

    zero = jnp.zeros_like(count)
    done: tuple[Array, Array] = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), digit, (zero, zero))
    return done

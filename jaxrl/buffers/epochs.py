"""Batches of fixed data without replacement: epochs, each a new random order of all items."""

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, Key
from jaxrl.xla.shuffle import permuted


def epoch_indices(key: Key, opt_step: Array, batch_size: int, rows: int) -> Array:
    """Return the items `[B]` that optimisation step `opt_step` (from 0) learns from, of `rows`, at least `B`.

    The orders of all epochs are laid end to end and cut into batches, so that every batch is whole: one that an epoch's
    end falls into takes the rest of it, and the first items of the next. It is a pure function of its arguments;
    nothing has to be kept from step to step.
    """
    epoch, first = mul_divmod(opt_step, batch_size, rows)
    place = first + jnp.arange(batch_size, dtype=jnp.uint32)
    inside = place < rows
    now = permuted(jax.random.fold_in(key, epoch), jnp.where(inside, place, 0), rows)
    if rows % batch_size == 0:  # no batch has two epochs in it
        return now
    then = permuted(jax.random.fold_in(key, epoch + 1), jnp.where(inside, 0, place - rows), rows)
    return jnp.where(inside, now, then)


def mul_divmod(count: Array, size: int, rows: int) -> tuple[Array, Array]:
    """Return `count * size` divided by `rows`, and the rest, uint32, where the product has more than 32 bits.

    `size` is at most `rows`, and that is below 2^31. This is long division, a bit of `count` at a time.
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

"""Random permutations without sorting, and random integers from one word each. Plain: permutation by sorting.

Used on all platforms, because the order of minibatches is part of a run's result. On a CPU, sorting random words takes
longer than a whole epoch of small networks: four orders of 131 072 positions take 794 ms. A Feistel network on the
positions needs no comparisons and only a few random words: 5 ms.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.trees import Array, Key

ROUNDS = 6
"""Rounds of the network. Two fewer suffice to make the result indistinguishable from a random order by its positions
(Luby and Rackoff 1988, https://doi.org/10.1137/0217022); the extra two are there because the sides are small."""
NARROW = 8
"""With fewer rows or columns than this there is too little to mix, and sorting is used."""


def random_orders(key: Key, count: int, units: int) -> Array:
    """Draw `count` permutations of `0 .. units-1`, int32 `[count, units]`; the key is consumed.

    The positions are laid out as a rectangle. Every row is rotated by its own random number, then every column, and so
    on in turn (the generalised Feistel network of Black and Rogaway 2002, https://doi.org/10.1007/3-540-45760-7_9).
    Each rotation is invertible, so every position occurs exactly once, whatever the numbers.
    """
    # The factorisation that is closest to a square.
    rows = next(d for d in range(math.isqrt(units), 0, -1) if units % d == 0)
    columns = units // rows
    if rows < NARROW:
        return jnp.argsort(jax.random.bits(key, (count, units), jnp.uint32), axis=-1).astype(jnp.int32)
    place = jnp.broadcast_to(jnp.arange(units, dtype=jnp.int32), (count, units))
    row, column = place // columns, place % columns
    for i, round_key in enumerate(jax.random.split(key, ROUNDS)):
        if i % 2:
            column = _rotate(round_key, column, columns, row, rows)
        else:
            row = _rotate(round_key, row, rows, column, columns)
    return row * columns + column


def permute(key: Key, place: Array, units: int) -> Array:
    """Return the entries at `place` `[B]` of a random permutation of `0 .. units-1`, int32 `[B]`.

    The key is consumed. Few units are sorted. More are laid out as a rectangle, nearly a square, whose rows and columns
    are rotated as in `random_orders`. The rectangle may have a few positions past `units`; an entry that lands there is
    permuted again until it does not ("cycle walking", Black and Rogaway 2002).
    """
    if units < NARROW * NARROW:
        return jnp.argsort(jax.random.bits(key, (units,), jnp.uint32)).astype(jnp.int32)[place]
    rows = math.isqrt(units)
    columns = -(-units // rows)
    # Even rounds shift rows, by a number for each column; odd rounds shift columns, by a number for each row.
    keys = jax.random.split(key, ROUNDS)
    turns = [below(k, (columns if i % 2 == 0 else rows,), (rows, columns)[i % 2]) for i, k in enumerate(keys)]

    def moved(place: Array) -> Array:
        row, column = place // columns, place % columns
        for i, turn in enumerate(turns):
            if i % 2:
                column = (column + turn[row].astype(jnp.int32)) % columns
            else:
                row = (row + turn[column].astype(jnp.int32)) % rows
        return row * columns + column

    outside = lambda place: (place >= units).any()
    first = moved(jnp.asarray(place, jnp.int32))
    # No position is outside of `units`, so none has to walk.
    if rows * columns == units:
        return first
    # Only entries that are still outside move on. A walk ends, since its cycle returns to its start, which is inside.
    return jax.lax.while_loop(outside, lambda place: jnp.where(place >= units, moved(place), place), first)


def _rotate(key: Key, moved: Array, size: int, by: Array, lines: int) -> Array:
    """Rotate `moved`, of `0 .. size-1`, by a random number for each of the `lines` that `by` indexes."""
    shift = below(key, (moved.shape[0], lines), size).astype(jnp.int32)
    return (moved + jnp.take_along_axis(shift, by, axis=1, mode="promise_in_bounds")) % size


def below(key: Key, shape: tuple[int, ...], bound: Array | np.ndarray | int) -> Array:
    """Draw integers from `0 .. bound-1`, uint32 and of `shape`; the key is consumed.

    Each takes one random word; `jax.random.randint` takes two and a split, which matters, because these are half of
    what a vector step draws. The relative error of each probability is at most `bound / 2^32`, and 0 if `bound` is a
    power of two.
    """
    return jax.random.bits(key, shape, jnp.uint32) % jnp.broadcast_to(jnp.asarray(bound, jnp.uint32), shape)

"""Random matrices with orthonormal rows or columns.

Plain: a QR factorisation, as in Flax's initialiser. On CPUs, `jnp.linalg.qr` waits inside a thread of XLA's pool for
other threads of that pool: on two cores, two factorisations for several seeds at once deadlock. So CPUs use
Gram-Schmidt, one column at a time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, Key
from jaxrl.xla import shaped_for


def orthogonal(gain: float, key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Return `gain` times a uniformly random matrix with orthonormal rows or columns, whichever are fewer."""
    if not shaped_for("cpu"):
        return jax.nn.initializers.orthogonal(gain)(key, shape, dtype)
    long, short = max(math.prod(shape[:-1]), shape[-1]), min(math.prod(shape[:-1]), shape[-1])

    def column(i: Array, done: Array) -> Array:
        # The columns done so far; the others still hold random numbers.
        before = jnp.where(jnp.arange(short, dtype=jnp.int32)[None] < i, done, 0.0)
        v = jax.lax.dynamic_index_in_dim(done, i, axis=1, keepdims=False)
        for _ in range(2):  # the second pass removes what rounding left after the first
            v = v - before @ (v @ before)
        return jax.lax.dynamic_update_index_in_dim(done, v / jnp.linalg.norm(v), i, axis=1)

    # Columns are made orthonormal, so a matrix with fewer rows than columns is made as its transpose.
    tall = jax.lax.fori_loop(0, short, column, jax.random.normal(key, (long, short), jnp.float32))
    matrix = tall if math.prod(shape[:-1]) == long else tall.T
    return gain * matrix.reshape(shape).astype(dtype)

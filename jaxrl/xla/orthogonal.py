"""Random matrices with orthonormal rows or columns.

Plain: a QR factorisation, as Flax's initialiser makes it. On CPUs `jnp.linalg.qr` waits inside a thread of XLA's pool
for others of that pool: on two cores, two factorisations for several seeds at once never end. So there it is Gram and
Schmidt, a column at a time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, Key
from jaxrl.xla import shaped_for


def orthogonal(gain: float, key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Return `gain` times a random matrix with orthonormal rows or columns, whichever are fewer, uniform among such."""
    if not shaped_for("cpu"):
        return jax.nn.initializers.orthogonal(gain)(key, shape, dtype)
    long, short = max(math.prod(shape[:-1]), shape[-1]), min(math.prod(shape[:-1]), shape[-1])

    def column(i: Array, done: Array) -> Array:
        before = jnp.where(jnp.arange(short)[None] < i, done, 0.0)
        v = jax.lax.dynamic_index_in_dim(done, i, axis=1, keepdims=False)
        for _ in range(2):  # twice, for what the first leaves by rounding
            v = v - before @ (v @ before)
        return jax.lax.dynamic_update_index_in_dim(done, v / jnp.linalg.norm(v), i, axis=1)

    tall = jax.lax.fori_loop(0, short, column, jax.random.normal(key, (long, short)))
    matrix = tall if math.prod(shape[:-1]) == long else tall.T
    return gain * matrix.reshape(shape).astype(dtype)

"""Test whether a few flags all hold, and select between two states by the result.

Plain: `flags.all()` and selects.
"""

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, PyTree, tree_bytes, tree_where
from jaxrl.xla import by_platform, shaped_for

LARGE = 1 << 20
"""Bytes of a state from which branching is faster on a CPU: `dqn-conv` takes 0.86 of the time. A branch copies the new
state over the old one if the update is accepted, while selects read both and are split among threads. For a small state
a branch only adds delay, and a GPU would wait for the host."""


def all_true(flags: Array) -> Array:
    """Return whether all of `flags` `[M]` hold.

    As a dot product, the result is a number in memory. On a CPU any simpler form would be fused into its readers, and
    every entry of the state selected by it would recompute the batch's means. Elsewhere it would be a kernel more.
    """
    if not shaped_for("cpu"):
        return jnp.all(flags)
    fine = flags.astype(jnp.float32)
    return jnp.vdot(fine, fine) == len(fine)


def either(ok: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new` if the scalar `ok` is true, otherwise `old`."""
    select = lambda ok, new, old: tree_where(ok, new, old)
    if tree_bytes(new) < LARGE:
        return select(ok, new, old)
    return by_platform(lambda ok, new, old: jax.lax.cond(ok, lambda: new, lambda: old), select, ok, new, old)

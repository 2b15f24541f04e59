"""Stack scalars into one array.

Plain: `jnp.stack`. XLA spends a kernel on each scalar of a concatenation, while a chain of selects fuses into one
kernel with what follows. Used on CPUs and TPUs (145 000 estimated cycles for an iteration of DQN on a v5e, 154 000
without); on CUDA XLA concatenates in one kernel by itself (54 kernels, 57 with the selects).
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla import shaped_for

SELECTED = ("cpu", "tpu")
"""Platforms on which scalars are stacked by selects."""


def column(scalars: Sequence[Array]) -> Array:
    """Stack scalars, `M` times `[]` to `[M]`."""
    if not shaped_for(*SELECTED):
        return jnp.stack(scalars)
    place = jnp.arange(len(scalars))
    stacked = jnp.broadcast_to(scalars[0], place.shape)
    for i, scalar in enumerate(scalars[1:], 1):
        stacked = jnp.where(place == i, scalar, stacked)
    return stacked

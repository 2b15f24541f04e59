"""Scalars stacked into one array.

Plain: `jnp.stack`. A concatenation takes XLA a kernel for each scalar; a chain of selects fuses with what follows into
one. On all platforms: the metrics of an update are some twenty scalars, and a kernel each is a launch each on a GPU.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.xla import PLATFORMS, shaped_for


def column(scalars: Sequence[Array]) -> Array:
    """Stack scalars, `M` times `[]` to `[M]`."""
    if not shaped_for(*PLATFORMS):
        return jnp.stack(scalars)
    place = jnp.arange(len(scalars))
    stacked = jnp.broadcast_to(scalars[0], place.shape)
    for i, scalar in enumerate(scalars[1:], 1):
        stacked = jnp.where(place == i, scalar, stacked)
    return stacked

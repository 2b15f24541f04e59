"""Stack scalars into one array.

Plain: `jnp.stack`. XLA spends a kernel on each scalar of a concatenation, while a chain of selects fuses into one
kernel with what follows. Used on all platforms: an update has some twenty scalar metrics, and on a GPU each kernel is a
launch.
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

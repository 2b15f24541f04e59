"""Encode observations for a torso as float32, with images separate from the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.masks import for_critic
from jaxrl.nn.layers import FLAT, flatten
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space, box_bounds, is_leaf
from jaxrl.trees import Array, PyTree


def encode(space: Space, obs: PyTree, torso: str = "auto") -> Any:
    """Encode a batch of observations as float32: `[B, H, W, C]` for a convolution, `[B, D]` for dense layers.

    A dict or tuple with images becomes a tuple of images, `[B, H, W, C]` each, and all other parts as `[B, D]`, unless
    the torso has no convolutions. Discrete parts are encoded one-hot, integers bounded by 0 and 255 (images) are
    divided by 255, and parts of dicts and tuples are concatenated. Action masks are dropped.
    """
    space, obs = for_critic(space), for_critic(obs)
    spaces = space_leaves(space)
    parts = [_encode_leaf(s, x) for s, x in zip(spaces, jax.tree.leaves(obs), strict=True)]
    flat = lambda parts: [flatten(x) for x in parts]
    if torso in FLAT or not image_leaves(space):
        return jnp.concatenate(flat(parts), axis=-1)
    if isinstance(space, Box):
        return parts[0]
    images = tuple(x for s, x in zip(spaces, parts, strict=True) if is_image(s))
    rest = [x for s, x in zip(spaces, parts, strict=True) if not is_image(s)]
    # The empty array is for observations of images alone, with nothing else to concatenate.
    return images, jnp.concatenate([jnp.zeros((images[0].shape[0], 0), jnp.float32), *flat(rest)], axis=-1)


def space_leaves(space: Space) -> list[Any]:
    """Return the leaves of a space, in the order of its elements' leaves."""
    # Leaves by type, because Flax turns a dict among the attributes of a module into a `FrozenDict`.
    return jax.tree.leaves(space, is_leaf=is_leaf)


def image_leaves(space: Space) -> list[Box]:
    """Return the leaves of a space that are images `[H, W, C]` of at least 3 x 3."""
    return [leaf for leaf in space_leaves(space) if is_image(leaf)]


def is_image(space: Any) -> bool:
    """Return whether a leaf is an image that a 3x3 convolution can take."""
    return isinstance(space, Box) and len(space.shape) == 3 and min(space.shape[:2]) >= 3


def is_bytes(space: Box) -> bool:
    """Return whether entries are integers from 0 to 255, as in images; bounds are clipped to the dtype's range."""
    if not jnp.issubdtype(space.dtype, jnp.integer):
        return False
    low, high, _ = box_bounds(space)
    kind = jnp.iinfo(space.dtype)
    return bool(np.all(np.maximum(low, kind.min) == 0) and np.all(np.minimum(high, kind.max) == 255))


def _encode_leaf(space: Box | Discrete | MultiDiscrete, x: Array) -> Array:
    if isinstance(space, Discrete):
        return jax.nn.one_hot(x, space.n, dtype=jnp.float32)
    if isinstance(space, MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(x[:, i], n, dtype=jnp.float32) for i, n in enumerate(space.n)], axis=-1)
    return x.astype(jnp.float32) / (255.0 if is_bytes(space) else 1.0)

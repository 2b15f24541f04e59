"""Networks: torsos that take any observation, heads, and how one is chosen from the observation space."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError, nearest
from jaxrl.types import Array, Box, Discrete, MultiDiscrete, PyTree, Space

ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu, "silu": nn.silu, "elu": nn.elu}


class MLP(nn.Module):
    """Dense layers, each with its activation; `[..., D] -> [..., features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.features:
            x = ACTIVATIONS[self.activation](nn.Dense(width)(x))
        return x


class ConvTorso(nn.Module):
    """One 3x3 convolution of 16 channels and dense layers, the network of MinAtar (Young and Tian 2019);
    `[B, H, W, C] -> [B, features[-1]]`."""

    features: Sequence[int]
    channels: Sequence[int] = (16,)
    activation: str = "relu"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            x = ACTIVATIONS[self.activation](nn.Conv(channels, (3, 3), padding="VALID")(x))
        return MLP(self.features, self.activation)(x.reshape(x.shape[0], -1))


class QNetwork(nn.Module):
    """Action values of a batch of observations, `[B, ...] -> [B, num_actions]`.

    With `dueling`, `q = v + a - mean(a)` (Wang et al. 2016, https://arxiv.org/abs/1511.06581, equation 9).
    """

    observation_space: Any
    num_actions: int
    torso: str = "auto"
    features: Sequence[int] = (120, 84)
    activation: str = "relu"
    dueling: bool = False

    @nn.compact
    def __call__(self, obs: PyTree) -> Array:
        hidden = make_torso(self.torso, self.observation_space, self.features, self.activation)(
            encode(self.observation_space, obs, self.torso)
        )
        advantage = nn.Dense(self.num_actions)(hidden)
        if not self.dueling:
            return advantage
        return nn.Dense(1)(hidden) + advantage - advantage.mean(axis=-1, keepdims=True)


def torso_kind(torso: str, space: Space) -> str:
    """Return `mlp` or `conv`: as told, or with `auto` by the rank of the observation (three: an image).

    Raises:
      SettingsError: unknown torso, or `conv` for observations that are not `[H, W, C]`.
    """
    is_image = isinstance(space, Box) and len(space.shape) == 3 and min(space.shape[:2]) >= 3
    if torso == "auto":
        return "conv" if is_image else "mlp"
    if torso not in ("mlp", "conv"):
        raise SettingsError(f"unknown torso {torso!r}; {nearest(torso, ('auto', 'mlp', 'conv'))}")
    if torso == "conv" and not is_image:
        raise SettingsError("torso conv wants one observation [H, W, C] with H and W of at least 3; use torso mlp")
    return torso


def make_torso(torso: str, space: Space, features: Sequence[int], activation: str) -> nn.Module:
    """Build the torso that `torso_kind` chooses."""
    kind = MLP if torso_kind(torso, space) == "mlp" else ConvTorso
    return kind(features=tuple(features), activation=activation)


def encode(space: Space, obs: PyTree, torso: str = "auto") -> Array:
    """Make one float32 array of a batch of observations: `[B, H, W, C]` for a convolution, else `[B, D]`.

    Discrete parts become one-hot, 8-bit images are divided by 255, parts of dicts and tuples are joined.
    """
    is_leaf = lambda x: isinstance(x, Box | Discrete | MultiDiscrete)
    # Leaf by leaf, not tree by tree: Flax turns a dict among a module's attributes into a `FrozenDict`.
    spaces = jax.tree.leaves(space, is_leaf=is_leaf)
    parts = [_encode_leaf(s, x) for s, x in zip(spaces, jax.tree.leaves(obs), strict=True)]
    if torso_kind(torso, space) == "conv":
        return parts[0]
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], axis=-1)


def _encode_leaf(space: Box | Discrete | MultiDiscrete, x: Array) -> Array:
    if isinstance(space, Discrete):
        return jax.nn.one_hot(x, space.n)
    if isinstance(space, MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(x[:, i], n) for i, n in enumerate(space.n)], axis=-1)
    return x.astype(jnp.float32) / (255.0 if x.dtype == jnp.uint8 else 1.0)

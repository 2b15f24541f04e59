"""Torsos: map an encoded observation to features, by dense layers, or convolutions and dense layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxrl.errors import SettingsError, suggest
from jaxrl.nn.encode import image_leaves
from jaxrl.nn.layers import DTYPES, FLAT, MLP, RESIDUAL, activate, flatten, kernel_init, make_layers
from jaxrl.spaces import Box, Space
from jaxrl.trees import Array
from jaxrl.xla.products import convolve

NATURE_SIDE = 36
"""Smallest side of an image for `NatureCNN`: `((36 - 8) / 4 + 1 - 4) / 2 + 1 = 3` is left for its 3x3 convolution."""
NATURE = ((8, 4), (4, 2), (3, 1))
"""Size and stride of the convolutions of `NatureCNN`."""


class Convolutions(nn.Module):
    """3x3 convolutions, by default one of 16 channels as in MinAtar (Young and Tian 2019); `[B, H, W, C] -> [B, D]`."""

    channels: Sequence[int] = (16,)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            x = make_conv(channels, 3, 1, "VALID", self.orthogonal, self.dtype)(x)
            x = activate(x, self.activation, self.layer_norm, self.dtype)
        return flatten(x)


class NatureCNN(nn.Module):
    """The three convolutions of DQN on Atari; `[B, H, W, C] -> [B, D]`, with sides of at least 36.

    They are 8x8 with stride 4, 4x4 with stride 2, and 3x3 (Mnih et al. 2015,
    https://www.nature.com/articles/nature14236, methods). As published, one dense layer of width 512 follows.
    """

    channels: Sequence[int] = (32, 64, 64)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels, (size, stride) in zip(self.channels, NATURE, strict=True):
            x = make_conv(channels, size, stride, "VALID", self.orthogonal, self.dtype)(x)
            x = activate(x, self.activation, self.layer_norm, self.dtype)
        return flatten(x)


class ImpalaCNN(nn.Module):
    """The residual network of IMPALA; `[B, H, W, C] -> [B, D]`.

    Each of `channels` is a stage: a 3x3 convolution, a 3x3 max-pooling of stride 2, and two residual blocks (Espeholt
    et al. 2018, https://arxiv.org/abs/1802.01561, figure 3, right). As published, one dense layer of width 256 follows.
    """

    channels: Sequence[int] = (16, 32, 32)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            x = make_conv(channels, 3, 1, "SAME", self.orthogonal, self.dtype)(x)
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for _ in range(2):
                block = Residual(channels, self.activation, self.layer_norm, self.orthogonal, self.dtype)
                x = x + block(x)
        # Residual blocks end in a sum, without an activation behind it.
        x = activate(x, self.activation, self.layer_norm, self.dtype)
        return flatten(x)


class Residual(nn.Module):
    """The branch of a residual block: an activation and a 3x3 convolution, twice; `[B, H, W, C] -> [B, H, W, C]`."""

    channels: int
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(2):
            x = activate(x, self.activation, self.layer_norm, self.dtype)
            x = make_conv(self.channels, 3, 1, "SAME", self.orthogonal, self.dtype)(x)
        return x


def make_conv(channels: int, size: int, stride: int, padding: str, orthogonal: bool, dtype: str) -> nn.Conv:
    """Return a square convolution with the products of `jaxrl.xla.products`."""
    return nn.Conv(
        channels,
        (size, size),
        (stride, stride),
        padding=padding,
        kernel_init=kernel_init(orthogonal),
        conv_general_dilated=convolve,
        dtype=DTYPES[dtype],
    )


CONVOLUTIONS: Mapping[str, Any] = {"minatar": Convolutions, "nature": NatureCNN, "impala": ImpalaCNN}
TORSOS = ("auto", *FLAT, *CONVOLUTIONS)
"""Names of torsos."""


def make_convolutions(kind: str, channels: Sequence[int], **options: Any) -> nn.Module:
    """Build the convolutional network `kind`, with its default channels if none are given."""
    given = {"channels": tuple(channels)} if channels else {}
    return CONVOLUTIONS[kind](**given, **options)


class ConvTorso(nn.Module):
    """Convolutions followed by dense layers; `[B, H, W, C] -> [B, features[-1]]`."""

    features: Sequence[int]
    channels: Sequence[int] = ()
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    noisy: float = 0.0
    kind: str = "minatar"
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        options = {"layer_norm": self.layer_norm, "orthogonal": self.orthogonal, "dtype": self.dtype}
        x = make_convolutions(self.kind, self.channels, activation=self.activation, **options)(x)
        return MLP(self.features, self.activation, noisy=self.noisy, **options)(x)  # type: ignore[arg-type]


class Joined(nn.Module):
    """Convolutions for each image, concatenated with the rest; `([B, H, W, C], ...)` and `[B, D] -> [B, F]`."""

    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    kind: str = "minatar"
    channels: Sequence[int] = ()
    dtype: str = "float32"

    @nn.compact
    def __call__(self, images: tuple[Array, ...], rest: Array) -> Array:
        options = {"layer_norm": self.layer_norm, "orthogonal": self.orthogonal, "dtype": self.dtype}
        make = lambda: make_convolutions(self.kind, self.channels, activation=self.activation, **options)
        return jnp.concatenate([*[make()(image) for image in images], rest], axis=-1)


class JoinedTorso(nn.Module):
    """Convolutions for each image, followed by dense layers on their outputs and the rest; `-> [B, features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    noisy: float = 0.0
    kind: str = "minatar"
    channels: Sequence[int] = ()
    dtype: str = "float32"

    @nn.compact
    def __call__(self, obs: tuple[tuple[Array, ...], Array]) -> Array:
        options = {"layer_norm": self.layer_norm, "orthogonal": self.orthogonal, "dtype": self.dtype}
        x = Joined(self.activation, kind=self.kind, channels=self.channels, **options)(*obs)  # type: ignore[arg-type]
        return MLP(self.features, self.activation, noisy=self.noisy, **options)(x)  # type: ignore[arg-type]


def torso_kind(torso: str, space: Space, channels: Sequence[int] = ()) -> str:
    """Return the given torso, or for `auto` one that fits the observations.

    `auto` is `mlp` if there are no images, `nature` if that can take all of them, and otherwise `minatar`. `nature`
    cannot take an image with a side below 36, or a number of `channels` other than three.
    """
    if torso != "auto":
        return torso
    images = image_leaves(space)
    if not images:
        return "mlp"
    return "nature" if len(channels) in (0, len(NATURE)) and _shortest_side(images) >= NATURE_SIDE else "minatar"


def check_torso(
    torso: str, space: Space, channels: Sequence[int] = (), features: Sequence[int] = (), name: str = "features"
) -> None:
    """Raise `SettingsError` if the torso is unknown, or cannot take these observations, channels or features.

    `name` is that of the setting of `features`.
    """
    if torso not in TORSOS:
        raise SettingsError(f"unknown torso {torso!r}; {suggest(torso, TORSOS)}")
    kind, images = torso_kind(torso, space, channels), image_leaves(space)
    if kind in RESIDUAL and len(set(features)) > 1:
        raise SettingsError(
            f"agent.{name} is {tuple(features)}, but the blocks of torso {torso} are all of one width; "
            f"the nearest is {(max(features),) * len(features)}"
        )
    if kind in FLAT:
        return
    if not images:
        raise SettingsError(
            f"torso {torso} needs an observation [H, W, C] with H and W of at least 3, or one among others; "
            "use torso mlp"
        )
    if kind == "nature" and channels and len(channels) != len(NATURE):
        raise SettingsError(
            f"agent.channels is {tuple(channels)}; torso nature has three convolutions, as in (32, 64, 64)"
        )
    side = _shortest_side(images)
    if side < (least := _min_side(kind, channels)):
        fits = [other for other in CONVOLUTIONS if other != kind and _min_side(other, ()) <= side]
        raise SettingsError(
            f"torso {torso} needs images with sides of at least {least}"
            f"{f' for {len(channels)} channels' if channels and kind == 'minatar' else ''}, but one has {side}; "
            f"use torso {', '.join(fits)} or mlp"
        )


def _shortest_side(images: Sequence[Box]) -> int:
    """Return the shortest side among all images."""
    return min(min(image.shape[:2]) for image in images)


def _min_side(kind: str, channels: Sequence[int]) -> int:
    """Return the smallest image side that the convolutional network `kind` accepts."""
    # Each unpadded 3x3 convolution shortens a side by 2, and 1 must remain. Padded ones keep it.
    return {"minatar": 1 + 2 * (len(channels) or 1), "nature": NATURE_SIDE, "impala": 3}[kind]


def make_torso(
    torso: str,
    space: Space,
    features: Sequence[int],
    activation: str,
    channels: Sequence[int] = (),
    **options: Any,
) -> nn.Module:
    """Build the torso chosen by `torso_kind`; `options` are `layer_norm`, `orthogonal`, `noisy` and `dtype`.

    Raises:
      SettingsError: the torso is unknown, or cannot take these observations or features.
    """
    check_torso(torso, space, channels, features)
    kind = torso_kind(torso, space, channels)
    if kind in FLAT:
        return make_layers(kind, tuple(features), activation, **options)
    made = ConvTorso if isinstance(space, Box) else JoinedTorso
    return made(tuple(features), activation=activation, kind=kind, channels=tuple(channels), **options)

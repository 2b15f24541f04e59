"""Torsos: from an encoded observation to features, by dense layers or by one of three convolutional networks."""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxrl.errors import SettingsError, nearest
from jaxrl.nn.encode import images_of
from jaxrl.nn.layers import DTYPES, MLP, activated, kernel_init
from jaxrl.spaces import Box, Space
from jaxrl.trees import Array
from jaxrl.xla.products import convolve

NATURE_SIDE = 36
"""Sides of the smallest image that `NatureCNN` takes: `((36 - 8) / 4 + 1 - 4) / 2 + 1 = 3`, a 3x3 convolution's own."""
NATURE = ((8, 4), (4, 2), (3, 1))
"""Size and stride of its convolutions."""


class Convolutions(nn.Module):
    """One 3x3 convolution of 16 channels, as of MinAtar (Young and Tian 2019); `[B, H, W, C] -> [B, D]`."""

    channels: Sequence[int] = (16,)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            x = conv(channels, 3, 1, "VALID", self.orthogonal, self.dtype)(x)
            x = activated(x, self.activation, self.layer_norm, self.dtype)
        return x.reshape(x.shape[0], -1)


class NatureCNN(nn.Module):
    """The three convolutions of DQN on Atari; `[B, H, W, C] -> [B, D]`, with sides of at least 36.

    Of 8x8 with stride 4, 4x4 with stride 2, and 3x3 (Mnih et al. 2015, https://www.nature.com/articles/nature14236,
    methods). Published with one dense layer of 512 behind them.
    """

    channels: Sequence[int] = (32, 64, 64)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels, (size, stride) in zip(self.channels, NATURE, strict=True):
            x = conv(channels, size, stride, "VALID", self.orthogonal, self.dtype)(x)
            x = activated(x, self.activation, self.layer_norm, self.dtype)
        return x.reshape(x.shape[0], -1)


class ImpalaCNN(nn.Module):
    """The residual network of IMPALA; `[B, H, W, C] -> [B, D]`.

    Each of `channels` is a stage: a 3x3 convolution, the largest of each 3x3 at every other place, and two residual
    blocks (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, figure 3, right). Published with one dense layer of
    256 behind it.
    """

    channels: Sequence[int] = (16, 32, 32)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            x = conv(channels, 3, 1, "SAME", self.orthogonal, self.dtype)(x)
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for _ in range(2):
                block = Residual(channels, self.activation, self.layer_norm, self.orthogonal, self.dtype)
                x = x + block(x)
        x = activated(x, self.activation, self.layer_norm, self.dtype)
        return x.reshape(x.shape[0], -1)


class Residual(nn.Module):
    """What a residual block adds: twice an activation and a 3x3 convolution; `[B, H, W, C] -> [B, H, W, C]`."""

    channels: int
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(2):
            x = activated(x, self.activation, self.layer_norm, self.dtype)
            x = conv(self.channels, 3, 1, "SAME", self.orthogonal, self.dtype)(x)
        return x


def conv(channels: int, size: int, stride: int, padding: str, orthogonal: bool, dtype: str) -> nn.Conv:
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
TORSOS = ("auto", "mlp", *CONVOLUTIONS, "conv")
"""Names of torsos; `conv` is what `minatar` was called first."""


def convolutions(kind: str, channels: Sequence[int], **options: Any) -> nn.Module:
    """Build the convolutional network `kind`, with channels of its own where none are given."""
    given = {"channels": tuple(channels)} if channels else {}
    built: nn.Module = CONVOLUTIONS[kind](**given, **options)
    return built


class ConvTorso(nn.Module):
    """Convolutions and dense layers behind them; `[B, H, W, C] -> [B, features[-1]]`."""

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
        x = convolutions(self.kind, self.channels, activation=self.activation, **options)(x)
        return MLP(self.features, self.activation, noisy=self.noisy, **options)(x)  # type: ignore[arg-type]


class Joined(nn.Module):
    """Convolutions for each image, what they see joined with the rest; `([B, H, W, C], ...)` and `[B, D] -> [B, F]`."""

    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    kind: str = "minatar"
    channels: Sequence[int] = ()
    dtype: str = "float32"

    @nn.compact
    def __call__(self, images: tuple[Array, ...], rest: Array) -> Array:
        options = {"layer_norm": self.layer_norm, "orthogonal": self.orthogonal, "dtype": self.dtype}
        make = lambda: convolutions(self.kind, self.channels, activation=self.activation, **options)
        return jnp.concatenate([*[make()(image) for image in images], rest], axis=-1)


class JoinedTorso(nn.Module):
    """Convolutions for each image, and dense layers behind them and the rest; `-> [B, features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    noisy: float = 0.0
    kind: str = "minatar"
    channels: Sequence[int] = ()
    dtype: str = "float32"

    @nn.compact
    def __call__(self, seen: tuple[tuple[Array, ...], Array]) -> Array:
        options = {"layer_norm": self.layer_norm, "orthogonal": self.orthogonal, "dtype": self.dtype}
        x = Joined(self.activation, kind=self.kind, channels=self.channels, **options)(*seen)  # type: ignore[arg-type]
        return MLP(self.features, self.activation, noisy=self.noisy, **options)(x)  # type: ignore[arg-type]


def torso_kind(torso: str, space: Space, channels: Sequence[int] = ()) -> str:
    """Return `mlp`, `minatar`, `nature` or `impala`: as told, or with `auto` what suits the images among observations.

    `auto` is `mlp` where there are none, `nature` where that can take all of them, and otherwise `minatar`. It cannot
    take an image with a side below 36, or other than three `channels`.
    """
    if torso != "auto":
        return "minatar" if torso == "conv" else torso
    images = images_of(space)
    if not images:
        return "mlp"
    return "nature" if len(channels) in (0, len(NATURE)) and _side(images) >= NATURE_SIDE else "minatar"


def check_torso(torso: str, space: Space, channels: Sequence[int] = ()) -> None:
    """Raise `SettingsError` for an unknown torso, or one that cannot take these observations with these channels."""
    if torso not in TORSOS:
        raise SettingsError(f"unknown torso {torso!r}; {nearest(torso, TORSOS)}")
    kind, images = torso_kind(torso, space, channels), images_of(space)
    if kind == "mlp":
        return
    if not images:
        raise SettingsError(
            f"torso {torso} wants an observation [H, W, C] with H and W of at least 3, or one among others; "
            "use torso mlp"
        )
    if kind == "nature" and channels and len(channels) != len(NATURE):
        raise SettingsError(
            f"agent.channels is {tuple(channels)}; torso nature has three convolutions, as in (32, 64, 64)"
        )
    side = _side(images)
    if side < (least := _least(kind, channels)):
        fits = [other for other in CONVOLUTIONS if other != kind and _least(other, ()) <= side]
        raise SettingsError(
            f"torso {torso} wants images with sides of at least {least}"
            f"{f' for {len(channels)} channels' if channels and kind == 'minatar' else ''}, but one has {side}; "
            f"use torso {', '.join(fits)} or mlp"
        )


def _side(images: Sequence[Box]) -> int:
    """Return the shortest side of any of the images."""
    return min(min(image.shape[:2]) for image in images)


def _least(kind: str, channels: Sequence[int]) -> int:
    """Return the shortest side that a convolutional network can take."""
    return {"minatar": 1 + 2 * (len(channels) or 1), "nature": NATURE_SIDE, "impala": 3}[kind]


def make_torso(
    torso: str,
    space: Space,
    features: Sequence[int],
    activation: str,
    channels: Sequence[int] = (),
    **options: Any,
) -> nn.Module:
    """Build the torso that `torso_kind` chooses; `options` are `layer_norm`, `orthogonal`, `noisy` and `dtype`.

    Raises:
      SettingsError: an unknown torso, or one that cannot take these observations.
    """
    check_torso(torso, space, channels)
    kind, options = torso_kind(torso, space, channels), {**options, "features": tuple(features)}
    if kind == "mlp":
        return MLP(activation=activation, **options)
    made = ConvTorso if isinstance(space, Box) else JoinedTorso
    return made(activation=activation, kind=kind, channels=tuple(channels), **options)

"""Networks: torsos that take any observation, heads, and how one is chosen from the observation space."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, nearest
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space
from jaxrl.trees import Array, PyTree
from jaxrl.xla.orthogonal import orthogonal as random_orthogonal
from jaxrl.xla.products import convolve, dot_general, multiply

_LECUN = nn.initializers.lecun_normal()
ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu, "silu": nn.silu, "elu": nn.elu}


class MLP(nn.Module):
    """Dense layers, each with its activation; `[..., D] -> [..., features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"
    layer_norm: bool = False
    """Normalise each layer before its activation (Ba et al. 2016, https://arxiv.org/abs/1607.06450)."""
    orthogonal: bool = False
    """Begin with orthogonal matrices of gain `sqrt(2)` (Saxe et al. 2014, https://arxiv.org/abs/1312.6120)."""
    noisy: float = 0.0
    """Deviation of the parameters' noise at first, see `NoisyDense`; 0: none."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.features:
            x = _dense(width, self.noisy, self.orthogonal)(x)
            x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        return x


class NoisyDense(nn.Module):
    """A dense layer with factorised noise on its parameters; `[..., D] -> [..., features]`.

    The noise is in the collection `noise`, zeros unless it is given: two standard normal vectors a layer (Fortunato et
    al. 2018, https://arxiv.org/abs/1706.10295, section 3.1b).
    """

    features: int
    std: float
    """Deviation at first, over the root of the inputs."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape, bound = (x.shape[-1], self.features), x.shape[-1] ** -0.5
        middle = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        spread = nn.initializers.constant(self.std * bound)
        zeros = lambda name, size: self.variable("noise", name, jnp.zeros, size).value
        before, after = (
            jnp.sign(e) * jnp.sqrt(jnp.abs(e)) for e in (zeros("before", shape[0]), zeros("after", shape[1]))
        )
        kernel = self.param("kernel", middle, shape)
        kernel_spread = self.param("kernel_spread", spread, shape)
        bias = self.param("bias", middle, shape[1:])
        bias_spread = self.param("bias_spread", spread, shape[1:])
        weights = kernel + kernel_spread * before[:, None] * after[None]
        return multiply(x, weights) + jnp.expand_dims(bias + bias_spread * after, tuple(range(x.ndim - 1)))


def _dense(width: int, noisy: float, orthogonal: bool = False) -> nn.Module:
    return NoisyDense(width, noisy) if noisy else dense(width, _kernel(orthogonal))


def dense(width: int, kernel_init: Any = _LECUN) -> nn.Dense:
    """Return a dense layer `[..., D] -> [..., width]` with the products of `jaxrl.xla.products`."""
    return nn.Dense(width, kernel_init=kernel_init, dot_general=dot_general)


def _kernel(orthogonal: bool, gain: float = 2**0.5) -> Any:
    return partial(random_orthogonal, gain) if orthogonal else _LECUN


class Convolutions(nn.Module):
    """One 3x3 convolution of 16 channels, as of MinAtar (Young and Tian 2019); `[B, H, W, C] -> [B, D]`."""

    channels: Sequence[int] = (16,)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            init = _kernel(self.orthogonal)
            x = nn.Conv(channels, (3, 3), padding="VALID", kernel_init=init, conv_general_dilated=convolve)(x)
            x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        return x.reshape(x.shape[0], -1)


class ConvTorso(nn.Module):
    """Convolutions and dense layers behind them; `[B, H, W, C] -> [B, features[-1]]`."""

    features: Sequence[int]
    channels: Sequence[int] = (16,)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    noisy: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = Convolutions(self.channels, self.activation, self.layer_norm, self.orthogonal)(x)
        return MLP(self.features, self.activation, self.layer_norm, self.orthogonal, self.noisy)(x)


class Joined(nn.Module):
    """Convolutions for each image, what they see joined with the rest; `([B, H, W, C], ...)` and `[B, D] -> [B, F]`."""

    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False

    @nn.compact
    def __call__(self, images: tuple[Array, ...], rest: Array) -> Array:
        seen = [Convolutions((16,), self.activation, self.layer_norm, self.orthogonal)(image) for image in images]
        return jnp.concatenate([*seen, rest], axis=-1)


class JoinedTorso(nn.Module):
    """Convolutions for each image, and dense layers behind them and the rest; `-> [B, features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False
    noisy: float = 0.0

    @nn.compact
    def __call__(self, seen: tuple[tuple[Array, ...], Array]) -> Array:
        x = Joined(self.activation, self.layer_norm, self.orthogonal)(*seen)
        return MLP(self.features, self.activation, self.layer_norm, self.orthogonal, self.noisy)(x)


class QNetwork(nn.Module):
    """Action values of a batch of observations, `[B, ...] -> [B, num_actions]`, or with `atoms` what they are made of,
    `[B, num_actions, atoms]`.

    With `dueling`, `q = v + a - mean(a)` (Wang et al. 2016, https://arxiv.org/abs/1511.06581, equation 9) of each atom.
    Given `taus` `[B, n]`, the quantiles there, `[B, num_actions, n]` (Dabney et al. 2018,
    https://arxiv.org/abs/1806.06923, equation 4; they enter before the last layer).
    """

    observation_space: Any
    num_actions: int
    torso: str = "auto"
    features: Sequence[int] = (120, 84)
    activation: str = "relu"
    dueling: bool = False
    layer_norm: bool = False
    atoms: int = 0
    noisy: float = 0.0

    @nn.compact
    def __call__(self, obs: PyTree, taus: Array | None = None) -> Array:
        options: dict[str, Any] = {"layer_norm": self.layer_norm, "noisy": self.noisy}
        widths = self.features if taus is None else self.features[:-1]
        torso = make_torso(self.torso, self.observation_space, widths, self.activation, **options)
        hidden = torso(encode(self.observation_space, obs, self.torso))
        if taus is not None:
            waves = jnp.cos(jnp.pi * jnp.arange(COSINES)[None, None] * taus[..., None])
            weight = nn.relu(dense(hidden.shape[-1])(waves))
            hidden = MLP(self.features[-1:], self.activation, **options)(hidden[:, None] * weight)
        return self._head(hidden) if taus is None else self._head(hidden).swapaxes(-1, -2)

    def _head(self, hidden: Array) -> Array:
        shape = (self.atoms,) if self.atoms else ()
        values = lambda count: _dense(count * max(1, self.atoms), self.noisy)(hidden).reshape(
            *hidden.shape[:-1], count, *shape
        )
        advantage = values(self.num_actions)
        if not self.dueling:
            return advantage
        return values(1) + advantage - advantage.mean(axis=hidden.ndim - 1, keepdims=True)


COSINES = 64
"""Waves by which a network is told a quantile."""


class PolicyNetwork(nn.Module):
    """What a policy needs to choose, of a batch of observations; `[B, ...] -> [B, outputs]`."""

    observation_space: Any
    outputs: int
    torso: str = "auto"
    features: Sequence[int] = (256, 256)
    activation: str = "relu"

    @nn.compact
    def __call__(self, obs: PyTree) -> Array:
        torso = make_torso(self.torso, self.observation_space, self.features, self.activation)
        return dense(self.outputs)(torso(encode(self.observation_space, obs, self.torso)))


class Critic(nn.Module):
    """Values `[B, outputs]` of a batch of observations, or of actions `[B, D]` in them."""

    observation_space: Any
    outputs: int = 1
    torso: str = "auto"
    features: Sequence[int] = (256, 256)
    activation: str = "relu"
    layer_norm: bool = False

    @nn.compact
    def __call__(self, obs: PyTree, action: Array | None = None) -> Array:
        x = encode(self.observation_space, obs, self.torso)
        kind = torso_kind(self.torso, self.observation_space)
        if kind == "conv":
            x = Convolutions(activation=self.activation, layer_norm=self.layer_norm)(x)
        elif kind == "joined":
            x = Joined(activation=self.activation, layer_norm=self.layer_norm)(*x)
        if action is not None:
            x = jnp.concatenate([x, action], axis=-1)
        return dense(self.outputs)(MLP(self.features, self.activation, self.layer_norm)(x))


def ensemble(size: int, observation_space: Any, **options: Any) -> nn.Module:
    """Return `size` critics side by side, each with parameters of its own; values `[size, B, outputs]`."""
    several = nn.vmap(
        Critic, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, out_axes=0, axis_size=size
    )
    built: nn.Module = several(observation_space, **options)
    return built


class ActorCritic(nn.Module):
    """What a policy needs to choose, and values, of a batch of observations; with a core, also of what is remembered.

    `[B, ...] -> [B, outputs]`, `[B]` and the memory after it (`()` without a core). Matrices begin orthogonal (but
    for those by which a core takes in), the last of the policy small, so that at first all actions are alike
    (Andrychowicz et al. 2021, https://arxiv.org/abs/2006.05990, section 3.2).
    """

    observation_space: Any
    outputs: int
    scales: int = 0
    """Of the outputs, the last so many are logarithms of scales that do not depend on the observation."""
    torso: str = "auto"
    features: Sequence[int] = (64, 64)
    activation: str = "tanh"
    shared: bool = False
    """One torso for both; otherwise each has its own."""
    layer_norm: bool = False
    core: str = "none"
    """`gru` or `lstm`, behind a shared torso."""
    core_features: int = 64

    def setup(self) -> None:
        make = lambda: make_torso(
            self.torso,
            self.observation_space,
            self.features,
            self.activation,
            layer_norm=self.layer_norm,
            orthogonal=True,
        )
        self.actor_torso = make()
        if not (self.shared or self.core != "none"):
            self.critic_torso = make()
        if self.core != "none":
            self.cell = CORES[self.core](self.core_features, recurrent_kernel_init=_kernel(True, 1.0))
        self.policy = dense(self.outputs - self.scales, _kernel(True, 0.01))
        self.value = dense(1, _kernel(True, 1.0))
        if self.scales:
            self.log_std = self.param("log_std", nn.initializers.zeros, (self.scales,))

    def __call__(self, obs: PyTree) -> tuple[Array, Array, PyTree]:
        if self.core == "none":
            return *self.judge(*self.see(obs)), ()
        hidden, _ = self.see(obs.obs)
        memory, hidden = self.cell(obs.memory, hidden)
        return *self.judge(hidden, hidden), memory

    def see(self, obs: PyTree) -> tuple[Array, Array]:
        """Return what policy and value are made of, `[B, F]` each."""
        x = encode(self.observation_space, obs, self.torso)
        hidden = self.actor_torso(x)
        return hidden, hidden if self.shared or self.core != "none" else self.critic_torso(x)

    def advance(self, memory: PyTree, hidden: Array) -> tuple[PyTree, Array]:
        """Take in one step `[B, F]`; return the memory after it, and what policy and value are made of."""
        memory, hidden = self.cell(memory, hidden)
        return memory, hidden

    def judge(self, actor: Array, critic: Array) -> tuple[Array, Array]:
        """Return the outputs of the policy `[B, outputs]` and values `[B]`."""
        outputs = self.policy(actor)
        if self.scales:
            free = jnp.broadcast_to(self.log_std, (outputs.shape[0], self.scales))
            outputs = jnp.concatenate([outputs, free], axis=-1)
        return outputs, self.value(critic)[:, 0]


CORES = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


def no_memory(core: str, features: int) -> PyTree:
    """Return what a core remembers before it has seen anything; `None` for the core `none`."""
    zeros = np.zeros(features, np.float32)
    return {"none": None, "gru": zeros, "lstm": (zeros, zeros)}[core]


def torso_kind(torso: str, space: Space) -> str:
    """Return `mlp`, `conv` or `joined`: as told, or with `auto` by the rank of the observation (three: an image).

    `joined` is that of a dict or tuple with images: convolutions for these, dense layers for all together.

    Raises:
      SettingsError: unknown torso, or `conv` for observations without an image `[H, W, C]`.
    """
    several = not isinstance(space, Box)
    kind = ("joined" if several else "conv") if any(map(_is_image, _leaves(space))) else "mlp"
    if torso == "auto":
        return kind
    if torso not in ("mlp", "conv"):
        raise SettingsError(f"unknown torso {torso!r}; {nearest(torso, ('auto', 'mlp', 'conv'))}")
    if torso == "conv" and kind == "mlp":
        raise SettingsError(
            "torso conv wants an observation [H, W, C] with H and W of at least 3, or one among others; use torso mlp"
        )
    return kind if torso == "conv" else torso


def _leaves(space: Space) -> list[Any]:
    # Leaf by leaf, not tree by tree: Flax turns a dict among a module's attributes into a `FrozenDict`.
    return jax.tree.leaves(space, is_leaf=lambda x: isinstance(x, Box | Discrete | MultiDiscrete))


def _is_image(space: Any) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3 and min(space.shape[:2]) >= 3


def make_torso(torso: str, space: Space, features: Sequence[int], activation: str, **options: Any) -> nn.Module:
    """Build the torso that `torso_kind` chooses; `options` are `layer_norm`, `orthogonal` and `noisy`."""
    kinds: dict[str, Any] = {"mlp": MLP, "conv": ConvTorso, "joined": JoinedTorso}
    built: nn.Module = kinds[torso_kind(torso, space)](features=tuple(features), activation=activation, **options)
    return built


def encode(space: Space, obs: PyTree, torso: str = "auto") -> Any:
    """Make float32 of a batch of observations: `[B, H, W, C]` for a convolution, `[B, D]` for dense layers.

    For a `joined` torso it is a tuple of the images `[B, H, W, C]`, and all else as `[B, D]`. Discrete parts become
    one-hot, 8-bit images are divided by 255, parts of dicts and tuples are joined.
    """
    spaces = _leaves(space)
    parts = [_encode_leaf(s, x) for s, x in zip(spaces, jax.tree.leaves(obs), strict=True)]
    kind = torso_kind(torso, space)
    if kind == "conv":
        return parts[0]
    flat = lambda parts: [x.reshape(x.shape[0], -1) for x in parts]
    if kind == "mlp":
        return jnp.concatenate(flat(parts), axis=-1)
    images = tuple(x for s, x in zip(spaces, parts, strict=True) if _is_image(s))
    rest = [x for s, x in zip(spaces, parts, strict=True) if not _is_image(s)]
    return images, jnp.concatenate([jnp.zeros((images[0].shape[0], 0)), *flat(rest)], axis=-1)


def _encode_leaf(space: Box | Discrete | MultiDiscrete, x: Array) -> Array:
    if isinstance(space, Discrete):
        return jax.nn.one_hot(x, space.n)
    if isinstance(space, MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(x[:, i], n) for i, n in enumerate(space.n)], axis=-1)
    return x.astype(jnp.float32) / (255.0 if x.dtype == jnp.uint8 else 1.0)

"""Networks: torsos that take any observation, heads, and how one is chosen from the observation space."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError, nearest
from jaxrl.types import Array, Box, Discrete, Key, MultiDiscrete, PyTree, Space

ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu, "silu": nn.silu, "elu": nn.elu}


class MLP(nn.Module):
    """Dense layers, each with its activation; `[..., D] -> [..., features[-1]]`."""

    features: Sequence[int]
    activation: str = "relu"
    layer_norm: bool = False
    """Normalise each layer before its activation (Ba et al. 2016, https://arxiv.org/abs/1607.06450)."""
    orthogonal: bool = False
    """Begin with orthogonal matrices of gain `sqrt(2)` (Saxe et al. 2014, https://arxiv.org/abs/1312.6120)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.features:
            x = nn.Dense(width, kernel_init=_kernel(self.orthogonal))(x)
            x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        return x


def _kernel(orthogonal: bool, gain: float = 2**0.5) -> Any:
    return partial(_orthogonal, gain) if orthogonal else nn.initializers.lecun_normal()


def _orthogonal(gain: float, key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Return `gain` times a random matrix with orthonormal rows or columns, whichever are fewer, uniform among such.

    By Gram and Schmidt, twice for each column. `jnp.linalg.qr`, which Flax's initialiser calls, waits on a CPU inside a
    thread of XLA's pool for others of that pool: on two cores, two factorisations for several seeds at once never end.
    """
    long, short = max(math.prod(shape[:-1]), shape[-1]), min(math.prod(shape[:-1]), shape[-1])

    def column(i: Array, done: Array) -> Array:
        before = jnp.where(jnp.arange(short)[None] < i, done, 0.0)
        v = jax.lax.dynamic_index_in_dim(done, i, axis=1, keepdims=False)
        for _ in range(2):
            v = v - before @ (v @ before)
        return jax.lax.dynamic_update_index_in_dim(done, v / jnp.linalg.norm(v), i, axis=1)

    tall = jax.lax.fori_loop(0, short, column, jax.random.normal(key, (long, short)))
    matrix = tall if math.prod(shape[:-1]) == long else tall.T
    return gain * matrix.reshape(shape).astype(dtype)


class ConvTorso(nn.Module):
    """One 3x3 convolution of 16 channels and dense layers, the network of MinAtar (Young and Tian 2019);
    `[B, H, W, C] -> [B, features[-1]]`."""

    features: Sequence[int]
    channels: Sequence[int] = (16,)
    activation: str = "relu"
    layer_norm: bool = False
    orthogonal: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in self.channels:
            x = nn.Conv(channels, (3, 3), padding="VALID", kernel_init=_kernel(self.orthogonal))(x)
            x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        x = x.reshape(x.shape[0], -1)
        return MLP(self.features, self.activation, self.layer_norm, self.orthogonal)(x)


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
    layer_norm: bool = False

    @nn.compact
    def __call__(self, obs: PyTree) -> Array:
        hidden = make_torso(
            self.torso, self.observation_space, self.features, self.activation, layer_norm=self.layer_norm
        )(encode(self.observation_space, obs, self.torso))
        advantage = nn.Dense(self.num_actions)(hidden)
        if not self.dueling:
            return advantage
        return nn.Dense(1)(hidden) + advantage - advantage.mean(axis=-1, keepdims=True)


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
        self.policy = nn.Dense(self.outputs - self.scales, kernel_init=_kernel(True, 0.01))
        self.value = nn.Dense(1, kernel_init=_kernel(True, 1.0))
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
    zeros = jnp.zeros(features)
    return {"none": None, "gru": zeros, "lstm": (zeros, zeros)}[core]


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


def make_torso(torso: str, space: Space, features: Sequence[int], activation: str, **options: bool) -> nn.Module:
    """Build the torso that `torso_kind` chooses; `options` are `layer_norm` and `orthogonal`."""
    kind: Any = MLP if torso_kind(torso, space) == "mlp" else ConvTorso
    built: nn.Module = kind(features=tuple(features), activation=activation, **options)
    return built


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

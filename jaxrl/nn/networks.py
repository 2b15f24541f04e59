"""Networks of a torso and heads. Torsos may compute in bfloat16; heads, and so all outputs, are float32."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl.masks import for_policy
from jaxrl.nn.cores import Core
from jaxrl.nn.encode import encode
from jaxrl.nn.layers import ACTIVATIONS, FLAT, MLP, BatchNorm, dense, kernel_init, make_dense, make_layers
from jaxrl.nn.recurrent import merge_axes, run_core
from jaxrl.nn.torsos import Joined, check_torso, make_convolutions, make_torso, torso_kind
from jaxrl.spaces import Box
from jaxrl.trees import Array, PyTree
from jaxrl.types import RecurrentObs


class QNetwork(nn.Module):
    """Action values, `[B, ...] -> [B, num_actions]`, or with `atoms` return distributions, `[B, num_actions, atoms]`.

    With `dueling`, `q = v + a - mean(a)` for each atom (Wang et al. 2016, https://arxiv.org/abs/1511.06581, equation
    9). Given levels `taus` `[B, n]`, it returns the quantiles there, `[B, num_actions, n]` (Dabney et al. 2018,
    https://arxiv.org/abs/1806.06923, equation 4; the levels enter before the last layer).
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
    channels: Sequence[int] = ()
    dtype: str = "float32"

    @nn.compact
    def __call__(self, obs: PyTree, taus: Array | None = None) -> Array:
        options: dict[str, Any] = {"layer_norm": self.layer_norm, "noisy": self.noisy, "dtype": self.dtype}
        # With quantile levels, the last layer follows their embedding.
        widths = self.features if taus is None else self.features[:-1]
        torso = make_torso(self.torso, self.observation_space, widths, self.activation, self.channels, **options)
        hidden = torso(encode(self.observation_space, obs, self.torso))
        if taus is not None:
            # Equation 4 of IQN: cosines of each level, a dense layer, and a product with the features.
            waves = jnp.cos(jnp.pi * jnp.arange(COSINES, dtype=jnp.float32)[None, None] * taus[..., None])
            weight = nn.relu(dense(hidden.shape[-1], dtype=self.dtype)(waves))
            # `[B, n, F]`: the features, multiplied by an embedding of each level, pass through the last layer.
            hidden = MLP(self.features[-1:], self.activation, **options)(hidden[:, None] * weight)
        hidden = hidden.astype(jnp.float32)
        # `[B, n, A] -> [B, A, n]`, the order of all distributions.
        return self._head(hidden) if taus is None else self._head(hidden).swapaxes(-1, -2)

    def _head(self, hidden: Array) -> Array:
        shape = (self.atoms,) if self.atoms else ()
        values = lambda count: make_dense(count * max(1, self.atoms), self.noisy)(hidden).reshape(
            *hidden.shape[:-1], count, *shape
        )
        advantage = values(self.num_actions)
        if not self.dueling:
            return advantage
        # The mean is over the actions, on the axis where `hidden` has its features; atoms, if any, come after it.
        return values(1) + advantage - advantage.mean(axis=hidden.ndim - 1, keepdims=True)


COSINES = 64
"""Number of cosines in the embedding of a quantile level."""


class PolicyNetwork(nn.Module):
    """Parameters of a policy's action distributions for a batch of observations; `[B, ...] -> [B, outputs]`."""

    observation_space: Any
    outputs: int
    torso: str = "auto"
    features: Sequence[int] = (256, 256)
    activation: str = "relu"
    channels: Sequence[int] = ()
    dtype: str = "float32"
    layer_norm: bool = False

    @nn.compact
    def __call__(self, obs: PyTree) -> Array:
        options: dict[str, Any] = {"layer_norm": self.layer_norm, "dtype": self.dtype}
        torso = make_torso(self.torso, self.observation_space, self.features, self.activation, self.channels, **options)
        hidden = torso(encode(self.observation_space, obs, self.torso))
        return dense(self.outputs)(hidden.astype(jnp.float32))


class Critic(nn.Module):
    """State values, or values of actions `[B, D]`, for a batch of observations; `[B, outputs]`."""

    observation_space: Any
    outputs: int = 1
    torso: str = "auto"
    features: Sequence[int] = (256, 256)
    activation: str = "relu"
    layer_norm: bool = False
    channels: Sequence[int] = ()
    dtype: str = "float32"

    @nn.compact
    def __call__(self, obs: PyTree, action: Array | None = None) -> Array:
        return self._values(obs, action)

    def _values(self, obs: PyTree, action: Array | None, dropout: float = 0.0) -> Array:
        """Return the outputs, with `dropout` in the dense layers; for use inside a compact method."""
        check_torso(self.torso, self.observation_space, self.channels, self.features)
        options: dict[str, Any] = {
            "activation": self.activation, "layer_norm": self.layer_norm, "dtype": self.dtype,
        }  # fmt: skip
        x = encode(self.observation_space, obs, self.torso)
        # Convolutions only: an action must enter before the first dense layer.
        kind = torso_kind(self.torso, self.observation_space, self.channels)
        if kind not in FLAT and isinstance(self.observation_space, Box):
            x = make_convolutions(kind, self.channels, **options)(x)
        elif kind not in FLAT:
            x = Joined(kind=kind, channels=self.channels, **options)(*x)
        if action is not None:
            x = jnp.concatenate([x, action], axis=-1)
        hidden = make_layers(kind, self.features, dropout=dropout, **options)(x)
        return dense(self.outputs)(hidden.astype(jnp.float32))


class DropoutCritic(Critic):
    """A `Critic` with dropout in all dense layers but the last (Hiraoka et al. 2022, https://arxiv.org/abs/2110.02034).

    With `train`, a call needs Flax's `rngs={"dropout": key}`; without, it equals a `Critic` with the same parameters.
    """

    dropout: float = 0.0

    @nn.compact
    def __call__(self, obs: PyTree, action: Array | None = None, train: bool = False) -> Array:
        return self._values(obs, action, self.dropout if train else 0.0)


class BatchNormNetwork(nn.Module):
    """Dense layers with batch normalisation of the input and after each activation; `[B, ...] -> [B, outputs]`.

    With actions `[B, D]` it is a critic (Bhatt et al. 2024, https://arxiv.org/abs/1902.05605, figure 2). Images are
    flattened. With `pre_activation`, normalisation comes before each activation, and its shift takes the place of the
    layer's bias (Palenicek et al. 2026, https://arxiv.org/abs/2509.25174).
    """

    observation_space: Any
    outputs: int
    features: Sequence[int] = (256, 256)
    activation: str = "relu"
    renorm: bool = False
    dtype: str = "float32"
    pre_activation: bool = False

    @nn.compact
    def __call__(self, obs: PyTree, action: Array | None = None, train: bool = False) -> Array:
        x = encode(self.observation_space, obs, "mlp")
        if action is not None:
            x = jnp.concatenate([x, action], axis=-1)
        # Inputs are normalised as well: observations and actions differ in scale.
        x = BatchNorm(self.renorm)(x, train)
        activate = ACTIVATIONS[self.activation]
        for width in self.features:
            x = dense(width, dtype=self.dtype, bias=not self.pre_activation)(x)
            x = BatchNorm(self.renorm)((x if self.pre_activation else activate(x)).astype(jnp.float32), train)
            x = activate(x) if self.pre_activation else x
        return dense(self.outputs)(x)


class ActorCritic(nn.Module):
    """Policy outputs and values for a batch of observations; with a core, for observations and memory.

    `[B, ...] -> [B, outputs]`, `[B]` and the next memory (`()` without a core). Matrices are initialised orthogonal,
    except in the blocks of SimBa and in a core, where only the recurrent ones of GRU and LSTM are. The last matrix of
    the policy is small, so that the initial policy is close to uniform (Andrychowicz et al. 2021,
    https://arxiv.org/abs/2006.05990, section 3.2).
    """

    observation_space: Any
    outputs: int
    scales: int = 0
    """Number of outputs, the last ones, that are log-scales independent of the observation."""
    torso: str = "auto"
    features: Sequence[int] = (64, 64)
    activation: str = "tanh"
    shared: bool = False
    """Share one torso between policy and value; otherwise each has its own."""
    layer_norm: bool = False
    core: Core | None = None
    """Recurrent core after the policy's torso."""
    channels: Sequence[int] = ()
    dtype: str = "float32"
    critic_space: Any = None
    """Space of complete observations, if `observation_space` is the part that the policy sees. The value function then
    has a separate torso for complete observations, in addition to features shared with the policy, if any."""
    share_core: bool = True
    """Share the core, and the torso before it; otherwise the value function has its own torso."""
    value_core: Core | None = None
    """The value function's own core after its torso; memories are then those of policy and value, a pair."""
    init_std: float = 1.0
    """Exponential of the log-scales at the start."""

    def setup(self) -> None:
        make = lambda space: make_torso(
            self.torso,
            space,
            self.features,
            self.activation,
            self.channels,
            layer_norm=self.layer_norm,
            orthogonal=True,
            dtype=self.dtype,
        )
        self.actor_torso = make(self.observation_space)
        if self.critic_space is not None or not self._joint:
            self.critic_torso = make(self.observation_space if self.critic_space is None else self.critic_space)
        self.policy = dense(self.outputs - self.scales, kernel_init(True, 0.01))
        self.value = dense(1, kernel_init(True, 1.0))
        if self.scales:
            begin = nn.initializers.constant(math.log(self.init_std))
            self.log_std = self.param("log_std", begin, (self.scales,), jnp.float32)

    @property
    def _joint(self) -> bool:
        """Whether policy and value share features."""
        return self.shared or (self.core is not None and self.share_core)

    def __call__(self, obs: PyTree) -> tuple[Array, Array, PyTree]:
        if self.core is None:
            return *self.apply_heads(*self.apply_torso(obs)), ()
        hidden, critic = self.apply_torso(obs.obs)
        memory, *features = self._remember(lambda core, memory, x: core(memory, x), obs.memory, hidden, critic)
        return *self._read_core(*features), memory

    def apply_sequence(self, obs: RecurrentObs, is_first: Array) -> tuple[Array, Array]:
        """Return policy outputs `[B * T, outputs]` and values `[B * T]` of sequences `[B, T, ...]`.

        A sequence continues from its memory `[B, ...]`, which is reset before steps where `is_first` `[B, T]`.
        """
        return self._read_core(*self._remember_sequence(obs, is_first)[1:])

    def apply_core(self, obs: RecurrentObs, is_first: Array) -> PyTree:
        """Return the memories after each step of sequences, `[T, B, ...]`; arguments as of `apply_sequence`."""
        return self._remember_sequence(obs, is_first)[0]

    def _remember_sequence(self, obs: RecurrentObs, is_first: Array) -> tuple[PyTree, Array, Array]:
        features = self.apply_torso(jax.tree.map(merge_axes, obs.obs))
        return self._remember(partial(run_core, is_first=is_first), obs.memory, *features)

    def _remember(
        self, run: Callable[..., tuple[PyTree, Array]], memory: PyTree, hidden: Array, critic: Array
    ) -> tuple[PyTree, Array, Array]:
        """Run the cores by `run(core, memory, features)`; return the memories, and what policy and value read."""
        assert self.core is not None
        if self.value_core is None:
            return *run(self.core, memory, hidden), critic
        of_policy, hidden = run(self.core, memory[0], hidden)
        of_value, critic = run(self.value_core, memory[1], critic)
        return (of_policy, of_value), hidden, critic

    def _read_core(self, hidden: Array, critic: Array) -> tuple[Array, Array]:
        # Without its own torso, the value function reads the core's output, as the policy does.
        has_torso = self.critic_space is not None or not self.share_core
        return self.apply_heads(hidden, critic if has_torso else hidden)

    def apply_torso(self, obs: PyTree) -> tuple[Array, Array]:
        """Return the features of the torsos for policy and value, each `[B, F]`."""
        x = encode(self.observation_space, obs if self.critic_space is None else for_policy(obs), self.torso)
        hidden = self.actor_torso(x).astype(jnp.float32)
        if self.critic_space is not None:
            x = encode(self.critic_space, obs, self.torso)
        elif self._joint:
            return hidden, hidden
        return hidden, self.critic_torso(x).astype(jnp.float32)

    def apply_heads(self, actor: Array, critic: Array) -> tuple[Array, Array]:
        """Return the outputs of the policy `[B, outputs]` and values `[B]`."""
        if self.critic_space is not None and self._joint:
            # Features shared with the policy, such as those of a core, then the critic's, of the complete observation.
            critic = jnp.concatenate([actor, critic], axis=-1)
        outputs = self.policy(actor)
        if self.scales:
            # Broadcast like outputs of each observation, so that the head need not know where scales come from.
            log_std = jnp.broadcast_to(self.log_std, (outputs.shape[0], self.scales))
            outputs = jnp.concatenate([outputs, log_std], axis=-1)
        return outputs, self.value(critic)[:, 0]

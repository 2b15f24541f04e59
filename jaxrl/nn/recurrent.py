"""Networks with a recurrent core between torso and head."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl.nn.cores import Core
from jaxrl.nn.custom import Network
from jaxrl.nn.encode import encode
from jaxrl.nn.torsos import make_torso
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import RecurrentObs


class Recurrent(nn.Module):
    """A recurrent core between a torso and a head; `RecurrentObs` -> the outputs and the next memory."""

    head: nn.Module
    """Network from features `[B, core.features]`, and any further arguments, to the outputs."""
    observation_space: Any
    core: Core
    torso: str = "auto"
    features: Sequence[int] = (120, 84)
    activation: str = "relu"
    noisy: float = 0.0
    channels: Sequence[int] = ()
    dtype: str = "float32"
    layer_norm: bool = False

    def setup(self) -> None:
        self.body = make_torso(
            self.torso,
            self.observation_space,
            self.features,
            self.activation,
            self.channels,
            layer_norm=self.layer_norm,
            noisy=self.noisy,
            dtype=self.dtype,
        )

    def __call__(self, obs: RecurrentObs, *args: Array) -> tuple[Array, PyTree]:
        memory, hidden = self.core(obs.memory, self.apply_torso(obs.obs))
        return self.head(hidden, *args), memory

    def apply_torso(self, obs: PyTree) -> Array:
        """Return the torso's features `[B, F]`."""
        return self.body(encode(self.observation_space, obs, self.torso)).astype(jnp.float32)

    def step_core(self, memory: PyTree, hidden: Array) -> PyTree:
        """Return the memory after a step with the torso's features `[B, F]`."""
        return self.core(memory, hidden)[0]

    def apply_core(self, obs: RecurrentObs, is_first: Array) -> tuple[PyTree, Array]:
        """Run the core over sequences `[B, T, ...]` from their initial memories `[B, ...]`.

        Return the memories after each step, `[T, B, ...]`, and the core's outputs, `[B * T, F]`.
        """
        return run_core(self.core, obs.memory, self.apply_torso(jax.tree.map(merge_axes, obs.obs)), is_first)

    def apply_sequence(self, obs: RecurrentObs, is_first: Array, *args: Array) -> Array:
        """Return the outputs for sequences `[B, T, ...]`, as rows `[B * T, ...]` in the order of `apply_core`."""
        return self.head(self.apply_core(obs, is_first)[1], *args)


def run_core(core: Core, memory: PyTree, hidden: Array, is_first: Array) -> tuple[PyTree, Array]:
    """Run `core` over features `[B * T, F]` of sequences; return memories `[T, B, ...]` and outputs `[B * T, F]`.

    The memory is reset before steps where `is_first` `[B, T]`.
    """
    # The torso is applied to flat rows; a core needs the time axis first.
    by_time = jnp.moveaxis(hidden.reshape(*is_first.shape, hidden.shape[-1]), 1, 0)
    memories, out = core.sequence(memory, by_time, is_first.T)
    return memories, merge_axes(jnp.moveaxis(out, 0, 1))


def merge_axes(x: Array) -> Array:
    """Flatten an array `[B, T, ...]` to rows `[B * T, ...]`."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


class RecurrentNetwork(NamedTuple):
    """A recurrent network as two functions: outputs for a given memory, and the next memory."""

    core: Network
    """A `Recurrent`."""

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the variables. The key is consumed."""
        return self.core.init(key, *args)

    def apply(self, variables: PyTree, obs: RecurrentObs, /, *args: Any) -> Array:
        """Return the outputs `[B, ...]` alone."""
        return self.core.apply(variables, obs, *args)[0]

    def next_memory(self, variables: PyTree, obs: RecurrentObs, /) -> PyTree:
        """Return the memory after a step, `[B, ...]`."""
        # Torso and core suffice: the head does not affect the memory.
        apply = partial(cast(Any, self.core).apply, variables)
        return apply(obs.memory, apply(obs.obs, method="apply_torso"), method="step_core")


class RecurrentEnsemble(NamedTuple):
    """An ensemble of `size` recurrent networks with separate parameters and memories; outputs `[size, B, ...]`.

    Memories are `[B, size, ...]`, so that they are stored per environment like observations.
    """

    member: RecurrentNetwork
    size: int

    def init(self, key: Key, /, obs: RecurrentObs, *args: Any) -> PyTree:
        """Initialise the variables of all members, leaves `[size, ...]`. The key is consumed."""
        # A member takes one memory `[B, ...]`. Initialisation differs between members only in the key, so the memory of
        # the first serves all.
        first = RecurrentObs(obs.obs, jax.tree.map(lambda x: x[:, 0], obs.memory))
        return jax.vmap(lambda key: self.member.init(key, first, *args))(jax.random.split(key, self.size))

    def apply(self, variables: PyTree, obs: RecurrentObs, /, *args: Any) -> Array:
        """Return the outputs of all members."""
        # Parameters have the axis of members first, `[size, ...]`, and memories second, `[B, size, ...]`.
        one = lambda params, memory: self.member.apply(params, RecurrentObs(obs.obs, memory), *args)
        return jax.vmap(one, in_axes=(0, 1))(variables, obs.memory)

    def next_memory(self, variables: PyTree, obs: RecurrentObs, /) -> PyTree:
        """Return the memories of all members after a step, `[B, size, ...]`."""
        one = lambda params, memory: self.member.next_memory(params, RecurrentObs(obs.obs, memory))
        return jax.vmap(one, in_axes=(0, 1), out_axes=1)(variables, obs.memory)

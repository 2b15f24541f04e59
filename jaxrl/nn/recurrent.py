"""Recurrent cores: Flax's cells, their initial memory, and networks with a core between torso and head."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.nn.custom import Network
from jaxrl.nn.encode import encode
from jaxrl.nn.layers import kernel_init
from jaxrl.nn.torsos import make_torso
from jaxrl.trees import Array, Key, PyTree, tree_where
from jaxrl.types import RecurrentObs

CORES = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


def initial_memory(core: str, features: int) -> PyTree:
    """Return a core's initial memory; `None` for the core `none`."""
    zeros = np.zeros(features, np.float32)
    return {"none": None, "gru": zeros, "lstm": (zeros, zeros)}[core]


def unroll(
    step_core: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    initial: PyTree,
    memory: PyTree,
    inputs: PyTree,
    is_first: Array,
) -> tuple[PyTree, PyTree]:
    """Scan `memory, out = step_core(memory, inputs[t])` over time; return the last memory and all `out`, `[T, B, ...]`.

    Where `is_first` `[T, B]` is true, the memory is first reset to `initial`, that of one environment.
    """

    def step(memory: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        x, is_first = row
        fresh = jax.tree.map(lambda old, new: jnp.broadcast_to(new, old.shape), memory, initial)
        # Reset before the step, so that the first step of an episode sees nothing of the one before.
        return step_core(tree_where(is_first, fresh, memory), x)

    return jax.lax.scan(step, memory, (inputs, is_first))


class Recurrent(nn.Module):
    """A recurrent core between a torso and a head; `RecurrentObs` -> the outputs and the next memory.

    The core's matrices for its own memory are initialised orthogonal.
    """

    head: nn.Module
    """A network on features `[B, core_features]`, called with any further arguments too."""
    observation_space: Any
    core: str
    core_features: int
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
        self.cell = CORES[self.core](self.core_features, recurrent_kernel_init=kernel_init(True, 1.0))

    def __call__(self, obs: RecurrentObs, *args: Array) -> tuple[Array, PyTree]:
        memory, hidden = self.cell(obs.memory, self.apply_torso(obs.obs))
        return self.head(hidden, *args), memory

    def apply_torso(self, obs: PyTree) -> Array:
        """Return the torso's features `[B, F]`."""
        hidden: Array = self.body(encode(self.observation_space, obs, self.torso)).astype(jnp.float32)
        return hidden

    def step_core(self, memory: PyTree, hidden: Array) -> PyTree:
        """Return the memory after a step with the torso's features `[B, F]`."""
        return self.cell(memory, hidden)[0]


class RecurrentNetwork(NamedTuple):
    """A recurrent network as two functions: outputs for a given memory, and the next memory."""

    core: Network
    """A `Recurrent`."""

    def init(self, key: Key, /, *args: Any) -> PyTree:
        """Initialise the variables. The key is consumed."""
        return self.core.init(key, *args)

    def apply(self, variables: PyTree, obs: RecurrentObs, /, *args: Any) -> Array:
        """Return the outputs `[B, ...]` alone."""
        out: Array = self.core.apply(variables, obs, *args)[0]
        return out

    def next_memory(self, variables: PyTree, obs: RecurrentObs, /) -> PyTree:
        """Return the memory after a step, `[B, ...]`."""
        # Torso and core alone: the head has no part in the memory.
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
        # A member sees one memory `[B, ...]`. Members are initialised alike but for their keys, so the first one serves
        # all.
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

"""Recurrent cores: Flax's cells, their initial memory, and a network with one in its middle."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.nn.encode import encode
from jaxrl.nn.layers import kernel_init
from jaxrl.nn.torsos import make_torso
from jaxrl.trees import Array, PyTree, tree_where
from jaxrl.types import Remembered

CORES = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


def no_memory(core: str, features: int) -> PyTree:
    """Return a core's initial memory; `None` for the core `none`."""
    zeros = np.zeros(features, np.float32)
    return {"none": None, "gru": zeros, "lstm": (zeros, zeros)}[core]


def unroll(
    advance: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    blank: PyTree,
    memory: PyTree,
    seen: PyTree,
    first: Array,
) -> tuple[PyTree, PyTree]:
    """Run `memory, out = advance(memory, seen[t])` along time; return the last memory and every `out`, `[T, B, ...]`.

    Where `first` `[T, B]` is true an episode begins, and the memory is `blank`, given for one environment.
    """

    def step(memory: PyTree, now: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        seen, first = now
        fresh = jax.tree.map(lambda x, zero: jnp.broadcast_to(zero, x.shape), memory, blank)
        return advance(tree_where(first, fresh, memory), seen)

    return jax.lax.scan(step, memory, (seen, first))


class Recurrent(nn.Module):
    """A recurrent core between a torso and a network on its features; `Remembered` -> the outputs and the next memory.

    The core's matrices for its own memory are initialised orthogonal.
    """

    head: nn.Module
    """A network for observations `[B, core_features]`; further arguments are passed on to it."""
    observation_space: Any
    core: str
    core_features: int
    torso: str = "auto"
    features: Sequence[int] = (120, 84)
    activation: str = "relu"
    noisy: float = 0.0
    channels: Sequence[int] = ()
    dtype: str = "float32"

    def setup(self) -> None:
        self.body = make_torso(
            self.torso,
            self.observation_space,
            self.features,
            self.activation,
            self.channels,
            noisy=self.noisy,
            dtype=self.dtype,
        )
        self.cell = CORES[self.core](self.core_features, recurrent_kernel_init=kernel_init(True, 1.0))

    def __call__(self, obs: Remembered, *args: Array) -> tuple[Array, PyTree]:
        memory, hidden = self.cell(obs.memory, self.see(obs.obs))
        return self.head(hidden, *args), memory

    def see(self, obs: PyTree) -> Array:
        """Return the torso's features `[B, F]`."""
        hidden: Array = self.body(encode(self.observation_space, obs, self.torso)).astype(jnp.float32)
        return hidden

    def advance(self, memory: PyTree, hidden: Array) -> PyTree:
        """Return the memory after a step with the torso's features `[B, F]`."""
        return self.cell(memory, hidden)[0]

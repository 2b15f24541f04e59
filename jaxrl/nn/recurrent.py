"""Recurrent cores: cells of Flax, and what they remember at first."""

import flax.linen as nn
import numpy as np

from jaxrl.trees import PyTree

CORES = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


def no_memory(core: str, features: int) -> PyTree:
    """Return what a core remembers before it has seen anything; `None` for the core `none`."""
    zeros = np.zeros(features, np.float32)
    return {"none": None, "gru": zeros, "lstm": (zeros, zeros)}[core]

"""Recurrent cores: Flax's cells and their initial memory."""

import flax.linen as nn
import numpy as np

from jaxrl.trees import PyTree

CORES = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


def no_memory(core: str, features: int) -> PyTree:
    """Return a core's initial memory; `None` for the core `none`."""
    zeros = np.zeros(features, np.float32)
    return {"none": None, "gru": zeros, "lstm": (zeros, zeros)}[core]

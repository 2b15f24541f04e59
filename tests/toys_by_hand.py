"""Networks of one layer, and what is made of their outputs, once more in NumPy and double precision."""

from typing import Any

import numpy as np


def numbers(params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel and the bias of a network's one layer, or of that of each critic."""
    layer = params["params"]["Dense_0"]
    return np.asarray(layer["kernel"], np.float64), np.asarray(layer["bias"], np.float64)


def linear(layer: Any, x: Any) -> np.ndarray:
    """Apply one layer, or that of each critic, as a network or its `numbers`: `[B, D] -> [(K,) B, outputs]`."""
    kernel, bias = layer if isinstance(layer, tuple) else numbers(layer)
    return np.asarray(np.asarray(x, np.float64) @ kernel + bias[..., None, :])


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def project(z: np.ndarray, p: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Share each probability out between the two atoms beside its return, one at a time."""
    out, gap = np.zeros(len(support)), support[1] - support[0]
    for value, probability in zip(z, p, strict=True):
        place = (np.clip(value, support[0], support[-1]) - support[0]) / gap
        low = min(int(place), len(support) - 2)
        out[low] += probability * (low + 1 - place)
        out[low + 1] += probability * (place - low)
    return out

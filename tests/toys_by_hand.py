"""Networks of one layer, and what is made of their outputs, once more in NumPy and double precision."""

from typing import Any

import numpy as np

from jaxrl.distributions import LOG_STD


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


def beside(obs: Any, action: Any) -> np.ndarray:
    """Return what critics of actions that are numbers see."""
    return np.concatenate([np.asarray(obs, np.float64), np.asarray(action, np.float64)], axis=-1)


def squashed(outputs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return actions, `tanh` of a Gaussian of `outputs` at `noise` `[B, D]`, and their log-densities, `[B]`."""
    mean, log_std = np.split(np.asarray(outputs, np.float64), 2, axis=-1)
    log_std, noise = np.clip(log_std, *LOG_STD), noise.astype(np.float64)
    raw = mean + np.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    # The slope of tanh is one over the square of cosh.
    return np.tanh(raw), (normal + 2 * (np.logaddexp(raw, -raw) - np.log(2))).sum(-1)


def slope(f: Any, x: np.ndarray) -> np.ndarray:
    """Return the gradient of `f` at `x`, by differences."""
    ways = 1e-5 * np.eye(x.size).reshape(-1, *x.shape)
    return np.array([(f(x + way) - f(x - way)) / 2e-5 for way in ways]).reshape(x.shape)


def project(z: np.ndarray, p: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Share each probability out between the two atoms beside its return, one at a time."""
    out, gap = np.zeros(len(support)), support[1] - support[0]
    for value, probability in zip(z, p, strict=True):
        place = (np.clip(value, support[0], support[-1]) - support[0]) / gap
        low = min(int(place), len(support) - 2)
        out[low] += probability * (low + 1 - place)
        out[low + 1] += probability * (place - low)
    return out

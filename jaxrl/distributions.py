"""Distributions of actions, made of a network's outputs `[..., K]`, and how a drawn action reaches the environment.

What is drawn and judged is the raw action: a number, several numbers, or a point of the Gaussian before it is squashed
or clipped. Only `Head.to_env` makes of it an element of the action space, so that the density is always exact.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, box_bounds
from jaxrl.trees import Array, Key

LOG_STD = (-5.0, 2.0)
"""Bounds of the logarithm of a scale."""


class Distribution(Protocol):
    """Distributions `[...]` of raw actions `[..., *action]`."""

    def mode(self) -> Array:
        """Return the most likely action (before squashing)."""
        ...

    def sample(self, noise: Array) -> Array:
        """Return an action for `noise` that the head's `draw` made."""
        ...

    def log_prob(self, action: Array) -> Array:
        """Return `[...]`, the logarithm of the probability, or density, of `action`."""
        ...

    def entropy(self) -> Array:
        """Return `[...]`, the entropy in nats."""
        ...


class Categorical(NamedTuple):
    """The numbers `0 .. A-1`."""

    logits: Array
    """`[..., A]`"""

    def mode(self) -> Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def sample(self, noise: Array) -> Array:
        # Gumbel's maximum: an argmax over noise that was drawn ahead, without a cumulative sum in the loop.
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        return _entry(jax.nn.log_softmax(self.logits), action)

    def entropy(self) -> Array:
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


class MultiCategorical(NamedTuple):
    """Vectors of independent numbers, entry `i` from `0 .. n[i]-1`."""

    logits: Array
    """`[..., sum(n)]`"""
    n: tuple[int, ...]

    def mode(self) -> Array:
        return jnp.stack([part.mode() for part in self._parts(self.logits)], axis=-1)

    def sample(self, noise: Array) -> Array:
        return jnp.stack([part.mode() for part in self._parts(self.logits + noise)], axis=-1)

    def log_prob(self, action: Array) -> Array:
        parts = self._parts(self.logits)
        return jnp.stack([p.log_prob(action[..., i]) for i, p in enumerate(parts)]).sum(0)

    def entropy(self) -> Array:
        return jnp.stack([part.entropy() for part in self._parts(self.logits)]).sum(0)

    def _parts(self, logits: Array) -> list[Categorical]:
        return [Categorical(x) for x in jnp.split(logits, np.cumsum(self.n)[:-1], axis=-1)]


class Gaussian(NamedTuple):
    """Independent normal numbers."""

    mean: Array
    """`[..., D]`"""
    log_std: Array
    """`[..., D]`"""

    def mode(self) -> Array:
        return self.mean

    def sample(self, noise: Array) -> Array:
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: Array) -> Array:
        apart = (action - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * jnp.square(apart) + self.log_std + 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> Array:
        return jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)


class TanhGaussian(NamedTuple):
    """`tanh` of independent normal numbers: densities are those of the squashed action, given the one before it."""

    base: Gaussian

    def mode(self) -> Array:
        return self.base.mode()

    def sample(self, noise: Array) -> Array:
        return self.base.sample(noise)

    def log_prob(self, action: Array) -> Array:
        return self.base.log_prob(action) - jnp.sum(log_slope(action), axis=-1)

    def entropy(self) -> Array:
        """Return the entropy of the Gaussian plus the mean of `log_slope`, by the trapezoidal rule.

        Under a wide Gaussian, evenly spaced points follow the bend of `log_slope` better than Gauss and Hermite's.
        """
        mean, std = self.base.mean[..., None], jnp.exp(self.base.log_std)[..., None]
        slope = log_slope(mean + std * jnp.asarray(_NODES).reshape((1,) * (mean.ndim - 1) + (-1,)))
        return self.base.entropy() + jnp.sum(slope @ jnp.asarray(_WEIGHTS), axis=-1)


_NODES = np.linspace(-5.0, 5.0, 33, dtype=np.float32)
_WEIGHTS = np.exp(-np.square(_NODES) / 2) / np.exp(-np.square(_NODES) / 2).sum()


def log_slope(u: Array) -> Array:
    """Return `log(1 - tanh(u)^2)`, without the cancellation of that expression where `u` is large."""
    return 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))


def _entry(row: Array, index: Array) -> Array:
    """Return `row[..., index]` as a masked sum: what fuses, where the gradient of an index would be a scatter."""
    places = jnp.arange(row.shape[-1]).reshape((1,) * index.ndim + (-1,))
    return jnp.sum(row, axis=-1, where=places == index[..., None])


class Head(NamedTuple):
    """What stands between the outputs of a network and the actions of a space."""

    outputs: int
    """Numbers that the network puts out for an observation."""
    of: Callable[[Array], Distribution]
    """`[..., outputs]` -> distributions `[...]`"""
    draw: Callable[[Key, int], Array]
    """`(key, N)` -> noise for one sample each. The key is consumed."""
    to_env: Callable[[Array], Array]
    """Raw actions `[N, ...]` -> elements of the action space `[N, ...]`"""
    scales: int = 0
    """Of the outputs, the last so many are logarithms of scales."""


def head_of(spec: EnvSpec, squash: bool = False) -> Head:
    """Return the head for the actions of `spec`: categorical, several of them, or a Gaussian.

    A bounded action space is rescaled, so that raw actions from -1 to 1 span it; those beyond are clipped, or with
    `squash` brought inside by `tanh`.

    Raises:
      SettingsError: dict and tuple actions, whole-number boxes, or `squash` without bounds.
    """
    space = spec.action_space
    if isinstance(space, Discrete):
        return Head(space.n, Categorical, partial(_gumbel, space.n), lambda raw: raw.astype(space.dtype))
    if isinstance(space, MultiDiscrete):
        of = partial(_multi, tuple(space.n))
        return Head(sum(space.n), of, partial(_gumbel, sum(space.n)), lambda raw: raw.astype(space.dtype))
    if not isinstance(space, Box) or not jnp.issubdtype(np.dtype(space.dtype), jnp.floating):
        raise SettingsError(
            f"{spec.name} has actions {space}; expected Discrete, MultiDiscrete or a Box of floating-point numbers"
        )
    size = math.prod(space.shape)
    if squash and not box_bounds(space)[2].all():
        raise SettingsError(
            f"agent.squash needs bounds, but actions of {spec.name} have none; set agent.squash to false"
        )
    to_env = (lambda raw: to_box(space, jnp.tanh(raw))) if squash else partial(to_box, space)
    return Head(2 * size, partial(_gaussian, squash), partial(_normal, size), to_env, size)


def _gumbel(size: int, key: Key, num_envs: int) -> Array:
    return jax.random.gumbel(key, (num_envs, size))


def _normal(size: int, key: Key, num_envs: int) -> Array:
    return jax.random.normal(key, (num_envs, size))


def _multi(n: tuple[int, ...], outputs: Array) -> MultiCategorical:
    return MultiCategorical(outputs, n)


def _gaussian(squash: bool, outputs: Array) -> Distribution:
    mean, log_std = jnp.split(outputs, 2, axis=-1)
    base = Gaussian(mean, jnp.clip(log_std, *LOG_STD))
    return TanhGaussian(base) if squash else base


def to_box(space: Box, x: Array) -> Array:
    """Stretch `x` `[N, D]` so that -1 to 1 spans the bounds of `space`, and clip it there; `[N, *space.shape]`."""
    low, high, _ = box_bounds(space)
    middle, reach = _span(space)
    within = jnp.clip(middle + reach * x, low.reshape(1, -1).astype(np.float32), high.reshape(1, -1).astype(np.float32))
    return within.reshape(-1, *space.shape).astype(space.dtype)


def from_box(space: Box, action: Array) -> Array:
    """Take `to_box` back: elements of `space` `[N, ...]` -> `[N, D]`, from -1 to 1 within bounds."""
    middle, reach = _span(space)
    return (action.reshape(action.shape[0], -1).astype(jnp.float32) - middle) / np.where(reach > 0, reach, 1)


def _span(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return middle and half width `[1, D]` of the bounds; 0 and 1 where there are none, or only one."""
    low, high, bounded = (x.reshape(1, -1) for x in box_bounds(space))
    bottom, top = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    return ((top + bottom) / 2).astype(np.float32), ((top - bottom) / 2).astype(np.float32)

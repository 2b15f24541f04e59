"""Action distributions, parametrised by a network's outputs `[..., K]`, and the map from samples to actions.

Samples and densities are those of raw actions: indices, or points of the Gaussian before squashing or clipping.
`Head.to_env` maps them to the action space as a last step, so densities are always exact.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import spaces
from jaxrl.errors import SettingsError
from jaxrl.masks import apply_mask
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl.trees import Array, Key
from jaxrl.xla import reductions

LOG_STD = (-5.0, 2.0)
"""Bounds on the log-scale."""


class Distribution(Protocol):
    """Distributions `[...]` of raw actions `[..., *action]`."""

    def mode(self) -> Array:
        """Return the mode (for a squashed Gaussian, that before squashing)."""
        ...

    def sample(self, key: Key) -> Array:
        """Draw a sample. The key is consumed."""
        ...

    def log_prob(self, action: Array) -> Array:
        """Return the log-probability, or log-density, of `action`; `[...]`."""
        ...

    def entropy(self) -> Array:
        """Return the entropy in nats; `[...]`."""
        ...


class Categorical(NamedTuple):
    """Distribution over `0 .. A-1`."""

    logits: Array
    """`[..., A]`"""

    def mode(self) -> Array:
        return reductions.argmax(self.logits).astype(jnp.int32)

    def sample(self, key: Key) -> Array:
        return reductions.argmax(self.logits + gumbel_like(key, self.logits)).astype(jnp.int32)  # the Gumbel-max trick

    def log_prob(self, action: Array) -> Array:
        return reductions.entry(reductions.log_softmax(self.logits), action)

    def entropy(self) -> Array:
        log_p = reductions.log_softmax(self.logits)
        return -reductions.total(jnp.exp(log_p) * log_p)


class MultiCategorical(NamedTuple):
    """Vectors of independent categorical variables, entry `i` from `0 .. n[i]-1`."""

    logits: Array
    """`[..., sum(n)]`"""
    n: tuple[int, ...]

    def mode(self) -> Array:
        return jnp.stack([part.mode() for part in self.parts()], axis=-1)

    def sample(self, key: Key) -> Array:
        return self._replace(logits=self.logits + gumbel_like(key, self.logits)).mode()

    def log_prob(self, action: Array) -> Array:
        return jnp.stack([p.log_prob(action[..., i]) for i, p in enumerate(self.parts())]).sum(0)

    def entropy(self) -> Array:
        return jnp.stack([part.entropy() for part in self.parts()]).sum(0)

    def parts(self) -> list[Categorical]:
        """Return the variables one by one."""
        return [Categorical(x) for x in jnp.split(self.logits, np.cumsum(self.n)[:-1], axis=-1)]


class Gaussian(NamedTuple):
    """Independent normal variables."""

    mean: Array
    """`[..., D]`"""
    log_std: Array
    """`[..., D]`"""

    def mode(self) -> Array:
        return self.mean

    def sample(self, key: Key) -> Array:
        return self.at(jax.random.normal(key, self.mean.shape, jnp.float32))

    def at(self, deviation: Array) -> Array:
        """Return the point that lies `deviation` `[..., D]` standard deviations from the mean."""
        return self.mean + jnp.exp(self.log_std) * deviation

    def log_prob(self, action: Array) -> Array:
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return -reductions.total(0.5 * jnp.square(z) + self.log_std + 0.5 * math.log(2 * math.pi))

    def entropy(self) -> Array:
        return reductions.total(self.log_std + 0.5 * math.log(2 * math.pi * math.e))


class TanhGaussian(NamedTuple):
    """`tanh` of independent normal variables; densities are those of the squashed action, given the raw one."""

    base: Gaussian

    def mode(self) -> Array:
        return self.base.mode()

    def sample(self, key: Key) -> Array:
        return self.base.sample(key)

    def at(self, deviation: Array) -> Array:
        """Return the raw action that lies `deviation` standard deviations from the mean."""
        return self.base.at(deviation)

    def log_prob(self, action: Array) -> Array:
        # Change of variables: p(tanh u) = p(u) / |d tanh u / du|.
        return self.base.log_prob(action) - reductions.total(log_tanh_slope(action))

    def entropy(self) -> Array:
        """Return the Gaussian's entropy plus the mean of `log_tanh_slope`, computed by the trapezoidal rule.

        For a wide Gaussian, evenly spaced points resolve the bend of `log_tanh_slope` better than Gauss-Hermite
        quadrature.
        """
        mean, std = self.base.mean[..., None], jnp.exp(self.base.log_std)[..., None]
        slope = log_tanh_slope(mean + std * jnp.asarray(_NODES, jnp.float32).reshape((1,) * (mean.ndim - 1) + (-1,)))
        return self.base.entropy() + jnp.sum(slope @ jnp.asarray(_WEIGHTS, jnp.float32), axis=-1)


def kl_divergence(p: Distribution, q: Distribution) -> Array:
    """Return the divergence of `q` from `p`, `sum p log(p / q)`, `[...]`, of two distributions of the same kind.

    `tanh` is one-to-one, so that the divergence of squashed Gaussians is that of the Gaussians.
    """
    if isinstance(p, TanhGaussian) and isinstance(q, TanhGaussian):
        p, q = p.base, q.base
    if isinstance(p, Gaussian) and isinstance(q, Gaussian):
        # Per dimension: log(s_q / s_p) + (s_p^2 / s_q^2 + (m_p - m_q)^2 / s_q^2 - 1) / 2.
        ratio = jnp.exp(2 * (p.log_std - q.log_std))
        distance = jnp.square((p.mean - q.mean) * jnp.exp(-q.log_std))
        return reductions.total(q.log_std - p.log_std + 0.5 * (ratio + distance - 1))
    if isinstance(p, MultiCategorical) and isinstance(q, MultiCategorical):
        # Of independent variables the divergences add up.
        return jnp.stack([kl_divergence(*pair) for pair in zip(p.parts(), q.parts(), strict=True)]).sum(0)
    assert isinstance(p, Categorical)
    assert isinstance(q, Categorical)
    log_p, log_q = reductions.log_softmax(p.logits), reductions.log_softmax(q.logits)
    return reductions.total(jnp.exp(log_p) * (log_p - log_q))


def gumbel_like(key: Key, logits: Array) -> Array:
    """Draw standard Gumbel noise of the shape of `logits`; the key is consumed."""
    return jax.random.gumbel(key, logits.shape, jnp.float32)


_NODES = np.linspace(-5.0, 5.0, 33, dtype=np.float32)
_WEIGHTS = np.exp(-np.square(_NODES) / 2) / np.exp(-np.square(_NODES) / 2).sum()


def log_tanh_slope(u: Array) -> Array:
    """Return `log(1 - tanh(u)^2)`, the log-derivative of `tanh`, without cancellation for large `u`."""
    return 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))


def mask_distribution(distribution: Distribution, mask: Array | None) -> Distribution:
    """Condition a categorical distribution on the actions allowed by `mask` `[..., A]`; `None` allows all.

    Forbidden actions have probability 0 and contribute nothing to entropies and gradients.
    """
    if mask is None:
        return distribution
    if isinstance(distribution, Categorical):
        return Categorical(apply_mask(distribution.logits, mask))
    assert isinstance(distribution, MultiCategorical), "a mask needs discrete actions"
    ends = np.cumsum(distribution.n)[:-1]
    pairs = zip(*(jnp.split(x, ends, axis=-1) for x in (distribution.logits, mask)), strict=True)
    return distribution._replace(logits=jnp.concatenate([apply_mask(*pair) for pair in pairs], axis=-1))


MIN_TEMPERATURE = 1e-6
"""Lower bound of the sampling temperature; 0 means this."""


def apply_temperature(distribution: Distribution, temperature: Array | tuple[()]) -> Distribution:
    """Divide logits by `temperature`, or multiply scales by it; `()`: no temperature."""
    if isinstance(temperature, tuple):
        return distribution
    temperature = jnp.maximum(temperature, MIN_TEMPERATURE)
    if isinstance(distribution, TanhGaussian):
        return TanhGaussian(_scale_std(distribution.base, temperature))
    if isinstance(distribution, Gaussian):
        return _scale_std(distribution, temperature)
    assert isinstance(distribution, Categorical | MultiCategorical)
    return distribution._replace(logits=distribution.logits / temperature)


def _scale_std(distribution: Gaussian, factor: Array) -> Gaussian:
    return Gaussian(distribution.mean, distribution.log_std + jnp.log(factor))


class Head(NamedTuple):
    """Maps network outputs to action distributions, and raw actions to the action space."""

    outputs: int
    """Number of network outputs per observation."""
    distribution: Callable[[Array], Distribution]
    """`[..., outputs]` -> distributions `[...]`"""
    to_env: Callable[[Array], Array]
    """Raw actions `[N, ...]` -> elements of the action space `[N, ...]`"""
    scales: int = 0
    """Number of outputs, the last ones, that are log-scales."""
    to_raw: Callable[[Array], Array] = lambda action: action
    """Elements of the action space `[N, ...]` -> raw actions; the inverse of `to_env` up to clipping."""
    log_half_width: float = 0.0
    """Log of the product of half-widths, by which `to_env` scales: the log-density of an action is smaller by this."""


def make_head(spec: EnvSpec, squash: bool = False) -> Head:
    """Return the head for the action space of `spec`: categorical, multi-categorical or Gaussian.

    A bounded action space is rescaled to raw actions from -1 to 1. Those beyond are clipped, or with `squash` mapped
    inside by `tanh`.

    Raises:
      SettingsError: actions are dicts, tuples or whole-number boxes, or `squash` is set without bounds.
    """
    space = spec.action_space
    if isinstance(space, Discrete):
        return Head(space.n, Categorical, lambda raw: raw.astype(space.dtype))
    if isinstance(space, MultiDiscrete):
        of = partial(_multi, tuple(space.n))
        return Head(sum(space.n), of, lambda raw: raw.astype(space.dtype))
    if not isinstance(space, Box) or not jnp.issubdtype(np.dtype(space.dtype), jnp.floating):
        raise SettingsError(
            f"{spec.name} has actions {space}; expected Discrete, MultiDiscrete or a Box of floating-point numbers"
        )
    size = math.prod(space.shape)
    if squash and not spaces.box_bounds(space)[2].all():
        raise SettingsError(
            f"agent.squash needs bounds, but actions of {spec.name} have none; set agent.squash to false"
        )
    to_env = (lambda raw: spaces.to_box(space, jnp.tanh(raw))) if squash else partial(spaces.to_box, space)
    # An entry with equal bounds has half-width 0 and is left out of the product.
    reach = np.log(np.where(spaces.box_span(space)[1] > 0, spaces.box_span(space)[1], 1)).sum()
    return Head(
        2 * size,
        partial(_gaussian, squash),
        to_env,
        size,
        partial(_to_raw, space, squash),
        float(reach),
    )


MAX_SQUASHED = 1 - 1e-6
"""Largest squashed action for `arctanh`, which is infinite at 1; actions at a bound are moved here."""


def _to_raw(space: Box, squash: bool, action: Array) -> Array:
    unit = spaces.from_box(space, action)
    return jnp.arctanh(jnp.clip(unit, -MAX_SQUASHED, MAX_SQUASHED)) if squash else unit


def _multi(n: tuple[int, ...], outputs: Array) -> MultiCategorical:
    return MultiCategorical(outputs, n)


def _gaussian(squash: bool, outputs: Array) -> Distribution:
    mean, log_std = jnp.split(outputs, 2, axis=-1)
    base = Gaussian(mean, jnp.clip(log_std, *LOG_STD))
    return TanhGaussian(base) if squash else base

"""Action distributions, parametrised by a network's outputs `[..., K]`, and the map from samples to actions.

Samples and densities are those of raw actions: indices, or points of the Gaussian before squashing or clipping.
`Head.to_env` maps them to the action space as a last step, so densities are always exact.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import spaces
from jaxrl.errors import SettingsError
from jaxrl.masks import apply_mask, masks_of_parts
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space
from jaxrl.trees import Array, Key, PyTree
from jaxrl.xla import reductions

LOG_STD = (-5.0, 2.0)
"""Bounds on the log-scale."""


class Distribution(Protocol):
    """Distributions `[...]` of raw actions `[..., *action]`, or of trees of them."""

    def mode(self) -> PyTree:
        """Return the mode (for a squashed Gaussian, that before squashing)."""
        ...

    def sample(self, key: Key) -> PyTree:
        """Draw a sample. The key is consumed."""
        ...

    def log_prob(self, action: PyTree) -> Array:
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


class Joint(NamedTuple):
    """Actions of several independent parts: a dict or tuple of distributions, nested as the action space is.

    Probabilities of independent parts multiply, so log-probabilities, entropies and divergences add up.
    """

    parts: PyTree

    def mode(self) -> PyTree:
        return jax.tree.map(lambda part: part.mode(), self.parts, is_leaf=is_distribution)

    def sample(self, key: Key) -> PyTree:
        parts, form = self.flatten()
        keys = jax.random.split(key, len(parts)) if len(parts) > 1 else [key]
        return form.unflatten([part.sample(key) for part, key in zip(parts, keys, strict=True)])

    def log_prob(self, action: PyTree) -> Array:
        return _add(part.log_prob(x) for part, x in zip(self.flatten()[0], jax.tree.leaves(action), strict=True))

    def entropy(self) -> Array:
        return _add(part.entropy() for part in self.flatten()[0])

    def flatten(self) -> tuple[list[Any], Any]:
        """Return the distributions of all parts, in the order of `jax.tree.leaves`, and the structure of the action."""
        return jax.tree.flatten(self.parts, is_leaf=is_distribution)


def is_distribution(x: object) -> bool:
    """Return whether `x` is the distribution of a part, and not a dict or tuple of several."""
    return isinstance(x, Categorical | MultiCategorical | Gaussian | TanhGaussian)


def _add(terms: Iterable[Array]) -> Array:
    return reduce(operator.add, terms)


def kl_divergence(p: Distribution, q: Distribution) -> Array:
    """Return the divergence of `q` from `p`, `sum p log(p / q)`, `[...]`, of two distributions of the same kind.

    `tanh` is one-to-one, so that the divergence of squashed Gaussians is that of the Gaussians.
    """
    if isinstance(p, Joint) and isinstance(q, Joint):
        return _add(kl_divergence(*pair) for pair in zip(p.flatten()[0], q.flatten()[0], strict=True))
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


def mask_distribution(distribution: Distribution, mask: PyTree) -> Distribution:
    """Condition a categorical distribution on the actions allowed by `mask` `[..., A]`; `None` allows all.

    The mask of a `Joint` is a dict or tuple of masks; parts that it leaves out are unchanged. Forbidden actions have
    probability 0 and contribute nothing to entropies and gradients.
    """
    if mask is None:
        return distribution
    if isinstance(distribution, Joint):
        parts, form = distribution.flatten()
        pairs = zip(parts, masks_of_parts(distribution.parts, mask, is_distribution), strict=True)
        return Joint(form.unflatten([mask_distribution(*pair) for pair in pairs]))
    if isinstance(distribution, Categorical):
        return Categorical(apply_mask(distribution.logits, mask))
    assert isinstance(distribution, MultiCategorical), "a mask needs discrete actions"
    ends = np.cumsum(distribution.n)[:-1]
    split = zip(*(jnp.split(x, ends, axis=-1) for x in (distribution.logits, mask)), strict=True)
    return distribution._replace(logits=jnp.concatenate([apply_mask(*pair) for pair in split], axis=-1))


MIN_TEMPERATURE = 1e-6
"""Lower bound of the sampling temperature; 0 means this."""


def apply_temperature(distribution: Distribution, temperature: Array | tuple[()]) -> Distribution:
    """Divide logits by `temperature`, or multiply scales by it; `()`: no temperature."""
    if isinstance(temperature, tuple):
        return distribution
    if isinstance(distribution, Joint):
        heated = lambda part: apply_temperature(part, temperature)
        return Joint(jax.tree.map(heated, distribution.parts, is_leaf=is_distribution))
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
    to_env: Callable[[PyTree], PyTree]
    """Raw actions `[N, ...]` -> elements of the action space `[N, ...]`"""
    scales: int = 0
    """Number of outputs, the last ones, that are log-scales."""
    to_raw: Callable[[PyTree], PyTree] = lambda action: action
    """Elements of the action space `[N, ...]` -> raw actions; the inverse of `to_env` up to clipping."""
    log_half_width: float = 0.0
    """Log of the product of half-widths, by which `to_env` scales: the log-density of an action is smaller by this."""
    parts: PyTree = ()
    """The heads of the parts of an action, in the structure of its space; `()` if that is a single space."""

    def split(self, outputs: Array) -> list[Array]:
        """Return the outputs `[..., K]` of each of the `parts`, in the order of `jax.tree.leaves`."""
        heads = part_heads(self)
        along = outputs.ndim - 1
        means, scales = 0, self.outputs - self.scales
        split = []
        for head in heads:
            # Log-scales come last in a head's outputs: those of the parts after everything else of all the parts.
            ranges = [(means, head.outputs - head.scales), (scales, head.scales)]
            taken = [jax.lax.slice_in_dim(outputs, start, start + n, axis=along) for start, n in ranges if n]
            split.append(jnp.concatenate(taken, axis=-1) if len(taken) > 1 else taken[0])
            means, scales = means + head.outputs - head.scales, scales + head.scales
        return split

    def join(self, outputs: Sequence[Array]) -> Array:
        """Invert `split`."""
        pairs = list(zip(outputs, part_heads(self), strict=True))
        first = [x[..., : head.outputs - head.scales] for x, head in pairs]
        return jnp.concatenate([*first, *(x[..., head.outputs - head.scales :] for x, head in pairs)], axis=-1)


def demonstrated_raw(head: Head, action: PyTree) -> PyTree:
    """Return the raw actions `[N, ...]` that stand for demonstrated ones; behind `tanh` they are bounded by `MAX_RAW`.

    `Head.to_raw` alone sends an action at a bound so far out that no policy would come near it.
    """
    raw, form = jax.tree.flatten(head.to_raw(action))
    pairs = zip(raw, part_heads(head) or [head], strict=True)
    return jax.tree.unflatten(form, [jnp.clip(x, -MAX_RAW, MAX_RAW) if is_squashed(part) else x for x, part in pairs])


def is_squashed(head: Head) -> bool:
    """Return whether the head of a single space has Gaussians behind `tanh`."""
    return isinstance(head.distribution(jnp.zeros((1, head.outputs))), TanhGaussian)


def part_heads(head: Head) -> list[Head]:
    """Return the heads of the parts of an action, in the order of `jax.tree.leaves`; none if it is a single space."""
    return jax.tree.leaves(head.parts, is_leaf=_is_head)


def _is_head(x: object) -> bool:
    return isinstance(x, Head)


def make_head(spec: EnvSpec, squash: bool = False) -> Head:
    """Return the head for the action space of `spec`: categorical, multi-categorical, Gaussian, or several of these.

    A bounded box is rescaled to raw actions from -1 to 1. Those beyond are clipped, or with `squash` mapped inside by
    `tanh`. Parts of a dict or tuple are independent of each other, given the observation.

    Raises:
      SettingsError: actions are whole-number boxes or have no parts, or `squash` is set without bounds.
    """
    space = spec.action_space
    if not isinstance(space, Mapping | tuple):
        return _make_leaf_head(spec.name, space, squash)
    if not jax.tree.leaves(space, is_leaf=spaces.is_leaf):
        raise SettingsError(f"{spec.name} has actions {space}, which have no part; expected at least one space")
    heads = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _make_leaf_head(spec.name, leaf, squash, jax.tree_util.keystr(path)),
        space,
        is_leaf=spaces.is_leaf,
    )
    return _join_heads(heads)


def _join_heads(heads: PyTree) -> Head:
    """Return the head of a dict or tuple of independent parts with these `heads`."""
    form: Any
    parts, form = jax.tree.flatten(heads, is_leaf=_is_head)

    def joint(outputs: Array) -> Joint:
        pairs = zip(parts, head.split(outputs), strict=True)
        return Joint(form.unflatten([part.distribution(x) for part, x in pairs]))

    def convert(name: str, action: PyTree) -> PyTree:
        pairs = zip(parts, jax.tree.leaves(action), strict=True)
        return form.unflatten([getattr(part, name)(x) for part, x in pairs])

    head = Head(
        sum(part.outputs for part in parts),
        joint,
        partial(convert, "to_env"),
        sum(part.scales for part in parts),
        partial(convert, "to_raw"),
        sum(part.log_half_width for part in parts),
        heads,
    )
    return head


def _make_leaf_head(name: str, space: Space, squash: bool, at: str = "") -> Head:
    """Return the head for one space, the entry `at` of the actions of environment `name`."""
    if isinstance(space, Discrete):
        return Head(space.n, Categorical, lambda raw: raw.astype(space.dtype))
    if isinstance(space, MultiDiscrete):
        of = partial(_multi, tuple(space.n))
        return Head(sum(space.n), of, lambda raw: raw.astype(space.dtype))
    if not isinstance(space, Box) or not jnp.issubdtype(np.dtype(space.dtype), jnp.floating):
        raise SettingsError(
            f"{name} has actions{at} {space}; expected Discrete, MultiDiscrete or a Box of floating-point numbers"
        )
    size = math.prod(space.shape)
    if squash and not spaces.box_bounds(space)[2].all():
        raise SettingsError(
            f"agent.squash needs bounds, but actions{at} of {name} have none; set agent.squash to false"
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


MAX_RAW = 3.0
"""Largest raw action asked of a policy squashed by `tanh`, 0.995 of the bound; the bound is at infinity."""
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

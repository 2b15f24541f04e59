"""Representations of an action's return: its mean, or a distribution; each equation is for a single transition.

A network's output is `[A, n]`: the mean (`n` is 1), logits over the atoms of a support, or quantiles.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import shards
from jaxrl.agents import losses
from jaxrl.errors import SettingsError
from jaxrl.trees import Array
from jaxrl.types import Transition
from jaxrl.xla.reductions import entry, total

RESCALE_SLOPE = 1e-3
"""Least slope of `signed_hyperbolic`, epsilon of the papers. It makes the inverse Lipschitz continuous."""
MIN_ONE_MINUS_DISCOUNT = 1e-3
"""Stands for `1 - discount` where the discount is 1, and one step's reward would imply no bound on the return."""
ENTROPY_MARGIN = 0.1
"""Share of its width by which a derived support reaches beyond the bounds if entropy adds to returns."""


class BootstrapTarget(NamedTuple):
    """What the loss needs to form a target: the reward, and the bootstrap after the step."""

    reward: Array
    discount: Array
    out: Array
    """`[A, n]`, outputs of the target network"""
    policy: Array
    """`[A]`, probabilities of the actions"""
    penalty: Array | float = 0.0
    """`[A]`, subtracted from the value of each action"""


class ReturnRepresentation(NamedTuple):
    """A representation of the return: its mean, or a distribution."""

    atoms: int
    """Numbers that a network outputs for each action; 0: a single one, without an axis."""
    mean: Callable[[Array], Array]
    """`[A, n] -> [A]`: expected returns"""
    loss: Callable[[Array, Array, BootstrapTarget], tuple[Array, Array]]
    """`(chosen [n], taus [n], bootstrap) -> (loss, error)`, where the size of the error is the priority for replay"""
    outside: Callable[[BootstrapTarget], Array] | None = None
    """For values on a support: the probability that the target return lies beyond its ends."""
    return_error: Callable[[Array, Array], Array] | None = None
    """For values on another scale than returns: `(chosen [n], error) -> error` of the return that `chosen` means"""


class ReturnBounds(NamedTuple):
    """The range of returns that the transitions seen so far allow; float32 scalars with `low <= 0 <= high`."""

    low: Array
    high: Array


def init_return_bounds() -> ReturnBounds:
    """Return the bounds before the first transition."""
    return ReturnBounds(jnp.float32(0.0), jnp.float32(0.0))


def update_return_bounds(reach: ReturnBounds, items: Transition) -> ReturnBounds:
    """Widen the bounds `reach` by the returns that `items` `[B]` allow.

    If every later transition repeated a transition's reward, the return would be `reward / (1 - discount)`. No return
    lies outside the smallest and largest of these. At an episode's end the discount is 0, and the return is the reward
    itself. Rows of weight 0 do not count. A discount of 1 allows any return; it is treated as 0.999.

    The bounds only widen: one large reward widens them for good, and the first reward of a sparse task stretches the
    support.
    """
    # For a return over `n` steps, `discount` is that of all of them, and the bound is the same.
    rest = jnp.where(items.discount < 1, 1 - items.discount, MIN_ONE_MINUS_DISCOUNT)
    bound = jnp.where(jnp.asarray(items.weight) > 0, items.reward / rest, 0.0)
    # All shards must have the same support.
    low, high = shards.pmin(bound.min()), shards.pmax(bound.max())
    return ReturnBounds(jnp.minimum(reach.low, low), jnp.maximum(reach.high, high))


def support_bounds(
    reach: ReturnBounds, v_min: float | None, v_max: float | None, margin: float = 0.0
) -> tuple[Array, Array]:
    """Return the ends of a support: `v_min` and `v_max`, or the end of `reach` in place of one that is `None`.

    If the two would coincide or cross, the end that is not given is moved away from the other by 1, or by the other's
    size if that is larger. Then it is moved further by `margin` times the width.
    """
    low, high = _apart(reach, v_min, v_max)
    if not margin:
        return low, high
    spare = margin * (high - low)
    return (low - spare if v_min is None else low), (high + spare if v_max is None else high)


def atoms_between(
    reach: ReturnBounds, v_min: float | None, v_max: float | None, atoms: int, margin: float = 0.0
) -> Array:
    """Return the support `[atoms]` between the ends of `support_bounds`."""
    return jnp.asarray(evenly(*support_bounds(reach, v_min, v_max, margin), atoms))


def _apart(reach: ReturnBounds, v_min: float | None, v_max: float | None) -> tuple[Array, Array]:
    low = reach.low if v_min is None else jnp.float32(v_min)
    high = reach.high if v_max is None else jnp.float32(v_max)
    if v_max is None:
        return low, jnp.where(high > low, high, low + jnp.maximum(jnp.abs(low), 1.0))
    return jnp.where(high > low, low, high - jnp.maximum(jnp.abs(high), 1.0)), high


def check_support(atoms: int, v_min: float | None, v_max: float | None) -> None:
    """Raise `SettingsError` if both ends of a support are given and do not lie apart."""
    if v_min is None or v_max is None:
        return
    if not (v_max - v_min) / (atoms - 1) > 1e-5 * max(abs(v_min), abs(v_max)):
        raise SettingsError(
            f"agent.v_min is {v_min} and agent.v_max {v_max}; expected v_min below v_max, "
            "and atoms that differ by more than 1e-5 of the larger, which float32 can resolve"
        )


def expected(loss: str) -> ReturnRepresentation:
    """Represent returns by their mean, as Mnih et al. 2015 do; `loss` is `huber` or `squared`."""
    return ReturnRepresentation(
        0, lambda out: out[:, 0], partial(_expected_loss, losses.huber if loss == "huber" else losses.squared)
    )


def _expected_loss(
    loss: Callable[[Array], Array], chosen: Array, taus: Array, bootstrap: BootstrapTarget
) -> tuple[Array, Array]:
    value = total(bootstrap.policy * (bootstrap.out[:, 0] - bootstrap.penalty))
    error = bootstrap.reward + bootstrap.discount * value - chosen[0]
    return loss(error), error


def signed_hyperbolic(x: Array, eps: float = RESCALE_SLOPE) -> Array:
    """Return `sign(x) (sqrt(|x| + 1) - 1) + eps x`, which squashes large values.

    Pohlen et al. 2018, https://arxiv.org/abs/1805.11593, proposition A.2; Kapturowski et al. 2019, section 2.3.
    """
    # `sqrt(|x| + 1) - 1` without a difference, which for small values would cancel all digits.
    return x / (jnp.sqrt(jnp.abs(x) + 1) + 1) + eps * x


def signed_parabolic(y: Array, eps: float = RESCALE_SLOPE) -> Array:
    """Return the `x` of which `signed_hyperbolic` is `y`."""
    # With `u = sqrt(|x| + 1) - 1`, `|y| = u + eps (u^2 + 2 u)` and `|x| = u^2 + 2 u`. The root of this quadratic is
    # written as a quotient: its other form, as published, is a difference of nearly equal numbers.
    slope = 1 + 2 * eps
    share = 2 / (slope + jnp.sqrt(slope**2 + 4 * eps * jnp.abs(y)))  # `u / |y|`
    return y * share * (jnp.abs(y) * share + 2)


def rescaled(loss: str) -> ReturnRepresentation:
    """Represent returns by their `signed_hyperbolic`, which is what networks output and losses compare.

    The target is `h(r + discount * h^-1(q_target))` (Kapturowski et al. 2019, section 2.3), so rewards and discounts
    are those of returns. The error, and with it the priority, is one of `h`.
    """
    return ReturnRepresentation(
        0,
        lambda out: signed_parabolic(out[:, 0]),
        partial(_rescaled_loss, losses.huber if loss == "huber" else losses.squared),
        return_error=lambda chosen, error: signed_parabolic(chosen[0] + error) - signed_parabolic(chosen[0]),
    )


def _rescaled_loss(
    loss: Callable[[Array], Array], chosen: Array, taus: Array, bootstrap: BootstrapTarget
) -> tuple[Array, Array]:
    value = total(bootstrap.policy * (signed_parabolic(bootstrap.out[:, 0]) - bootstrap.penalty))
    error = signed_hyperbolic(bootstrap.reward + bootstrap.discount * value) - chosen[0]
    return loss(error), error


def c51(atoms: int, v_min: float | Array, v_max: float | Array) -> ReturnRepresentation:
    """Represent returns by logits over atoms from `v_min` to `v_max` (Bellemare et al. 2017).

    The ends may be traced scalars. The priority is the KL divergence between target and prediction (Hessel et al. 2018,
    https://arxiv.org/abs/1710.02298).
    """
    support = evenly(v_min, v_max, atoms)
    mean = lambda out: jnp.sum(jax.nn.softmax(out) * support[None], axis=-1)
    return ReturnRepresentation(atoms, mean, partial(_c51_loss, support), partial(_c51_outside, support))


def evenly(low: float | Array, high: float | Array, count: int) -> np.ndarray | Array:
    """Return `count` numbers from `low` to `high`, both ends exact; a constant where the ends are."""
    if not isinstance(low, jax.Array) and not isinstance(high, jax.Array):
        return np.linspace(low, high, count, dtype=np.float32)
    # A weighted mean of the ends gives both of them without rounding.
    share = np.linspace(0.0, 1.0, count, dtype=np.float32)
    return low * (1 - share) + high * share


def _c51_loss(
    support: np.ndarray | Array, chosen: Array, taus: Array, bootstrap: BootstrapTarget
) -> tuple[Array, Array]:
    target = losses.project(*_target_distribution(support, bootstrap), jnp.asarray(support, jnp.float32))
    loss = losses.cross_entropy(chosen, target)
    # Cross-entropy less the entropy of the target, which is their KL divergence. Rounding may take it below 0.
    return loss, jnp.maximum(loss + jnp.sum(jax.scipy.special.xlogy(target, target)), 0.0)


def _c51_outside(support: np.ndarray | Array, bootstrap: BootstrapTarget) -> Array:
    return outside_support(*_target_distribution(support, bootstrap), support)


def outside_support(z: Array, p: Array, support: np.ndarray | Array) -> Array:
    """Return the probability that returns `z` `[n]` with probabilities `p` `[n]` lie beyond the ends of `support`."""
    # The tolerance absorbs rounding: an atom that should fall on an end may land slightly beyond it.
    beyond = jnp.abs(z - jnp.clip(z, support[0], support[-1])) > 0.01 * (support[1] - support[0])
    return jnp.sum(p, where=beyond)


def expected_value(p: Array, support: Array) -> Array:
    """Return the means `[...]` of probabilities `[..., n]` of the atoms `support` `[n]`."""
    # A sum in place of a product: the latter is rounded in different ways for one shard and for several.
    return jnp.sum(p * support.reshape((1,) * (p.ndim - 1) + (-1,)), axis=-1)


def _target_distribution(support: np.ndarray | Array, bootstrap: BootstrapTarget) -> tuple[Array, Array]:
    """Return the target distribution before projection: its returns `[n]` and their probabilities `[n]`."""
    return bootstrap.reward + bootstrap.discount * support, bootstrap.policy @ jax.nn.softmax(bootstrap.out)


def quantiles(atoms: int) -> ReturnRepresentation:
    """Represent returns by `atoms` quantiles, at fixed levels (QR-DQN) or at given ones (IQN)."""
    return ReturnRepresentation(atoms, lambda out: out.mean(axis=-1), _quantile_loss)


def _quantile_loss(chosen: Array, taus: Array, bootstrap: BootstrapTarget) -> tuple[Array, Array]:
    # Quantiles are averaged level by level: exact for a greedy policy, an approximation for the soft one of Munchausen.
    z_t = bootstrap.policy @ (bootstrap.out - jnp.reshape(bootstrap.penalty, (-1, 1)))
    target = bootstrap.reward + bootstrap.discount * z_t
    return losses.quantile_huber(chosen, taus, target), target.mean() - chosen.mean()


def midpoints(count: int) -> np.ndarray:
    """Return the midpoints of `count` equal parts of `[0, 1]`."""
    return ((np.arange(count) + 0.5) / count).astype(np.float32)


def select_row(out: Array, action: Array) -> Array:
    """Select the outputs `[n]` for `action` from `out` `[A, n]`."""
    return jax.vmap(entry, in_axes=(1, None))(out, action)

"""What a network says of each action's return: its expectation, or a distribution; each for a single transition.

All are `[A, n]`: the expectation with `n` of 1, probabilities of a fixed support, or quantiles.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.losses import cross_entropy, entry, huber, project, quantile_huber, squared
from jaxrl.trees import Array


class After(NamedTuple):
    """What is known of the step's end."""

    reward: Array
    discount: Array
    out: Array
    """`[A, n]`, by the target network"""
    policy: Array
    """`[A]`, probabilities of the actions"""
    penalty: Array | float = 0.0
    """`[A]`, taken from the value of each action"""


class Values(NamedTuple):
    """How returns are told."""

    atoms: int
    """Numbers that a network puts out for an action; 0: one, without an axis."""
    mean: Callable[[Array], Array]
    """`[A, n] -> [A]`: expected returns"""
    loss: Callable[[Array, Array, After], tuple[Array, Array]]
    """`(chosen [n], taus [n], after) -> (loss, error)`, the error such as its size should be the priority"""


def expected(loss: str) -> Values:
    """Return values that are expectations, as of Mnih et al. 2015; `loss` is `huber` or `squared`."""
    return Values(0, lambda out: out[:, 0], partial(_expected_loss, huber if loss == "huber" else squared))


def _expected_loss(loss: Callable[[Array], Array], chosen: Array, taus: Array, after: After) -> tuple[Array, Array]:
    value = jnp.sum(after.policy * (after.out[:, 0] - after.penalty))
    error = after.reward + after.discount * value - chosen[0]
    return loss(error), error


def c51(atoms: int, v_min: float, v_max: float) -> Values:
    """Return values that are logits over returns from `v_min` to `v_max` (Bellemare et al. 2017).

    The priority is the divergence of prediction from target (Hessel et al. 2018, https://arxiv.org/abs/1710.02298).
    """
    support = np.linspace(v_min, v_max, atoms, dtype=np.float32)
    mean = lambda out: jnp.sum(jax.nn.softmax(out) * support[None], axis=-1)
    return Values(atoms, mean, partial(_c51_loss, support))


def _c51_loss(support: np.ndarray, chosen: Array, taus: Array, after: After) -> tuple[Array, Array]:
    p_t = after.policy @ jax.nn.softmax(after.out)
    target = project(after.reward + after.discount * support, p_t, jnp.asarray(support))
    loss = cross_entropy(chosen, target)
    return loss, jnp.maximum(loss + jnp.sum(jax.scipy.special.xlogy(target, target)), 0.0)


def quantiles(atoms: int) -> Values:
    """Return values that are quantiles, at fixed places (QR-DQN) or at those given (IQN); `atoms` of them."""
    return Values(atoms, lambda out: out.mean(axis=-1), _quantile_loss)


def _quantile_loss(chosen: Array, taus: Array, after: After) -> tuple[Array, Array]:
    z_t = after.policy @ (after.out - jnp.reshape(after.penalty, (-1, 1)))
    target = after.reward + after.discount * z_t
    return quantile_huber(chosen, taus, target), target.mean() - chosen.mean()


def midpoints(count: int) -> np.ndarray:
    """Return the middles of `count` equal parts of `[0, 1]`."""
    return ((np.arange(count) + 0.5) / count).astype(np.float32)


def chosen_row(out: Array, action: Array) -> Array:
    """Return, of `[A, n]`, what is said of `action`, `[n]`."""
    return jax.vmap(entry, in_axes=(1, None))(out, action)

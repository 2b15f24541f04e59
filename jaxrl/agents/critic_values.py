"""What the outputs of critics represent, and their losses: mean returns, quantiles, or probabilities of atoms.

`K` critics put out `[K, B, n]`: a value for each of `n` discrete actions, one value (`n` is 1), `n` quantiles, or
logits of `n` atoms.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.custom import CriticLoss
from jaxrl.agents.losses import cross_entropy, quantile_huber, squared
from jaxrl.agents.values import expected_value, midpoints
from jaxrl.errors import SettingsError
from jaxrl.trees import Array
from jaxrl.xla.reductions import entry


class CriticValues(NamedTuple):
    """A representation of returns by the outputs `[K, B, n]` of critics; the DQN family has `ReturnRepresentation`."""

    mean: Callable[[Array, Array | None], Array]
    """`(outputs, action) -> [K, B]`: expected returns, for discrete actions of `action` `[B]`, otherwise `None`."""
    loss: Callable[[Array, Array, Array], tuple[Array, Array]]
    """`(outputs, q, target) -> (loss, error)`, both `[K, B]`: `q` is what `mean` returned, and `error` the mean of the
    target minus `q`. The target is a return `[B]`, samples of it `[B, S]`, or probabilities of the atoms `[B, n]`."""
    policy_values: Callable[[Array], Array]
    """`outputs -> [B, A]`, or `[B, 1]` for continuous actions: the expected returns that a policy improves, reduced
    over the critics."""
    support: Array | None = None
    """`[n]`, the returns that atoms stand for."""


def reduce_critics(q: Array, how: str) -> Array:
    """Return the lowest (`min`) of the critics' values `[K, ...]`, or their `mean`; `[...]`.

    The lowest counters overestimation (Fujimoto et al. 2018, algorithm 1).
    """
    return q.mean(0) if how == "mean" else q.min(0)


def select_values(q: Array, action: Array | None) -> Array:
    """Select the output for `action` `[B]`, or the only one, from `q` `[K, B, outputs]`; `[K, B]`."""
    if action is None:
        return q[..., 0]
    return jax.vmap(jax.vmap(entry), in_axes=(0, None))(q, action)


def mean_values(how: str, critic_loss: CriticLoss | None = None) -> CriticValues:
    """Represent returns by their mean.

    Args:
      how: how a policy reduces the critics' values: `min` or `mean`.
      critic_loss: the user's; by default half the squared error.
    """
    return CriticValues(select_values, partial(_mean_loss, critic_loss), lambda outputs: reduce_critics(outputs, how))


def _mean_loss(critic_loss: CriticLoss | None, outputs: Array, q: Array, target: Array) -> tuple[Array, Array]:
    """Return `(target - q)^2 / 2`, or the user's loss (Haarnoja et al. 2018, equations 5 and 6), and `target - q`."""
    error = target[None] - q
    if critic_loss is None:
        return squared(error), error
    loss = jnp.asarray(critic_loss(q, target))
    if loss.shape != q.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise SettingsError(
            f"critic_loss returned {loss.dtype}{list(loss.shape)}; expected a number for each critic and step, "
            f"{q.dtype}{list(q.shape)}"
        )
    return loss, error


def quantile_values() -> CriticValues:
    """Represent returns by quantiles; a policy improves the mean of all (Kuznetsov et al. 2020)."""
    return CriticValues(
        lambda outputs, action: outputs.mean(-1), quantile_critic_loss, lambda outputs: outputs.mean((0, 2))[:, None]
    )


def quantile_critic_loss(z: Array, q: Array, target: Array) -> tuple[Array, Array]:
    """Return the loss of each critic and step `[K, B]`, and the mean target minus `q` `[K, B]`, the critics' means.

    The loss is the quantile Huber loss of the quantiles `z` `[K, B, M]` for samples `target` `[B, S]` of the return,
    averaged over quantiles and samples (Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269).
    """
    count = z.shape[-1]
    taus = jnp.asarray(midpoints(count))
    of_critic = jax.vmap(lambda z, target: quantile_huber(z, taus, target) / count)
    return jax.vmap(of_critic, in_axes=(0, None))(z, target), target.mean(-1)[None] - q


def atom_values(support: Array, how: str) -> CriticValues:
    """Represent returns by logits of the atoms `support` `[n]`; `how` is as for `mean_values`."""
    means = lambda logits: expected_value(jax.nn.softmax(logits), support)
    return CriticValues(
        lambda logits, action: means(logits),
        partial(categorical_critic_loss, support),
        lambda logits: reduce_critics(means(logits)[..., None], how),
        support,
    )


def categorical_critic_loss(support: Array, logits: Array, q: Array, target: Array) -> tuple[Array, Array]:
    """Return the loss of each critic and step `[K, B]`, and the mean target minus `q` `[K, B]`, the critics' means.

    The loss is the cross-entropy of the probabilities `target` `[B, n]` and the critics' `logits` `[K, B, n]` of the
    atoms `support` `[n]` (Bellemare et al. 2017, https://arxiv.org/abs/1707.06887, algorithm 1).
    """
    loss = jax.vmap(jax.vmap(cross_entropy), in_axes=(0, None))(logits, target)
    return loss, expected_value(target, support)[None] - q

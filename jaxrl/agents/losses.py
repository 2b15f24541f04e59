"""The equations of losses, each for a single transition; callers `vmap`.

Time is in the names: `q_tm1` are the action values before the step, `q_t` after it.
"""

import jax.numpy as jnp

from jaxrl.types import Array


def td_error(q_tm1: Array, a_tm1: Array, r_t: Array, discount_t: Array, q_t_value: Array, q_t_select: Array) -> Array:
    """Return the temporal-difference error of Q-learning, target less prediction.

    The action after the step is the best by `q_t_select` and is worth what `q_t_value` says. With both the target
    network's this is Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236); with `q_t_select` the
    online network's it is double Q-learning (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461, equation 4).

    Args:
      q_tm1: `[A]` action values before the step.
      a_tm1: scalar int, the action taken.
      r_t: scalar reward.
      discount_t: scalar, `gamma^k`, or 0 after termination.
      q_t_value: `[A]` values after the step, by which the chosen action is judged.
      q_t_select: `[A]` values after the step, by which it is chosen.
    """
    return r_t + discount_t * _entry(q_t_value, jnp.argmax(q_t_select)) - _entry(q_tm1, a_tm1)


def _entry(row: Array, index: Array) -> Array:
    """Return `row[index]`, but as a sum: what fuses, where the gradient of an index would be a scatter of its own."""
    return jnp.sum(row, where=jnp.arange(row.shape[0]) == index)


def huber(error: Array, delta: float = 1.0) -> Array:
    """Return `error^2 / 2` up to `delta`, and its tangent beyond (Huber 1964)."""
    inside = jnp.minimum(jnp.abs(error), delta)
    return 0.5 * inside**2 + delta * (jnp.abs(error) - inside)


def squared(error: Array) -> Array:
    """Return `error^2 / 2`."""
    return 0.5 * error**2

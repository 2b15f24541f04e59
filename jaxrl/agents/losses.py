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
    return r_t + discount_t * entry(q_t_value, jnp.argmax(q_t_select)) - entry(q_tm1, a_tm1)


def entry(row: Array, index: Array) -> Array:
    """Return `row[index]`, but as a sum: what fuses, where the gradient of an index would be a scatter of its own."""
    return jnp.sum(row, where=jnp.arange(row.shape[0]) == index)


def huber(error: Array, delta: float = 1.0) -> Array:
    """Return `error^2 / 2` up to `delta`, and its tangent beyond (Huber 1964)."""
    inside = jnp.minimum(jnp.abs(error), delta)
    return 0.5 * inside**2 + delta * (jnp.abs(error) - inside)


def squared(error: Array) -> Array:
    """Return `error^2 / 2`."""
    return 0.5 * error**2


def clipped_surrogate(ratio: Array, advantage: Array, clip: Array | float) -> Array:
    """Return the loss of PPO, the objective's negative (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7).

    `ratio` is the probability of the action over that under the policy that chose it.
    """
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


def value_loss(value: Array, old_value: Array, target: Array, clip: float) -> Array:
    """Return the larger of the squared losses of `value`, and of it held within `clip` of `old_value`.

    As in the first implementation of PPO (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3).
    """
    held = old_value + jnp.clip(value - old_value, -clip, clip)
    return jnp.maximum(squared(value - target), squared(held - target))

"""The equations of returns, each along the time axis of one environment; callers `vmap`.

Time is in the names: `v_tm1` is the value before a step, `v_t` that of its true successor. `discount_t` is 0 only after
termination, `last_t` is true wherever nothing later may be counted, so that a cut is bootstrapped and an end is not.
"""

import jax
import jax.numpy as jnp

from jaxrl.types import Array


def gae(r_t: Array, discount_t: Array, last_t: Array, v_tm1: Array, v_t: Array, lambda_: Array | float) -> Array:
    """Return generalised advantage estimates `[T]` (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).

    `A_tm1 = delta_t + discount_t * lambda * A_t` with `delta_t = r_t + discount_t * v_t - v_tm1`, summed up to the last
    step of an episode, whether that is an end or a cut; the rollout's own end is a cut.

    Args:
      r_t: `[T]` rewards.
      discount_t: `[T]`, gamma, or 0 after termination.
      last_t: `[T]` bool, the last step of an episode.
      v_tm1: `[T]` values of the observations.
      v_t: `[T]` values of their true successors.
      lambda_: scalar in `[0, 1]`.
    """
    return _backwards(r_t + discount_t * v_t - v_tm1, discount_t * lambda_ * (1 - last_t))


def lambda_returns(r_t: Array, discount_t: Array, last_t: Array, v_t: Array, lambda_: Array | float) -> Array:
    """Return lambda returns `[T]` (Sutton and Barto 2018, equation 12.20).

    `G_tm1 = r_t + discount_t * ((1 - lambda) * v_t + lambda * G_t)`, and `r_t + discount_t * v_t` at the last step of
    an episode and of the rollout. With `lambda` 1 this is the Monte-Carlo return, with 0 the one-step target. Arguments
    are as for `gae`.
    """
    # Behind the rollout there is nothing to go on with, whatever `last_t` says of the episode.
    further = lambda_ * (1 - last_t.at[-1].set(True))
    return _backwards(r_t + discount_t * (1 - further) * v_t, discount_t * further)


def _backwards(terms: Array, factors: Array) -> Array:
    """Return `x` `[T]` with `x[t] = terms[t] + factors[t] * x[t + 1]`, and 0 behind the end."""

    def step(after: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        term, factor = row
        x = term + factor * after
        return x, x

    return jax.lax.scan(step, jnp.zeros_like(terms[0]), (terms, factors), reverse=True)[1]

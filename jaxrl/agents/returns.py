"""Return estimators, each along the time axis of one environment; callers `vmap`.

Time is in the names: `v_tm1` is the value before a step, `v_t` that of its true successor. `discount_t` is 0 only after
termination; `last_t` is true wherever no later step may count. So a truncation is bootstrapped, and a termination is
not.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl.trees import Array
from jaxrl.types import Transition


def last_steps(items: Transition) -> Array:
    """Return `[T, ...]` bool, of steps in order: no later step may count towards this one.

    The episode ends here, another begins with the next step (a loop of one's own may cut an episode once its last step
    was taken), or the next step must not be learnt from.
    """
    worthless = jnp.asarray(items.weight) == 0
    # Shifted by one: a step is the last one if the next begins an episode or is invalid.
    starts = jnp.asarray(items.is_first, bool) | worthless
    return jnp.asarray(items.is_last, bool) | jnp.concatenate([starts[1:], jnp.zeros_like(starts[:1])])


def gae(r_t: Array, discount_t: Array, last_t: Array, v_tm1: Array, v_t: Array, lambda_: Array | float) -> Array:
    """Return generalised advantage estimates `[T]` (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).

    `A_tm1 = delta_t + discount_t * lambda * A_t` with `delta_t = r_t + discount_t * v_t - v_tm1`, summed up to the last
    step of an episode, whether it terminated or was truncated. The end of the rollout is a truncation.

    Args:
      r_t: `[T]` rewards.
      discount_t: `[T]`, gamma, or 0 after termination.
      last_t: `[T]` bool, the last step of an episode.
      v_tm1: `[T]` values of the observations.
      v_t: `[T]` values of their true successors.
      lambda_: scalar in `[0, 1]`.
    """
    chex.assert_rank([r_t, discount_t, last_t, v_tm1, v_t], 1)
    # The bootstrap is in the errors themselves, also at a last step, which only lets no later error through.
    return _backwards(r_t + discount_t * v_t - v_tm1, discount_t * lambda_ * (1 - last_t))


def lambda_returns(r_t: Array, discount_t: Array, last_t: Array, v_t: Array, lambda_: Array | float) -> Array:
    """Return lambda-returns `[T]` (Sutton and Barto 2018, equation 12.20).

    `G_tm1 = r_t + discount_t * ((1 - lambda) * v_t + lambda * G_t)`, and `r_t + discount_t * v_t` at the last step of
    an episode and of the rollout. With `lambda` 1 this is the Monte-Carlo return, with 0 the one-step target. Arguments
    are as for `gae`; `lambda_` may also be `[T]`, one for each step.
    """
    chex.assert_rank([r_t, discount_t, last_t, v_t], 1)
    # Nothing follows the rollout's last step, even if its episode goes on.
    further = lambda_ * (1 - last_t.at[-1].set(True))
    # At a last step `further` is 0, and the bootstrap has the whole weight.
    return _backwards(r_t + discount_t * (1 - further) * v_t, discount_t * further)


class NStepReturn(NamedTuple):
    """What a return over several steps is made of, each `[T]`."""

    reward: Array
    """The discounted sum of the rewards."""
    discount: Array
    """The discount of what follows them."""
    step: Array
    """Int32, the last of the steps: its successor is what follows."""


def n_step_return(r_t: Array, discount_t: Array, last_t: Array, n: int) -> NStepReturn:
    """Return the parts of n-step returns within a sequence (Sutton and Barto 2018, equation 7.1).

    A return runs over `n` steps, or fewer where an episode or the sequence ends before. Arguments are as for `gae`.
    """
    chex.assert_rank([r_t, discount_t, last_t], 1)
    steps = jnp.arange(r_t.shape[0], dtype=jnp.int32)
    reward, discount, step, on = r_t, discount_t, steps, ~last_t
    # All returns grow by one step at a time, as long as they are `on`.
    for i in range(1, min(n, r_t.shape[0])):
        # Past the end the index stays at the last step, and the return is switched off.
        later = jnp.minimum(steps + i, r_t.shape[0] - 1)
        on = on & (steps + i == later)
        reward = jnp.where(on, reward + discount * r_t[later], reward)
        discount = jnp.where(on, discount * discount_t[later], discount)
        step, on = jnp.where(on, later, step), on & ~last_t[later]
    return NStepReturn(reward, discount, step)


class VTrace(NamedTuple):
    """Targets and advantages of V-trace, each `[T]`."""

    target: Array
    """Regression target for the value before each step."""
    advantage: Array
    """Advantage of each action, not yet weighted by its ratio."""


def vtrace(
    r_t: Array,
    discount_t: Array,
    last_t: Array,
    v_tm1: Array,
    v_t: Array,
    rho_tm1: Array,
    lambda_: Array | float,
    rho_clip: Array | float,
    c_clip: Array | float,
) -> VTrace:
    """Return V-trace targets and advantages (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561).

    Targets are those of equation 1, with `c = lambda * min(c_clip, rho)` as in remark 2: `vs_tm1 = v_tm1 + x_tm1`,
    `x_tm1 = min(rho_clip, rho_tm1) * delta_t + discount_t * c_tm1 * x_t`, and
    `delta_t = r_t + discount_t * v_t - v_tm1`. Advantages are those of section 4.2, `r_t + discount_t * vs_t - v_tm1`;
    with `lambda` below 1 they bootstrap from `lambda * vs_t + (1 - lambda) * v_t`. So if all ratios are 1, targets are
    lambda-returns, and advantages are those of `gae`. At the last step of an episode and of the rollout the bootstrap
    is `v_t` alone.

    Args:
      r_t: `[T]` rewards.
      discount_t: `[T]`, gamma, or 0 after termination.
      last_t: `[T]` bool, the last step of an episode.
      v_tm1: `[T]` values of the observations.
      v_t: `[T]` values of their true successors.
      rho_tm1: `[T]`, the probability of each action divided by its probability under the policy that chose it.
      lambda_: scalar in `[0, 1]`.
      rho_clip: bound on the ratios that weight the errors; it determines whose values are learnt.
      c_clip: bound on the ratios that pass later errors back; at most `rho_clip` in the paper.
    """
    chex.assert_rank([r_t, discount_t, last_t, v_tm1, v_t, rho_tm1], 1)
    delta = r_t + discount_t * v_t - v_tm1
    further = discount_t * lambda_ * (1 - last_t)
    # `rho` scales the error of a step, `c` how much of the later errors passes back through it.
    x = _backwards(jnp.minimum(rho_clip, rho_tm1) * delta, further * jnp.minimum(c_clip, rho_tm1))
    # `x[1:]` is `vs_t - v_t`, so the sum turns the bootstrap in `delta` from `v_t` to `vs_t`, by the share lambda.
    return VTrace(v_tm1 + x, delta + further * jnp.append(x[1:], 0.0))


def _backwards(terms: Array, factors: Array) -> Array:
    """Return `x` `[T]` with `x[t] = terms[t] + factors[t] * x[t + 1]`, where `x` is 0 past the end.

    Each half of the steps is one such equation from its end to its start, and two of them follow one another as one:
    so `T` steps take `log2(T)` rounds (Blelloch 1990, https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf, section 1.4.1).
    """

    def follow(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        # A pair `(a, b)` is the map from `x` to `a + b x`; the later one is applied first.
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return jax.lax.associative_scan(follow, (terms, factors), reverse=True)[0]

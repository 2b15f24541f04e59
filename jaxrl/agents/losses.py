"""Loss equations, each for a single transition; callers `vmap`.

Time is in the names: `q_tm1` are the action values before the step, `q_t` after it.
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl.masks import apply_mask, unmask_empty_rows
from jaxrl.trees import Array


def huber(error: Array, delta: float = 1.0) -> Array:
    """Return `error^2 / 2` up to `delta`, and its tangent beyond (Huber 1964)."""
    # A sum in place of a select: the part up to `delta` is squared, the part beyond has the slope `delta`.
    inside = jnp.minimum(jnp.abs(error), delta)
    return 0.5 * inside**2 + delta * (jnp.abs(error) - inside)


def squared(error: Array) -> Array:
    """Return `error^2 / 2`."""
    return 0.5 * error**2


def project(z: Array, p: Array, support: Array) -> Array:
    """Project the distribution of `z` `[m]` with probabilities `p` `[m]` onto `support`; return `[n]` probabilities.

    `support` is evenly spaced. Each value splits its probability between its two neighbours; a value beyond the ends
    gives all of it to the nearest end (Bellemare et al. 2017, https://arxiv.org/abs/1707.06887, equation 7).
    """
    chex.assert_rank([z, p, support], 1)
    step = support[1] - support[0]
    # `[n, m]`, from each atom to each value. The share of a value falls linearly to 0 at a distance of one step.
    distance = jnp.abs(jnp.clip(z, support[0], support[-1])[None, :] - support[:, None])
    return jnp.sum(p[None, :] * jnp.clip(1 - distance / step, 0.0, 1.0), axis=1)


def hl_gauss(target: Array, support: Array, spread: float = 0.75) -> Array:
    """Return a histogram `[n]` of the scalar `target` on `support`: a normal distribution around it, cut into bins.

    The bins are centred on the evenly spaced `support` `[n]`, and `spread` is the standard deviation in widths of a
    bin. A target beyond the ends is moved to the nearest; what the distribution has outside of the bins is shared out
    among them (HL-Gauss, Imani and White 2018, https://arxiv.org/abs/1806.04613; Farebrother et al. 2024,
    https://arxiv.org/abs/2403.03950, section 3.1).
    """
    chex.assert_rank([target, support], [0, 1])
    place = (jnp.clip(target, support[0], support[-1]) - support[0]) / (support[1] - support[0])
    edges = jnp.arange(support.shape[0] + 1, dtype=jnp.float32) - 0.5
    below = jax.scipy.special.ndtr((edges - place) / spread)
    return (below[1:] - below[:-1]) / (below[-1] - below[0])


def cross_entropy(logits: Array, target: Array) -> Array:
    """Return the cross-entropy of `target` `[n]` and the softmax of `logits` `[n]`."""
    chex.assert_rank([logits, target], 1)
    return -jnp.sum(target * jax.nn.log_softmax(logits))


def quantile_huber(z: Array, taus: Array, target: Array) -> Array:
    """Return the quantile Huber loss (delta 1) of quantiles `z` `[n]` at levels `taus` `[n]` for samples `target`
    `[m]`.

    It is summed over the quantiles and averaged over the samples (Dabney et al. 2018, https://arxiv.org/abs/1710.10044,
    equation 10).
    """
    chex.assert_rank([z, taus, target], 1)
    # `[n, m]`: each quantile against each sample.
    error = target[None, :] - z[:, None]
    weight = jnp.abs(taus[:, None] - (error < 0))
    return jnp.sum(jnp.mean(weight * huber(error), axis=1))


def munchausen(q: Array, temperature: float, mask: Array | None = None) -> tuple[Array, Array]:
    """Return the softmax policy of `q` `[A]` and `temperature` times its logarithm, both `[A]`.

    Actions that `mask` `[A]` forbids have the probability 0, and 0 in place of its logarithm. Vieillard et al. 2020,
    https://arxiv.org/abs/2007.14430, section 3.
    """
    chex.assert_rank(q, 1)
    # The mask comes after the division, by which its finite minimum could overflow to infinity.
    log_p = jax.nn.log_softmax(apply_mask(q / temperature, mask))
    policy, scaled = jnp.exp(log_p), temperature * log_p
    return policy, scaled if mask is None else jnp.where(unmask_empty_rows(mask), scaled, 0.0)


def clipped_surrogate(ratio: Array, advantage: Array, clip: Array | float) -> Array:
    """Return PPO's loss, the negated clipped objective (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7).

    `ratio` is the action's probability divided by its probability under the policy that chose it.
    """
    # The minimum only ever removes gain: past the bounds, a further step earns nothing, and one back is never held up.
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


def weighted_surrogate(log_prob: Array, behaviour: Array, advantage: Array, rho_clip: Array | float) -> Array:
    """Return IMPALA's policy loss, `-min(rho_clip, ratio) * log_prob * advantage`.

    The weight itself is not differentiated (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, section 4.2).
    `behaviour` is the action's log-probability under the policy that chose it.
    """
    rho = jnp.minimum(jnp.exp(jax.lax.stop_gradient(log_prob) - behaviour), rho_clip)
    return -rho * log_prob * advantage


def value_loss(value: Array, old_value: Array, target: Array, clip: float) -> Array:
    """Return the larger squared loss of `value` and of `value` clipped to within `clip` of `old_value`.

    As in the first implementation of PPO (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3).
    """
    held = old_value + jnp.clip(value - old_value, -clip, clip)
    return jnp.maximum(squared(value - target), squared(held - target))


def expectile_loss(error: Array, expectile: Array | float) -> Array:
    """Return `|expectile - 1(error < 0)| error^2`; the expectile of the targets minimises its mean.

    Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169, equation 5; `error` is the target minus the value.
    """
    return jnp.abs(expectile - (error < 0)) * jnp.square(error)


def advantage_weight(advantage: Array, beta: Array | float, most: Array | float) -> Array:
    """Return `exp(beta advantage)`, at most `most`: the weight of an action in advantage-weighted regression.

    Peng et al. 2019, https://arxiv.org/abs/1910.00177, section 3; there, `beta` is an inverse temperature.
    """
    # Bounded in the exponent, since the exponential itself could overflow.
    return jnp.exp(jnp.minimum(beta * advantage, jnp.log(most)))


def conservative_gap(q: Array, log_density: Array, chosen: Array) -> Array:
    """Return by how much the soft maximum of action values `q` `[S]` exceeds `chosen`, the value of the data's action.

    `log_density` `[S]` is each action's log-density under its sampling distribution, plus the logarithm of the number
    of samples; zeros if `q` are the values of all actions (Kumar et al. 2020, https://arxiv.org/abs/2006.04779,
    equation 4 and appendix F).
    """
    return jax.nn.logsumexp(q - log_density) - chosen

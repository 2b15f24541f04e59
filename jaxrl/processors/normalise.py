"""Running normalisation of observations and rewards, over all environments at once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.errors import check_between
from jaxrl.processors.base import Processor, ReplayFns, StatsFns
from jaxrl.trees import Array, PyTree
from jaxrl.tuning import tunable
from jaxrl.types import Step, Transition

CLIP = 10.0
"""Bound of normalised observations and rewards, in standard deviations."""
EPSILON = 1e-8
"""Constant added to variances."""


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of all entries so far; the last two have the shape of one entry."""

    count: Array  # type: ignore[assignment]
    mean: Array
    squares: Array
    lost: tuple[Array, Array, Array]
    """Rounding errors of the three (Kahan 1965). Without compensation the sums would stop growing at 2^24 entries."""

    @property
    def variance(self) -> Array:
        """Mean squared deviation; 1 until there are two entries."""
        return jnp.where(self.count > 1, self.squares / jnp.maximum(self.count, 1), 1.0)


def init_moments(shape: tuple[int, ...]) -> Moments:
    """Return the moments before the first entry."""
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    return Moments(zeros(()), zeros(shape), zeros(shape), (zeros(()), zeros(shape), zeros(shape)))


def update_moments(moments: Moments, entries: Array, where: Array | None = None) -> Moments:
    """Add `entries` `[N, ...]` to `moments` at once; with `where` `[N]`, only the rows where it is true.

    Exact up to rounding for any number of rows (Chan, Golub and LeVeque 1979, equation 2.1). If `where` is true
    everywhere, the bits are those without it.
    """
    entries = jnp.asarray(entries, jnp.float32)
    rows = jnp.ones(entries.shape[0], bool) if where is None else where
    new = shards.psum(rows.sum(dtype=jnp.float32))
    # Selects, not weights: a row that does not count may be non-finite.
    select = lambda x: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0)
    mean = shards.psum(select(entries).sum(0)) / jnp.maximum(new, 1)
    # Deviations from the mean of these entries, since the difference of two large sums of squares would cancel.
    squares = shards.psum(jnp.square(select(entries - mean[None])).sum(0))
    return merge_moments(moments, new, mean, squares)


def merge_moments(moments: Moments, new: Array, mean: Array, squares: Array) -> Moments:
    """Merge `moments` with those of `new` entries with the given mean and sum of squared deviations.

    With counts `n` and `m`, `d = mean_m - mean_n` and `s = m / (n + m)`: `mean = mean_n + d s` and
    `squares = squares_n + squares_m + d^2 n s`.
    """
    delta = mean - moments.mean
    share = new / jnp.maximum(moments.count + new, 1)
    more = squares + jnp.square(delta) * moments.count * share
    count, of_count = _kahan_add(moments.count, moments.lost[0], new)
    mean, of_mean = _kahan_add(moments.mean, moments.lost[1], delta * share)
    squares, of_squares = _kahan_add(moments.squares, moments.lost[2], more)
    return Moments(count, mean, squares, (of_count, of_mean, of_squares))


def _kahan_add(total: Array, lost: Array, more: Array) -> tuple[Array, Array]:
    """Add `more` to `total` with Kahan's compensation `lost`; return the new sum and compensation."""
    # Subtract the rounding error of the previous sum.
    more = more - lost
    new_total = total + more
    return new_total, (new_total - total) - more


class ObsState(NamedTuple):
    """Moments of each leaf of an observation (`None` if it is not normalised), and the current observation."""

    moments: PyTree
    obs: PyTree


def normalise_obs() -> Processor:
    """Normalise observations by their running mean and standard deviation, and clip them to 10 standard deviations.

    Every observation that the policy sees counts once, over all environments, except zeros that replace a non-finite
    one. Integer leaves stay unchanged. The statistics are part of the training state and of the policy, and constant
    during evaluation. Replay stores observations unscaled and normalises a batch when it is used, by the statistics at
    that time.
    """
    observe = lambda state: state.obs
    return Processor(
        init=lambda obs: ObsState(_init_obs_moments(obs), _normalise(_init_obs_moments(obs), obs)),
        process=_process_obs,
        observe=observe,
        settings={"normalise_obs": True},
        stats=StatsFns(
            get=lambda state: state.moments,
            freeze=_freeze_obs,
            merge=lambda a, b: tuple(m if m is None else merge_moments(m, *n[:3]) for m, n in zip(a, b, strict=True)),
        ),
        replay_fns=ReplayFns(lambda obs: ObsState(_init_obs_moments(obs), obs), _update_obs_stats, observe, _apply_obs),
        changes=("obs",),
    )


def _freeze_obs(moments: PyTree) -> Processor:
    def process(state: PyTree, step: Step) -> tuple[PyTree, Step]:
        obs, final_obs = _normalise(moments, step.obs), _normalise(moments, step.final_obs)
        return obs, step._replace(obs=obs, final_obs=final_obs)

    return Processor(partial(_normalise, moments), process, lambda state: state)


def _init_obs_moments(obs: PyTree) -> tuple[Moments | None, ...]:
    # A flat tuple in place of a tree: `None` leaves of a tree would vanish from its structure.
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(obs))
    return tuple(init_moments(x.shape[1:]) if f else None for f, x in zip(floats, jax.tree.leaves(obs), strict=True))


def _normalise(moments: tuple[Moments | None, ...], obs: PyTree) -> PyTree:
    leaves, treedef = jax.tree.flatten(obs)
    return jax.tree.unflatten(treedef, [_normalise_leaf(m, x) for m, x in zip(moments, leaves, strict=True)])


def _normalise_leaf(moments: Moments | None, x: Array) -> Array:
    if moments is None:
        return x
    # Moments have the shape of one entry; leading axes, of which sequences have two, are added here.
    over = lambda y: y.reshape((1,) * (x.ndim - y.ndim) + y.shape)
    scaled = (x - over(moments.mean)) * over(jax.lax.rsqrt(moments.variance + EPSILON))
    return jnp.clip(scaled, -CLIP, CLIP).astype(x.dtype)


def _update_obs_stats(state: ObsState, step: Step) -> tuple[ObsState, Step]:
    """Update the statistics, and pass the step on unchanged."""
    # `obs` alone, which the policy sees next. Where no episode ended, `final_obs` is the same one.
    leaves = jax.tree.leaves(step.obs)
    where = None if isinstance(step.obs_valid, tuple) else step.obs_valid
    moments = tuple(m if m is None else update_moments(m, x, where) for m, x in zip(state.moments, leaves, strict=True))
    return ObsState(moments, step.obs), step


def _process_obs(state: ObsState, step: Step) -> tuple[ObsState, Step]:
    # Moments first, so that each observation is normalised by statistics that contain it.
    moments = _update_obs_stats(state, step)[0].moments
    obs, final_obs = _normalise(moments, step.obs), _normalise(moments, step.final_obs)
    return ObsState(moments, obs), step._replace(obs=obs, final_obs=final_obs)


def _apply_obs(state: ObsState, items: Transition) -> Transition:
    scaled = partial(_normalise, state.moments)
    return items._replace(obs=scaled(items.obs), next_obs=scaled(items.next_obs))


class RewardState(NamedTuple):
    """Discounted sums of past rewards, and their moments."""

    obs: PyTree
    discount: Array
    returns: Array
    """`[N]`, `R_t = discount R_{t-1} + r_t` since the start of the episode."""
    moments: Moments


def normalise_reward(discount: float = 0.99) -> Processor:
    """Divide rewards by the running standard deviation of their discounted sum, and clip them to 10.

    The mean is not subtracted, so a reward keeps its sign (as in Engstrom et al. 2020,
    https://arxiv.org/abs/2005.12729, section 3). Recorded returns are those of the environment. Actors share the
    statistics. Replay stores unscaled rewards, or their sums over several steps, and scales and clips them when a batch
    is used.
    """
    check_between("discount", discount, 0.0, 1.0)
    init, observe = partial(_init_reward, discount), lambda state: state.obs
    return Processor(
        init=init,
        process=_process_reward,
        observe=observe,
        settings={"normalise_reward": True, "discount": discount},
        stats=StatsFns(
            merge=lambda moments, more: merge_moments(moments, *more[:3]), get_shared=lambda state: state.moments
        ),
        replay_fns=ReplayFns(init, _update_reward_stats, observe, _apply_reward),
        changes=("reward",),
    )


def _init_reward(discount: float, obs: Any) -> RewardState:
    num_envs = jax.tree.leaves(obs)[0].shape[0]
    return RewardState(obs, tunable("processor.discount", discount), jnp.zeros(num_envs, jnp.float32), init_moments(()))


def _update_reward_stats(state: RewardState, step: Step) -> tuple[RewardState, Step]:
    """Update the statistics, and pass the step on unchanged."""
    # The discounted sum of past rewards stands in for the return, which is not known yet.
    returns = state.discount * state.returns + step.reward
    moments = update_moments(state.moments, returns, jnp.broadcast_to(step.valid, returns.shape))
    continued = jnp.where(step.terminated | step.truncated, 0.0, returns)
    return RewardState(step.obs, state.discount, continued, moments), step


def _process_reward(state: RewardState, step: Step) -> tuple[RewardState, Step]:
    state, step = _update_reward_stats(state, step)
    return state, step._replace(reward=_scale_reward(state.moments, step.reward))


def _apply_reward(state: RewardState, items: Transition) -> Transition:
    return items._replace(reward=_scale_reward(state.moments, items.reward))


def _scale_reward(moments: Moments, reward: Array) -> Array:
    return jnp.clip(reward * jax.lax.rsqrt(moments.variance + EPSILON), -CLIP, CLIP)

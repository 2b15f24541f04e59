"""What every agent shares whose policy is a regression on the actions of data: its head, its choices, its step."""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp

from jaxrl.agents.base import Mode
from jaxrl.agents.critics import unit_actions
from jaxrl.agents.optimizers import GradientStep, Learnt, Schedule, learn
from jaxrl.distributions import Distribution, Gaussian, Head, apply_temperature, make_head, mask_distribution
from jaxrl.masks import for_policy, get_mask
from jaxrl.nn import Network
from jaxrl.spaces import Box, EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Transition

LOG_STD = (-3.0, 0.0)
"""Bounds on the log-scale. Where the data agree, the scale would otherwise collapse to zero and the loss to minus
infinity."""
FORBIDDEN = -1e30
"""Log-likelihoods below are those of actions that a mask forbids. Data may hold some, and nothing is learnt of them."""


def cloning_head(spec: EnvSpec) -> Head:
    """Return the head of a policy that assigns a likelihood to the data's actions, as `taken` returns them."""
    head = make_head(spec)
    return head._replace(distribution=_bounded) if isinstance(spec.action_space, Box) else head


def _bounded(outputs: Array) -> Distribution:
    mean, scale = jnp.split(outputs, 2, axis=-1)
    # Not clipped: beyond a bound the gradient would be zero.
    low, high = LOG_STD
    return Gaussian(jnp.tanh(mean), (low + high) / 2 + (high - low) / 2 * jnp.tanh(scale))


def taken(spec: EnvSpec, action: Array) -> Array:
    """Return actions as a policy represents them: scaled to -1 to 1, `[B, D]`, or unchanged if discrete."""
    unit = unit_actions(spec, action)
    return unit[0] if unit else action


def choice(network: Network, head: Head, policy: PyTree, obs: PyTree, temperature: PyTree = ()) -> Distribution:
    """Return the action distributions for `obs` `[B, ...]`, at a `temperature` of an actor's own."""
    outputs = cast(Array, network.apply(policy, for_policy(obs)))
    return mask_distribution(apply_temperature(head.distribution(outputs), temperature), get_mask(obs))


def act(
    network: Network, head: Head, state: Any, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode
) -> tuple[PyTree, tuple[()]]:
    """Choose the likeliest action for each of `obs` `[N, ...]`, or sample one, as `ActFn`."""
    distribution = choice(network, head, state.policy, obs, state.hyper.exploration)
    return head.to_env(distribution.mode() if key is None or mode == "exploit" else distribution.sample(key)), ()


def regress(
    config: Schedule,
    gradient_step: GradientStep,
    network: Network,
    head: Head,
    extra: Callable[[PyTree, Transition, Distribution, Array], Array] | None,
    policy: PyTree,
    opt_state: PyTree,
    batch: tuple[PyTree, Array, Array, Array, PyTree],
    lr: Array,
    max_norm: Array,
    opt_step: Array,
) -> Learnt:
    """Take one gradient step up the weighted log-likelihood of actions.

    `batch` holds observations, actions (see `taken`), loss weights, extra weights on the likelihoods and, for `extra`,
    the steps. The auxiliary output is the log-likelihoods `[B]`: 0, a constant, for actions that their observation
    forbids. `extra`, of `(params, items, distributions, weight)`, is a further term of the loss.
    """

    def loss(params: PyTree, batch: tuple[PyTree, Array, Array, Array, PyTree]) -> tuple[Array, Array]:
        obs, action, weight, worth, items = batch
        distribution = choice(network, head, params, obs)
        log_prob = distribution.log_prob(action)
        log_prob = log_prob if get_mask(obs) is None else jnp.where(log_prob > FORBIDDEN, log_prob, 0.0)
        each = -worth * log_prob
        if extra is not None:
            each = each + extra(params, items, distribution, weight)
        return jnp.mean(weight * each), log_prob

    return learn(config, gradient_step, loss, policy, opt_state, batch, lr, max_norm, opt_step)

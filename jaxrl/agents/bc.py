"""Behavioural cloning (Pomerleau 1991), and the weighted regression on actions that AWAC and IQL share with it.

Policies are categorical, or Gaussians whose mean lies within the bounds. Data are full of actions at a bound. Under
such a Gaussian their density is finite, while under a squashed Gaussian it would be unbounded.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrl import distributions, masks, nn, shards
from jaxrl.agents.base import Agent, AgentInfo, AgentMaker, Mode, PolicyFns
from jaxrl.agents.checks import check_actions, make_hyper
from jaxrl.agents.critics import unit_actions
from jaxrl.agents.custom import (
    CustomParts,
    ExtraLoss,
    MakePolicy,
    agent_maker,
    build_network,
    extra_term,
    observation_structs,
    policy_output,
)
from jaxrl.agents.exploration import TEMPERATURE
from jaxrl.agents.fields import NetworkConfig, OptimizerConfig, Positive
from jaxrl.agents.optimizers import GradientStep, GradientUpdate, Optimizer, gradient_update
from jaxrl.distributions import Distribution, Gaussian, Head
from jaxrl.metrics import Metrics, Stat, stat
from jaxrl.nn import Network, PolicyNetwork
from jaxrl.spaces import Box, EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Transition


@dataclass(frozen=True)
class BCConfig(NetworkConfig, OptimizerConfig):
    """Settings of behavioural cloning."""

    max_grad_norm: Positive = 1e6


class BCHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    exploration: PyTree = ()
    """Temperature at which an actor samples actions, if set per actor; else `()`."""


class BCState(NamedTuple):
    """Agent state. `opt_state` is empty in an acting-only copy."""

    policy: PyTree
    opt_state: PyTree
    hyper: BCHyper


class _Parts(NamedTuple):
    """What an agent's functions share: its settings, its network and parts made in Python."""

    config: BCConfig
    network: Network
    gradient_step: GradientStep
    spec: EnvSpec
    head: Head
    extra_loss: ExtraLoss | None = None


def bc(
    config: BCConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakePolicy | None = None,
    extra_loss: ExtraLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure behavioural cloning; call the result with an `EnvSpec` to build it.

    Actions may be discrete, multi-discrete, or a bounded box.

    Args:
      config: settings to start from; if left out, the defaults of `BCConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_network: function from an `EnvSpec` and the head for its actions to a network
        `[B, ...] -> [B, head.outputs]`.
      extra_loss: a term of the loss for each step beside the agent's own, `(params, items, distributions) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      **settings: fields of `BCConfig` to change, as in `bc(lr=1e-3)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    custom = {"make_optimizer": make_optimizer, "make_network": make_network, "extra_loss": extra_loss}
    return agent_maker("bc", _build, config or BCConfig(), {**settings, **custom}, [*custom])


def _build(name: str, config: BCConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    head = make_cloning_head(spec)
    policy_spec = masks.view_spec(spec, masks.for_policy)
    network = build_network(
        custom,
        "make_network",
        (policy_spec, head),
        partial(_network, config, policy_spec, head),
        (observation_structs(policy_spec),),
        (policy_output(head),),
    )
    parts = _Parts(config, network, custom.gradient_step, spec, head, custom.extra_loss)
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(act, network, head),
        update=partial(_update, parts),
        strip=lambda state: state._replace(opt_state=()),
        apply={"policy": lambda policy, obs: network.apply(policy, masks.for_policy(obs))},
        policy_fns=PolicyFns(
            lambda state, obs, opt_step: action_distribution(network, head, state.policy, obs),
            "learns actions alone, and has no values",
            head,
        ),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=TEMPERATURE,
            offline=True,
        ),
    )


def _network(config: BCConfig, spec: EnvSpec, head: Head) -> Network:
    nn.check_torso(config.torso, spec.observation_space, config.channels, config.features)
    return PolicyNetwork(
        spec.observation_space,
        head.outputs,
        config.torso,
        config.features,
        config.activation,
        config.channels,
        config.dtype,
    )


def _init(parts: _Parts, key: Key) -> BCState:
    policy = parts.network.init(key, space_zeros(masks.for_policy(parts.spec.observation_space), 1))
    hyper = BCHyper(*make_hyper(asdict(parts.config), BCHyper._fields, optional=TEMPERATURE))
    return BCState(policy, parts.gradient_step.init(policy, hyper.lr), hyper)


def _update(parts: _Parts, state: BCState, batch: Batch, key: Key, opt_step: Array) -> tuple[BCState, Metrics, Array]:
    items, hyper = batch.items, state.hyper
    result = regress(
        parts.gradient_step,
        parts.network,
        parts.head,
        parts.extra_loss and partial(extra_term, parts.extra_loss),
        state.policy,
        state.opt_state,
        (
            items.obs,
            to_policy_actions(parts.spec, items.action),
            batch.weight * items.weight,
            # Cloning weighs all actions alike. AWAC and IQL weigh them by their advantages here.
            jnp.ones_like(batch.weight),
            items if parts.extra_loss else (),
        ),
        key=nn.training_key(parts.network, key),
        lr=hyper.lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    log_prob, allowed = result.aux
    mean = mean_of_allowed(log_prob, allowed, items.weight)
    metrics: Metrics = {"loss": result.loss, "log_prob": mean, "grad_norm": result.norm}
    # Priorities are never negative, which would leave the old ones; a log-density may be above 0.
    priorities = jnp.maximum(-log_prob, 0.0) * items.weight
    return BCState(result.variables, result.opt_state, hyper), metrics, priorities


# --- weighted regression on actions, shared with AWAC and IQL --------------------------------------------------------

LOG_STD = (-3.0, 0.0)
"""Bounds on the log-scale. Where the data agree, the scale would otherwise collapse to zero and the loss to minus
infinity."""
FORBIDDEN = -1e30
"""Log-likelihoods below are those of actions that a mask forbids. Data may hold some, and nothing is learnt of them."""


def make_cloning_head(spec: EnvSpec) -> Head:
    """Return the head of a policy under which actions of data, see `to_policy_actions`, have a likelihood."""
    head = distributions.make_head(spec)
    return head._replace(distribution=_bounded_gaussian) if isinstance(spec.action_space, Box) else head


def _bounded_gaussian(outputs: Array) -> Distribution:
    mean, scale = jnp.split(outputs, 2, axis=-1)
    # Not clipped: beyond a bound the gradient would be zero.
    low, high = LOG_STD
    return Gaussian(jnp.tanh(mean), (low + high) / 2 + (high - low) / 2 * jnp.tanh(scale))


def to_policy_actions(spec: EnvSpec, action: Array) -> Array:
    """Return actions as a policy represents them: scaled to -1 to 1, `[B, D]`, or unchanged if discrete."""
    unit = unit_actions(spec, action)
    return unit[0] if unit else action


def action_distribution(
    network: Network, head: Head, policy: PyTree, obs: PyTree, temperature: PyTree = ()
) -> Distribution:
    """Return the action distributions for `obs` `[B, ...]`, at the actor's `temperature` if it has one."""
    return _distribution(head, network.apply(policy, masks.for_policy(obs)), obs, temperature)


def _distribution(head: Head, outputs: Array, obs: PyTree, temperature: PyTree = ()) -> Distribution:
    return distributions.mask_distribution(
        distributions.apply_temperature(head.distribution(outputs), temperature), masks.get_mask(obs)
    )


def act(
    network: Network, head: Head, state: Any, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode
) -> tuple[PyTree, tuple[()]]:
    """Choose the likeliest action for each of `obs` `[N, ...]`, or sample one, as `ActFn`."""
    distribution = action_distribution(network, head, state.policy, obs, state.hyper.exploration)
    return head.to_env(distribution.mode() if key is None or mode == "exploit" else distribution.sample(key)), ()


def regress(
    gradient_step: GradientStep,
    network: Network,
    head: Head,
    extra: Callable[[PyTree, Transition, Distribution, Array], Array] | None,
    policy: PyTree,
    opt_state: PyTree,
    batch: tuple[PyTree, Array, Array, Array, PyTree],
    **arguments: Any,
) -> GradientUpdate:
    """Take one gradient step up the weighted log-likelihood of actions.

    `batch` holds observations, actions (see `to_policy_actions`), loss weights, extra weights on the likelihoods and,
    for `extra`, the steps. Further `arguments` are those of `gradient_update`: `key`, `lr`, `max_norm` and `opt_step`.
    The auxiliary output is the log-likelihoods `[B]`: 0, a constant, for actions that their observation forbids; and
    bool `[B]`, whether it allows them.
    `extra(params, items, distributions, weight)` is a further term of the loss.
    """

    def loss(
        params: PyTree, batch: tuple[PyTree, Array, Array, Array, PyTree], key: Key | None
    ) -> tuple[Array, tuple[tuple[Array, Array], PyTree]]:
        obs, action, weight, advantage_weight, items = batch
        outputs, collections = nn.forward(network, params, masks.for_policy(obs), key=key)
        distribution = _distribution(head, outputs, obs)
        log_prob = distribution.log_prob(action)
        # Data may hold actions that a mask forbids; their log-probability would be minus infinity.
        allowed = jnp.ones_like(log_prob, bool) if masks.get_mask(obs) is None else log_prob > FORBIDDEN
        log_prob = jnp.where(allowed, log_prob, 0.0)
        # Two weights: that of the advantage is part of the objective, `weight` says how much a step counts in the mean.
        step_loss = -advantage_weight * log_prob
        if extra is not None:
            step_loss = step_loss + extra(params, items, distribution, weight)
        return jnp.mean(weight * step_loss), ((log_prob, allowed), collections)

    return gradient_update(gradient_step, loss, policy, opt_state, batch, **arguments)


def mean_of_allowed(log_prob: Array, allowed: Array, weight: Array) -> Stat:
    """Return the mean of the log-likelihoods of allowed actions, see `regress`, of steps whose `weight` is not 0.

    It is no measurement without any.
    """
    counts = allowed & (weight > 0)
    return stat(shards.step_means({"log_prob": log_prob}, counts)["log_prob"], where=counts.any())

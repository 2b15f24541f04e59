"""Behavioural cloning (Pomerleau 1991), and the weighted regression on actions that AWAC and IQL share with it.

Policies are categorical, or Gaussians whose mean lies within the bounds. Data are full of actions at a bound. Under
such a Gaussian their density is finite, while under a squashed Gaussian it would be unbounded.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker, Insight
from jaxrl.agents.checks import check_actions, hyper_of
from jaxrl.agents.exploration import TEMPERATURE
from jaxrl.agents.fields import (
    NetworkConfig,
    OptimizerConfig,
    Weight,
)
from jaxrl.agents.optimizers import GradientStep, Optimizer, gradient_step
from jaxrl.agents.own import ExtraLoss, MakePolicy, Own, agent_maker, choices, extra_term, network_of, observations
from jaxrl.agents.regression import act, choice, cloning_head, regress, taken
from jaxrl.distributions import Head
from jaxrl.masks import for_policy, view_spec
from jaxrl.metrics import Metrics
from jaxrl.nn import Network, PolicyNetwork, check_torso
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch


@dataclass(frozen=True)
class BCConfig(NetworkConfig, OptimizerConfig):
    """Settings of behavioural cloning."""

    max_grad_norm: Weight = 1e6


class BCHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    exploration: PyTree = ()
    """The temperature at which an actor draws actions, where it has one of its own; else `()`."""


class BCState(NamedTuple):
    """Agent state. `opt_state` is empty in an acting-only copy."""

    policy: PyTree
    opt_state: PyTree
    hyper: BCHyper


class _Parts(NamedTuple):
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
        `jaxrl.agents.own.ExtraLoss`.
      **settings: fields of `BCConfig` to change, as in `bc(lr=1e-3)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    return agent_maker(
        "bc",
        _bind,
        config or BCConfig(),
        settings,
        make_optimizer=make_optimizer,
        make_network=make_network,
        extra_loss=extra_loss,
    )


def _bind(name: str, config: BCConfig, own: Own, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    head = cloning_head(spec)
    seen = view_spec(spec, for_policy)
    usual = partial(_network, config, seen, head)
    network = network_of(own, "make_network", (seen, head), usual, (observations(seen),), (choices(head),))
    parts = _Parts(config, network, gradient_step(own.optimizer), spec, head, own.extra_loss)
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(act, network, head),
        update=partial(_update, parts),
        strip=lambda state: state._replace(opt_state=()),
        settings=asdict(config),
        custom=own.custom,
        exploration=TEMPERATURE,
        offline=True,
        insight=Insight(
            lambda state, obs, opt_step: choice(network, head, state.policy, obs),
            "learns actions alone, and has no values",
            head,
        ),
    )


def _network(config: BCConfig, spec: EnvSpec, head: Head) -> Network:
    check_torso(config.torso, spec.observation_space, config.channels)
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
    policy = parts.network.init(key, space_zeros(for_policy(parts.spec.observation_space), 1))
    hyper = BCHyper(*hyper_of(asdict(parts.config), BCHyper._fields, optional=TEMPERATURE))
    return BCState(policy, parts.gradient_step.init(policy, hyper.lr), hyper)


def _update(parts: _Parts, state: BCState, batch: Batch, key: Key, opt_step: Array) -> tuple[BCState, Metrics, Array]:
    items, hyper = batch.items, state.hyper
    learnt = regress(
        parts.config,
        parts.gradient_step,
        parts.network,
        parts.head,
        parts.extra_loss and partial(extra_term, parts.extra_loss),
        state.policy,
        state.opt_state,
        (
            items.obs,
            taken(parts.spec, items.action),
            batch.weight * items.weight,
            jnp.ones_like(batch.weight),
            items if parts.extra_loss else (),
        ),
        hyper.lr,
        hyper.max_grad_norm,
        opt_step,
    )
    metrics = {"loss": learnt.loss, "log_prob": learnt.aux.mean(), "grad_norm": learnt.norm}
    return BCState(learnt.params, learnt.opt_state, hyper), metrics, -learnt.aux * items.weight

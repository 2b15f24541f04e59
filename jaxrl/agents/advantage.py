"""Advantage-weighted regression from data: AWAC and IQL, which differ in the baseline of the advantage.

Both raise the likelihood of the data's actions, weighted by `exp(beta (q(s, a) - v(s)))`. In AWAC (Nair et al. 2020,
https://arxiv.org/abs/2006.09359), `v` is the value of its own policy. In IQL (Kostrikov et al. 2021,
https://arxiv.org/abs/2110.06169), `v` is an upper expectile of the values of the data's actions, learnt without
evaluating any other action.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.agents import bc, critics
from jaxrl.agents.base import Agent, AgentInfo, AgentMaker
from jaxrl.agents.checks import check_actions, make_hyper
from jaxrl.agents.critic_values import mean_values, reduce_critics, select_values
from jaxrl.agents.critics import CriticConfig, Parts
from jaxrl.agents.custom import CriticLoss, CustomParts, ExtraLoss, MakeNetwork, MakePolicy, agent_maker, squeeze_values
from jaxrl.agents.exploration import TEMPERATURE
from jaxrl.agents.fields import Between, Positive, Weight
from jaxrl.agents.losses import advantage_weight, expectile_loss
from jaxrl.agents.optimizers import GradientUpdate, Optimizer, gradient_update, polyak_update
from jaxrl.metrics import Metrics
from jaxrl.nn import Network, forward, training_key
from jaxrl.spaces import Discrete, EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Transition


@dataclass(frozen=True)
class AWACConfig(CriticConfig):
    """Settings of AWAC."""

    beta: Weight = 1.0
    """Inverse temperature of the advantage weights exp(beta * advantage); 0: all actions count alike."""
    max_weight: Positive = 100.0
    """Upper bound on an advantage weight."""


@dataclass(frozen=True)
class IQLConfig(AWACConfig):
    """Settings of IQL."""

    beta: Weight = 3.0
    expectile: Annotated[float, Between(1e-6, 1 - 1e-6)] = 0.7
    """Expectile of the action values that the state value learns; 0.5: their mean; towards 1: the best."""


class AdvantageHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    policy_lr: Array
    max_grad_norm: Array
    tau: Array
    beta: Array
    max_weight: Array
    expectile: PyTree
    """`()` for AWAC."""
    exploration: PyTree = ()
    """Temperature at which an actor samples actions, if set per actor; else `()`."""


class OptStates(NamedTuple):
    """States of the optimizers; the value's is empty for AWAC."""

    policy: PyTree
    critic: PyTree
    value: PyTree


class AdvantageState(NamedTuple):
    """Agent state. Fields other than `policy` and `hyper` are empty in an acting-only copy."""

    policy: PyTree
    critic: PyTree
    target: PyTree
    value: PyTree
    """`()` for AWAC."""
    opt_state: OptStates
    hyper: AdvantageHyper


def awac(
    config: AWACConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    extra_policy_loss: ExtraLoss | None = None,
    critic_loss: CriticLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure an AWAC agent; call the result with an `EnvSpec` of discrete actions or a bounded box to build it.

    Args:
      config: settings to start from; if left out, the defaults of `AWACConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_policy: function from an `EnvSpec` and the head for its actions to a network `[B, ...] -> [B, head.outputs]`.
      make_critic: function from an `EnvSpec` to the network of one critic: `[B, ...], [B, D] -> [B]` for observations
        and actions scaled to -1 to 1, `[B, ...] -> [B, A]` for discrete actions.
      extra_loss: a term of the critics' loss for each step beside the agent's own, `(params, items, q) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      extra_policy_loss: a term of the policy's loss, `(params, items, outputs) -> [B]`.
      critic_loss: the loss of the critics' values of the actions taken in place of half the squared error,
        `(q [K, B], target [B]) -> [K, B]`, see `jaxrl.agents.custom.CriticLoss`.
      **settings: fields of `AWACConfig` to change, as in `awac(beta=3.0)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    parts = {
        "make_optimizer": make_optimizer,
        "make_policy": make_policy,
        "make_critic": make_critic,
        "extra_loss": extra_loss,
        "extra_policy_loss": extra_policy_loss,
        "critic_loss": critic_loss,
    }
    return agent_maker("awac", _build, config or AWACConfig(), {**settings, **parts}, [*parts])


def iql(
    config: IQLConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    make_value: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    extra_policy_loss: ExtraLoss | None = None,
    critic_loss: CriticLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure an IQL agent; as for `awac`, and `make_value` maps an `EnvSpec` to a network `[B, ...] -> [B]`."""
    parts = {
        "make_optimizer": make_optimizer,
        "make_policy": make_policy,
        "make_critic": make_critic,
        "make_value": make_value,
        "extra_loss": extra_loss,
        "extra_policy_loss": extra_policy_loss,
        "critic_loss": critic_loss,
    }
    return agent_maker("iql", _build, config or IQLConfig(), {**settings, **parts}, [*parts])


def _build(name: str, config: AWACConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    head = bc.make_cloning_head(spec)
    networks = critics.build_networks(config, custom, spec, head)
    if isinstance(config, IQLConfig):
        networks = networks._replace(value=critics.value_network(config, custom, spec))
    network = networks.policy
    values = mean_values("min", custom.critic_loss)
    parts = critics.make_parts(config, custom, networks, spec, head, lambda reach: values)
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(bc.act, network, head),
        update=partial(_update_iql if isinstance(config, IQLConfig) else _update_awac, parts),
        strip=lambda state: state._replace(critic=(), target=(), value=(), opt_state=()),
        apply=critics.apply_fns(parts.networks),
        policy_fns=critics.critic_policy_fns(
            parts,
            lambda state, obs, opt_step: bc.action_distribution(network, head, state.policy, obs),
            keep_critic=lambda state: state._replace(target=(), opt_state=()),
        )._replace(state_value=None if networks.value is None else partial(_state_value, parts)),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=TEMPERATURE,
            offline=True,
        ),
    )


def _init(parts: Parts, key: Key) -> AdvantageState:
    network_key, value_key = jax.random.split(key)
    policy, critic = critics.init_networks(parts, network_key)
    hyper = AdvantageHyper(
        *make_hyper(asdict(parts.config), AdvantageHyper._fields, optional=("expectile", *TEMPERATURE))
    )
    value: PyTree = ()
    if parts.networks.value is not None:
        obs = critics.to_critic(space_zeros(parts.spec.observation_space, 1))
        value = critics.init_network(parts, parts.networks.value, value_key, obs)
    opt_state = OptStates(
        parts.gradient_step.init(policy, hyper.policy_lr),
        parts.gradient_step.init(critic, hyper.lr),
        parts.gradient_step.init(value, hyper.lr) if value else (),
    )
    # The target must be a copy: both arrays are donated to the compiled loop.
    return AdvantageState(policy, critic, jax.tree.map(jnp.copy, critic), value, opt_state, hyper)


def _update_awac(
    parts: Parts, state: AdvantageState, batch: Batch, key: Key, opt_step: Array
) -> tuple[AdvantageState, Metrics, Array]:
    """Update the critics, then the policy against the new critics."""
    items, policy = batch.items, state.policy
    key_tm1, key_t = jax.random.split(key)
    # The bootstrap is that of the policy before this update, under the target critics.
    v_t = policy_value(parts, policy, state.target, items.next_obs, key_t, critics.target_key(parts, key))
    target = items.reward + items.discount * v_t
    critic, metrics, priorities = critics.learn_critic(
        parts, state, batch, parts.critic_values(()), target, key, opt_step
    )
    v_tm1 = policy_value(parts, policy, critic.variables, items.obs, key_tm1)
    # Against the new critics, as the policy's own value is.
    advantage = done_value(parts, critic.variables, items) - v_tm1
    state = state._replace(critic=critic.variables, opt_state=state.opt_state._replace(critic=critic.opt_state))
    state, policy_metrics = _improve(parts, state, batch, advantage, key, opt_step)
    return state, {**metrics, **policy_metrics}, priorities


def _update_iql(
    parts: Parts, state: AdvantageState, batch: Batch, key: Key, opt_step: Array
) -> tuple[AdvantageState, Metrics, Array]:
    """Update the value, then the critics and the policy against the new value."""
    items = batch.items
    # Values of the data's actions alone: IQL never evaluates an action that the data do not have.
    q = done_value(parts, state.target, items, critics.target_key(parts, key))
    value = _learn_value(parts, state, batch, q, key, opt_step)
    # The new state value takes the place of a maximum over next actions, so the critics' targets need no policy.
    v_tm1, v_t = (_value(parts, value.variables, obs) for obs in (items.obs, items.next_obs))
    target = items.reward + items.discount * v_t
    critic, metrics, priorities = critics.learn_critic(
        parts, state, batch, parts.critic_values(()), target, key, opt_step
    )
    state = state._replace(
        critic=critic.variables,
        value=value.variables,
        opt_state=state.opt_state._replace(critic=critic.opt_state, value=value.opt_state),
    )
    # The advantage compares the target critics with the value that was just regressed on them.
    state, policy_metrics = _improve(parts, state, batch, q - v_tm1, key, opt_step)
    value_metrics = {**shards.step_means({"value": v_tm1}, items.weight), "value_loss": value.loss}
    return state, {**metrics, **policy_metrics, **value_metrics}, priorities


def done_value(parts: Parts, critic: PyTree, items: Transition, dropout_key: Key | None = None) -> Array:
    """Return the lowest of the critics' values of the data's actions, `[B]`; with a key, under dropout."""
    action = critics.unit_actions(parts.spec, items.action)
    q = critics.apply_critics(parts.networks.critic, critic, items.obs, *action, key=dropout_key)
    return reduce_critics(select_values(q, None if action else items.action), "min")


def policy_value(
    parts: Parts, policy: PyTree, critic: PyTree, obs: PyTree, key: Key, dropout_key: Key | None = None
) -> Array:
    """Return the policy's value, `[B]`: exact for discrete actions, estimated from one sample for continuous ones.

    With `dropout_key` the critics have dropout. The keys are consumed.
    """
    apply = partial(critics.apply_critics, parts.networks.critic, critic, obs, key=dropout_key)
    distribution = bc.action_distribution(parts.networks.policy, parts.head, policy, obs)
    if isinstance(parts.spec.action_space, Discrete):
        # The logits are masked, so that forbidden actions have probability 0.
        probability = jax.nn.softmax(cast(Any, distribution).logits)
        return jnp.sum(probability * reduce_critics(apply(), "min"), axis=-1)
    # The head is not squashed, and critics have seen actions from -1 to 1 alone.
    drawn = jnp.clip(distribution.sample(key), -1.0, 1.0)
    return reduce_critics(apply(drawn), "min")[:, 0]


def _value(parts: Parts, params: PyTree, obs: PyTree) -> Array:
    """Return state values, `[B]`."""
    return squeeze_values(cast(Any, parts.networks.value).apply(params, critics.to_critic(obs)))


def _state_value(parts: Parts, state: AdvantageState, obs: PyTree, action: PyTree) -> Array:
    return _value(parts, state.value, obs)


def _learn_value(
    parts: Parts, state: AdvantageState, batch: Batch, q: Array, key: Key, opt_step: Array
) -> GradientUpdate:
    """Regress the state value on the expectile of `q` `[B]`."""
    network = cast(Network, parts.networks.value)

    def loss(params: PyTree, batch: PyTree, key: Key | None) -> tuple[Array, tuple[tuple, PyTree]]:
        obs, q, weight = batch
        value, collections = forward(network, params, critics.to_critic(obs), key=key)
        error = q - squeeze_values(value)
        return jnp.mean(weight * expectile_loss(error, state.hyper.expectile)), ((), collections)

    return gradient_update(
        parts.gradient_step,
        loss,
        state.value,
        state.opt_state.value,
        (batch.items.obs, q, batch.weight * batch.items.weight),
        # Number 0 is that of the critics and 1 that of the policy: each network of an update draws its own dropout.
        key=training_key(network, key, 2),
        lr=state.hyper.lr,
        max_norm=state.hyper.max_grad_norm,
        opt_step=opt_step,
    )


def _improve(
    parts: Parts, state: AdvantageState, batch: Batch, advantage: Array, key: Key, opt_step: Array
) -> tuple[AdvantageState, Metrics]:
    """Raise the likelihood of the data's actions, weighted by their advantages `[B]`, and update the target critics."""
    items, hyper = batch.items, state.hyper
    # Computed outside of the loss: the weights are data, and no gradient goes through the advantage.
    weight = advantage_weight(advantage, hyper.beta, hyper.max_weight)
    policy = bc.regress(
        parts.gradient_step,
        parts.networks.policy,
        parts.head,
        parts.extra_policy_loss and partial(critics.extra_policy_term, parts),
        state.policy,
        state.opt_state.policy,
        (
            items.obs,
            bc.to_policy_actions(parts.spec, items.action),
            batch.weight * items.weight,
            weight,
            items if parts.extra_policy_loss else (),
        ),
        key=training_key(parts.networks.policy, key, 1),
        lr=hyper.policy_lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    log_prob, allowed = policy.aux
    policy_metrics: Metrics = {
        "policy_loss": policy.loss,
        "policy_grad_norm": policy.norm,
        "log_prob": bc.mean_of_allowed(log_prob, allowed, items.weight),
        **shards.step_means({"advantage": advantage, "advantage_weight": weight}, items.weight),
    }
    return state._replace(
        policy=policy.variables,
        # Both callers have already put the new critics into `state`.
        target=polyak_update(state.target, state.critic, hyper.tau),
        opt_state=state.opt_state._replace(policy=policy.opt_state),
    ), policy_metrics

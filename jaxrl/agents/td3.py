"""Deterministic policy gradients: TD3 (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477), with DDPG as a setting.

DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971) is TD3 with one critic, a policy update at every step,
and no noise on targets. For fixed data sets, TD3+BC (Fujimoto & Gu 2021, https://arxiv.org/abs/2106.06860) also keeps
the policy near the data's actions, and ReBRAC (Tarasov et al. 2023, https://arxiv.org/abs/2305.09836) the targets too,
each by a weight of its own. FastTD3 has critics of atoms, and noise whose scale is drawn for each episode.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.agents import critics, optimizers, sequences
from jaxrl.agents.base import Agent, AgentFns, AgentInfo, AgentMaker, Mode
from jaxrl.agents.checks import check_actions, make_hyper, refuse_beside
from jaxrl.agents.critic_values import CriticValues
from jaxrl.agents.critics import CategoricalConfig, Parts
from jaxrl.agents.custom import CriticLoss, CustomParts, ExtraLoss, MakeNetwork, MakePolicy
from jaxrl.agents.fields import Between, Count, Rate, SequenceConfig, Share, Steps, Weight, Widths
from jaxrl.agents.optimizers import Gradient, Optimizer
from jaxrl.distributions import Head
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics
from jaxrl.nn import forward
from jaxrl.spaces import Box, EnvSpec, to_box
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, NextAction, RecurrentObs, Transition
from jaxrl.xla.reductions import select


@dataclass(frozen=True)
class TD3Config(CategoricalConfig, SequenceConfig):
    """Settings of TD3."""

    noise: Weight = 0.1
    """Standard deviation of the exploration noise, for actions scaled to -1 to 1; with noise_memory, in the long
    run."""
    noise_min: Weight = 0.0
    """Lowest such deviation: at each episode's start that of its noise is drawn between noise_min and noise, for each
    environment (FastTD3); 0: noise in all of them."""
    noise_memory: Annotated[float, Between(0.0, 0.9999)] = 0.0
    """Correlation of the exploration noise between successive steps of an episode; 0: independent noise."""
    target_noise: Weight = 0.2
    """Standard deviation of the noise on the target policy's actions (target policy smoothing)."""
    target_noise_clip: Weight = 0.5
    """Bound at which the target noise is clipped."""
    policy_interval: Count = 2
    """Optimisation steps between updates of the policy and the targets."""
    bc_alpha: Weight = 0.0
    """Weight of the value, divided by its mean size, against the squared distance from the data's actions (alpha of
    TD3+BC); 0: the value alone."""
    actor_bc_coef: Weight = 0.0
    """Weight of the squared distance of the policy's actions from the data's, against the lowest value divided by its
    mean size (ReBRAC); 0 turns both off."""
    critic_bc_coef: Weight = 0.0
    """Weight of the squared distance of targets' actions from the data's next actions, which is taken off the value
    there (ReBRAC, from data alone); 0 turns it off."""


@dataclass(frozen=True)
class DDPGConfig(TD3Config):
    """Settings of DDPG."""

    num_critics: Count = 1
    target_noise: Weight = 0.0
    policy_interval: Count = 1


@dataclass(frozen=True)
class TD3BCConfig(TD3Config):
    """Settings of TD3+BC."""

    bc_alpha: Weight = 2.5


@dataclass(frozen=True)
class FastTD3Config(TD3Config):
    """Settings of FastTD3."""

    optimizer: str = "adamw"
    weight_decay: Weight | None = 0.1
    tau: Share = 0.1
    atoms: Steps = 101
    noise: Weight = 0.4
    noise_min: Weight = 0.001
    target_noise: Weight = 0.001
    features: Widths = (512, 256, 128)
    critic_features: Widths = (1024, 512, 256)


@dataclass(frozen=True)
class ReBRACConfig(TD3Config):
    """Settings of ReBRAC."""

    lr: Rate = 1e-3
    policy_lr: Rate = 1e-3
    actor_bc_coef: Weight = 0.01
    critic_bc_coef: Weight = 0.01
    layer_norm: bool = True
    features: Widths = (256, 256, 256)


class TD3Hyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    policy_lr: Array
    max_grad_norm: Array
    tau: Array
    noise: Array
    noise_memory: Array
    target_noise: Array
    target_noise_clip: Array
    bc_alpha: PyTree
    """`()` if it is off."""
    noise_min: PyTree = ()
    """`()` if it is off."""
    actor_bc_coef: PyTree = ()
    """`()` if it is off."""
    critic_bc_coef: PyTree = ()
    """`()` if it is off."""


class ScaledNoise(NamedTuple):
    """Memory of exploration noise whose scale is drawn for each episode."""

    scale: Array
    """The standard deviation in this episode; 0 before its first step, in which it is drawn."""
    noise: PyTree
    """`[D]`, the noise of the step before; `()` without `noise_memory`."""


class OptStates(NamedTuple):
    """States of the optimizers."""

    policy: PyTree
    critic: PyTree


class TD3State(NamedTuple):
    """Agent state. Fields other than `policy` and `hyper` are empty in an acting-only copy."""

    policy: PyTree
    critic: PyTree
    target_policy: PyTree
    target_critic: PyTree
    opt_state: OptStates
    hyper: TD3Hyper
    reach: PyTree = ()
    """The `ReturnBounds` from which the support of atoms is derived; `()` if `v_min` and `v_max` are given, or without
    atoms."""


OPTIONS = ("bc_alpha", "noise_min", "actor_bc_coef", "critic_bc_coef")
"""Hyperparameters that are `()` where they are 0."""


def td3(
    config: TD3Config | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    extra_policy_loss: ExtraLoss | None = None,
    critic_loss: CriticLoss | str | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a TD3 agent; call the result with an `EnvSpec` whose actions are a bounded box to build it.

    Args:
      config: settings to start from; if left out, the defaults of `TD3Config`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_policy: function from an `EnvSpec` and the head for its actions to a network `[B, ...] -> [B, head.outputs]`.
      make_critic: function from an `EnvSpec` to the network of one critic, `[B, ...], [B, D] -> [B]`, for observations
        and actions scaled to -1 to 1.
      extra_loss: a term of the critics' loss for each step beside the agent's own, `(params, items, q) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      extra_policy_loss: a term of the policy's loss, `(params, items, outputs) -> [B]`.
      critic_loss: the loss of the critics' values of the actions taken in place of half the squared error,
        `(q [K, B], target [B]) -> [K, B]`, see `jaxrl.agents.custom.CriticLoss`; or, with `atoms`, the setting.
      **settings: fields of `TD3Config` to change, as in `td3(lr=1e-3, noise=0.2)`.

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
    return _maker("td3", config or TD3Config(), {**settings, **parts})


def ddpg(config: DDPGConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure a DDPG agent; arguments are as for `td3`."""
    return _maker("ddpg", config or DDPGConfig(), arguments)


def td3_bc(config: TD3BCConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure TD3+BC, to learn from data; arguments are as for `td3`."""
    return _maker("td3_bc", config or TD3BCConfig(), arguments)


def fast_td3(config: FastTD3Config | None = None, **arguments: Any) -> AgentMaker:
    """Configure FastTD3, for many simulated environments and large batches; arguments are as for `td3`.

    Seo et al. 2025, https://arxiv.org/abs/2505.22642. Critics learn distributions of the return, and each environment
    explores by noise of its own scale. Environments, batches and updates are the strategy's.
    """
    return _maker("fast_td3", config or FastTD3Config(), arguments)


def rebrac(config: ReBRACConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure ReBRAC, to learn from data; arguments are as for `td3`."""
    return _maker("rebrac", config or ReBRACConfig(), arguments)


def _maker(name: str, config: Any, arguments: Mapping[str, Any]) -> AgentMaker:
    """Return the maker of an agent of this family."""
    return critics.critic_maker(name, _build, config, arguments, _check)


def _check(config: TD3Config, parts: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for settings that contradict each other."""
    sequences.check_core(config, make_policy=parts["make_policy"], make_critic=parts["make_critic"])
    # With a core, the memory is that of the networks alone.
    refuse_beside(config, "noise_memory", core="none")
    refuse_beside(config, "noise_min", core="none")
    # Both weigh the distance from the data's actions.
    refuse_beside(config, "bc_alpha", actor_bc_coef=0.0)
    critics.check_atoms(config, parts)
    if config.noise_min > config.noise:
        raise SettingsError(
            f"agent.noise_min is {config.noise_min} and agent.noise {config.noise}; expected noise_min at most noise"
        )


def _build(name: str, config: TD3Config, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    space = cast(Box, spec.action_space)
    size = critics.space_size(space)
    # The policy is deterministic: `distribution` of its head returns the action itself, from -1 to 1.
    head = Head(size, cast(Any, jnp.tanh), partial(to_box, space))
    memories = sequences.initial_memories(config, config.num_critics)
    networks = (
        critics.build_networks(config, custom, spec, head, max(1, config.atoms))
        if memories is None
        else critics.recurrent_networks(config, spec, head)
    )
    values = critics.mean_or_atom_values(config, custom, config.critic_target)
    parts = critics.make_parts(config, custom, networks, spec, head, values, memories)
    noise: PyTree = jnp.zeros(size, jnp.float32) if config.noise_memory else None
    if config.noise_min:
        noise = ScaledNoise(jnp.float32(0.0), () if noise is None else noise)
    with_critics = lambda state: state._replace(target_policy=(), target_critic=(), opt_state=())
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        strip=lambda state: state._replace(critic=(), target_policy=(), target_critic=(), opt_state=(), reach=()),
        memory=noise if memories is None else memories,
        window=sequences.sequence_spec(config),
        apply=critics.apply_fns(parts.networks),
        policy_fns=critics.critic_policy_fns(
            parts,
            "acts deterministically with added noise; single actions have no probability",
            keep_critic=with_critics,
        ),
        # Actors need critics with memories, which acting carries on, see `_act`.
        fns=AgentFns(publish=None if memories is None else with_critics),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=("noise", "noise_min") if config.noise_min else ("noise",),
            offline=isinstance(config, TD3BCConfig | ReBRACConfig),
            next_actions=config.critic_bc_coef > 0,
            bounds_returns=config.derives_support,
        ),
    )


def _init(parts: Parts, key: Key) -> TD3State:
    policy, critic = critics.init_networks(parts, key)
    hyper = TD3Hyper(*make_hyper(asdict(parts.config), TD3Hyper._fields, optional=OPTIONS))
    opt_state = OptStates(parts.gradient_step.init(policy, hyper.policy_lr), parts.gradient_step.init(critic, hyper.lr))
    # Targets must be copies: all of these arrays are donated to the compiled loop.
    target_policy, target_critic = jax.tree.map(jnp.copy, (policy, critic))
    return TD3State(policy, critic, target_policy, target_critic, opt_state, hyper, critics.initial_reach(parts.config))


def _policy(parts: Parts, params: PyTree, obs: PyTree) -> Array:
    """Return the policy's actions, from -1 to 1, `[B, D]`."""
    return cast(Array, parts.head.distribution(parts.networks.policy.apply(params, critics.to_policy(obs))))


def _act(parts: Parts, state: TD3State, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode) -> tuple[Array, Any]:
    action, to_env = _policy(parts, state.policy, obs), parts.head.to_env
    if parts.memory is not None:
        if key is not None and mode != "exploit":
            action = action + state.hyper.noise * jax.random.normal(key, action.shape, jnp.float32)
        # Critics have memories too, and must see each step to have them when they learn.
        memories = critics.next_memories(parts, obs, state.policy, state.critic if state.critic else ())
        return to_env(action), {"memory": memories}
    if key is None or mode == "exploit":
        return to_env(action), {"memory": obs.memory} if isinstance(obs, RecurrentObs) else ()
    # Noise may carry actions beyond their bounds, to which `to_env` clips them.
    if isinstance(obs, RecurrentObs) and isinstance(obs.memory, ScaledNoise):
        return _act_scaled(parts, state.hyper, action, obs.memory, key)
    noise = jax.random.normal(key, action.shape, jnp.float32)
    if not isinstance(obs, RecurrentObs):
        return to_env(action + state.hyper.noise * noise), ()
    noise = critics.correlated_noise(state.hyper.noise_memory, obs.memory, noise)
    return to_env(action + state.hyper.noise * noise), {"memory": noise}


def _act_scaled(
    parts: Parts, hyper: TD3Hyper, action: Array, memory: ScaledNoise, key: Key
) -> tuple[Array, dict[str, ScaledNoise]]:
    """Add noise of each environment's own scale to the policy's actions `[N, D]`. The key is consumed."""
    key, scale_key = jax.random.split(key)
    drawn = jax.random.uniform(scale_key, memory.scale.shape, jnp.float32, hyper.noise_min, hyper.noise)
    # The memory begins anew with each episode, and with it the scale.
    scale = jnp.where(memory.scale > 0, memory.scale, drawn)
    noise = jax.random.normal(key, action.shape, jnp.float32)
    if parts.config.noise_memory:
        noise = critics.correlated_noise(hyper.noise_memory, memory.noise, noise)
    next_memory = ScaledNoise(scale, noise if parts.config.noise_memory else ())
    return parts.head.to_env(action + scale[:, None] * noise), {"memory": next_memory}


def _update(parts: Parts, state: TD3State, batch: Batch, key: Key, opt_step: Array) -> tuple[TD3State, Metrics, Array]:
    """Update the critics, and every `policy_interval` optimisation steps (counted from 1) the policy and targets."""
    steps = critics.learning_steps(parts, batch)
    seen = critics.observe_around(parts, batch.items, state.target_policy, state.target_critic)
    next_action = _smooth_action(state.hyper, _policy(parts, state.target_policy, seen.then), key)
    # Another key than that of the noise: `training_key` folds a number into it.
    forward_key = critics.target_key(parts, key)
    outputs = critics.apply_critics(parts.networks.critic, state.target_critic, seen.then, next_action, key=forward_key)
    bonus: PyTree = ()
    if parts.config.critic_bc_coef:
        bonus = -state.hyper.critic_bc_coef * _next_distance(parts, steps.items, next_action)
    reach = critics.widen_reach(parts.config, state.reach, steps.items)
    values = parts.critic_values(reach)
    target, target_metrics = _target(parts, batch, steps, outputs, values, bonus)
    critic, metrics, priorities = critics.learn_critic(parts, state, batch, values, target, key, opt_step)
    state = state._replace(
        critic=critic.variables, opt_state=state.opt_state._replace(critic=critic.opt_state), reach=reach
    )
    gradient = partial(_policy_gradient, parts, state, batch, steps, key)
    metrics = {**metrics, **target_metrics}
    if parts.config.policy_interval == 1:
        return _move_policy(parts, state, gradient(), opt_step), metrics, priorities
    # A whole population shares one scalar counter, so the branch stays one under `vmap`, and the work is skipped.
    due = (opt_step + 1) % parts.config.policy_interval == 0
    moved = _move_policy(parts, state, optimizers.gradient_if(due, gradient), opt_step)
    return select(due, moved, state), metrics, priorities


def _smooth_action(hyper: TD3Hyper, action: Array, key: Key) -> Array:
    """Add clipped noise to the target policy's actions `[R, D]`: target policy smoothing, equations 14 and 15.

    The key is consumed.
    """
    noise = hyper.target_noise * jax.random.normal(key, action.shape, jnp.float32)
    noise = jnp.clip(noise, -hyper.target_noise_clip, hyper.target_noise_clip)
    return jnp.clip(action + noise, -1.0, 1.0)


def _target(
    parts: Parts, batch: Batch, steps: Batch, outputs: Array, values: CriticValues, bonus: PyTree
) -> tuple[Array, Metrics]:
    """Return what the critics are regressed on, and metrics.

    `outputs` `[K, R, n]` are the target critics' for the next steps, whose value has `bonus` `[R]` added, unless `()`.
    """
    without = isinstance(bonus, tuple)
    if values.support is not None:
        more = 0.0 if without else bonus
        return critics.target_distribution(parts.config, steps.items, outputs, values.support, more)
    v_t = values.policy_values(outputs)[:, 0]
    return critics.bootstrap_targets(parts, batch.items, steps.items, v_t if without else v_t + bonus), {}


def _next_distance(parts: Parts, items: Transition, action: Array) -> Array:
    """Return the squared distance `[B]` of `action` `[B, D]` from what the data did next; 0 where they did nothing."""
    next_action = items.extras
    if not isinstance(next_action, NextAction):
        raise SettingsError(
            f"agent.critic_bc_coef is {parts.config.critic_bc_coef}, but transitions have their next actions in data "
            "alone; learn from data only, or set it to 0"
        )
    of_data = critics.unit_actions(parts.spec, next_action.action)[0]
    return jnp.where(next_action.known, jnp.square(action - of_data).sum(-1), 0.0)


def _policy_gradient(parts: Parts, state: TD3State, batch: Batch, steps: Batch, key: Key) -> Gradient:
    """Return the gradient of the policy's loss; `steps` are the `learning_steps` of `batch`."""
    weight = steps.weight * steps.items.weight
    of_data: PyTree = ()
    loss = partial(_policy_loss, parts, state.critic, state.reach, 1.0, state.hyper)
    if parts.config.bc_alpha or parts.config.actor_bc_coef:
        # Critics and policies have actions from -1 to 1, whatever the bounds of the box.
        of_data = critics.unit_actions(parts.spec, steps.items.action)[0]
        obs = critics.observe_before(parts, batch.items.obs, batch.items.is_first, state.policy, state.critic)
        # Equation 5 normalises by the size of the values; no gradient goes through it.
        q = _value(parts, state.critic, state.reach, obs, _policy(parts, state.policy, obs))
        scale = value_weight(q, weight, state.hyper.bc_alpha if parts.config.bc_alpha else 1.0)
        loss = partial(_policy_loss, parts, state.critic, state.reach, scale, state.hyper)
    return optimizers.loss_gradient(
        parts.gradient_step,
        loss,
        state.policy,
        # As sampled, and not as seen: the policy's memories are recomputed under its gradient.
        (batch.items.obs, batch.items.is_first, weight, of_data, steps.items if parts.extra_policy_loss else ()),
        key=critics.policy_loss_key(parts, key),
    )


def _move_policy(parts: Parts, state: TD3State, gradient: Gradient, opt_step: Array) -> TD3State:
    """Update the policy by its gradient, and move the targets."""
    hyper = state.hyper
    policy = optimizers.apply_gradient(
        parts.gradient_step,
        gradient,
        state.policy,
        state.opt_state.policy,
        lr=hyper.policy_lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    return state._replace(
        policy=policy.variables,
        opt_state=state.opt_state._replace(policy=policy.opt_state),
        target_policy=optimizers.polyak_update(state.target_policy, policy.variables, hyper.tau),
        # Both targets move together with the policy, as in algorithm 1 of TD3.
        target_critic=optimizers.polyak_update(state.target_critic, state.critic, hyper.tau),
    )


def _value(parts: Parts, critic: PyTree, reach: PyTree, obs: PyTree, action: Array, key: Key | None = None) -> Array:
    """Return the values `[B]` that the policy improves of actions from -1 to 1, `[B, D]`; with a key, under dropout."""
    outputs = critics.apply_critics(parts.networks.critic, critic, obs, action, key=key)
    if not parts.config.atoms and parts.config.critic_target == "min" and not parts.config.actor_bc_coef:
        # The policy follows one critic, as in algorithm 1 of TD3; that of ReBRAC the lowest, as in its authors' code.
        return outputs[0, :, 0]
    return parts.critic_values(reach).policy_values(outputs)[:, 0]


def value_weight(q: Array, weight: Array, alpha: Array | float) -> Array:
    """Return `alpha` divided by the weighted mean of `|q|` `[B]` (equation 5 of TD3+BC)."""
    # One weight for the whole batch, and so for all of its shards and pieces.
    count, size = shards.psum((jnp.sum(weight), jnp.sum(weight * jnp.abs(q))))
    return alpha * count / jnp.maximum(size, 1e-6)


def _policy_loss(
    parts: Parts,
    critic: PyTree,
    reach: PyTree,
    scale: Array | float,
    hyper: TD3Hyper,
    policy: PyTree,
    batch: PyTree,
    key: Key | None,
) -> tuple[Array, tuple[tuple, PyTree]]:
    """Return the negated weighted mean of the value (equation 9 of DDPG), times `scale`; and the policy's collections.

    TD3+BC adds the mean squared distance from the data's actions (its equation 3), ReBRAC a share of the summed one.
    """
    obs, is_first, weight, of_data, items = batch
    policy_key, critic_key = critics.policy_loss_keys(parts, key)
    obs = critics.observe_before(parts, obs, is_first, policy, critic)
    outputs, collections = forward(parts.networks.policy, policy, critics.to_policy(obs), key=policy_key)
    action = cast(Array, parts.head.distribution(outputs))
    loss = -scale * _value(parts, critic, reach, obs, action, critic_key)
    if parts.config.bc_alpha:
        loss = loss + jnp.mean(jnp.square(action - of_data), axis=-1)
    if parts.config.actor_bc_coef:
        loss = loss + hyper.actor_bc_coef * jnp.sum(jnp.square(action - of_data), axis=-1)
    if parts.extra_policy_loss is not None:
        loss = loss + critics.extra_policy_term(parts, policy, items, action, weight)
    return jnp.mean(weight * loss), ((), collections)

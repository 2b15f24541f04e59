"""Relative entropy pathwise policy optimisation (REPPO), on-policy learning with a Q-function.

Voelcker et al. 2025, https://arxiv.org/abs/2507.11019. Each rollout of the policy `p` gives targets for the Q-function,

    G_tm1 = r_t + d_t (alpha H(p(s_t)) + (1 - lambda) Q(s_t, a') + lambda G_t),    a' drawn from p(s_t)

where `H` is the entropy. They are learnt by cross-entropy, as histograms on a fixed support (`losses.hl_gauss`). The
new policy `q` improves the Q-function by the gradient that passes through its action, within a bound on the divergence
from `p`; at each observation it minimises

    -Q(s, a) - alpha H(q(s)),  a drawn from q(s)       if KL(p(s) || q(s)) < bound
    beta KL(p(s) || q(s))                              otherwise

Discrete actions are not drawn: both values are expectations over all of them. `alpha` and `beta` are learnt beside it:
`alpha` falls where the entropy is above its target, `beta` rises where the divergence is above its bound. Both are in
units of a hundredth of the support. As the support follows from the rewards, defaults hold for rewards of any scale.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import distributions, masks, nn, shards, spaces
from jaxrl.agents import critics, optimizers
from jaxrl.agents.base import Agent, AgentFns, AgentInfo, AgentMaker, Mode, PolicyFns
from jaxrl.agents.checks import check_actions, make_hyper
from jaxrl.agents.custom import (
    CustomParts,
    ExtraLoss,
    MakeNetwork,
    MakePolicy,
    agent_maker,
    build_network,
    extra_term,
    observation_structs,
    policy_output,
    value_output,
)
from jaxrl.agents.exploration import TEMPERATURE, mask_values
from jaxrl.agents.fields import Activation, AtLeast, NetworkConfig, OptimizerConfig, Positive, Rate, Real, Share
from jaxrl.agents.losses import cross_entropy, hl_gauss
from jaxrl.agents.optimizers import GradientStep, Optimizer, gradient_update
from jaxrl.agents.returns import lambda_returns
from jaxrl.agents.values import (
    ENTROPY_MARGIN,
    atoms_between,
    check_support,
    expected_value,
    init_return_bounds,
    select_row,
    update_return_bounds,
)
from jaxrl.distributions import Categorical, Distribution, Head, TanhGaussian
from jaxrl.masks import PRIVILEGED
from jaxrl.metrics import Metrics
from jaxrl.nn import Critic, Network, PolicyNetwork, QNetwork, merge_axes
from jaxrl.nn.custom import ROWS, Output
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.tuning import mark_initial, tunable
from jaxrl.types import Batch, Rollout, Transition
from jaxrl.xla import flat

UNITS = 100.0
"""Number of units in the width of the support. With a discount of 0.99 one is the range of a step's rewards."""
ADAM = optimizers.gradient_step(optimizers.OPTIMIZERS["adam"])
"""Optimizer of the multipliers, whatever optimises the networks."""


@dataclass(frozen=True)
class REPPOConfig(NetworkConfig, OptimizerConfig):
    """Settings of REPPO."""

    lr: Rate = 3e-4
    max_grad_norm: Positive = 0.5
    activation: Activation = "silu"
    layer_norm: bool = True
    """Apply layer normalisation before each activation."""
    q_lambda: Share = 0.95
    """Lambda of the targets; 0: one-step targets, 1: Monte-Carlo returns."""
    kl_bound: Positive = 0.1
    """Divergence from the policy of the rollout at which the policy stops improving at an observation."""
    kl_weight: Positive = 0.01
    """Initial weight of the divergence beyond the bound; it is learnt."""
    temperature: Positive = 0.01
    """Initial entropy temperature; it is learnt."""
    target_entropy: Real = 0.0
    """Entropy in nats at which the temperature aims, for actions scaled to -1 to 1; 0: minus half the number of action
    dimensions, or for discrete actions 0.3 times the entropy of the uniform policy."""
    atoms: Annotated[int, AtLeast(2)] = 151
    """Number of bins of the support."""
    v_min: Real | None = None
    """Lowest return that the critic can represent; unset: derived from the rewards seen and the discount."""
    v_max: Real | None = None
    """Highest return that the critic can represent; unset: as for `v_min`."""


class REPPOHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    q_lambda: Array
    kl_bound: Array
    target_entropy: Array
    exploration: PyTree = ()
    """Temperature at which an actor samples actions, if set per actor; else `()`."""


class Multipliers(NamedTuple):
    """The learnt weights `alpha` and `beta` as logarithms, or their gradients; scalars."""

    log_temperature: Array
    log_kl_weight: Array


class OptStates(NamedTuple):
    """States of the optimizers."""

    policy: PyTree
    critic: PyTree
    multipliers: PyTree


class REPPOState(NamedTuple):
    """Agent state. Fields other than `policy` and `hyper` are empty in an acting-only copy."""

    policy: PyTree
    critic: PyTree
    multipliers: PyTree
    opt_state: PyTree
    hyper: REPPOHyper
    reach: PyTree
    """The `ReturnBounds` from which the support is derived."""


class Sample(NamedTuple):
    """Steps `[B]` that an update learns from."""

    obs: PyTree
    action: Array
    reward: Array
    discount: Array
    target: Array
    """Regression target of the action's value, `G_tm1`."""
    behaviour: Distribution
    """The policy of the rollout, of raw actions."""
    weight: Array
    """1, or 0 for a step that must not be learnt from."""


class _Parts(NamedTuple):
    config: REPPOConfig
    policy: Network
    critic: Network
    gradient_step: GradientStep
    spec: EnvSpec
    head: Head
    extra_loss: ExtraLoss | None
    extra_policy_loss: ExtraLoss | None


# --- the equations ----------------------------------------------------------------------------------------------


def soft_targets(
    items: Transition, last: Array, q_t: Array, entropy_t: Array, temperature: Array, lambda_: Array
) -> Array:
    """Return the targets `G_tm1` `[T, N]` of a rollout, given `Q(s_t, a')` and `H(p(s_t))` at the true successors.

    `lambda_` `[T, N]` counts as 0 where `last` is true, at ends of episodes, and at the end of the rollout.
    """
    # The entropy is that of the successor, so it is discounted with it, and 0 after a termination.
    reward = items.reward + items.discount * temperature * entropy_t
    return jax.vmap(lambda_returns, in_axes=1, out_axes=1)(reward, items.discount, last, q_t, lambda_)


def critic_loss(logits: Array, target: Array, support: Array) -> Array:
    """Return the cross-entropy `[B]` of `logits` `[B, n]` and the histograms of `target` `[B]` on `support` `[n]`."""
    return jax.vmap(cross_entropy)(logits, jax.vmap(hl_gauss, in_axes=(0, None))(target, support))


def policy_loss(value: Array, kl: Array, kl_bound: Array, kl_weight: Array) -> Array:
    """Return `-value` where the divergence `kl` is below its bound, `kl_weight * kl` elsewhere; `[B]`."""
    return jnp.where(kl < kl_bound, -value, kl_weight * kl)


def multiplier_gradients(multipliers: Multipliers, excess_entropy: Array, excess_kl: Array) -> Multipliers:
    """Return the gradients of `alpha * excess_entropy` and `-beta * excess_kl` for the logarithms.

    The excesses are means of entropy less its target, and of divergence less its bound.
    """
    temperature, kl_weight = map(jnp.exp, multipliers)
    return Multipliers(temperature * excess_entropy, -kl_weight * excess_kl)


# --- learning ---------------------------------------------------------------------------------------------------


def _prepare(parts: _Parts, state: REPPOState, rollout: Rollout) -> Sample:
    """Return a rollout's steps `[T * N]` with targets and the policy that took them."""
    items, last, hyper = rollout.items, rollout.last, state.hyper
    rows = jax.tree.map(merge_axes, items._replace(weight=jnp.broadcast_to(items.weight, last.shape)))
    support = _support(parts.config, state.reach)
    q_t, entropy_t = _action_value(
        parts, state.critic, support, rows.next_obs, _policy(parts, state.policy, rows.next_obs), rows.extras
    )
    behaviour, lambda_ = _policy(parts, state.policy, rows.obs), jnp.full(last.shape, hyper.q_lambda)
    if "log_prob" in items.extras:
        # Steps of actors with other parameters: no more of a return is passed on than the policy itself would have
        # taken. `G_t` begins with the action of the next row.
        ratio = jnp.exp(
            behaviour.log_prob(parts.head.to_raw(rows.action)).reshape(last.shape) - items.extras["log_prob"]
        )
        lambda_ = lambda_ * jnp.minimum(1.0, jnp.roll(ratio, -1, axis=0))
    temperature = jnp.exp(state.multipliers.log_temperature) * _unit(support)
    at = lambda x: x.reshape(last.shape)
    target = merge_axes(soft_targets(items, last, at(q_t), at(entropy_t), temperature, lambda_))
    return Sample(rows.obs, rows.action, rows.reward, rows.discount, target, behaviour, rows.weight)


def _update(
    parts: _Parts, state: REPPOState, batch: Batch, key: Key, opt_step: Array
) -> tuple[REPPOState, Metrics, Array]:
    """Update the critic, then the policy against the new critic, and the multipliers."""
    hyper, items = state.hyper, batch.items
    reach = update_return_bounds(state.reach, cast(Transition, items))
    support = _support(parts.config, reach)
    rates = {"lr": hyper.lr, "max_norm": hyper.max_grad_norm, "opt_step": opt_step}
    critic = gradient_update(
        parts.gradient_step,
        partial(_critic_loss, parts, support),
        state.critic,
        state.opt_state.critic,
        items,
        key=nn.training_key(parts.critic, key),
        **rates,
    )
    policy = gradient_update(
        parts.gradient_step,
        partial(_policy_loss, parts, support, critic.variables, state.multipliers, hyper.kl_bound),
        state.policy,
        state.opt_state.policy,
        (items, _deviations(parts, key, items.weight.shape[0])),
        key=nn.training_key(parts.policy, key, 1),
        **rates,
    )
    error, q, outside = critic.aux
    entropy, kl = policy.aux
    mean = lambda x: shards.pmean(jnp.mean(items.weight * x))
    wanted = critics.target_entropy(
        parts.config.target_entropy, hyper.target_entropy, _usual_entropy(parts.spec), items.obs
    )
    gradients = multiplier_gradients(
        state.multipliers,
        mean(entropy - wanted),
        mean(kl - hyper.kl_bound),
    )
    multipliers, opt_state, _ = ADAM.step(
        state.multipliers,
        flat.ravel(gradients),
        state.opt_state.multipliers,
        optimizers.decay_lr(hyper.lr, parts.config.lr_decay, opt_step),
        jnp.float32(jnp.inf),  # not clipped: the one multiplier must not hold up the other
    )
    of_steps = {"q": q, "td_error": jnp.abs(error), "entropy": entropy, "kl": kl}
    if parts.config.v_min is not None or parts.config.v_max is not None:
        of_steps["out_of_support"] = outside
    metrics = {
        "loss": critic.loss,
        **shards.step_means(of_steps, items.weight),
        "grad_norm": critic.norm,
        "policy_loss": policy.loss,
        "policy_grad_norm": policy.norm,
        "temperature": jnp.exp(state.multipliers.log_temperature) * _unit(support),
        "kl_weight": jnp.exp(state.multipliers.log_kl_weight) * _unit(support),
    }
    opt_states = OptStates(policy.opt_state, critic.opt_state, opt_state)
    state = REPPOState(policy.variables, critic.variables, multipliers, opt_states, hyper, reach)
    return state, metrics, jnp.abs(error)


def _critic_loss(
    parts: _Parts, support: Array, params: PyTree, items: Sample, key: Key | None
) -> tuple[Array, tuple[tuple[Array, Array, Array], PyTree]]:
    """Return the mean loss; errors, values and flags of targets beyond the support, `[B]`; the critic's collections."""
    taken = critics.unit_actions(parts.spec, items.action)
    out, collections = _logits(parts, params, items.obs, *taken, key=key)
    logits = out[:, 0] if taken else jax.vmap(select_row)(out, items.action)
    loss, q = critic_loss(logits, items.target, support), _mean_return(logits, support)
    if parts.extra_loss is not None:
        values = q if taken else _mean_return(out, support)
        loss = loss + extra_term(parts.extra_loss, params, items, values, items.weight)
    outside = (items.target < support[0]) | (items.target > support[-1])
    return jnp.mean(items.weight * loss), ((items.weight * (items.target - q), q, outside), collections)


def _policy_loss(
    parts: _Parts,
    support: Array,
    critic: PyTree,
    multipliers: Multipliers,
    kl_bound: Array,
    params: PyTree,
    batch: tuple[Sample, PyTree],
    key: Key | None,
) -> tuple[Array, tuple[tuple[Array, Array], PyTree]]:
    """Return the mean loss, entropy and divergence `[B]`, and the policy's collections."""
    items, extras = batch
    outputs, collections = nn.forward(parts.policy, params, masks.for_policy(items.obs), key=key)
    policy = distributions.mask_distribution(parts.head.distribution(outputs), masks.get_mask(items.obs))
    # The critic is a constant here; the gradient reaches the policy through its action, or its probabilities.
    q, entropy = _action_value(parts, critic, support, items.obs, policy, extras)
    kl = distributions.kl_divergence(items.behaviour, policy)
    temperature, kl_weight = map(jnp.exp, multipliers)
    loss = policy_loss(q / _unit(support) + temperature * entropy, kl, kl_bound, kl_weight)
    if parts.extra_policy_loss is not None:
        loss = loss + extra_term(parts.extra_policy_loss, params, items, policy, items.weight, "extra_policy_loss")
    return jnp.mean(items.weight * loss), ((entropy, kl), collections)


def _action_value(
    parts: _Parts, critic: PyTree, support: Array, obs: PyTree, policy: Distribution, extras: PyTree
) -> tuple[Array, Array]:
    """Return the value of the action of `policy` at `obs`, and its entropy, both `[B]`.

    A continuous action lies `extras["deviation"]` `[B, D]` standard deviations from the mean.
    """
    if isinstance(policy, Categorical):
        q = _mean_return(_logits(parts, critic, obs)[0], support)
        return jnp.sum(jax.nn.softmax(policy.logits) * q, axis=-1), policy.entropy()
    action = jnp.tanh(cast(TanhGaussian, policy).at(extras["deviation"]))
    return _mean_return(_logits(parts, critic, obs, action)[0], support)[:, 0], policy.entropy()


def _logits(parts: _Parts, params: PyTree, obs: PyTree, *action: Array, key: Key | None = None) -> tuple[Array, PyTree]:
    """Return the critic's logits `[B, A, n]`, with `A` 1 for a continuous `action`, and its collections."""
    out, collections = nn.forward(parts.critic, params, masks.for_critic(obs), *action, key=key)
    return out[:, None] if action else out, collections


def _mean_return(logits: Array, support: Array) -> Array:
    """Return the mean returns `[...]` of logits `[..., n]`."""
    return expected_value(jax.nn.softmax(logits), support)


def _support(config: REPPOConfig, reach: PyTree) -> Array:
    return atoms_between(reach, config.v_min, config.v_max, config.atoms, ENTROPY_MARGIN)


def _unit(support: Array) -> Array:
    return (support[-1] - support[0]) / UNITS


def _usual_entropy(spec: EnvSpec) -> float:
    """Return the target entropy of an agent whose settings name none."""
    actions = spec.action_space
    if isinstance(actions, Discrete):
        return 0.3 * math.log(actions.n)
    return -critics.space_size(cast(Box, actions)) / 2


def _deviations(parts: _Parts, key: Key | None, rows: int) -> dict[str, Array]:
    """Draw deviations of continuous actions from their mean, `[rows, D]`. The key is consumed; without one, zeros."""
    if isinstance(parts.spec.action_space, Discrete):
        return {}
    shape = (rows, critics.space_size(cast(Box, parts.spec.action_space)))
    return {"deviation": jnp.zeros(shape) if key is None else jax.random.normal(key, shape, jnp.float32)}


# --- acting -----------------------------------------------------------------------------------------------------


def _act(
    parts: _Parts,
    state: REPPOState,
    obs: PyTree,
    key: Key | None,
    opt_step: Array,
    mode: Mode,
    with_log_prob: bool = False,
) -> tuple[Array, dict[str, Array]]:
    policy = _policy(parts, state.policy, obs, state.hyper.exploration)
    rows = jax.tree.leaves(obs)[0].shape[0]
    if key is None or mode == "exploit":
        return parts.head.to_env(policy.mode()), _deviations(parts, None, rows)
    act_key, next_key = jax.random.split(key)
    action = parts.head.to_env(policy.sample(act_key))
    # Targets draw an action at the successor, which is not known yet: its noise is drawn here, with a key at hand.
    extras = _deviations(parts, next_key, rows)
    if with_log_prob:
        # Of the raw action as the learner will have it, after a way through the action space and back.
        extras["log_prob"] = policy.log_prob(parts.head.to_raw(action))
    return action, extras


def _policy(parts: _Parts, params: PyTree, obs: PyTree, temperature: PyTree = ()) -> Distribution:
    outputs = cast(Array, parts.policy.apply(params, masks.for_policy(obs)))
    return distributions.mask_distribution(
        distributions.apply_temperature(parts.head.distribution(outputs), temperature), masks.get_mask(obs)
    )


def _values(parts: _Parts, state: REPPOState, obs: PyTree, action: PyTree) -> Array:
    """Return values as `ValueFn`."""
    taken = critics.unit_actions(parts.spec, action)
    q = _mean_return(_logits(parts, state.critic, obs, *taken)[0], _support(parts.config, state.reach))
    return q[:, 0] if taken else mask_values(q, obs)


# --- the agent --------------------------------------------------------------------------------------------------


def reppo(
    config: REPPOConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    extra_policy_loss: ExtraLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a REPPO agent; call the result with an `EnvSpec` of discrete actions or a bounded box to build it.

    Args:
      config: settings to start from; if left out, the defaults of `REPPOConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_policy: function from an `EnvSpec` and the head for its actions to a network `[B, ...] -> [B, head.outputs]`.
      make_critic: function from an `EnvSpec` to the network of the critic, which returns logits of `atoms` bins:
        `[B, ...], [B, D] -> [B, atoms]` for observations and actions scaled to -1 to 1, `[B, ...] -> [B, A, atoms]` for
        discrete actions.
      extra_loss: a term of the critic's loss for each step beside the agent's own, `(params, sample, q) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      extra_policy_loss: a term of the policy's loss, `(params, sample, distribution) -> [B]`.
      **settings: fields of `REPPOConfig` to change, as in `reppo(lr=1e-3, kl_bound=0.05)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    parts = {
        "make_optimizer": make_optimizer,
        "make_policy": make_policy,
        "make_critic": make_critic,
        "extra_loss": extra_loss,
        "extra_policy_loss": extra_policy_loss,
    }
    return agent_maker("reppo", _build, config or REPPOConfig(), {**settings, **parts}, [*parts], _check)


def _check(config: REPPOConfig, parts: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for ends of the support that are not apart."""
    check_support(config.atoms, config.v_min, config.v_max)


def _build(name: str, config: REPPOConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    head = distributions.make_head(spec, squash=True)
    parts = _Parts(
        config,
        *_networks(config, custom, spec, head),
        custom.gradient_step,
        spec,
        head,
        custom.extra_loss,
        custom.extra_policy_loss,
    )
    bare = {"multipliers": (), "opt_state": ()}
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        strip=lambda state: state._replace(critic=(), reach=(), **bare),
        prepare=partial(_prepare, parts),
        apply={
            "policy": lambda params, obs: parts.policy.apply(params, masks.for_policy(obs)),
            "critic": lambda params, obs, *action: parts.critic.apply(params, masks.for_critic(obs), *action),
        },
        policy_fns=PolicyFns(
            lambda state, obs, opt_step: _policy(parts, state.policy, obs),
            partial(_values, parts),
            head,
            masks.has_entry(spec.observation_space, PRIVILEGED),
            keep_critic=lambda state: state._replace(**bare),
        ),
        fns=AgentFns(behave=partial(_act, parts, with_log_prob=True)),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=TEMPERATURE,
            bounds_returns=config.v_min is None or config.v_max is None,
        ),
    )


def _networks(config: REPPOConfig, custom: CustomParts, spec: EnvSpec, head: Head) -> tuple[Network, Network]:
    """Return the policy and the critic: those that `config` describes, or those made in Python."""
    seen, whole = (masks.view_spec(spec, view) for view in (masks.for_policy, masks.for_critic))
    options: dict[str, Any] = {
        name: getattr(config, name) for name in ("torso", "features", "channels", "activation", "layer_norm", "dtype")
    }
    usual: Any = partial(PolicyNetwork, seen.observation_space, head.outputs, **options)
    policy = build_network(
        custom, "make_policy", (seen, head), usual, (observation_structs(seen),), (policy_output(head),)
    )
    args: tuple[PyTree, ...] = (observation_structs(whole),)
    if isinstance(spec.action_space, Discrete):
        usual = partial(QNetwork, whole.observation_space, spec.action_space.n, atoms=config.atoms, **options)
        made = value_output(spec, config.atoms)
    else:
        usual = partial(Critic, whole.observation_space, config.atoms, **options)
        made = Output("agent.atoms numbers for each observation", ((ROWS, config.atoms),))
        args = (*args, jnp.zeros((ROWS, critics.space_size(cast(Box, spec.action_space))), jnp.float32))
    for view in (seen, whole):
        nn.check_torso(config.torso, view.observation_space, config.channels)
    return policy, build_network(custom, "make_critic", (whole,), usual, args, (made,))


def _init(parts: _Parts, key: Key) -> REPPOState:
    config, policy_key, critic_key = parts.config, *jax.random.split(key)
    obs, actions = spaces.space_zeros(parts.spec.observation_space, 1), parts.spec.action_space
    size = 0 if isinstance(actions, Discrete) else critics.space_size(cast(Box, actions))
    action = (jnp.zeros((1, size), jnp.float32),) if size else ()
    policy = parts.policy.init(policy_key, masks.for_policy(obs))
    critic = parts.critic.init(critic_key, masks.for_critic(obs), *action)
    settings = {**asdict(config), "target_entropy": config.target_entropy or _usual_entropy(parts.spec)}
    hyper = REPPOHyper(*make_hyper(settings, REPPOHyper._fields, optional=TEMPERATURE))
    # Learnt from here on, so that these are no hyperparameters of the state; a sweep varies where they begin.
    first = {f"agent.{name}": getattr(config, name) for name in ("temperature", "kl_weight")}
    for name in first:
        mark_initial(name)
    multipliers = Multipliers(*(jnp.log(tunable(name, value)) for name, value in first.items()))
    opt_state = OptStates(
        parts.gradient_step.init(policy, hyper.lr),
        parts.gradient_step.init(critic, hyper.lr),
        ADAM.init(multipliers, hyper.lr),
    )
    return REPPOState(policy, critic, multipliers, opt_state, hyper, init_return_bounds())

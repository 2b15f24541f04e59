"""Soft actor-critic (SAC): maximum-entropy actor-critic.

Continuous actions follow Haarnoja et al. 2018 (https://arxiv.org/abs/1812.05905), discrete actions Christodoulou 2019
(https://arxiv.org/abs/1910.07207). The two differ only in how they take an expectation over actions.

Conservative Q-learning (Kumar et al. 2020, https://arxiv.org/abs/2006.04779) is an option, for learning from a fixed
data set. So are critics without target networks (CrossQ), with kernels on the unit sphere (XQC), of quantiles (TQC), of
atoms (FastSAC), drawn for each target (REDQ), with dropout (DroQ), of residual blocks (SimBa), many of them (SAC-N) and
diverse ones (EDAC; both An et al. 2021, https://arxiv.org/abs/2110.01548), each of which also has a name; and
temporally correlated exploration noise, for tasks that need the same action for many steps (Eberhard et al. 2023,
https://openreview.net/forum?id=hQ9V5QN27eS; here an autoregressive process). And so are recurrent cores, one for the
policy and one for each critic, which learn from sequences of replay, see `jaxrl.agents.sequences`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import distributions, shards
from jaxrl.agents import critics, optimizers, sequences
from jaxrl.agents.base import Agent, AgentFns, AgentInfo, AgentMaker, Mode
from jaxrl.agents.checks import check_actions, make_hyper
from jaxrl.agents.critics import CategoricalConfig, NextStep, Parts, Rows, SampledActions
from jaxrl.agents.custom import CustomParts, ExtraLoss, MakeNetwork, MakePolicy, agent_maker
from jaxrl.agents.exploration import TEMPERATURE
from jaxrl.agents.fields import (
    Activation,
    Between,
    Count,
    OneOf,
    Positive,
    Rate,
    Real,
    SequenceConfig,
    Share,
    Steps,
    Torso,
    Weight,
    Widths,
)
from jaxrl.agents.optimizers import OPTIMIZERS, Gradient, Optimizer
from jaxrl.agents.schedules import schedules_in
from jaxrl.agents.sequences import Views
from jaxrl.agents.values import ENTROPY_MARGIN
from jaxrl.distributions import Distribution, TanhGaussian
from jaxrl.errors import SettingsError
from jaxrl.masks import entropy_share, get_mask
from jaxrl.metrics import Metrics, stat
from jaxrl.nn import forward
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, RecurrentObs, Transition
from jaxrl.xla.reductions import select


@dataclass(frozen=True)
class SACConfig(SequenceConfig, CategoricalConfig):
    """Settings of SAC."""

    temperature: Positive = 1.0
    """Entropy temperature (the initial value if it is learnt)."""
    learn_temperature: bool = True
    """Adjust the temperature so that the policy's entropy approaches target_entropy."""
    temperature_lr: Rate = 3e-4
    """Learning rate of the log-temperature."""
    target_entropy: Real = 0.0
    """Target entropy in nats, for actions scaled to -1 to 1; 0: minus the number of action dimensions, or for discrete
    actions 0.3 times the entropy of the uniform policy."""
    target_network: bool = True
    """Bootstrap from a target network. Without one, a single pass through the critics values a step and the next one
    (CrossQ, which also has batch_norm)."""
    joint_batch: bool = False
    """With a target network and batch_norm, pass each step and the next one through critics and targets together, so
    that both are normalised by the statistics of both (XQC)."""
    policy_interval: Count = 1
    """Optimisation steps between updates of the policy and the temperature."""
    critic_subset: Steps = 0
    """Critics, drawn anew for each update, whose lowest value is the target; the policy then improves the mean of all
    (REDQ; 2 of 10 as published). 0: both take the lowest of all."""
    quantiles: Steps = 0
    """Quantiles of the return that each critic learns; the policy then improves the mean of all (TQC; 25 as published).
    0: the mean return alone."""
    drop_quantiles: Steps = 2
    """With quantiles, how many for each critic are left out of the target: of those of all critics, the largest
    (TQC)."""
    noise_memory: Annotated[float, Between(0.0, 0.9999)] = 0.0
    """Correlation of the exploration noise between successive steps of an episode (continuous actions); 0: independent
    noise."""
    cql: Weight = 0.0
    """Weight of the conservative (CQL) penalty; 0 turns it off."""
    cql_actions: Count = 10
    """Continuous actions sampled for the CQL penalty: this many uniformly, this many from the policy, and this many
    from the policy at the next observation."""
    eta: Weight = 0.0
    """Weight of a penalty for critics whose gradients in the action point the same way (continuous actions; EDAC, 1 to
    1000 as published); 0 turns it off."""


@dataclass(frozen=True)
class CQLConfig(SACConfig):
    """Settings of conservative Q-learning (CQL) on top of SAC."""

    cql: Weight = 5.0


@dataclass(frozen=True)
class CrossQConfig(SACConfig):
    """Settings of CrossQ."""

    lr: Rate = 1e-3
    policy_lr: Rate = 1e-3
    temperature_lr: Rate = 1e-3
    optimizer_b1: Share | None = 0.5
    target_network: bool = False
    batch_norm: Annotated[str, OneOf(("none", "batch", "renorm"))] = "renorm"
    policy_interval: Count = 3
    critic_features: Widths = (2048, 2048)


@dataclass(frozen=True)
class XQCConfig(SACConfig):
    """Settings of XQC."""

    temperature: Positive = 0.01
    joint_batch: bool = True
    batch_norm: Annotated[str, OneOf(("none", "batch", "renorm"))] = "batch"
    pre_activation_norm: bool = True
    weight_norm: bool = True
    policy_interval: Count = 3
    atoms: Steps = 101
    v_min: Real | None = -5.0
    v_max: Real | None = 5.0
    features: Widths = (256, 256, 256, 256)
    critic_features: Widths = (512, 512, 512, 512)


@dataclass(frozen=True)
class TQCConfig(SACConfig):
    """Settings of TQC."""

    num_critics: Count = 5
    quantiles: Steps = 25
    critic_features: Widths = (512, 512, 512)


@dataclass(frozen=True)
class REDQConfig(SACConfig):
    """Settings of REDQ."""

    num_critics: Count = 10
    critic_subset: Steps = 2
    policy_interval: Count = 20


@dataclass(frozen=True)
class DroQConfig(SACConfig):
    """Settings of DroQ."""

    critic_subset: Steps = 2
    policy_interval: Count = 20
    layer_norm: bool = True
    dropout: Annotated[float, Between(0.0, 0.9999)] = 0.01


@dataclass(frozen=True)
class SimBaConfig(SACConfig):
    """Settings of SAC on SimBa's networks."""

    lr: Rate = 1e-4
    policy_lr: Rate = 1e-4
    temperature_lr: Rate = 1e-4
    temperature: Positive = 0.01
    optimizer: str = "adamw"
    weight_decay: Weight | None = 1e-2
    torso: Torso = "simba"
    features: Widths = (128,)
    critic_features: Widths = (512, 512)


@dataclass(frozen=True)
class FastSACConfig(SACConfig):
    """Settings of FastSAC."""

    optimizer: str = "adamw"
    optimizer_b2: Share | None = 0.95
    weight_decay: Weight | None = 1e-3
    tau: Share = 0.125
    temperature: Positive = 0.001
    policy_interval: Count = 4
    critic_target: Annotated[str, OneOf(("min", "mean"))] = "mean"
    atoms: Steps = 101
    activation: Activation = "silu"
    layer_norm: bool = True
    features: Widths = (512, 256, 128)
    critic_features: Widths = (768, 384, 192)


@dataclass(frozen=True)
class SACNConfig(SACConfig):
    """Settings of SAC-N."""

    num_critics: Count = 10
    features: Widths = (256, 256, 256)


@dataclass(frozen=True)
class EDACConfig(SACNConfig):
    """Settings of EDAC."""

    eta: Weight = 1.0


ADAM = optimizers.gradient_step(OPTIMIZERS["adam"])
"""Optimizer of the temperature, whatever optimises the networks: weight decay, for one, makes no sense for a
temperature."""


class SACHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    policy_lr: Array
    temperature_lr: Array
    max_grad_norm: Array
    tau: Array
    temperature: Array
    target_entropy: Array
    cql: PyTree
    """`()` if it is off."""
    noise_memory: PyTree = ()
    """`()` if it is off."""
    exploration: PyTree = ()
    """Temperature at which an actor samples actions, if set per actor; else `()`."""
    eta: PyTree = ()
    """`()` if it is off."""


class OptStates(NamedTuple):
    """States of the optimizers; the temperature's is empty if the temperature is fixed."""

    policy: PyTree
    critic: PyTree
    temperature: PyTree


class SACState(NamedTuple):
    """Agent state. Fields other than `policy` and `hyper` are empty in an acting-only copy."""

    policy: PyTree
    critic: PyTree
    target: PyTree
    log_temperature: PyTree
    """A scalar, or `()` if the temperature is fixed."""
    opt_state: OptStates
    hyper: SACHyper
    reach: PyTree = ()
    """The `ReturnBounds` from which the support of atoms is derived; `()` if `v_min` and `v_max` are given, or without
    atoms."""


PARTS = ("make_optimizer", "make_policy", "make_critic", "extra_loss", "extra_policy_loss")
"""Arguments for parts made in Python."""


def sac(
    config: SACConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    extra_policy_loss: ExtraLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a SAC agent; call the result with an `EnvSpec` of discrete actions or a bounded box to build it.

    Args:
      config: settings to start from; if left out, the defaults of `SACConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_policy: function from an `EnvSpec` and the head for its actions to a network `[B, ...] -> [B, head.outputs]`.
      make_critic: function from an `EnvSpec` to the network of one critic: `[B, ...], [B, D] -> [B]` for observations
        and actions scaled to -1 to 1, `[B, ...] -> [B, A]` for discrete actions.
      extra_loss: a term of the critics' loss for each step beside the agent's own, `(params, items, q) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      extra_policy_loss: a term of the policy's loss, `(params, items, outputs) -> [B]`.
      **settings: fields of `SACConfig` to change, as in `sac(lr=1e-3, num_critics=5)`.

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
    return _maker("sac", config or SACConfig(), {**settings, **parts})


def cql(config: CQLConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure conservative Q-learning on top of SAC, to learn from data; arguments are as for `sac`."""
    return _maker("cql", config or CQLConfig(), arguments)


def crossq(config: CrossQConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure CrossQ: SAC with batch normalisation in place of target networks; arguments are as for `sac`.

    Bhatt et al. 2024, https://arxiv.org/abs/1902.05605.
    """
    return _maker("crossq", config or CrossQConfig(), arguments)


def xqc(config: XQCConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure XQC: SAC whose critics are well conditioned; arguments are as for `sac`.

    Palenicek et al. 2026, https://arxiv.org/abs/2509.25174. Batch normalisation, kernels on the unit sphere, and
    distributions of the return from -5 to 5, for which rewards are to be normalised, which is the processor's part:
    `off_policy` has `normalise_reward()` for it if no processor is given. For continuous actions.
    """
    return _maker("xqc", config or XQCConfig(), arguments)


def tqc(config: TQCConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure TQC: SAC whose critics learn quantiles, of which targets leave out the largest.

    Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269. For continuous actions; arguments are as for `sac`.
    """
    return _maker("tqc", config or TQCConfig(), arguments)


def redq(config: REDQConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure REDQ: SAC with many critics and as many updates, whose targets take the lowest of a random few.

    Chen et al. 2021, https://arxiv.org/abs/2101.05982. Arguments are as for `sac`; the number of updates for each
    environment step is the strategy's, `off_policy(..., updates=20)`; after as many the policy moves once
    (`policy_interval`).
    """
    return _maker("redq", config or REDQConfig(), arguments)


def droq(config: DroQConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure DroQ: REDQ with two critics that have dropout and layer normalisation; arguments are as for `sac`.

    Hiraoka et al. 2022, https://arxiv.org/abs/2110.02034. The number of updates for each environment step is the
    strategy's, as for `redq`.
    """
    return _maker("droq", config or DroQConfig(), arguments)


def simba(config: SimBaConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure SAC on SimBa's networks: residual blocks with layer normalisation; arguments are as for `sac`.

    Lee et al. 2024, https://arxiv.org/abs/2410.09754. Its observations are to be normalised, which is the processor's
    part: `off_policy` has `normalise_obs()` for it if no processor is given, a session needs one that does so.
    """
    return _maker("simba", config or SimBaConfig(), arguments)


def fast_sac(config: FastSACConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure FastSAC, for many simulated environments and large batches; arguments are as for `sac`.

    Seo et al. 2025, https://arxiv.org/abs/2512.01996. Critics learn distributions of the return, and targets take the
    mean of them. For continuous actions; environments, batches and updates are the strategy's.
    """
    return _maker("fast_sac", config or FastSACConfig(), arguments)


def sac_n(config: SACNConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure SAC-N: SAC with the lowest of many critics, to learn from data; arguments are as for `sac`.

    An et al. 2021, https://arxiv.org/abs/2110.01548.
    """
    return _maker("sac_n", config or SACNConfig(), arguments)


def edac(config: EDACConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure EDAC: SAC-N with a penalty for critics that agree on where to go, to learn from data.

    An et al. 2021, https://arxiv.org/abs/2110.01548. For continuous actions; arguments are as for `sac`.
    """
    return _maker("edac", config or EDACConfig(), arguments)


def _maker(name: str, config: Any, arguments: Mapping[str, Any]) -> AgentMaker:
    """Return the maker of an agent of this family."""
    return agent_maker(name, _build, config, arguments, PARTS, _check)


# --- learning ----------------------------------------------------------------------------------------------------


def _update(parts: Parts, state: SACState, batch: Batch, key: Key, opt_step: Array) -> tuple[SACState, Metrics, Array]:
    """Update the critics, the policy against the new critics, then the temperature (the paper's algorithm 1)."""
    config, hyper, rows = parts.config, state.hyper, critics.training_rows(parts, batch)
    policy_key, target_key, sample_key = jax.random.split(key, 3)
    # One temperature for all of this step; it is updated last.
    temperature = jnp.exp(state.log_temperature) if config.learn_temperature else hyper.temperature
    seen = critics.observe_around(parts, batch.items, state.policy, state.target)
    deviation = _deviations(parts, target_key, rows)
    # The next action comes from the present policy, not from a target policy as in TD3.
    policy_t = _policy(parts, state.policy, seen.then)
    reach = critics.widen_reach(config, state.reach, rows.items)
    support = parts.support_fn and parts.support_fn(reach)
    before = after = None
    if config.joint_batch:
        before = Rows(rows.items.obs, critics.unit_actions(parts.spec, rows.items.action))
        after = Rows(seen.then, _next_action(parts, policy_t, deviation))
    target: Array | NextStep
    more: Metrics = {}
    if support is not None:
        training_key = critics.target_key(parts, key, together=config.joint_batch)
        outputs, _, entropy_t = _evaluate(
            parts, policy_t, state.target, seen.then, deviation, key=training_key, before=before
        )
        target, more = critics.target_distribution(config, rows.items, outputs, support, temperature * entropy_t)
    elif config.target_network:
        pool: Callable[[Array], Array] = parts.policy_values
        if config.critic_subset:
            sample_key, subset_key = jax.random.split(sample_key)
            pool = partial(lowest_of_subset, subset_key, config.critic_subset)
        elif config.quantiles:
            pool = partial(truncated_mixture, config.drop_quantiles)
        training_key = critics.target_key(parts, key, together=config.joint_batch)
        v_t, entropy_t = _soft_value(
            parts, pool, policy_t, state.target, temperature, seen.then, deviation, key=training_key, before=before
        )
        target = critics.bootstrap_targets(parts, batch.items, rows.items, v_t, temperature * entropy_t)
    else:
        target, after = _next_step(parts, rows.items, policy_t, temperature, deviation)
    sampled = _sample_actions(parts, state.policy, seen, sample_key) if config.cql else None
    critic, metrics, priorities = critics.learn_critic(
        parts, state, batch, target, key, opt_step, sampled, hyper.eta, support, after
    )
    if parts.memory is not None:
        priorities = sequences.sequence_priorities(priorities, batch.weight.shape[0], config.priority_max)
    state = state._replace(
        critic=critic.variables,
        target=optimizers.polyak_update(state.target, critic.variables, hyper.tau) if config.target_network else (),
        opt_state=state.opt_state._replace(critic=critic.opt_state),
        reach=reach,
    )
    deviation = _deviations(parts, policy_key, rows)
    gradient = partial(_policy_gradient, parts, state, batch, rows, deviation, temperature, key)
    improve = partial(_improve_policy, parts, state, rows, temperature, opt_step=opt_step)
    if config.policy_interval == 1:
        state, policy_metrics = improve(gradient())
        measured: Metrics = {**policy_metrics}
    else:
        # A whole population shares one scalar counter, so the branch stays one under `vmap`, and the work is skipped.
        due = (opt_step + 1) % config.policy_interval == 0
        improved, policy_metrics = improve(optimizers.gradient_if(due, gradient))
        state = select(due, improved, state)
        # The zeros of a skipped update are no measurement.
        measured = {name: stat(value, due) for name, value in policy_metrics.items()}
    return state, {**metrics, **more, **measured, "temperature": temperature}, priorities


def _policy_gradient(
    parts: Parts,
    state: SACState,
    batch: Batch,
    rows: Batch,
    deviation: PyTree,
    temperature: Array,
    key: Key,
) -> Gradient:
    """Return the gradient of the policy's loss; `rows` are the `training_rows` of `batch`."""
    return optimizers.loss_gradient(
        parts.gradient_step,
        partial(_policy_loss, parts, critics.policy_pool(parts, state.reach), state.critic, temperature),
        state.policy,
        (
            # As sampled, and not as seen: the policy's memories are recomputed under its gradient.
            batch.items.obs,
            batch.items.is_first,
            deviation,
            rows.weight * rows.items.weight,
            rows.items if parts.extra_policy_loss else (),
        ),
        key=critics.policy_loss_key(parts, key),
    )


def _improve_policy(
    parts: Parts, state: SACState, rows: Batch, temperature: Array, gradient: Gradient, opt_step: Array
) -> tuple[SACState, dict[str, Array]]:
    """Update the policy by its gradient, and the temperature."""
    config, hyper = parts.config, state.hyper
    policy = optimizers.apply_gradient(
        parts.gradient_step,
        gradient,
        state.policy,
        state.opt_state.policy,
        lr=hyper.policy_lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    entropy = policy.aux
    log_temperature, opt_state = state.log_temperature, state.opt_state.temperature
    if config.learn_temperature:
        # The gradient of temperature * (entropy - target) with respect to the log-temperature (equation 18).
        wanted = _target_entropy(parts, hyper.target_entropy, rows.items.obs)
        slope = temperature * shards.pmean(jnp.mean((entropy - wanted) * rows.items.weight))
        log_temperature, opt_state, _ = ADAM.step(
            log_temperature,
            # The gradient of one parameter in the form of `ravel`.
            [slope[None]],
            opt_state,
            optimizers.decay_lr(hyper.temperature_lr, config.lr_decay, opt_step),
            hyper.max_grad_norm,
        )
    state = state._replace(
        policy=policy.variables,
        log_temperature=log_temperature,
        opt_state=state.opt_state._replace(policy=policy.opt_state, temperature=opt_state),
    )
    return state, {"policy_loss": policy.loss, "policy_grad_norm": policy.norm, "entropy": entropy.mean()}


def _policy_loss(
    parts: Parts,
    pool: Callable[[Array], Array],
    critic: PyTree,
    temperature: Array,
    policy: PyTree,
    batch: PyTree,
    key: Key | None,
) -> tuple[Array, tuple[Array, PyTree]]:
    """Return the negated weighted mean of the soft value, the entropy `[B]`, and the policy's collections."""
    obs, is_first, deviation, weight, items = batch
    policy_key, critic_key = critics.policy_loss_keys(parts, key)
    seen = critics.observe_before(parts, obs, is_first, policy, critic)
    outputs, collections = forward(parts.networks.policy, policy, critics.to_policy(seen), key=policy_key)
    distribution = _distribution(parts, outputs, seen)
    # Critics and temperature are constants here; gradients reach the policy through its action and its entropy.
    value, entropy = _soft_value(parts, pool, distribution, critic, temperature, seen, deviation, key=critic_key)
    loss = -value
    if parts.extra_policy_loss is not None:
        loss = loss + critics.extra_policy_term(parts, policy, items, distribution, weight)
    return jnp.mean(weight * loss), (entropy, collections)


def soft_value(q: Array, entropy: Array, temperature: Array, probability: Array | None = None) -> Array:
    """Return the value of a state with its entropy bonus, `sum_a p(a) q(a) + temperature * entropy`, `[B]`.

    Discrete actions have values and probabilities `[B, A]`, and the value is exact (Christodoulou 2019, equation 10).
    Continuous ones have the value `[B, 1]` of one action drawn from the policy, without `probability`, and its
    `-log p` as the entropy: an estimate (Haarnoja et al. 2018, equation 3). Samples `[B, S]` of the return after that
    action are values each, `[B, S]`.
    """
    if probability is None and q.shape[1] > 1:
        return q + (temperature * entropy)[:, None]
    value = q[:, 0] if probability is None else jnp.sum(probability * q, axis=-1)
    return value + temperature * entropy


def lowest_of_subset(key: Key, count: int, outputs: Array) -> Array:
    """Return the lowest values `[B, outputs]` of `count` critics drawn from all, `[K, B, outputs]`.

    One draw serves the batch (Chen et al. 2021, https://arxiv.org/abs/2101.05982, algorithm 1). The key is consumed.
    """
    return outputs[jax.random.choice(key, outputs.shape[0], (count,), replace=False)].min(0)


def truncated_mixture(drop: int, quantiles: Array) -> Array:
    """Return the quantiles `[K, B, M]` of all critics in order, without the `drop * K` largest; `[B, (M - drop) * K]`.

    Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269: what is left out are overestimates.
    """
    members, rows, count = quantiles.shape
    together = jnp.sort(jnp.moveaxis(quantiles, 0, 1).reshape(rows, members * count), axis=-1)
    return together[:, : (count - drop) * members]


def _policy_values(config: SACConfig) -> Callable[[Array], Array]:
    """Return what makes values for the policy, `[B, outputs]`, of the critics' outputs `[K, B, outputs]`."""
    if config.quantiles:
        return lambda outputs: outputs.mean((0, 2))[:, None]
    return critics.pool_values("mean" if config.critic_subset else config.critic_target)


def _soft_value(
    parts: Parts,
    pool: Callable[[Array], Array],
    policy: Distribution,
    critic: PyTree,
    temperature: Array,
    obs: PyTree,
    deviation: PyTree,
    *,
    key: Key | None,
    before: Rows | None = None,
) -> tuple[Array, Array]:
    """Return the soft value of `obs` `[B]`, or samples of it `[B, S]`, and the entropy of `policy` `[B]`.

    `pool` makes one value, or samples, of the critics' outputs `[K, B, ...]`. The rest is as for `_evaluate`.
    """
    outputs, probability, entropy = _evaluate(parts, policy, critic, obs, deviation, key=key, before=before)
    return soft_value(pool(outputs), entropy, temperature, probability), entropy


def _evaluate(
    parts: Parts,
    policy: Distribution,
    critic: PyTree,
    obs: PyTree,
    deviation: PyTree,
    *,
    key: Key | None,
    before: Rows | None = None,
) -> tuple[Array, Array | None, Array]:
    """Return the critics' outputs `[K, B, outputs]`, probabilities of discrete actions, and the policy's entropy `[B]`.

    A continuous action lies `deviation` `[B, D]` standard deviations from the mean, and gradients reach the policy
    through it (equations 8 and 9). With a key, which is consumed, the critics have dropout, and the steps `before`
    share their pass.
    """

    def apply(*action: Array) -> Array:
        if before is None:
            return critics.apply_critics(parts.networks.critic, critic, obs, *action, key=key)
        return critics.apply_together(parts.networks.critic, critic, before, Rows(obs, action), key)[1]

    if isinstance(parts.spec.action_space, Discrete):
        outputs, entropy = apply(), policy.entropy()
        return outputs, jax.nn.softmax(cast(Any, policy).logits), entropy
    # Critics take the squashed action. Its density is computed from the raw one, since `tanh` is hard to invert near 1.
    raw = cast(TanhGaussian, policy).at(deviation)
    entropy = -policy.log_prob(raw)
    return apply(jnp.tanh(raw)), None, entropy


def _next_action(parts: Parts, policy: Distribution, deviation: PyTree) -> tuple[Array, ...]:
    """Return the action of `policy`, as critics take it; `()` for discrete actions."""
    if isinstance(parts.spec.action_space, Discrete):
        return ()
    return (jnp.tanh(cast(TanhGaussian, policy).at(deviation)),)


def _next_step(
    parts: Parts, items: Transition, policy: Distribution, temperature: Array, deviation: PyTree
) -> tuple[NextStep, Rows]:
    """Return what the steps `items` `[R]` are regressed on without a target network; `policy` is that after them."""
    if isinstance(parts.spec.action_space, Discrete):
        action: tuple[Array, ...] = ()
        probability, entropy = jax.nn.softmax(cast(Any, policy).logits), policy.entropy()
    else:
        raw = cast(TanhGaussian, policy).at(deviation)
        action, probability, entropy = (jnp.tanh(raw),), jnp.ones((raw.shape[0], 1)), -policy.log_prob(raw)
    step = NextStep(items.reward, items.discount, probability, temperature * entropy)
    return step, Rows(items.next_obs, action)


def _target_entropy(parts: Parts, usual: Array, obs: PyTree) -> Array:
    """Return the target entropy; the default is, under a mask, a share of the entropy of the uniform policy there.

    Compared with the value in the state, which a population may override.
    """
    mask = get_mask(obs)
    # A target that the user set stays as it is. With a single action the entropy below would be divided by 0.
    if mask is None or parts.config.target_entropy or mask.shape[-1] == 1:
        return usual
    return jnp.where(usual == jnp.float32(_usual_entropy(parts.spec)), usual * entropy_share(mask), usual)


def _deviations(parts: Parts, key: Key, rows: Batch) -> PyTree:
    """Draw the deviations `[R, D]` of sampled actions from the mean; `()` for discrete actions, which need none.

    They are data of the loss, so that a batch that is cut into pieces has the same. The key is consumed.
    """
    if isinstance(parts.spec.action_space, Discrete):
        return ()
    return jax.random.normal(
        key, (rows.weight.shape[0], critics.space_size(cast(Box, parts.spec.action_space))), jnp.float32
    )


def _sample_actions(parts: Parts, policy: PyTree, seen: Views, key: Key) -> SampledActions:
    """Draw rivals for what is seen before a step: uniformly, from the policy there, and from the policy after it.

    The key is consumed.
    """
    if isinstance(parts.spec.action_space, Discrete):
        return SampledActions((), ())
    uniform_key, *keys = jax.random.split(key, 3)
    rows, size = jax.tree.leaves(seen.now)[0].shape[0], critics.space_size(cast(Box, parts.spec.action_space))
    shape = (rows, parts.config.cql_actions, size)
    # CQL, equation 4: the sum of exponentials is estimated by importance sampling. Uniform actions have density 2^-D.
    uniform = jax.random.uniform(uniform_key, shape, jnp.float32, -1.0, 1.0)
    actions, densities = [uniform], [jnp.full(shape[:2], -size * math.log(2), jnp.float32)]
    for obs, key in zip(seen, keys, strict=True):
        outputs = cast(Array, parts.networks.policy.apply(policy, critics.to_policy(obs)))
        # `[R, 1, D]`, which broadcasts against `S` actions in each row. All rivals are valued before the step,
        # whichever policy they come from.
        distribution = cast(TanhGaussian, parts.head.distribution(outputs[:, None]))
        raw = distribution.at(jax.random.normal(key, shape, jnp.float32))
        actions.append(jnp.tanh(raw))
        densities.append(distribution.log_prob(raw))
    # With the logarithm of their number, `conservative_gap` turns the sum over samples into a mean.
    action = jnp.concatenate(actions, axis=1)
    return SampledActions(action, jnp.concatenate(densities, axis=1) + math.log(action.shape[1]))


# --- acting ------------------------------------------------------------------------------------------------------


def _act(parts: Parts, state: SACState, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode) -> tuple[Array, Any]:
    distribution = _policy(parts, state.policy, obs, state.hyper.exploration)
    if parts.memory is not None:
        raw = distribution.mode() if key is None or mode == "exploit" else distribution.sample(key)
        # Critics have memories too, and must see each step to have them when they learn.
        memories = critics.next_memories(parts, obs, state.policy, state.critic if state.critic else ())
        return parts.head.to_env(raw), {"memory": memories}
    # A greedy action uses no noise, and leaves its memory as it is.
    if key is None or mode == "exploit":
        return parts.head.to_env(distribution.mode()), {"memory": obs.memory} if isinstance(obs, RecurrentObs) else ()
    if not isinstance(obs, RecurrentObs):
        return parts.head.to_env(distribution.sample(key)), ()
    # In the long run each action still follows the policy's distribution, and only successive ones are correlated. An
    # episode's first ones are nearer to the mean, because the memory begins at 0.
    after = critics.correlated_noise(
        state.hyper.noise_memory, obs.memory, jax.random.normal(key, obs.memory.shape, jnp.float32)
    )
    return parts.head.to_env(cast(TanhGaussian, distribution).at(after)), {"memory": after}


def _policy(parts: Parts, params: PyTree, obs: PyTree, temperature: PyTree = ()) -> Distribution:
    return _distribution(parts, parts.networks.policy.apply(params, critics.to_policy(obs)), obs, temperature)


def _distribution(parts: Parts, outputs: Array, obs: PyTree, temperature: PyTree = ()) -> Distribution:
    return distributions.mask_distribution(
        distributions.apply_temperature(parts.head.distribution(outputs), temperature), get_mask(obs)
    )


# --- the agent ---------------------------------------------------------------------------------------------------


def _check(config: SACConfig, parts: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for settings that contradict each other."""
    sequences.check_core(config, make_policy=parts["make_policy"], make_critic=parts["make_critic"])
    sequences.check_noise_memory(config)
    for name, alone in {"critic_subset": 0, "quantiles": 0}.items():
        if not config.target_network and getattr(config, name) != alone:
            raise SettingsError(
                f"agent.{name} is {getattr(config, name)}, but without agent.target_network targets come from the "
                f"critics themselves, all of them; leave target_network on, or set {name} to 0"
            )
    if config.critic_subset > config.num_critics:
        raise SettingsError(
            f"agent.critic_subset is {config.critic_subset}, but agent.num_critics {config.num_critics}; draw at most "
            "as many as there are"
        )
    if config.quantiles:
        _check_quantiles(config, parts)
    critics.check_atoms(
        config, parts["make_critic"], quantiles=0, critic_subset=0, cql=0.0, eta=0.0, target_network=True
    )
    for name in ("quantiles", "critic_subset"):
        if config.critic_target == "mean" and getattr(config, name):
            raise SettingsError(
                f"agent.critic_target is mean, but agent.{name} {getattr(config, name)} has a target of its own; set "
                f"critic_target to min, or {name} to 0"
            )
    if config.eta and (config.num_critics < 2 or config.core != "none"):
        what = f"num_critics {config.num_critics}" if config.num_critics < 2 else f"core {config.core}"
        raise SettingsError(f"agent.eta is {config.eta}, but agent.{what} has no pairs of critics for it; set eta to 0")
    _check_joint_batch(config, parts)
    if not config.target_network and config.core != "none":
        raise SettingsError(
            f"agent.target_network is off, but with agent.core {config.core} sequences need one; leave it on, "
            "or set core to none"
        )
    if config.learn_temperature and "temperature" in schedules_in(config.schedules):
        raise SettingsError("agent.temperature is learnt, and cannot follow a schedule; set learn_temperature=False")


def _check_joint_batch(config: SACConfig, parts: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a joint batch that joins nothing."""
    if not config.joint_batch:
        return
    if not config.target_network:
        raise SettingsError(
            "agent.joint_batch is on, but without agent.target_network a step and the next one share a pass anyway; "
            "leave it off, or target_network on"
        )
    if config.core != "none" or (config.batch_norm == "none" and parts["make_critic"] is None):
        what = f"core {config.core}" if config.core != "none" else "batch_norm none"
        raise SettingsError(
            f"agent.joint_batch is on, but critics with agent.{what} have no statistics of a batch; leave it off"
        )


def _check_quantiles(config: SACConfig, parts: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for settings that do not go together with quantiles."""
    if config.quantiles < 2 or (config.quantiles - config.drop_quantiles) * config.num_critics < 2:
        raise SettingsError(
            f"agent.quantiles is {config.quantiles} and agent.drop_quantiles {config.drop_quantiles}; expected at "
            "least 2 quantiles, and 2 of all critics that are left, or quantiles 0"
        )
    for name, given in {"critic_subset": config.critic_subset, "cql": config.cql}.items():
        if given:
            raise SettingsError(
                f"agent.quantiles is {config.quantiles} and agent.{name} {given}; critics of quantiles have no {name}, "
                "so set one of them to 0"
            )
    if config.core != "none" or parts["make_critic"] is not None:
        what = "a critic made in Python" if config.core == "none" else f"agent.core {config.core}"
        raise SettingsError(f"agent.quantiles is {config.quantiles}, which {what} does not have; set quantiles to 0")


def _build(name: str, config: SACConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    if config.noise_memory and isinstance(spec.action_space, Discrete):
        raise SettingsError(
            f"agent.noise_memory is {config.noise_memory}, but {spec.name} has Discrete actions, each drawn "
            "afresh; set it to 0"
        )
    if config.quantiles and isinstance(spec.action_space, Discrete):
        raise SettingsError(
            f"agent.quantiles is {config.quantiles}, but {spec.name} has Discrete actions; set it to 0, or take dqn "
            "with values qr"
        )
    if config.atoms and isinstance(spec.action_space, Discrete):
        raise SettingsError(
            f"agent.atoms is {config.atoms}, but {spec.name} has Discrete actions; set it to 0, or take dqn with "
            "values c51"
        )
    if config.eta and isinstance(spec.action_space, Discrete):
        raise SettingsError(f"agent.eta is {config.eta}, but {spec.name} has Discrete actions; set it to 0")
    head = distributions.make_head(spec, squash=True)
    memories = sequences.initial_memories(config, config.num_critics)
    networks = (
        critics.build_networks(config, custom, spec, head, max(1, config.quantiles, config.atoms))
        if memories is None
        else critics.recurrent_networks(config, spec, head)
    )
    parts = critics.make_parts(
        config,
        custom,
        networks,
        spec,
        head,
        memory=memories,
        policy_values=_policy_values(config),
        support_fn=config.support_fn(ENTROPY_MARGIN),
    )
    # The memory of the exploration noise is the noise of the step before, and 0 at an episode's start.
    noise = jnp.zeros(critics.space_size(cast(Box, spec.action_space)), jnp.float32) if config.noise_memory else None
    with_critics = lambda state: state._replace(target=(), log_temperature=(), opt_state=())
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        strip=lambda state: state._replace(critic=(), target=(), log_temperature=(), opt_state=(), reach=()),
        memory=noise if memories is None else memories,
        window=sequences.sequence_spec(config),
        apply=critics.apply_fns(parts.networks),
        policy_fns=critics.critic_policy_fns(
            parts,
            lambda state, obs, opt_step: _policy(parts, state.policy, obs),
            keep_critic=with_critics,
        ),
        fns=AgentFns(
            # Actors need critics with memories, which acting carries on, see `_act`.
            publish=None if memories is None else with_critics,
        ),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=TEMPERATURE,
            offline=isinstance(config, CQLConfig | SACNConfig),
            bounds_returns=config.derives_support,
        ),
    )


def _init(parts: Parts, key: Key) -> SACState:
    config = parts.config
    policy, critic = critics.init_networks(parts, key)
    entropy = config.target_entropy or _usual_entropy(parts.spec)
    settings = {**asdict(config), "target_entropy": entropy}
    hyper = SACHyper(*make_hyper(settings, SACHyper._fields, optional=("cql", "noise_memory", "eta", *TEMPERATURE)))
    log_temperature: PyTree = ()
    learnt: PyTree = ()
    if config.learn_temperature:
        log_temperature = jnp.log(hyper.temperature)
        learnt = ADAM.init(log_temperature, hyper.temperature_lr)
    opt_state = OptStates(
        parts.gradient_step.init(policy, hyper.policy_lr), parts.gradient_step.init(critic, hyper.lr), learnt
    )
    # The target must be a copy: both arrays are donated to the compiled loop.
    target = jax.tree.map(jnp.copy, critic) if config.target_network else ()
    return SACState(policy, critic, target, log_temperature, opt_state, hyper, critics.initial_reach(config))


def _usual_entropy(spec: EnvSpec) -> float:
    if isinstance(spec.action_space, Discrete):
        return 0.3 * math.log(spec.action_space.n)
    return -float(critics.space_size(cast(Any, spec.action_space)))

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import distributions, shards
from jaxrl.agents import critics, optimizers, sequences
from jaxrl.agents.base import Agent, AgentFns, AgentInfo, AgentMaker, Mode
from jaxrl.agents.checks import check_actions, make_hyper, refuse_beside
from jaxrl.agents.critic_values import CriticValues, quantile_values, reduce_critics
from jaxrl.agents.critics import (
    CategoricalConfig,
    OwnBootstrap,
    Parts,
    Penalties,
    SampledActions,
    StateAction,
    ValuesFn,
)
from jaxrl.agents.custom import CriticLoss, CustomParts, ExtraLoss, MakeNetwork, MakePolicy
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
from jaxrl.masks import get_mask
from jaxrl.metrics import Metrics, stat
from jaxrl.nn import forward
from jaxrl.nn.custom import split_variables
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.tuning import mark_initial
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
    """Weight of a penalty for critics whose gradients in the action point the same way (continuous actions; EDAC, up to
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


def sac(
    config: SACConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    extra_policy_loss: ExtraLoss | None = None,
    critic_loss: CriticLoss | str | None = None,
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
      critic_loss: the loss of the critics' values of the actions taken in place of half the squared error,
        `(q [K, B], target [B]) -> [K, B]`, see `jaxrl.agents.custom.CriticLoss`; or, with `atoms`, the setting.
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
        "critic_loss": critic_loss,
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
    return critics.critic_maker(name, _build, config, arguments, _check)


# --- learning ----------------------------------------------------------------------------------------------------


def _update(parts: Parts, state: SACState, batch: Batch, key: Key, opt_step: Array) -> tuple[SACState, Metrics, Array]:
    """Update critics and targets, then the policy against the new critics, then the temperature (algorithm 1)."""
    keys = _split_key(parts.config, key)
    steps = critics.learning_steps(parts, batch)
    # One temperature for all of this step; it is updated last.
    temperature = jnp.exp(state.log_temperature) if parts.config.learn_temperature else state.hyper.temperature
    state, metrics, priorities = _learn_critics(parts, state, batch, steps, temperature, keys, opt_step)
    state, policy_metrics = _learn_policy(parts, state, batch, steps, temperature, keys, opt_step)
    return state, {**metrics, **policy_metrics, "temperature": temperature}, priorities


class UpdateKeys(NamedTuple):
    """Keys of an update; each is used once."""

    policy_noise: Key
    """For the actions of the policy's loss."""
    target_noise: Key
    """For the next actions of targets."""
    subset: PyTree
    """For the critics of a target (REDQ); `()` without."""
    rivals: Key
    """For the actions that CQL samples."""
    networks: Key
    """The key of the update itself. `nn.training_key` folds a number into it for each pass through a network, larger
    than the index of any split, so that no key is used twice."""


def _split_key(config: SACConfig, key: Key) -> UpdateKeys:
    """Split the key of an update, which is consumed."""
    policy_noise, target_noise, rivals = jax.random.split(key, 3)
    if not config.critic_subset:
        return UpdateKeys(policy_noise, target_noise, (), rivals, key)
    rivals, subset = jax.random.split(rivals)
    return UpdateKeys(policy_noise, target_noise, subset, rivals, key)


def _learn_critics(
    parts: Parts,
    state: SACState,
    batch: Batch,
    steps: Batch,
    temperature: Array,
    keys: UpdateKeys,
    opt_step: Array,
) -> tuple[SACState, Metrics, Array]:
    """Update the critics, and the target networks if there are any; also return metrics and priorities.

    `steps` are the `learning_steps` of `batch`.
    """
    config = parts.config
    seen = critics.observe_around(parts, batch.items, state.policy, state.target)
    next_noise = _draw_noise(parts, keys.target_noise, steps)
    # The next action comes from the present policy, not from a target policy as in TD3.
    next_policy = _policy(parts, state.policy, seen.then)
    reach = critics.widen_reach(config, state.reach, steps.items)
    values = parts.critic_values(reach)
    drawn = _draw(parts, next_policy, next_noise)
    next_inputs = StateAction(seen.then, drawn.action)
    target, target_metrics = _target(parts, state.target, batch, steps, next_inputs, drawn, values, temperature, keys)
    critic, metrics, priorities = critics.learn_critic(
        parts,
        state,
        batch,
        values,
        target,
        keys.networks,
        opt_step,
        next_inputs=next_inputs if config.joint_batch or not config.target_network else None,
        penalties=_penalties(parts, state, seen, keys.rivals),
    )
    tau = state.hyper.tau
    state = state._replace(
        critic=critic.variables,
        target=optimizers.polyak_update(state.target, critic.variables, tau) if config.target_network else (),
        opt_state=state.opt_state._replace(critic=critic.opt_state),
        reach=reach,
    )
    return state, {**metrics, **target_metrics}, priorities


# --- targets -----------------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """What a soft value takes of a policy, at `B` observations."""

    action: tuple[Array, ...]
    """One action, `[B, D]` from -1 to 1; `()` for discrete ones, over all of which the value is summed."""
    probability: Array | None
    """`[B, A]`, of each discrete action; `None` for continuous ones."""
    entropy: Array
    """`[B]`, exact for discrete actions; the negated log-probability of a continuous one."""


def _draw(parts: Parts, policy: Distribution, noise: PyTree) -> Draw:
    """Draw actions by `noise` `[B, D]`, standard deviations from the mean (reparameterised, equations 8 and 9)."""
    if isinstance(parts.spec.action_space, Discrete):
        entropy = policy.entropy()
        return Draw((), jax.nn.softmax(cast(Any, policy).logits), entropy)
    # Critics take the squashed action. Its density is computed from the raw one, since `tanh` is hard to invert near 1.
    raw = cast(TanhGaussian, policy).at(noise)
    entropy = -policy.log_prob(raw)
    return Draw((jnp.tanh(raw),), None, entropy)


def _target(
    parts: Parts,
    critic: PyTree,
    batch: Batch,
    steps: Batch,
    next_inputs: StateAction,
    drawn: Draw,
    values: CriticValues,
    temperature: Array,
    keys: UpdateKeys,
) -> tuple[Array | OwnBootstrap, Metrics]:
    """Return what the critics are regressed on, and metrics; `critic` are the target networks, if there are any."""
    config = parts.config
    if not config.target_network:
        return _own_bootstrap(steps.items, drawn, temperature), {}
    outputs = _target_outputs(parts, critic, steps, next_inputs, keys.networks)
    if values.support is not None:
        bonus = temperature * drawn.entropy
        return critics.target_distribution(config, steps.items, outputs, values.support, bonus)
    v_t = soft_value(_reduce_targets(config, outputs, keys), drawn.entropy, temperature, drawn.probability)
    return critics.bootstrap_targets(parts, batch.items, steps.items, v_t, temperature * drawn.entropy), {}


def _target_outputs(parts: Parts, critic: PyTree, steps: Batch, next_inputs: StateAction, key: Key) -> Array:
    """Return the outputs `[K, R, outputs]` of the target networks for the next steps.

    With `joint_batch` they share a pass with the steps, as in the critics (XQC, Palenicek et al. 2026,
    https://arxiv.org/abs/2509.25174). `key` is that of the update.
    """
    network, joint = parts.networks.critic, parts.config.joint_batch
    forward_key = critics.target_key(parts, key, together=joint)
    if not joint:
        return critics.apply_critics(network, critic, next_inputs.obs, *next_inputs.action, key=forward_key)
    inputs = StateAction(steps.items.obs, critics.unit_actions(parts.spec, steps.items.action))
    return critics.apply_together(network, critic, [inputs, next_inputs], forward_key)[0][1]


def _reduce_targets(config: SACConfig, outputs: Array, keys: UpdateKeys) -> Array:
    """Reduce the target networks' outputs `[K, B, n]` to values `[B, n]`, or to samples of the return `[B, S]`."""
    if config.critic_subset:
        return lowest_of_subset(keys.subset, config.critic_subset, outputs)
    if config.quantiles:
        return truncated_mixture(config.drop_quantiles, outputs)
    return reduce_critics(outputs, config.critic_target)


def _own_bootstrap(items: Transition, drawn: Draw, temperature: Array) -> OwnBootstrap:
    """Return what targets are made of without a target network, beside the critics' own next values.

    CrossQ, Bhatt et al. 2024, https://arxiv.org/abs/1902.05605, section 3.
    """
    probability = jnp.ones((drawn.entropy.shape[0], 1)) if drawn.probability is None else drawn.probability
    return OwnBootstrap(items.reward, items.discount, probability, temperature * drawn.entropy)


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


def _penalties(parts: Parts, state: SACState, seen: Views, key: Key) -> Penalties:
    """Return the penalties of CQL and EDAC; without them they are off. The key is consumed."""
    if not parts.config.cql:
        return Penalties(eta=state.hyper.eta)
    return Penalties(state.hyper.cql, _sample_rivals(parts, state.policy, seen, key), state.hyper.eta)


# --- policy and temperature --------------------------------------------------------------------------------------


def _learn_policy(
    parts: Parts,
    state: SACState,
    batch: Batch,
    steps: Batch,
    temperature: Array,
    keys: UpdateKeys,
    opt_step: Array,
) -> tuple[SACState, Metrics]:
    """Update policy and temperature, every `policy_interval` optimisation steps (counted from 1); also return metrics.

    `steps` are the `learning_steps` of `batch`.
    """
    noise = _draw_noise(parts, keys.policy_noise, steps)
    gradient = partial(_policy_gradient, parts, state, batch, steps, noise, temperature, keys.networks)
    improve = partial(_improve_policy, parts, state, steps, temperature, opt_step=opt_step)
    if parts.config.policy_interval == 1:
        state, metrics = improve(gradient())
        return state, {**metrics}
    # A whole population shares one scalar counter, so the branch stays one under `vmap`, and the work is skipped.
    due = (opt_step + 1) % parts.config.policy_interval == 0
    improved, metrics = improve(optimizers.gradient_if(due, gradient))
    # The zeros of a skipped update are no measurement.
    return select(due, improved, state), {name: stat(value, due) for name, value in metrics.items()}


def _policy_gradient(
    parts: Parts, state: SACState, batch: Batch, steps: Batch, noise: PyTree, temperature: Array, key: Key
) -> Gradient:
    """Return the gradient of the policy's loss; `noise` is that of its actions, and `key` that of the update."""
    return optimizers.loss_gradient(
        parts.gradient_step,
        partial(_policy_loss, parts, parts.critic_values(state.reach), state.critic, temperature),
        state.policy,
        (
            # As sampled, and not as seen: the policy's memories are recomputed under its gradient.
            batch.items.obs,
            batch.items.is_first,
            noise,
            steps.weight * steps.items.weight,
            steps.items if parts.extra_policy_loss else (),
        ),
        key=critics.policy_loss_key(parts, key),
    )


def _improve_policy(
    parts: Parts, state: SACState, steps: Batch, temperature: Array, gradient: Gradient, opt_step: Array
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
        wanted = critics.target_entropy(
            config.target_entropy, hyper.target_entropy, _usual_entropy(parts.spec), steps.items.obs
        )
        slope = temperature * shards.pmean(jnp.mean((entropy - wanted) * steps.items.weight))
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
    of_steps = shards.step_means({"entropy": entropy}, steps.items.weight)
    return state, {"policy_loss": policy.loss, "policy_grad_norm": policy.norm, **of_steps}


def _policy_loss(
    parts: Parts,
    values: CriticValues,
    critic: PyTree,
    temperature: Array,
    policy: PyTree,
    batch: PyTree,
    key: Key | None,
) -> tuple[Array, tuple[Array, PyTree]]:
    """Return the negated weighted mean of the soft value, the entropy `[B]`, and the policy's collections."""
    obs, is_first, noise, weight, items = batch
    policy_key, critic_key = critics.policy_loss_keys(parts, key)
    seen = critics.observe_before(parts, obs, is_first, policy, critic)
    outputs, collections = forward(parts.networks.policy, policy, critics.to_policy(seen), key=policy_key)
    distribution = _distribution(parts, outputs, seen)
    # Critics and temperature are constants here; gradients reach the policy through its action and its entropy.
    drawn = _draw(parts, distribution, noise)
    q = values.policy_values(critics.apply_critics(parts.networks.critic, critic, seen, *drawn.action, key=critic_key))
    loss = -soft_value(q, drawn.entropy, temperature, drawn.probability)
    if parts.extra_policy_loss is not None:
        loss = loss + critics.extra_policy_term(parts, policy, items, distribution, weight)
    return jnp.mean(weight * loss), (drawn.entropy, collections)


def _draw_noise(parts: Parts, key: Key, steps: Batch) -> PyTree:
    """Draw standard normal noise `[R, D]` for actions; `()` for discrete actions, which need none.

    It is data of the loss, so that a batch that is cut into pieces has the same. The key is consumed.
    """
    if isinstance(parts.spec.action_space, Discrete):
        return ()
    size = critics.space_size(cast(Box, parts.spec.action_space))
    return jax.random.normal(key, (steps.weight.shape[0], size), jnp.float32)


def _sample_rivals(parts: Parts, policy: PyTree, seen: Views, key: Key) -> SampledActions:
    """Draw rivals for what is seen before a step: uniformly, from the policy there, and from the policy after it.

    The key is consumed.
    """
    if isinstance(parts.spec.action_space, Discrete):
        return SampledActions((), ())
    uniform_key, *keys = jax.random.split(key, 3)
    rows = jax.tree.leaves(seen.now)[0].shape[0]
    size = critics.space_size(cast(Box, parts.spec.action_space))
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
    fresh = jax.random.normal(key, obs.memory.shape, jnp.float32)
    noise = critics.correlated_noise(state.hyper.noise_memory, obs.memory, fresh)
    return parts.head.to_env(cast(TanhGaussian, distribution).at(noise)), {"memory": noise}


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
    # A subset and quantiles reduce the outputs of target networks in a way of their own; EDAC compares whole critics.
    refuse_beside(config, "quantiles", critic_subset=0, cql=0.0, core="none", target_network=True, critic_target="min")
    refuse_beside(config, "critic_subset", target_network=True, critic_target="min")
    refuse_beside(config, "noise_memory", core="none")
    refuse_beside(config, "eta", core="none", batch_norm="none")
    refuse_beside(config, "core", "none", target_network=True)
    refuse_beside(config, "joint_batch", False, target_network=True, core="none")
    critics.check_atoms(config, parts, quantiles=0, critic_subset=0, cql=0.0, eta=0.0, target_network=True)
    critics.check_own_critic(parts, "quantiles", config.quantiles)
    left = (config.quantiles - config.drop_quantiles) * config.num_critics
    if config.quantiles and (config.quantiles < 2 or left < 2):
        raise SettingsError(
            f"agent.quantiles is {config.quantiles} and agent.drop_quantiles {config.drop_quantiles}; expected at "
            "least 2 quantiles, and 2 of all critics that are left, or quantiles 0"
        )
    if config.critic_subset > config.num_critics:
        raise SettingsError(
            f"agent.critic_subset is {config.critic_subset}, but agent.num_critics {config.num_critics}; draw at most "
            "as many as there are"
        )
    if config.eta and config.num_critics < 2:
        raise SettingsError(
            f"agent.eta is {config.eta}, but agent.num_critics {config.num_critics} has no pairs of critics for it; "
            "set eta to 0"
        )
    if config.joint_batch and config.batch_norm == "none" and parts["make_critic"] is None:
        raise SettingsError(
            "agent.joint_batch is on, but critics with agent.batch_norm none have no statistics of a batch; leave it "
            "off"
        )
    if config.learn_temperature and "temperature" in schedules_in(config.schedules):
        raise SettingsError("agent.temperature is learnt, and cannot follow a schedule; set learn_temperature=False")


CONTINUOUS = {
    "noise_memory": "",
    "quantiles": ", or take dqn with values qr",
    "atoms": ", or take dqn with values c51",
    "eta": "",
}
"""Settings of continuous actions alone, and what else there is for others."""


def _check_continuous(config: SACConfig, spec: EnvSpec) -> None:
    """Raise `SettingsError` for discrete actions beside settings of continuous ones, and the other way round."""
    if not isinstance(spec.action_space, Discrete):
        refuse_beside(config, "cql", 0.0, batch_norm="none")  # see `_check_statistics`
    for name, instead in CONTINUOUS.items():
        if (value := getattr(config, name)) and isinstance(spec.action_space, Discrete):
            raise SettingsError(f"agent.{name} is {value}, but {spec.name} has Discrete actions; set it to 0{instead}")


def _check_statistics(parts: Parts, custom: CustomParts) -> None:
    """Raise `SettingsError` for a critic made in Python with statistics of the batch, beside sampled actions of CQL.

    They would be statistics of these actions, of which there are thirty for each of the data; other variables that are
    no parameters are refused alike.
    """
    if parts.config.cql and "make_critic" in custom.makers and isinstance(parts.spec.action_space, Box):
        _, critic = jax.eval_shape(lambda: critics.init_networks(parts, make_key(0)))
        if names := sorted(split_variables(critic)[1]):
            raise SettingsError(
                f"agent.cql is {parts.config.cql}, but the network of make_critic has {names[0]}, which would be of "
                "sampled actions more than of those of the data; take a network without them, or set cql to 0.0"
            )


def _build(name: str, config: SACConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    _check_continuous(config, spec)
    head = distributions.make_head(spec, squash=True)
    memories = sequences.initial_memories(config, config.num_critics)
    networks = (
        critics.build_networks(config, custom, spec, head, max(1, config.quantiles, config.atoms))
        if memories is None
        else critics.recurrent_networks(config, spec, head)
    )
    parts = critics.make_parts(config, custom, networks, spec, head, _values_fn(config, custom), memories)
    _check_statistics(parts, custom)
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


def _values_fn(config: SACConfig, custom: CustomParts) -> ValuesFn:
    """Return what the critics learn, and how the policy reduces it; targets have `_reduce_targets`."""
    if config.quantiles:
        values = quantile_values()
        return lambda reach: values
    # With targets of a few critics the policy improves the mean of all (REDQ).
    how = "mean" if config.critic_subset else config.critic_target
    return critics.mean_or_atom_values(config, custom, how, ENTROPY_MARGIN)


def _init(parts: Parts, key: Key) -> SACState:
    config = parts.config
    policy, critic = critics.init_networks(parts, key)
    entropy = config.target_entropy or _usual_entropy(parts.spec)
    settings = {**asdict(config), "target_entropy": entropy}
    hyper = SACHyper(*make_hyper(settings, SACHyper._fields, optional=("cql", "noise_memory", "eta", *TEMPERATURE)))
    log_temperature: PyTree = ()
    learnt: PyTree = ()
    if config.learn_temperature:
        mark_initial("agent.temperature")
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

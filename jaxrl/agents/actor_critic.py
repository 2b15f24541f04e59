"""Policy gradients with a critic: PPO, A2C, REINFORCE and IMPALA, as settings of one implementation.

PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) with one epoch over one whole batch is A2C, because the
probability ratio is then 1 (Huang et al. 2022, https://arxiv.org/abs/2205.09123). A2C with Monte-Carlo returns is
REINFORCE with a baseline. IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561) is A2C with returns and
gradient corrected by V-trace. If the parameters that acted are the learner's own, all ratios are 1, and IMPALA is A2C
again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import distributions, masks, nn, shards
from jaxrl.agents import losses, returns, sequences
from jaxrl.agents.base import Agent, AgentFns, AgentInfo, AgentMaker, Mode, PolicyFns
from jaxrl.agents.checks import make_hyper
from jaxrl.agents.custom import (
    ONE_VALUE,
    CustomParts,
    ExtraLoss,
    MakePolicy,
    Outputs,
    agent_maker,
    build_network,
    extra_term,
    observation_structs,
    policy_output,
    squeeze_values,
)
from jaxrl.agents.exploration import TEMPERATURE
from jaxrl.agents.fields import (
    Activation,
    Between,
    CoreConfig,
    NetworkConfig,
    OneOf,
    OptimizerConfig,
    Positive,
    Rate,
    Real,
    Share,
    Steps,
    Weight,
    Widths,
)
from jaxrl.agents.optimizers import GradientStep, Optimizer, apply_gradient, loss_gradient
from jaxrl.agents.schedules import schedules_in
from jaxrl.distributions import Distribution, Head
from jaxrl.errors import SettingsError
from jaxrl.masks import PRIVILEGED
from jaxrl.metrics import Metrics, Stat, as_stat, stat
from jaxrl.nn import ActorCritic, Network
from jaxrl.spaces import EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Demonstrations, RecurrentObs, Rollout
from jaxrl.xla.reductions import select

LARGEST_RATIO = 1e6
"""Probability ratio above which the reported KL divergence is no longer exact."""
LR_FACTOR = 1.5
"""Factor by which one update lowers or raises the learning rate that is adapted to `desired_kl`, as in RSL-RL."""
LR_BOUNDS = (1e-5, 1e-2)
"""Between which it stays, as in RSL-RL."""
KL_EPSILON = 1e-7
"""KL divergence up to which a policy counts as that of actors with older parameters: the rounding of a ratio of 1."""
CONSTANT_RETURN_RTOL = 1e-6
"""Standard deviation of returns, as a share of their mean, up to which they count as constant."""


@dataclass(frozen=True)
class PPOConfig(NetworkConfig, OptimizerConfig, CoreConfig):
    """Settings of PPO; policy and value share a core unless `critic_core` says otherwise."""

    lr: Rate = 2.5e-4
    max_grad_norm: Positive = 0.5
    features: Widths = (64, 64)
    activation: Activation = "tanh"
    gae_lambda: Share = 0.95
    """Lambda of the advantage estimate (GAE, or V-trace); 0: one-step errors, 1: Monte-Carlo returns."""
    baseline: bool = True
    """Subtract the value from the return to get the advantage."""
    rho_clip: Weight = 0.0
    """Bound on the importance ratios by which V-trace corrects for actors' stale parameters (1 as published); 0: no
    V-trace."""
    c_clip: Weight = 1.0
    """Bound on the importance ratios by which V-trace passes later errors back; used only with rho_clip."""
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "clipped"
    """Policy objective: clipped (PPO), plain (policy gradient), or weighted (policy gradient times the importance
    ratio, which is clipped at rho_clip)."""
    clip_eps: Weight = 0.2
    """How far the probability ratio may move from 1 before the clipped objective stops rewarding it."""
    vf_clip_eps: Weight = 0.0
    """How far values may move from those before the first epoch, or with recompute_advantage before each (value
    clipping); 0: no limit."""
    ent_coef: Real = 0.01
    """Weight of the entropy bonus."""
    vf_coef: Weight = 0.5
    """Weight of the value loss."""
    critic_warmup: Steps = 0
    """Optimisation steps at the start in which the value function's own layers learn alone, for a policy that begins
    with what it has learnt elsewhere (init_from)."""
    teacher_coef: Weight = 0.0
    """Weight of the divergence from a teacher (teacher), KL(teacher || policy) at the steps of each rollout."""
    imitation_coef: Weight = 0.0
    """Weight of the imitation of demonstrations (demos), -log p of their actions, in each minibatch."""
    policy_coef: Weight = 1.0
    """Weight of the policy objective and the entropy bonus beside a teacher or demonstrations; 0: learn the policy from
    these alone."""
    recompute_advantage: bool = False
    """Recompute advantages and value targets before each epoch, with the current values; otherwise those of before
    the first epoch serve all."""
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "minibatch"
    """Normalise advantages to mean 0 and standard deviation 1 over each minibatch, over the whole batch, or not at all
    (none). A minibatch of a single sample is left as it is."""
    target_kl: Weight = 0.0
    """Approximate KL divergence from the old policy above which the remaining updates on a rollout are skipped; needs
    several updates on each rollout. 0: never."""
    desired_kl: Weight = 0.0
    """Approximate KL divergence from the old policy for which the learning rate is adapted, in each update (0.01 in
    RSL-RL): lowered above twice as much, raised below half of it; needs several updates on each rollout, or actors
    that lag behind. 0: never."""
    squash: bool = False
    """Squash continuous actions into their bounds with tanh; otherwise they are clipped."""
    free_scale: bool = True
    """Learn one scale of continuous actions for all observations; otherwise the network predicts it from the
    observation."""
    init_std: Annotated[float, Between(0.01, 7.0)] = 1.0
    """Standard deviation of continuous actions at the start, in half-widths of their bounds (with squash, before tanh);
    needs free_scale."""
    layer_norm: bool = False
    """Apply layer normalisation before each activation."""
    shared: bool = False
    """Share one torso between policy and value; otherwise each has its own."""
    critic_core: Annotated[str, OneOf(("shared", "separate", "none"))] = "shared"
    """With a core, whether the value reads it too (shared), has a torso and a core of its own (separate), or a torso of
    its own and no memory (none)."""

    def initial_memory(self) -> PyTree | None:
        """Return the memory at the start of an episode, with separate cores those of policy and value; or `None`."""
        of_policy = super().initial_memory()
        return (of_policy, super().initial_memory()) if of_policy and self.critic_core == "separate" else of_policy


@dataclass(frozen=True)
class A2CConfig(PPOConfig):
    """Settings of A2C."""

    lr: Rate = 1e-3
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "plain"
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "none"


@dataclass(frozen=True)
class REINFORCEConfig(A2CConfig):
    """Settings of REINFORCE."""

    gae_lambda: Share = 1.0
    ent_coef: Real = 0.0
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "batch"


@dataclass(frozen=True)
class IMPALAConfig(A2CConfig):
    """Settings of IMPALA."""

    gae_lambda: Share = 1.0
    rho_clip: Weight = 1.0
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "weighted"


class PPOHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    gae_lambda: Array
    clip_eps: Array
    ent_coef: Array
    vf_coef: Array
    rho_clip: PyTree = ()
    """`()` without V-trace, as is `c_clip`."""
    c_clip: PyTree = ()
    exploration: PyTree = ()
    """Temperature at which an actor samples actions, if set per actor; else `()`."""
    teacher_coef: PyTree = ()
    """`()` without a teacher."""
    policy_coef: PyTree = ()
    """`()` without a teacher or demonstrations."""
    imitation_coef: PyTree = ()
    """`()` without demonstrations."""


class ActorCriticState(NamedTuple):
    """Agent state; `opt_state` is empty in an acting-only copy."""

    params: PyTree
    opt_state: PyTree
    hyper: PPOHyper
    lr_scale: PyTree = ()
    """Factor of `hyper.lr`, a float32 scalar, if it is adapted to `desired_kl`; else `()`."""


class Sample(NamedTuple):
    """What an update learns from: steps `[B]`, or for a recurrent agent sequences `[B, T]`, one per environment."""

    obs: PyTree
    action: PyTree
    """Raw actions, before the head maps them to the action space; a tree if the space is one."""
    log_prob: Array
    """Log-probability of the action under the parameters that chose it."""
    value: Array
    """Value estimate before the first epoch, or with `recompute_advantage` before each."""
    advantage: Array
    target: Array
    """Regression target of the value."""
    weight: Array
    """1, or 0 for a step that must not be learnt from."""
    memory: PyTree = ()
    """Memory of the recurrent core before the first step of each sequence, `[B, ...]`."""
    is_first: Array | tuple[()] = ()
    """`[B, T]` bool: a new episode begins, so the memory is reset."""
    teacher: Array | tuple[()] = ()
    """Outputs of the policy's head, `[B, head.outputs]`, that would make it the teacher's; `()` without a teacher."""
    demos: PyTree = ()
    """`Demonstrations` with raw actions, one for each step; `()` without any."""
    policy_bits: Array | tuple[()] = ()
    """`_policy_bits` of the parameters that acted, the same for each step, for `desired_kl`; `()` if they are unknown,
    as those of actors on the host."""


class _Parts(NamedTuple):
    """What an agent's functions share: its settings, its network and parts made in Python."""

    config: PPOConfig
    network: Network
    gradient_step: GradientStep
    head: Head
    spec: EnvSpec
    """With the observations that critics see."""
    memory: PyTree | None
    extra_loss: ExtraLoss | None = None
    blinds: bool = False
    """Whether the network, given everything, must be kept from choosing actions by the privileged state."""


VALUE_MODULES = ("value", "critic_torso", "value_core")
"""Modules of a network whose parameters, and collections such as batch statistics, the policy has no part in."""
CUSTOM_ARGUMENTS = ("make_optimizer", "make_network", "extra_loss")
"""Arguments for parts made in Python."""


def ppo(
    config: PPOConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakePolicy | None = None,
    extra_loss: ExtraLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a PPO agent; call the result with an `EnvSpec` to build it.

    Args:
      config: settings to start from; if left out, the defaults of `PPOConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_network: function from an `EnvSpec` and the head for its actions to a network that returns the policy's
        outputs `[B, head.outputs]` and values `[B]` for observations `[B, ...]`; replaces the built-in one. It has no
        memory: `core` must be none.
      extra_loss: a term of the loss for each step beside the agent's own, `(params, sample, outputs) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      **settings: fields of `PPOConfig` to change, as in `ppo(lr=1e-3, ent_coef=0.0)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    custom = {"make_optimizer": make_optimizer, "make_network": make_network, "extra_loss": extra_loss}
    return _maker("ppo", config or PPOConfig(), {**settings, **custom})


def a2c(config: A2CConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure an A2C agent (Mnih et al. 2016, https://arxiv.org/abs/1602.01783); arguments are as for `ppo`."""
    return _maker("a2c", config or A2CConfig(), arguments)


def reinforce(config: REINFORCEConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure REINFORCE with a baseline (Sutton and Barto 2018, section 13.4); arguments are as for `ppo`.

    Returns run to the end of the episode. Where a rollout or a time limit cuts it off, the critic's value stands for
    the rest.
    """
    return _maker("reinforce", config or REINFORCEConfig(), arguments)


def impala(config: IMPALAConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure an IMPALA agent (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561); arguments are as for `ppo`.

    It is meant for actors on the host whose parameters are several rounds old. `gae_lambda` is the lambda of V-trace.
    """
    return _maker("impala", config or IMPALAConfig(), arguments)


def _maker(name: str, config: Any, arguments: Mapping[str, Any]) -> AgentMaker:
    """Return the maker of an agent of this family."""
    return agent_maker(name, _build, config, arguments, CUSTOM_ARGUMENTS, _check)


def _check(config: PPOConfig, custom: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for settings that contradict each other, or the arguments `custom`."""
    if config.surrogate == "weighted" and not config.rho_clip:
        raise SettingsError("agent.surrogate weighted needs V-trace; set agent.rho_clip to 1, or another surrogate")
    if config.desired_kl and (config.lr_decay or "lr" in schedules_in(config.schedules)):
        other = f"lr_decay {config.lr_decay}" if config.lr_decay else "a schedule of lr"
        raise SettingsError(f"agent.desired_kl adapts the learning rate, and so does {other}; leave one of them out")
    others = config.teacher_coef or config.imitation_coef
    if not others and (config.policy_coef != 1 or "policy_coef" in schedules_in(config.schedules)):
        raise SettingsError(
            "agent.policy_coef weighs the policy objective beside a teacher or demonstrations, but agent.teacher_coef "
            "and agent.imitation_coef are 0; set one of them, or leave policy_coef at 1"
        )
    if config.desired_kl and not config.lr:
        raise SettingsError("agent.lr is 0, which agent.desired_kl cannot adapt; set it above 0")
    sequences.check_core(config, make_network=custom["make_network"])
    if config.init_std != 1 and not config.free_scale:
        raise SettingsError(
            f"agent.init_std is {config.init_std}, but with agent.free_scale off the network predicts the scale; turn "
            "free_scale on, or set init_std to 1"
        )
    if config.shared and config.core != "none" and config.critic_core != "shared":
        raise SettingsError(
            f"agent.shared is on, but with agent.critic_core {config.critic_core} the value has a torso of its own; "
            "turn shared off, or set critic_core to shared"
        )


def _build(name: str, config: PPOConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    masks.check_observation_entries(spec)
    # The network is given everything but the mask. The built-in one cuts the policy's view from that itself.
    spec = masks.view_spec(spec, masks.for_critic)
    privileged = masks.has_entry(spec.observation_space, PRIVILEGED)
    head = distributions.make_head(spec, config.squash)
    memory = config.initial_memory()
    network = build_network(
        custom,
        "make_network",
        (spec, head),
        partial(_network, config, spec, head),
        (observation_structs(spec),),
        (policy_output(head), ONE_VALUE),
    )
    # A network of the user's has no such view, so the policy's outputs come from a second pass, see `_apply_network`.
    blinds = privileged and "make_network" in custom.makers
    if blinds and nn.takes_train(network):
        raise SettingsError(
            f"{spec.name} has a privileged state, which a second pass through the network of make_network keeps "
            "from the policy; so it cannot have batch statistics or dropout, by an argument train"
        )
    parts = _Parts(config, network, custom.gradient_step, head, spec, memory, custom.extra_loss, blinds)
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        strip=lambda state: state._replace(opt_state=()),
        prepare=partial(_prepare, parts),
        memory=memory,
        apply={"params": lambda params, obs: network.apply(params, masks.for_critic(obs))},
        policy_fns=PolicyFns(
            partial(_action_distribution, parts),
            lambda state, obs, action: _apply_network(parts, state.params, obs)[1],
            head,
            privileged=privileged,
        ),
        fns=AgentFns(
            stop=partial(_stop, config.target_kl) if config.target_kl else None,
            measure=_measure if config.baseline else None,
            refresh=partial(_refresh, parts) if config.recompute_advantage else None,
            behave=partial(_act, parts, with_log_prob=True),
            imitate=partial(_imitate, head),
        ),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=TEMPERATURE,
        ),
    )


def _network(config: PPOConfig, spec: EnvSpec, head: Head) -> Network:
    nn.check_torso(config.torso, spec.observation_space, config.channels, config.features)
    policy_space = masks.for_policy(spec.observation_space)
    nn.check_torso(config.torso, policy_space, config.channels)
    return ActorCritic(
        policy_space,
        head.outputs,
        head.scales if config.free_scale else 0,
        config.torso,
        config.features,
        config.activation,
        config.shared,
        config.layer_norm,
        config.make_core(),
        config.channels,
        config.dtype,
        spec.observation_space if masks.has_entry(spec.observation_space, PRIVILEGED) else None,
        config.critic_core == "shared",
        config.make_core() if config.critic_core == "separate" else None,
        config.init_std,
    )


def _init(parts: _Parts, key: Key) -> ActorCriticState:
    obs = space_zeros(parts.spec.observation_space, 1)
    if parts.memory is not None:
        obs = RecurrentObs(obs, jax.tree.map(lambda x: x[None], parts.memory))
    params = parts.network.init(key, obs)
    config = parts.config
    # Fields that are off are left at their default, `()`. Not by `make_hyper(optional=...)`: beside V-trace or a
    # teacher, a `c_clip` or `policy_coef` of 0 is a number like any other.
    off = {*TEMPERATURE}
    if not config.rho_clip:
        off |= {"rho_clip", "c_clip"}
    if not config.teacher_coef:
        off |= {"teacher_coef"}
    if not config.imitation_coef:
        off |= {"imitation_coef"}
    if not (config.teacher_coef or config.imitation_coef):
        off |= {"policy_coef"}
    names = [name for name in PPOHyper._fields if name not in off]
    hyper = PPOHyper(**dict(zip(names, make_hyper(asdict(config), names), strict=True)))
    scale = jnp.float32(1.0) if config.desired_kl else ()
    return ActorCriticState(params, parts.gradient_step.init(params, hyper.lr), hyper, scale)


# --- acting -----------------------------------------------------------------------------------------------------


def _act(
    parts: _Parts,
    state: ActorCriticState,
    obs: PyTree,
    key: Key | None,
    opt_step: Array,
    mode: Mode,
    with_log_prob: bool = False,
) -> tuple[PyTree, dict[str, PyTree]]:
    distribution, memory = _policy_distribution(parts, state, obs)
    raw = distribution.mode() if key is None or mode == "exploit" else distribution.sample(key)
    # The raw action is stored only if it cannot be recovered from the environment's action.
    extras = {"raw": raw} if parts.head.scales else {}
    if with_log_prob:
        extras["log_prob"] = distribution.log_prob(raw)
    return parts.head.to_env(raw), extras if parts.memory is None else {**extras, "memory": memory}


def _policy_distribution(parts: _Parts, state: ActorCriticState, obs: PyTree) -> tuple[Distribution, PyTree]:
    """Return the distributions of raw actions, and the memory after the step."""
    outputs, _, memory, _ = _apply_network(parts, state.params, obs)
    # The mask comes after the temperature. Divided by a number below 1, its finite minimum would overflow to infinity.
    return distributions.mask_distribution(
        distributions.apply_temperature(parts.head.distribution(outputs), state.hyper.exploration), masks.get_mask(obs)
    ), memory


def _action_distribution(parts: _Parts, state: ActorCriticState, obs: PyTree, opt_step: Array) -> Distribution:
    """Return the distributions from which `act` draws raw actions, as `DistributionFn`."""
    distribution, _ = _policy_distribution(parts, state, obs)
    return distribution


def _apply_network(
    parts: _Parts, params: PyTree, obs: PyTree, key: Key | None = None
) -> tuple[Array, Array, PyTree, PyTree]:
    """Apply the network; return outputs of the policy `[B, K]`, values `[B]`, the memory after the step, collections.

    `key` and collections are as for `jaxrl.nn.forward`.
    """
    obs = masks.for_critic(obs)
    (outputs, value, *memory), collections = nn.forward(parts.network, params, obs, key=key)
    # Outputs that choose actions come from a pass that cannot see the privileged state; the value keeps it.
    if parts.blinds:
        outputs = cast(tuple, parts.network.apply(params, masks.zero_privileged(obs)))[0]
    return outputs, squeeze_values(value), memory[0] if memory else (), collections


def _evaluate_actions(
    parts: _Parts, params: PyTree, sample: Sample, key: Key | None = None
) -> tuple[Distribution, Array, PyTree]:
    """Return action distributions and values for steps `[B]`, or for sequences `[B, T]` from their initial memory.

    And the network's collections, see `jaxrl.nn.forward`.
    """
    if parts.memory is None:
        # Without a temperature, which only the states of actors have: the policy itself is learnt.
        outputs, value, _, collections = _apply_network(parts, params, sample.obs, key)
        return (
            distributions.mask_distribution(parts.head.distribution(outputs), masks.get_mask(sample.obs)),
            value,
            collections,
        )
    assert not isinstance(sample.is_first, tuple)
    num_envs, steps = sample.is_first.shape
    inputs = RecurrentObs(masks.for_critic(sample.obs), sample.memory)
    outputs, value = cast(Any, parts.network).apply(params, inputs, sample.is_first, method="apply_sequence")
    distribution = distributions.mask_distribution(
        parts.head.distribution(outputs.reshape(num_envs, steps, -1)), masks.get_mask(sample.obs, axes=2)
    )
    # Only networks of the user's have collections, and those have no core.
    return distribution, value.reshape(num_envs, steps), {}


# --- learning ---------------------------------------------------------------------------------------------------


def _prepare(parts: _Parts, state: ActorCriticState, rollout: Rollout, acted: Array | None = None) -> Sample:
    """Return a rollout's steps `[T * N]`, or for a recurrent agent its sequences `[N, T]`, with advantages and targets.

    Values and log-probabilities are computed here, for the whole rollout, and not step by step while acting. The loop
    over time then holds only what the next step needs, and the network runs on one large batch. No parameter changes
    during a rollout, so the result is the same. Where older parameters have acted, the ratios of the clipped objective
    and of V-trace are formed with their log-probabilities: actors on the host send them along, and between epochs they
    are given as `acted`, in the layout of samples.
    """
    items, params = rollout.items, state.params
    steps, num_envs = rollout.last.shape
    # Log-probabilities are those of raw actions: what the environment got may be clipped, and cannot be inverted.
    raw = items.extras["raw"] if parts.head.scales else items.action
    flat = lambda x: x.reshape(steps * num_envs, *x.shape[2:])
    weight = jnp.asarray(items.weight)
    zeros = jnp.zeros_like(weight)  # until the values are known
    sample = Sample(items.obs, raw, log_prob=zeros, value=zeros, advantage=zeros, target=zeros, weight=weight)
    if parts.config.teacher_coef:
        sample = sample._replace(teacher=_teacher_outputs(items.extras))
    # Three layouts meet below. A rollout is time-major, `[T, N]`, as the equations of returns want it. Minibatches are
    # made of samples: single steps `[T * N]`, or with a memory whole sequences `[N, T]`, since a core must be unrolled
    # in order from the memory it had at the first step. `as_rollout` and `as_sample` convert between the two.
    if parts.memory is None:
        sample = jax.tree.map(flat, sample)
        as_rollout, as_sample = lambda x: x.reshape(steps, num_envs), flat
    else:
        sample = sequences.rollout_sequences(sample, items)
        # The transposition between `[T, N]` and `[N, T]` is its own inverse.
        as_rollout = as_sample = jnp.transpose
    distribution, value, _ = _evaluate_actions(parts, params, sample)
    v_tm1 = as_rollout(value)
    # Not `v_tm1` shifted by a step: at an episode's end the successor is not the next observation of the rollout.
    # With a memory, `next_obs` holds the one that the step left, so all successors are valued in a single batch.
    next_obs = items.next_obs
    if acted is None and "log_prob" in items.extras:
        acted = as_sample(items.extras["log_prob"])
    if parts.memory is not None and acted is not None:
        # What older parameters remember would give a step's successor another value than the next step has, and
        # lambda-returns would add up the differences.
        inputs = RecurrentObs(masks.for_critic(sample.obs), sample.memory)
        memory = cast(Any, parts.network).apply(params, inputs, sample.is_first, method="apply_core")
        next_obs = next_obs._replace(memory=memory)
    v_t = _apply_network(parts, params, jax.tree.map(flat, next_obs))[1].reshape(steps, num_envs)
    log_prob = distribution.log_prob(sample.action)
    behaviour = log_prob if acted is None else acted
    # `log_rho` is 0 unless the parameters that acted differ from these.
    advantage, target = _estimate(parts.config, state.hyper, rollout, v_tm1, v_t, as_rollout(log_prob - behaviour))
    # Once, over the whole rollout. Normalisation per minibatch is left to `_update`.
    if parts.config.normalise_advantage == "batch":
        advantage = standardise(advantage, weight)
    if parts.config.desired_kl and "log_prob" not in items.extras:
        sample = sample._replace(policy_bits=jnp.full(log_prob.shape, _policy_bits(params)))
    return sample._replace(log_prob=behaviour, value=value, advantage=as_sample(advantage), target=as_sample(target))


def _refresh(parts: _Parts, state: ActorCriticState, rollout: Rollout, prepared: Sample) -> Sample:
    """Return a rollout's steps with advantages and targets by the values of now, as `RefreshFn`.

    Ratios are still formed with the policy that acted (Andrychowicz et al. 2020, https://arxiv.org/abs/2006.05990,
    section 3.5).
    """
    return _prepare(parts, state, rollout, acted=prepared.log_prob)._replace(policy_bits=prepared.policy_bits)


def _teacher_outputs(extras: Mapping[str, Array]) -> Array:
    """Return the teacher's outputs for the steps, see `Sample.teacher`."""
    if "teacher" not in extras:
        raise SettingsError(
            "agent.teacher_coef is set, but there is no teacher; name its run, as in --teacher RUN (in Python, "
            "on_policy(..., teacher=load_policy(RUN))), or set teacher_coef to 0"
        )
    return extras["teacher"]


def _imitate(head: Head, sample: Sample, demos: Demonstrations) -> Sample:
    """Return the steps of a minibatch with demonstrations beside them, as `ImitateFn`."""
    return sample._replace(demos=demos._replace(action=distributions.demonstrated_raw(head, demos.action)))


def _estimate(
    config: PPOConfig, hyper: PPOHyper, rollout: Rollout, v_tm1: Array, v_t: Array, log_rho: Array
) -> tuple[Array, Array]:
    """Return advantages and value targets, both `[T, N]`; `log_rho` `[T, N]` is the log of the importance ratios."""
    items, last, lambda_ = rollout.items, rollout.last, hyper.gae_lambda
    # The equations run along the time of one environment, so they are mapped over axis 1 of `[T, N]`.
    over_envs = lambda equation, *args: jax.vmap(partial(equation, lambda_=lambda_), in_axes=1, out_axes=1)(*args)
    if config.rho_clip:
        equation = partial(returns.vtrace, rho_clip=hyper.rho_clip, c_clip=hyper.c_clip)
        # V-trace truncates the ratios; with parameters that are not stale they are 1, and it is the lambda-return.
        traced = over_envs(equation, items.reward, items.discount, last, v_tm1, v_t, jnp.exp(log_rho))
        # Advantages of V-trace have `-v_tm1` as their last term; adding it back takes the baseline out.
        return (traced.advantage if config.baseline else traced.advantage + v_tm1), traced.target
    if config.baseline:
        advantage = over_envs(returns.gae, items.reward, items.discount, last, v_tm1, v_t)
        # The advantage estimate plus the value is the lambda-return, on which the value is regressed.
        return advantage, advantage + v_tm1
    # Without a baseline the return itself weighs the log-probabilities (REINFORCE).
    target = over_envs(returns.lambda_returns, items.reward, items.discount, last, v_t)
    return target, target


def standardise(x: Array, weight: Array) -> Array:
    """Normalise the entries of `x` with weight 1 to mean 0 and standard deviation 1, over all shards.

    A single entry is left unchanged: normalised, it would always be 0.
    """
    # Sums are reduced over the shards before they are divided, so that all shards normalise by the same numbers.
    count = jnp.maximum(shards.psum(weight.sum()), 1.0)
    counts = weight > 0
    # Select instead of multiplying by the weight: an entry of weight 0 may be NaN.
    mean = shards.psum(jnp.where(counts, x, 0.0).sum()) / count
    centred = jnp.where(counts, x - jnp.where(count > 1, mean, 0.0), 0.0)
    variance = shards.psum(jnp.square(centred).sum()) / count
    # The constant is for entries that are all alike, where 0 would be multiplied by infinity.
    return centred * jax.lax.rsqrt(jnp.where(count > 1, variance + 1e-8, 1.0))


def _measure(sample: Sample) -> Metrics:
    return {"explained_variance": explained_variance(sample.value, sample.target, sample.weight)}


def explained_variance(value: Array, target: Array, weight: Array) -> Stat:
    """Return the share of the variance of returns that values explain, `1 - Var(target - value) / Var(target)`.

    1: values are the returns; 0: they are no better than a constant; negative: worse than one. Entries of weight 0 do
    not count; those of all shards do. Returns that vary by no more than the rounding of float32 give no measurement,
    and neither do numbers that are not finite.
    """
    counts = weight > 0
    target = target.astype(jnp.float32)
    # Row 0: returns; row 1: what values leave unexplained. Both variances then take one pass over the entries.
    columns = jnp.stack([target, target - value.astype(jnp.float32)]).reshape(2, -1)
    # Select instead of multiplying by the weight: an entry of weight 0 may be NaN.
    total = lambda x: shards.psum(jnp.where(counts.ravel(), x, 0.0).sum(1))
    count = jnp.maximum(shards.psum(counts.sum()), 1)
    mean = total(columns) / count
    variance = total(jnp.square(columns - mean[:, None])) / count  # in two passes: the mean may be far from 0
    # Below this, the variance of the returns is rounding, and so would be the share of it.
    varies = variance[0] > jnp.square(CONSTANT_RETURN_RTOL * mean[0])
    share = 1 - variance[1] / jnp.where(varies, variance[0], 1.0)
    return stat(share, varies & jnp.isfinite(share))


def _update(
    parts: _Parts, state: ActorCriticState, batch: Batch, key: Key, opt_step: Array
) -> tuple[ActorCriticState, Metrics, Array]:
    config, hyper, sample = parts.config, state.hyper, batch.items
    if config.imitation_coef and not jax.tree.leaves(sample.demos):
        raise SettingsError(
            "agent.imitation_coef is set, but there are no demonstrations; name them, as in --demos FILE (in Python, "
            "on_policy(..., demos=load_dataset(FILE))), or set imitation_coef to 0"
        )
    if config.normalise_advantage == "minibatch":
        # Per minibatch, as in the paper's code: each update sees advantages of the same scale.
        sample = sample._replace(advantage=standardise(sample.advantage, sample.weight))
    loss = partial(_loss, parts, hyper, opt_step)
    training_key = nn.training_key(parts.network, key)
    gradient = loss_gradient(parts.gradient_step, loss, state.params, sample, key=training_key)
    terms = gradient.aux
    # One reduction for all terms: on a GPU each would be a kernel of its own. The terms are weighted; those of
    # demonstrations are not, which have nothing to do with the steps.
    rows = jnp.stack([*terms.values(), sample.weight]).reshape(len(terms) + 1, -1)
    means, share = jnp.split(shards.pmean(rows.mean(axis=1)), [len(terms)])
    of_steps = np.array([name != "imitation_loss" for name in terms])
    # If no step counts, all of them are 0.
    means = jnp.where(of_steps, means / jnp.maximum(share, 1 / (rows.shape[1] * shards.num_shards())), means)
    metrics = {name: means[i] for i, name in enumerate(terms)}
    lr, scale = hyper.lr, state.lr_scale
    if config.desired_kl:
        adapted = adapt_lr(lr * scale, metrics["approx_kl"], config.desired_kl)
        if not isinstance(sample.policy_bits, tuple):
            moved = sample.policy_bits.ravel()[0] != _policy_bits(state.params)
            # The same on all shards, as the parameters are, which only a reduction over them tells.
            adapted = jnp.where(shards.psum(moved.astype(jnp.float32)) > 0, adapted, lr * scale)
        lr = metrics["lr"] = adapted
        scale = lr / hyper.lr
    opt_state = state.opt_state
    if config.critic_warmup:
        # The policy's gradients were 0 until then. By the moments and the count that this leaves, Adam would take steps
        # of several times the learning rate.
        fresh = parts.gradient_step.init(state.params, lr)
        opt_state = select(_ends_warmup(opt_state, opt_step, config.critic_warmup), fresh, opt_state)
    result = apply_gradient(
        parts.gradient_step,
        gradient,
        state.params,
        opt_state,
        lr=lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    variables = result.variables
    if config.critic_warmup:
        variables = _hold_policy(opt_step < config.critic_warmup, state.params, variables)
    return (
        ActorCriticState(variables, result.opt_state, hyper, scale),
        {"loss": result.loss, "grad_norm": result.norm, **metrics},
        jnp.zeros(batch.weight.shape[0], jnp.float32),  # rollouts have no priorities
    )


def _ends_warmup(opt_state: PyTree, opt_step: Array, warmup: int) -> Array:
    """Return whether the update is the first after `warmup` optimisation steps that changes the policy.

    If those before it were skipped, the optimizer has still counted more updates than there were since the warm-up.
    """
    counts = [count for _, count in optax.tree_utils.tree_get_all_with_path(opt_state, "count") if not count.ndim]
    late = [(opt_step > warmup) & (count.astype(jnp.uint32) + warmup > opt_step) for count in counts]
    return jnp.any(jnp.stack([opt_step == warmup, *late]))


def _hold_policy(held: Array, old: PyTree, new: PyTree) -> PyTree:
    """Return `new` variables; while `held`, the `old` ones but for what belongs to the value function alone."""
    if not any(_of_value(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(new)[0]):
        raise SettingsError(
            "agent.critic_warmup: the network of make_network has no parameters of the value function alone, in a "
            "module called value or critic_torso; leave critic_warmup at 0"
        )
    keep = lambda keys, old, new: new if _of_value(keys) else jnp.where(held, old, new)
    return jax.tree_util.tree_map_with_path(keep, old, new)


def _of_value(keys: Any) -> bool:
    """Return whether the variable of this path belongs to the value function alone."""
    # In a network of `flax.nnx`, the name of a module is part of that of its parameter, as in `value/kernel`.
    names = jax.tree_util.keystr(keys, simple=True, separator="/").split("/")
    return len(names) > 1 and names[1] in VALUE_MODULES


def _policy_bits(variables: PyTree) -> Array:
    """Return the sum of the bits of the policy's parameters, uint32: those of another policy have another one.

    Whole numbers have the same sum in each program, where a divergence of 0 would be rounded, in bfloat16 by much.
    """
    of_policy = [x for keys, x in jax.tree_util.tree_flatten_with_path(variables)[0] if not _of_value(keys)]
    floats = [x.astype(jnp.float32) for x in of_policy if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jax.lax.bitcast_convert_type(x, jnp.uint32).sum(dtype=jnp.uint32) for x in floats), start=jnp.uint32(0))


def adapt_lr(lr: Array, kl: Array, desired_kl: float) -> Array:
    """Return the learning rate of an update before which the policy is `kl` away from the one that acted.

    Above twice the desired divergence it is lowered, below half of it raised, within `LR_BOUNDS` (RSL-RL,
    https://github.com/leggedrobotics/rsl_rl; Schwarke et al. 2025, https://arxiv.org/abs/2509.10771). That of a
    policy from itself has no meaning.
    """
    lower = jnp.maximum(lr / LR_FACTOR, LR_BOUNDS[0])
    raised = jnp.minimum(lr * LR_FACTOR, LR_BOUNDS[1])
    return jnp.where(kl > 2 * desired_kl, lower, jnp.where((kl < desired_kl / 2) & (kl > KL_EPSILON), raised, lr))


def _loss(
    parts: _Parts, hyper: PPOHyper, opt_step: Array, params: PyTree, sample: Sample, key: Key | None
) -> tuple[Array, tuple[dict[str, Array], PyTree]]:
    """Return the mean loss over all steps, each step's terms of it, and the network's collections."""
    distribution, value, collections = _evaluate_actions(parts, params, sample, key)
    teacher = None if isinstance(sample.teacher, tuple) else parts.head.distribution(sample.teacher)
    if teacher is not None:
        # The teacher may not know of the mask, and what it forbids would be infinitely far from the policy.
        teacher = distributions.mask_distribution(teacher, masks.get_mask(sample.obs, axes=value.ndim))
    imitation = _imitation_loss(parts, params, sample) if parts.config.imitation_coef else None
    loss, terms = actor_critic_loss(parts.config, hyper, distribution, value, sample, teacher, imitation)
    if parts.config.critic_warmup:
        loss = jnp.where(opt_step < parts.config.critic_warmup, hyper.vf_coef * terms["value_loss"], loss)
    if parts.extra_loss is not None:
        term = extra_term(parts.extra_loss, params, sample, Outputs(distribution, value), sample.weight)
        terms["extra_loss"] = sample.weight * term
        loss = loss + terms["extra_loss"]
    # Divided by `B` and not by the sum of weights, which shards would have to share. Steps of weight 0 are rare.
    return loss.mean(), (terms, collections)


def _imitation_loss(parts: _Parts, params: PyTree, sample: Sample) -> Array:
    """Return `-log p(a | s)` of the demonstrations beside the steps, `[B]`."""
    # Without a key: the policy as it acts, without dropout, and batch statistics stay those of rollouts.
    distribution = _evaluate_actions(parts, params, sample._replace(obs=sample.demos.obs))[0]
    return -distribution.log_prob(sample.demos.action)


def actor_critic_loss(
    config: PPOConfig,
    hyper: PPOHyper,
    distribution: Distribution,
    value: Array,
    sample: Sample,
    teacher: Distribution | None = None,
    imitation: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Return the loss of each step, and its terms (Schulman et al. 2017, equation 9).

    It is `policy_loss + vf_coef * value_loss - ent_coef * entropy`. `policy_loss` is the clipped surrogate of equation
    7, `-min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)`, or that of A2C, `-log p(a) * A`, or of V-trace.
    With a teacher or demonstrations, `policy_coef` multiplies the first and the last term, and `teacher_coef *
    teacher_kl` and `imitation_coef * imitation_loss` are added. The latter is that of DAPG (Rajeswaran et al. 2018,
    https://arxiv.org/abs/1709.10087) without its weights, the largest advantages.

    Args:
      config: which surrogate, and whether the value is clipped too.
      hyper: the coefficients.
      distribution: action distributions under the parameters that are trained.
      value: values under these parameters, of the shape of `sample.target`.
      sample: the steps, whose terms are multiplied by their weights.
      teacher: action distributions of the teacher.
      imitation: negative log-probability of the demonstration beside each step.
    """
    log_prob = distribution.log_prob(sample.action)
    log_ratio = log_prob - sample.log_prob
    ratio = jnp.exp(log_ratio)
    # A mask may forbid the action of a step that does not count: infinite, it would not be 0 by a weight of 0.
    log_prob = jnp.where(sample.weight > 0, log_prob, 0.0)
    if config.surrogate == "clipped":
        policy_loss = losses.clipped_surrogate(ratio, sample.advantage, hyper.clip_eps)
    elif config.surrogate == "weighted":
        policy_loss = losses.weighted_surrogate(log_prob, sample.log_prob, sample.advantage, hyper.rho_clip)
    else:
        policy_loss = -log_prob * sample.advantage
    if config.vf_clip_eps:
        error_loss = losses.value_loss(value, sample.value, sample.target, config.vf_clip_eps)
    else:
        error_loss = losses.squared(value - sample.target)
    terms = {
        "policy_loss": policy_loss,
        "value_loss": error_loss,
        "entropy": distribution.entropy(),
        # Schulman 2020, http://joschu.net/blog/kl-approx.html: unbiased and never negative. Bounded, because an update
        # with a non-finite metric would be skipped.
        "approx_kl": jnp.minimum(ratio, LARGEST_RATIO) - 1 - log_ratio,
        # Reported for every surrogate, although only one of them clips.
        "clip_fraction": (jnp.abs(ratio - 1) > hyper.clip_eps).astype(jnp.float32),
        "value": value,
    }
    if teacher is not None:
        terms["teacher_kl"] = distributions.kl_divergence(teacher, distribution)
    # Weighted before they are averaged: metrics and loss leave out the same steps.
    terms = {name: sample.weight * term for name, term in terms.items()}
    if teacher is None and imitation is None:
        loss = terms["policy_loss"] + hyper.vf_coef * terms["value_loss"] - hyper.ent_coef * terms["entropy"]
        return loss, terms
    policy_terms = terms["policy_loss"] - hyper.ent_coef * terms["entropy"]
    loss = hyper.policy_coef * policy_terms + hyper.vf_coef * terms["value_loss"]
    if teacher is not None:
        loss = loss + hyper.teacher_coef * terms["teacher_kl"]
    if imitation is not None:
        # Not by the weights of the steps, with which demonstrations have nothing to do.
        terms["imitation_loss"] = imitation
        loss = loss + hyper.imitation_coef * imitation
    return loss, terms


def _stop(target_kl: float, state: ActorCriticState, metrics: Metrics) -> Array:
    # With several shards it is their sum and number; a skipped update has none.
    kl = as_stat(metrics["approx_kl"])
    return kl.sum / jnp.maximum(kl.count, 1) > target_kl

"""Shared code of SAC, TD3, AWAC and IQL: settings, networks, memories, and the critics' targets and update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import masks, nn, shards, spaces
from jaxrl.agents import sequences
from jaxrl.agents.base import Agent, AgentMaker, DistributionFn, PolicyFns, StripFn
from jaxrl.agents.checks import refuse_beside
from jaxrl.agents.critic_values import CriticValues, atom_values, mean_values
from jaxrl.agents.custom import (
    ONE_VALUE,
    CustomParts,
    ExtraLoss,
    agent_maker,
    build_network,
    extra_term,
    observation_structs,
    policy_output,
    value_output,
)
from jaxrl.agents.exploration import mask_values
from jaxrl.agents.fields import (
    Between,
    Count,
    NetworkConfig,
    OneOf,
    OptimizerConfig,
    Positive,
    Rate,
    Real,
    Share,
    Steps,
    Widths,
)
from jaxrl.agents.losses import conservative_gap, hl_gauss, project
from jaxrl.agents.optimizers import (
    GradientStep,
    GradientUpdate,
    gradient_update,
    on_sphere,
    project_kernels,
    require_kernels,
)
from jaxrl.agents.sequences import Memories, Views
from jaxrl.agents.values import (
    atoms_between,
    check_support,
    expected_value,
    init_return_bounds,
    outside_support,
    update_return_bounds,
)
from jaxrl.distributions import Head
from jaxrl.errors import SettingsError
from jaxrl.masks import PRIVILEGED
from jaxrl.metrics import Metrics
from jaxrl.nn import (
    BatchNormNetwork,
    Critic,
    DropoutCritic,
    Ensemble,
    Network,
    PolicyNetwork,
    Recurrent,
    RecurrentEnsemble,
    RecurrentNetwork,
)
from jaxrl.nn.custom import ROWS, split_variables
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Batch, RecurrentObs, Transition
from jaxrl.xla.reductions import argmax


@dataclass(frozen=True)
class CriticConfig(NetworkConfig, OptimizerConfig):
    """Settings of an agent with critics."""

    lr: Rate = 3e-4
    """Learning rate of the critics."""
    lr_decay: Steps = 0
    """Optimisation steps over which the learning rates decay linearly to 0; 0: no decay."""
    max_grad_norm: Positive = 1e6
    """Largest global norm of each gradient (critics, policy, temperature); larger ones are scaled down to it."""
    policy_lr: Rate = 3e-4
    """Learning rate of the policy."""
    num_critics: Count = 2
    """Number of critics; unless other settings say otherwise, targets use the lowest of their values."""
    tau: Share = 0.005
    """Weight of the online networks in each update of the target networks."""
    layer_norm: bool = False
    """Apply layer normalisation before each activation of the critics; meant for many updates per environment step."""
    batch_norm: Annotated[str, OneOf(("none", "batch", "renorm"))] = "none"
    """Batch normalisation of the inputs and the hidden layers of all networks: none, batch, or renorm (batch
    renormalisation). For observations without convolutions."""
    pre_activation_norm: bool = False
    """With batch_norm, normalise the hidden layers before each activation, behind dense layers without biases (XQC);
    otherwise after it."""
    weight_norm: bool = False
    """Project the kernels of all networks onto the unit sphere, at the start and after each update: the weights of each
    output have length 1 (XQC)."""
    critic_features: Widths = ()
    """Widths of the critics' dense layers; empty: features."""
    dropout: Annotated[float, Between(0.0, 0.9999)] = 0.0
    """Share of the outputs of the critics' dense layers, before normalisation and activation, that are set to 0: where
    critics learn, in targets, and where a policy improves their values (DroQ, 0.01 as published); 0 turns it off."""


@dataclass(frozen=True)
class CategoricalConfig(CriticConfig):
    """Settings of an agent whose critics may learn distributions of the return."""

    critic_target: Annotated[str, OneOf(("min", "mean"))] = "min"
    """Targets take the lowest of the critics' values (min), or their mean."""
    atoms: Steps = 0
    """Atoms of the support on which each critic learns probabilities of the return, of continuous actions (101 in
    FastTD3); 0: the mean return alone."""
    critic_loss: Annotated[str, OneOf(("c51", "hl_gauss"))] = "c51"
    """With atoms, what those probabilities are matched to: the distribution of the target, projected onto the support
    (c51), or a histogram around its mean (hl_gauss)."""
    v_min: Real | None = None
    """Lowest return that atoms can represent; unset: the lowest possible under the rewards and discounts learnt from so
    far."""
    v_max: Real | None = None
    """Highest return that atoms can represent; unset: as for `v_min`."""

    @property
    def derives_support(self) -> bool:
        """Whether an end of the support follows from the rewards."""
        return bool(self.atoms) and (self.v_min is None or self.v_max is None)


ValuesFn = Callable[[PyTree], CriticValues]
"""`reach -> CriticValues`: what critics learn; the support of atoms follows from `ReturnBounds`, `()` otherwise."""


PARTS = ("make_optimizer", "make_policy", "make_critic", "extra_loss", "extra_policy_loss", "critic_loss")
"""Arguments for parts made in Python."""


def critic_maker(
    name: str,
    build: Callable[[str, Any, CustomParts, EnvSpec], Agent],
    config: CategoricalConfig,
    arguments: Mapping[str, Any],
    check: Callable[[Any, Mapping[str, Any]], None],
) -> AgentMaker:
    """Return the maker of an agent whose critics may learn distributions; arguments are as for `agent_maker`.

    The argument `critic_loss` is a part if it is a function of means, and the setting of that name if it is a string.
    """
    setting = isinstance(arguments.get("critic_loss"), str)
    parts = tuple(part for part in PARTS if part != "critic_loss" or not setting)
    return agent_maker(name, build, config, arguments, parts, check)


class Networks(NamedTuple):
    """A policy `[B, ...] -> [B, outputs]`, and critics `[B, ...], [B, D] -> [K, B, outputs]`."""

    policy: Network
    critic: Network
    value: Network | None = None
    """`[B, ...] -> [B]` or `[B, 1]`; only IQL has one."""


class Parts(NamedTuple):
    """The static parts of an agent with critics."""

    config: Any
    """A `CriticConfig`, or a subclass."""
    networks: Networks
    gradient_step: GradientStep
    spec: EnvSpec
    head: Head
    """Maps the policy's outputs to actions."""
    critic_values: ValuesFn
    """What the critics' outputs mean."""
    memory: Memories | None = None
    """With recurrent cores, their memories at the start of an episode."""
    extra_loss: ExtraLoss | None = None
    """Of the critics."""
    extra_policy_loss: ExtraLoss | None = None


def build_networks(config: CriticConfig, custom: CustomParts, spec: EnvSpec, head: Head, atoms: int = 1) -> Networks:
    """Build the networks that `config` describes, or those made in Python; raise `SettingsError` if they do not fit.

    Critics of continuous actions have as many outputs as `atoms`.
    """
    space, seen = spec.action_space, masks.view_spec(spec, masks.for_policy)
    _check_dropout(config, custom)
    if config.pre_activation_norm and config.batch_norm == "none":
        raise SettingsError(
            "agent.pre_activation_norm is on, but agent.batch_norm none; set batch_norm to batch or renorm, or "
            "pre_activation_norm off"
        )
    usual = lambda: _network(PolicyNetwork, config, seen, head.outputs, config.features)
    policy = build_network(
        custom, "make_policy", (seen, head), usual, (observation_structs(seen),), (policy_output(head),)
    )
    spec = masks.view_spec(spec, masks.for_critic)
    obs = observation_structs(spec)
    if "make_critic" not in custom.makers:
        outputs = space.n if isinstance(space, Discrete) else atoms
        widths = config.critic_features or config.features
        given = "critic_features" if config.critic_features else "features"
        nn.check_torso(config.torso, spec.observation_space, config.channels, widths, given)
        if config.batch_norm != "none":
            return Networks(policy, Ensemble(_network(Critic, config, spec, outputs, widths), config.num_critics))
        options = {**_options(config, spec), "features": widths, "layer_norm": config.layer_norm}
        kind = partial(DropoutCritic, dropout=config.dropout) if config.dropout else Critic
        return Networks(policy, Ensemble(kind(spec.observation_space, outputs, **options), config.num_critics))
    args, values = ((obs,), value_output(spec)) if isinstance(space, Discrete) else ((obs, _actions(space)), ONE_VALUE)
    # The user makes one critic; the ensemble maps it over K sets of parameters.
    member = nn.check_network(custom.make("make_critic", spec), "make_critic", args, (values,))
    variables = jax.eval_shape(member.init, make_key(0), *args)
    on_kernels = {"weight_norm": config.weight_norm, "weight_decay": config.weight_decay}
    require_kernels(split_variables(variables)[0], "make_critic", **on_kernels)
    return Networks(policy, Ensemble(member, config.num_critics))


def _check_dropout(config: CriticConfig, custom: CustomParts) -> None:
    """Raise `SettingsError` for dropout in critics that do not have it."""
    without = {
        "a critic made in Python": "make_critic" in custom.makers,
        f"agent.batch_norm {config.batch_norm}": config.batch_norm != "none",
        f"torso {config.torso}": config.torso in nn.RESIDUAL,
    }
    for what, given in without.items():
        if config.dropout and given:
            raise SettingsError(f"agent.dropout is {config.dropout}, which {what} does not have; set dropout to 0")


def value_network(config: CriticConfig, custom: CustomParts, spec: EnvSpec) -> Network:
    """Build the state-value network; arguments are as for `build_networks`."""
    spec = masks.view_spec(spec, masks.for_critic)
    widths, more = config.critic_features or config.features, {"layer_norm": config.layer_norm}
    usual = lambda: _network(Critic, config, spec, 1, widths, **more)
    return build_network(custom, "make_value", (spec,), usual, (observation_structs(spec),), (ONE_VALUE,))


def _network(
    kind: Callable[..., Network], config: CriticConfig, spec: EnvSpec, outputs: int, widths: Sequence[int], **more: Any
) -> Network:
    """Return a network of a `kind`, or with `batch_norm` a `BatchNormNetwork` of its inputs and outputs."""
    if config.batch_norm == "none":
        return kind(spec.observation_space, outputs, **{**_options(config, spec), "features": widths, **more})
    refuse_beside(config, "layer_norm", False, batch_norm="none")
    if nn.torso_kind(config.torso, spec.observation_space, config.channels) not in nn.FLAT:
        raise SettingsError(
            f"agent.batch_norm is {config.batch_norm}, but {spec.name} has images for a torso with convolutions; set "
            "agent.torso to mlp, or batch_norm to none"
        )
    if config.torso in nn.RESIDUAL:
        raise SettingsError(
            f"agent.batch_norm is {config.batch_norm}, which torso {config.torso} does not have; set agent.torso to "
            "mlp, or batch_norm to none"
        )
    renorm = config.batch_norm == "renorm"
    return BatchNormNetwork(
        spec.observation_space, outputs, widths, config.activation, renorm, config.dtype, config.pre_activation_norm
    )


def _options(config: CriticConfig, spec: EnvSpec) -> dict[str, Any]:
    nn.check_torso(config.torso, spec.observation_space, config.channels, config.features)
    return {name: getattr(config, name) for name in ("torso", "features", "activation", "channels", "dtype")}


def recurrent_networks(config: Any, spec: EnvSpec, head: Head) -> Networks:
    """Build recurrent networks, each with its own core; `config` is also a `SequenceConfig`.

    The core follows the torso. Critics concatenate continuous actions to its output, and have their last hidden layer
    after that.
    """
    space, hidden = spec.action_space, Box(-jnp.inf, jnp.inf, (config.core_features,))
    without = {"critic_features": (), "dropout": 0.0, "pre_activation_norm": False, "weight_norm": False}
    refuse_beside(config, "core", "none", batch_norm="none", **without)
    # Actions must pass a hidden layer together with the core's output. Without actions as input, a linear head
    # suffices.
    behind = 0 if isinstance(space, Discrete) else 1
    outputs = space.n if isinstance(space, Discrete) else 1

    def core(head: Any, spec: EnvSpec, features: tuple[int, ...], **more: Any) -> RecurrentNetwork:
        options = {**_options(config, spec), "features": features, **more}
        return RecurrentNetwork(Recurrent(head, spec.observation_space, config.make_core(), **options))

    # No layers: those of the policy all come before its core.
    policy = PolicyNetwork(hidden, head.outputs, "mlp", ())
    before, last = config.features[: len(config.features) - behind], config.features[len(config.features) - behind :]
    if config.torso in nn.RESIDUAL and not before:
        raise SettingsError(
            f"agent.features is {config.features}, but with a core the last layer of critics comes behind it, and "
            f"leaves no block of torso {config.torso} before it; give features another width, or set agent.torso to mlp"
        )
    critic = Critic(hidden, outputs, "mlp", last, config.activation, config.layer_norm, dtype=config.dtype)
    of_policy, of_critic = masks.view_spec(spec, masks.for_policy), masks.view_spec(spec, masks.for_critic)
    return Networks(
        core(policy, of_policy, config.features),
        RecurrentEnsemble(core(critic, of_critic, before, layer_norm=config.layer_norm), config.num_critics),
    )


def _actions(space: Any) -> Array:
    return jnp.zeros((ROWS, space_size(space)), jnp.float32)


def make_parts(
    config: CriticConfig,
    custom: CustomParts,
    networks: Networks,
    spec: EnvSpec,
    head: Head,
    critic_values: ValuesFn,
    memory: Memories | None = None,
) -> Parts:
    """Return the parts of an agent, with the gradient step of all networks and the user's losses."""
    step = on_sphere(custom.gradient_step) if config.weight_norm else custom.gradient_step
    losses = (custom.extra_loss, custom.extra_policy_loss)
    return Parts(config, networks, step, spec, head, critic_values, memory, *losses)


def mean_or_atom_values(config: CategoricalConfig, custom: CustomParts, how: str, margin: float = 0.0) -> ValuesFn:
    """Return what critics of mean returns learn, or with atoms those of distributions.

    Args:
      config: the agent's settings.
      custom: its parts made in Python, among them the loss of means.
      how: how the policy reduces the critics' values: `min` or `mean`.
      margin: of a support that follows from the rewards, as for `support_bounds`.
    """
    if not config.atoms:
        return lambda reach: mean_values(how, custom.critic_loss)
    return lambda reach: atom_values(atoms_between(reach, config.v_min, config.v_max, config.atoms, margin), how)


def init_networks(parts: Parts, key: Key) -> tuple[PyTree, PyTree]:
    """Initialise the variables of policy and critics. The key is consumed."""
    networks, spec, memory = parts.networks, parts.spec, parts.memory
    policy_key, critic_key = jax.random.split(key)
    obs = spaces.space_zeros(spec.observation_space, 1)
    if memory is not None:
        obs = RecurrentObs(obs, jax.tree.map(lambda x: jnp.asarray(x)[None], memory))
    space = spec.action_space
    action = (jnp.zeros((1, space_size(space)), jnp.float32),) if isinstance(space, Box) else ()
    return (
        init_network(parts, networks.policy, policy_key, to_policy(obs)),
        init_network(parts, networks.critic, critic_key, to_critic(obs), *action),
    )


def init_network(parts: Parts, network: Network, key: Key, *args: Any) -> PyTree:
    """Initialise the variables of `network`, with `weight_norm` on the sphere. The key is consumed."""
    variables = network.init(key, *args)
    return project_kernels(variables) if parts.config.weight_norm else variables


def apply_fns(networks: Networks) -> dict[str, Callable[..., Any]]:
    """Return the networks as pure functions, as `Agent.apply`."""
    fns: dict[str, Callable[..., Any]] = {
        "policy": lambda params, obs: networks.policy.apply(params, to_policy(obs)),
        "critic": lambda params, obs, *action: networks.critic.apply(params, to_critic(obs), *action),
    }
    if (value := networks.value) is not None:
        fns["value"] = lambda params, obs: value.apply(params, to_critic(obs))
    return fns


def space_size(space: Box) -> int:
    """Return the number of entries of an element of `space`."""
    return int(spaces.box_bounds(space)[0].size)


def target_entropy(chosen: float, target: Array, usual: float, obs: PyTree) -> Array:
    """Return the target entropy; the default is, under a mask, a share of the entropy of the uniform policy there.

    Args:
      chosen: the user's setting; 0: none.
      target: the value in the state, which a population may override.
      usual: the default.
      obs: observations, with a mask or without.
    """
    mask = masks.get_mask(obs)
    # A target that the user set stays as it is. With a single action the entropy below would be divided by 0.
    if mask is None or chosen or mask.shape[-1] == 1:
        return target
    return jnp.where(target == jnp.float32(usual), target * masks.entropy_share(mask), target)


def to_policy(obs: PyTree) -> PyTree:
    """Return what policies see of an observation: with the memory of their core, but without that of noise."""
    # `Memories` are those of cores. Any other memory is that of exploration noise, which no network sees.
    if isinstance(obs, RecurrentObs) and isinstance(obs.memory, Memories):
        return RecurrentObs(masks.for_policy(obs.obs), obs.memory.policy)
    return masks.for_policy(obs.obs if isinstance(obs, RecurrentObs) else obs)


def to_critic(obs: PyTree) -> PyTree:
    """Return what critics see of an observation: with the memories of their cores, but without that of noise."""
    if isinstance(obs, RecurrentObs) and isinstance(obs.memory, Memories):
        return RecurrentObs(masks.for_critic(obs.obs), obs.memory.critic)
    return masks.for_critic(obs.obs if isinstance(obs, RecurrentObs) else obs)


# --- the memories of recurrent networks -------------------------------------------------------------------------


def next_memories(parts: Parts, obs: RecurrentObs, policy: PyTree, critic: PyTree) -> Memories:
    """Return the memories `[N, ...]` of policy and critics after a step; those of critics stay without parameters."""
    networks: Any = parts.networks
    of_critics = networks.critic.next_memory(critic, to_critic(obs)) if jax.tree.leaves(critic) else obs.memory.critic
    return Memories(networks.policy.next_memory(policy, to_policy(obs)), of_critics)


def observe_before(parts: Parts, obs: PyTree, is_first: PyTree, policy: PyTree = (), critic: PyTree = ()) -> PyTree:
    """Return what networks of these parameters see before each step that is learnt from, `[R, ...]`.

    Without cores that is `obs` `[B, ...]`; with them, of sequences `[B, L, ...]`, with the memories that the given
    networks come to have of them, which begin anew where `is_first` `[B, L]`.
    """
    if parts.memory is None:
        return obs
    return sequences.remembering(obs, _memories(parts, obs, is_first, policy, critic)[0], parts.config.burn_in)


def observe_around(parts: Parts, items: Transition, policy: PyTree, critic: PyTree) -> Views:
    """Return what the networks see before and after each step that is learnt from, `[R, ...]`.

    With cores, observations have the memories before the step, and next observations those after it.
    """
    if parts.memory is None:
        return Views(items.obs, items.next_obs)
    memories, next_memories = _memories(parts, items.obs, items.is_first, policy, critic)
    burn_in = parts.config.burn_in
    return Views(
        sequences.remembering(items.obs, memories, burn_in),
        sequences.remembering(items.next_obs, next_memories, burn_in),
    )


def learning_steps(parts: Parts, batch: Batch) -> Batch:
    """Return the steps of a batch that are learnt from, `[R, ...]`; without cores they are its items."""
    return batch if parts.memory is None else sequences.training_rows_of_sequences(batch, parts.config)


def _memories(
    parts: Parts, obs: RecurrentObs, is_first: PyTree, policy: PyTree, critic: PyTree
) -> tuple[Memories, Memories]:
    """Return the memories before and after each learnt step of sequences; `()` of a network without parameters."""
    assert parts.memory is not None
    networks: Any = parts.networks
    burn_in = parts.config.burn_in
    # Replay stores the memory before each step; a sequence starts from that of its first.
    first, none = jax.tree.map(lambda x: x[:, 0], obs.memory), ((), ())
    of_policy = of_critic = none
    if jax.tree.leaves(policy):
        seen = RecurrentObs(masks.for_policy(obs.obs), first.policy)
        of_policy = sequences.memories_of(networks.policy.core, policy, seen, is_first, burn_in)
    if jax.tree.leaves(critic):
        seen = masks.for_critic(obs.obs)
        # Memories of critics are stored [B, K, ...], their parameters [K, ...].
        one = lambda params, first: sequences.memories_of(
            networks.critic.member.core, params, RecurrentObs(seen, first), is_first, burn_in
        )
        of_critic = jax.vmap(one, in_axes=(0, 1), out_axes=1)(critic, first.critic)
    # A pair of moments for each network becomes a pair of networks for each moment.
    memories, next_memories = (Memories(*pair) for pair in zip(of_policy, of_critic, strict=True))
    return memories, next_memories


class Bootstrap(NamedTuple):
    """What a return is made of; `[R]` each."""

    reward: Array
    """Reward of the step, plus the discounted entropy bonus of the next state."""
    discount: Array
    value: Array
    """Value of the next state, without its entropy bonus."""


def bootstrap_targets(
    parts: Parts, items: Transition, steps: Transition, v_t: Array, bonus: Array | float = 0.0
) -> Array:
    """Return the targets `[R]`, or samples of them `[R, S]`, for steps that lead to values `v_t`.

    `steps` are those of `items` that are learnt from. With cores, `items` are sequences, within which targets run
    over several steps; each step but the first then adds the entropy before it, of whose bonus `v_t` holds `bonus`
    `[R]`.
    """
    if v_t.ndim == 2:
        return steps.reward[:, None] + steps.discount[:, None] * v_t
    if parts.memory is None:
        return steps.reward + steps.discount * v_t
    # The entropy bonus moves into the reward, so that it is discounted and summed up with it; the value is left bare.
    one_step = Bootstrap(steps.reward + steps.discount * bonus, steps.discount, v_t - bonus)
    several = sequences.sequence_targets(one_step, items, parts.config)
    return several.reward + several.discount * several.value


def correlated_noise(correlation: Array, previous: Array, fresh: Array) -> Array:
    """Return noise with this correlation to that of the `previous` step, and unit standard deviation in the long run.

    This is a first-order autoregressive process: a discrete Ornstein-Uhlenbeck process.
    """
    # The square root keeps the variance at 1: `correlation^2 + (1 - correlation^2)`.
    return correlation * previous + jnp.sqrt(1 - jnp.square(correlation)) * fresh


# --- atoms ------------------------------------------------------------------------------------------------------


def check_atoms(config: Any, custom: Mapping[str, Any], **alone: Any) -> None:
    """Raise `SettingsError` for atoms without a support, beside settings other than those in `alone`, or with `custom`
    parts for means."""
    if not config.atoms:
        return
    if config.atoms < 2:
        raise SettingsError(f"agent.atoms is {config.atoms}; expected at least 2, or 0 for the mean return alone")
    check_support(config.atoms, config.v_min, config.v_max)
    refuse_beside(config, "atoms", core="none", **alone)
    check_own_critic(custom, "atoms", config.atoms)


def check_own_critic(custom: Mapping[str, Any], setting: str, value: int) -> None:
    """Raise `SettingsError` for a critic or a loss of mean returns made in Python, beside a distribution of returns."""
    if not value:
        return
    if custom["make_critic"] is not None:
        raise SettingsError(
            f"agent.{setting} is {value}, which a critic made in Python does not have; set {setting} to 0"
        )
    if custom.get("critic_loss") is not None:
        raise SettingsError(
            f"critic_loss is a function, of mean returns, but agent.{setting} is {value}; set {setting} to 0, or leave "
            "critic_loss out"
        )


def initial_reach(config: CategoricalConfig) -> PyTree:
    """Return the `ReturnBounds` before the first step; `()` where no end of a support follows from them."""
    return init_return_bounds() if config.derives_support else ()


def widen_reach(config: CategoricalConfig, reach: PyTree, items: Transition) -> PyTree:
    """Widen the bounds of `initial_reach` by the steps `items` `[R]`."""
    return update_return_bounds(reach, items) if config.derives_support else reach


def target_distribution(
    config: CategoricalConfig, items: Transition, logits: Array, support: Array, bonus: Array | float = 0.0
) -> tuple[Array, Metrics]:
    """Return the probabilities `[R, n]` of the atoms that critics are to learn, and metrics.

    The target critics have `logits` `[K, R, n]` after the steps `items` `[R]`, where entropy adds `bonus` `[R]`. The
    distribution is that of the critic with the lowest mean (FastTD3, Seo et al. 2025, https://arxiv.org/abs/2505.22642)
    or the mixture of all.
    """
    p = jax.nn.softmax(logits)
    if config.critic_target == "min":
        lowest = jax.nn.one_hot(argmax(-expected_value(p, support).T), p.shape[0], axis=0, dtype=p.dtype)  # `[K, R]`
        p = jnp.sum(lowest[..., None] * p, axis=0)
    else:
        p = p.mean(0)
    reward = items.reward + items.discount * bonus
    z = reward[:, None] + items.discount[:, None] * support[None]
    if config.critic_loss == "hl_gauss":
        target = jax.vmap(hl_gauss, in_axes=(0, None))(jnp.sum(p * z, axis=-1), support)
    else:
        target = jax.vmap(project, in_axes=(0, 0, None))(z, p, support)
    if config.v_min is None and config.v_max is None:
        # A support that follows from rewards contains the returns, but not what is added to them. Their means are
        # compared: of critics that know nothing yet, the outermost atoms would lie outside.
        if isinstance(bonus, float):
            return target, {}
        z, p = jnp.sum(p * z, axis=-1, keepdims=True), jnp.ones((len(z), 1), z.dtype)
    outside = jax.vmap(outside_support, in_axes=(0, 0, None))(z, p, support)
    return target, shards.step_means({"out_of_support": outside}, items.weight)


class SampledActions(NamedTuple):
    """Sampled actions whose values CQL pushes down; both are `()` for discrete actions, where every action counts."""

    action: PyTree
    """`[B, S, D]`, from -1 to 1."""
    log_density: PyTree
    """`[B, S]`, log-density under the sampling distribution, plus the logarithm of `S`."""


class StateAction(NamedTuple):
    """Inputs of critics: observations, and actions as they take them, `()` for discrete ones."""

    obs: PyTree
    action: tuple[Array, ...]


class OwnBootstrap(NamedTuple):
    """What targets are made of without a target network, beside the critics' own outputs for the next steps."""

    reward: Array
    discount: Array
    probability: Array
    """`[R, outputs]`, by which the critics' outputs are averaged: the policy's for discrete actions, otherwise ones."""
    bonus: Array
    """What the policy's entropy adds to the value."""


class Penalties(NamedTuple):
    """Terms beside the critics' own loss; all are off by default."""

    cql: Array | float = 0.0
    """Weight of the conservative penalty (CQL)."""
    rivals: SampledActions | None = None
    """The actions whose values it pushes down, `[R, S, D]`; `None` without."""
    eta: PyTree = ()
    """Weight of the `similarity` of the critics' gradients (EDAC); `()` without."""


NO_PENALTIES = Penalties()


class CriticBatch(NamedTuple):
    """What the critics' loss is computed on: `R` steps, and with cores sequences `[B, L, ...]` in `obs`."""

    obs: PyTree
    """As sampled: the memories of critics are computed inside of the loss."""
    is_first: PyTree
    action: tuple[Array, ...]
    """Continuous actions, an input of critics; `()` for discrete ones."""
    discrete_action: Array | None
    """`[R]`, which select one of the critics' outputs; `None` for continuous ones."""
    target: Array | OwnBootstrap
    next_inputs: StateAction | None
    weight: Array
    rivals: SampledActions | None
    items: PyTree
    """The steps themselves, for `extra_loss`; `()` without."""


class CriticAux(NamedTuple):
    """What the critics' loss returns beside its mean; `[R]` each, and the mean over critics."""

    error: Array
    """Absolute errors."""
    q: Array
    gap: PyTree
    """The conservative gap; `()` without CQL."""
    similarity: PyTree
    """Of the critics' gradients; `()` without EDAC."""


def learn_critic(
    parts: Parts,
    state: Any,
    batch: Batch,
    values: CriticValues,
    target: Array | OwnBootstrap,
    key: Key,
    opt_step: Array,
    *,
    next_inputs: StateAction | None = None,
    penalties: Penalties = NO_PENALTIES,
) -> tuple[GradientUpdate, Metrics, Array]:
    """Regress the critics on a target; also return metrics and the priorities of the batch.

    Args:
      parts: the agent's.
      state: the agent's, with `critic`, `opt_state.critic` and `hyper`.
      batch: steps, or with cores sequences, of which `R` steps are learnt from.
      values: what the critics learn.
      target: what `values.loss` takes, `[R, ...]`; or what it is made of, together with the critics' own outputs for
        `next_inputs`.
      key: of the update.
      opt_step: number of the optimisation step, from 0.
      next_inputs: of the next steps, which pass through the critics together with the steps, so that batch
        normalisation has the statistics of both.
      penalties: terms beside the loss.
    """
    steps = learning_steps(parts, batch)
    action = unit_actions(parts.spec, steps.items.action)
    learnt = gradient_update(
        parts.gradient_step,
        partial(_critic_loss, parts, values, penalties),
        state.critic,
        state.opt_state.critic,
        CriticBatch(
            batch.items.obs,
            batch.items.is_first,
            action,
            None if action else steps.items.action,
            target,
            next_inputs,
            steps.weight * steps.items.weight,
            penalties.rivals,
            steps.items if parts.extra_loss else (),
        ),
        key=nn.training_key(parts.networks.critic, key),
        lr=state.hyper.lr,
        max_norm=state.hyper.max_grad_norm,
        opt_step=opt_step,
    )
    aux: CriticAux = learnt.aux
    # The errors become priorities, which the importance weights of this batch must not enter; those of invalid steps
    # are 0.
    error = aux.error * steps.items.weight
    of_steps = {"q": aux.q, "td_error": error, "cql_gap": aux.gap, "similarity": aux.similarity}
    on = {name: x for name, x in of_steps.items() if not isinstance(x, tuple)}
    metrics = {"loss": learnt.loss, **shards.step_means(on, steps.items.weight), "grad_norm": learnt.norm}
    if parts.memory is None:
        return learnt, metrics, error
    return learnt, metrics, sequences.sequence_priorities(error, batch.weight.shape[0], parts.config.priority_max)


def _critic_loss(
    parts: Parts, values: CriticValues, penalties: Penalties, params: PyTree, batch: CriticBatch, key: Key | None
) -> tuple[Array, tuple[CriticAux, PyTree]]:
    """Return the weighted mean of the critics' summed losses, what else is reported, and the critics' collections.

    Every critic regresses on the same target, so that in a sum each has the gradient that it has alone.
    """
    # Inside of the loss: gradients reach the critics through their memories too.
    obs = observe_before(parts, batch.obs, batch.is_first, critic=params)
    critic, target = parts.networks.critic, batch.target
    inputs = [StateAction(obs, batch.action)]
    if batch.next_inputs is not None:
        inputs.append(batch.next_inputs)
    rivals = [] if batch.rivals is None else _rival_inputs(obs, batch.rivals)
    # Critics that learn differently from how they act, as with dropout, value an action of the data and its rivals in
    # one pass: they could push down rivals that another network values, without end.
    alongside = [] if key is None else rivals
    outputs, collections = apply_together(critic, params, [*inputs, *alongside], key)
    out = outputs[0]
    if isinstance(target, OwnBootstrap):
        target = _own_target(target, values.policy_values(outputs[1]))
    q = values.mean(out, batch.discrete_action)
    loss, error = values.loss(out, q, cast(Array, target))
    gap: PyTree = ()
    if batch.rivals is not None:
        others = outputs[-1:] if alongside else [apply_critics(critic, params, x.obs, *x.action) for x in rivals]
        gap = _conservative_gap(obs, batch.rivals, out, q, *others)
        # Conservative Q-learning (Kumar et al. 2020, equation 4).
        loss = loss + penalties.cql * gap
    loss = loss.sum(0)
    alike: PyTree = ()
    if not isinstance(penalties.eta, tuple):
        alike = similarity(_action_gradients(parts.networks, params, obs, *batch.action))
        # Half of the published term, beside half the squared errors: so that `eta` is as published.
        loss = loss + penalties.eta * q.shape[0] / 2 * alike
    if parts.extra_loss is not None:
        seen = q if batch.discrete_action is None else out
        loss = loss + extra_term(parts.extra_loss, params, batch.items, seen, batch.weight)
    gap = jax.tree.map(lambda x: x.mean(0), gap)
    return jnp.mean(batch.weight * loss), (CriticAux(jnp.abs(error).mean(0), q.mean(0), gap, alike), collections)


def _own_target(bootstrap: OwnBootstrap, q_t: Array) -> Array:
    """Return `r + discount * (sum_a p(a) q(s', a) + bonus)` `[R]`, of the critics' own values `q_t` `[R, outputs]`."""
    v_t = jnp.sum(bootstrap.probability * q_t, axis=-1) + bootstrap.bonus
    # This target comes from the parameters that are differentiated, while all others are data of the loss.
    return jax.lax.stop_gradient(bootstrap.reward + bootstrap.discount * v_t)


def _action_gradients(networks: Networks, params: PyTree, obs: PyTree, action: Array) -> Array:
    """Return the gradient of each critic's value for `action` `[B, D]`, `[K, B, D]`; without dropout."""
    one = cast(Ensemble, networks.critic).member
    seen = to_critic(obs)
    # Rows do not depend on each other, so the gradient of their sum has that of each.
    value = lambda params, action: one.apply(params, seen, action).sum()
    return jax.vmap(jax.grad(value, argnums=1), in_axes=(0, None))(params, action)


def similarity(gradients: Array) -> Array:
    """Return the mean cosine between the `gradients` `[K, B, D]` of two different critics, `[B]`.

    This times `K` is what EDAC makes small (An et al. 2021, https://arxiv.org/abs/2110.01548, algorithm 1).
    """
    count = gradients.shape[0]
    size = jnp.sum(jnp.square(gradients), axis=-1, keepdims=True)
    # Critics that are flat there count as 0. A constant in the root instead would give small gradients a slope along
    # themselves, of up to one over the constant's root: rare, but so large that Adam takes long to forget it.
    units = gradients * jax.lax.rsqrt(jnp.where(size > 0, size, 1.0))
    # The square of the sum of all has each pair twice, and each critic with itself once.
    pairs = jnp.square(units.sum(0)).sum(-1) - jnp.square(units).sum((0, 2))
    return pairs / (count * (count - 1))


def extra_policy_term(parts: Parts, policy: PyTree, items: Transition, outputs: Any, weight: Array) -> Array:
    """Return the user's term of the policy's loss for the steps `items` `[R]`."""
    assert parts.extra_policy_loss is not None
    return extra_term(parts.extra_policy_loss, policy, items, outputs, weight, "extra_policy_loss")


def _rival_inputs(obs: PyTree, sampled: SampledActions) -> list[StateAction]:
    """Return the inputs of sampled actions `[B, S, D]`, as `B * S` rows, if actions are sampled."""
    if isinstance(sampled.action, tuple):
        return []
    rows, several, _ = sampled.action.shape
    # Each action stands beside a copy of its observation.
    again = jax.tree.map(lambda x: jnp.repeat(x, several, axis=0), obs)
    return [StateAction(again, (sampled.action.reshape(rows * several, -1),))]


def _conservative_gap(obs: PyTree, sampled: SampledActions, out: Array, q: Array, others: Array | None = None) -> Array:
    """Return by how much the values of the rivals exceed `q` `[K, B]` of the data's actions; `[K, B]`.

    The rivals of discrete actions are all actions, valued in `out` `[K, B, A]`; of others `others` `[K, B * S, 1]`.
    """
    if others is None:
        # Every action is counted once, so there is no density to divide by; forbidden ones add nothing to the sum.
        counted = jax.vmap(masks.apply_mask, in_axes=(0, None))(out, masks.get_mask(obs))
        return jax.vmap(jax.vmap(conservative_gap))(counted, jnp.zeros_like(out), q)
    density = jnp.broadcast_to(sampled.log_density, (q.shape[0], *sampled.log_density.shape))
    return jax.vmap(jax.vmap(conservative_gap))(others.reshape(density.shape), density, q)


def apply_critics(critic: Network, params: PyTree, obs: PyTree, *action: Array, key: Key | None = None) -> Array:
    """Return the critics' outputs, `[K, B, outputs]`; actions are scaled to -1 to 1.

    With a key, that of `target_key` or `policy_loss_keys`, they have dropout. The key is consumed.
    """
    return cast(Array, nn.forward(critic, params, to_critic(obs), *action, key=key)[0])


def apply_together(
    critic: Network, params: PyTree, inputs: Sequence[StateAction], key: Key | None
) -> tuple[list[Array], PyTree]:
    """Return the critics' outputs `[K, R, outputs]` for each of `inputs`, and their collections.

    One pass makes all, so that critics which learn normalise steps and the next ones by the same statistics (CrossQ,
    Bhatt et al. 2024, https://arxiv.org/abs/1902.05605, section 3). The key is consumed.
    """
    given = [(to_critic(one.obs), one.action) for one in inputs]
    sizes = [jax.tree.leaves(obs)[0].shape[0] for obs, _ in given]
    obs, actions = given[0] if len(given) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *given)
    out, collections = nn.forward(critic, params, obs, *actions, key=key)
    return jnp.split(out, [*accumulate(sizes)][:-1], axis=1), collections


def target_key(parts: Parts, key: Key, *, together: bool = False) -> Key | None:
    """Return the key by which critics have dropout or statistics of the batch in targets; `None` if they have neither.

    They have statistics of the batch for steps `together` with the next ones, as `apply_together` has them.

    DroQ's targets and policy see critics with dropout (Hiraoka et al. 2022, https://arxiv.org/abs/2110.02034, algorithm
    2, and the authors' code); critics made in Python have theirs only where they learn. `key` is that of the update.
    """
    return nn.training_key(parts.networks.critic, key, 3) if parts.config.dropout or together else None


def policy_loss_key(parts: Parts, key: Key) -> Key | None:
    """Return the key of a policy's loss; `None` if neither the policy nor its critics draw. `key` is the update's."""
    network = parts.networks.critic if parts.config.dropout else parts.networks.policy
    return nn.training_key(network, key, 1)


def policy_loss_keys(parts: Parts, key: Key | None) -> tuple[Key | None, Key | None]:
    """Split the key of `policy_loss_key` into those of policy and critics; `None` of a network that draws nothing.

    Inside of the loss, so that each piece of a batch draws for itself. The key is consumed.
    """
    if key is None or not parts.config.dropout:
        return key, None
    policy_key, critic_key = jax.random.split(key)
    return policy_key if nn.takes_train(parts.networks.policy) else None, critic_key


def critic_policy_fns(parts: Parts, distribution: DistributionFn | str, keep_critic: StripFn) -> PolicyFns:
    """Return the `PolicyFns` of an agent with critics.

    The value is what its policy improves, except for TD3 and TD3+BC: there it is the lowest of the critics, while the
    policy improves the first.
    """
    return PolicyFns(
        distribution,
        partial(_values, parts),
        parts.head,
        masks.has_entry(parts.spec.observation_space, PRIVILEGED),
        keep_critic,
    )


def _values(parts: Parts, state: Any, obs: PyTree, action: PyTree) -> Array:
    apply = partial(apply_critics, parts.networks.critic, state.critic, obs)
    values = parts.critic_values(getattr(state, "reach", ()))
    if isinstance(parts.spec.action_space, Discrete):
        return mask_values(values.policy_values(apply()), obs)
    return values.policy_values(apply(*unit_actions(parts.spec, action)))[:, 0]


def unit_actions(spec: EnvSpec, action: Array) -> tuple[Array, ...]:
    """Return actions as critics take them, scaled to -1 to 1, `[B, D]`; nothing for discrete actions."""
    return (spaces.from_box(spec.action_space, action),) if isinstance(spec.action_space, Box) else ()

"""Parallelised Q-learning without replay or target network (Gallici et al. 2024, https://arxiv.org/abs/2407.04811)."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl import masks, nn, shards
from jaxrl.agents import exploration, sequences
from jaxrl.agents.base import Agent, AgentInfo, AgentMaker, Mode, PolicyFns
from jaxrl.agents.checks import check_actions, make_hyper
from jaxrl.agents.custom import (
    CustomParts,
    ExtraLoss,
    MakeNetwork,
    agent_maker,
    build_network,
    extra_term,
    observation_structs,
    value_output,
)
from jaxrl.agents.exploration import EPSILONS
from jaxrl.agents.fields import (
    CoreConfig,
    NetworkConfig,
    OptimizerConfig,
    Rate,
    Share,
    Steps,
    Widths,
)
from jaxrl.agents.losses import squared
from jaxrl.agents.optimizers import GradientStep, Optimizer, gradient_update, linear
from jaxrl.agents.returns import lambda_returns
from jaxrl.distributions import Distribution
from jaxrl.metrics import Metrics
from jaxrl.nn import Network, QNetwork, Recurrent, merge_axes
from jaxrl.spaces import Box, Discrete, EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, RecurrentObs, Rollout
from jaxrl.xla.reductions import entry, largest


@dataclass(frozen=True)
class PQNConfig(NetworkConfig, OptimizerConfig, CoreConfig):
    """Settings of PQN."""

    lr: Rate = 5e-4
    optimizer: str = "radam"
    features: Widths = (128, 128)
    q_lambda: Share = 0.65
    """Lambda of the Q(lambda) targets; 0: one-step targets, 1: Monte-Carlo returns."""
    epsilon_start: Share = 1.0
    """Probability of a random action at the first optimisation step."""
    epsilon_end: Share = 0.05
    """Probability of a random action after the decay."""
    epsilon_decay: Steps = 2_500
    """Optimisation steps over which epsilon decays linearly; 0: epsilon_end from the start."""
    dueling: bool = False
    """Split the head into a value and advantages (dueling network)."""
    layer_norm: bool = True
    """Apply layer normalisation before each activation; it stabilises learning in place of a target network."""


class PQNHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    q_lambda: Array
    epsilon_start: Array
    epsilon_end: Array


class PQNState(NamedTuple):
    """Agent state; `opt_state` is empty in an acting-only copy."""

    params: PyTree
    opt_state: PyTree
    hyper: PQNHyper


class TargetSample(NamedTuple):
    """Steps `[B]` and the regression targets of their actions' values; for a core, sequences `[B, T]` of them."""

    obs: PyTree
    action: Array
    target: Array
    weight: Array
    memory: PyTree = ()
    """Memory of the core before the first step of each sequence, `[B, ...]`."""
    is_first: Array | tuple[()] = ()
    """`[B, T]` bool: a new episode begins, so the memory is reset."""


class _Parts(NamedTuple):
    """What an agent's functions share: its settings, its network and parts made in Python."""

    config: PQNConfig
    network: Network
    gradient_step: GradientStep
    spec: EnvSpec
    memory: PyTree | None
    """With a recurrent core, its memory at the start of an episode."""
    extra_loss: ExtraLoss | None = None


def pqn(
    config: PQNConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a PQN agent; call the result with an `EnvSpec` of discrete actions to build it.

    Args:
      config: settings to start from; if left out, the defaults of `PQNConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_network: function from an `EnvSpec` to a network `[B, ...] -> [B, A]` of action values; replaces the built-in
        ones. It has no memory: `core` must be none.
      extra_loss: a term of the loss for each step beside the agent's own, `(params, sample, q) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      **settings: fields of `PQNConfig` to change, as in `pqn(lr=1e-3, q_lambda=0.9)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    custom = {"make_optimizer": make_optimizer, "make_network": make_network, "extra_loss": extra_loss}
    return agent_maker(
        "pqn",
        _build,
        config or PQNConfig(),
        {**settings, **custom},
        [*custom],
        lambda config, custom: sequences.check_core(config, make_network=custom["make_network"]),
    )


def _build(name: str, config: PQNConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    policy_spec = masks.view_spec(spec, masks.for_policy)
    network = build_network(
        custom,
        "make_network",
        (policy_spec,),
        partial(_network, config, policy_spec),
        (observation_structs(policy_spec),),
        (value_output(spec),),
    )
    parts = _Parts(config, network, custom.gradient_step, spec, config.initial_memory(), custom.extra_loss)
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        strip=lambda state: state._replace(opt_state=()),
        prepare=partial(_prepare, parts),
        memory=parts.memory,
        apply={"params": lambda params, obs: network.apply(params, masks.for_policy(obs))},
        policy_fns=PolicyFns(
            partial(_exploration_distribution, parts),
            lambda state, obs, action: exploration.mask_values(_action_values(parts, state.params, obs)[0], obs),
        ),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=EPSILONS,
        ),
    )


def _network(config: PQNConfig, spec: EnvSpec) -> Network:
    nn.check_torso(config.torso, spec.observation_space, config.channels, config.features)
    shape: dict[str, Any] = {"torso": config.torso, "features": config.features, "channels": config.channels}
    q_network = partial(
        QNetwork,
        num_actions=cast(Discrete, spec.action_space).n,
        activation=config.activation,
        dueling=config.dueling,
        layer_norm=config.layer_norm,
        dtype=config.dtype,
    )
    core = config.make_core()
    if core is None:
        return q_network(spec.observation_space, **shape)
    # All layers come before the core; its outputs are read linearly.
    return Recurrent(
        q_network(Box(-jnp.inf, jnp.inf, (config.core_features,)), torso="mlp", features=()),
        spec.observation_space,
        core,
        activation=config.activation,
        layer_norm=config.layer_norm,
        dtype=config.dtype,
        **shape,
    )


def _init(parts: _Parts, key: Key) -> PQNState:
    obs = space_zeros(masks.for_policy(parts.spec.observation_space), 1)
    if parts.memory is not None:
        obs = RecurrentObs(obs, jax.tree.map(lambda x: x[None], parts.memory))
    params = parts.network.init(key, obs)
    hyper = PQNHyper(*make_hyper(asdict(parts.config), PQNHyper._fields))
    return PQNState(params, parts.gradient_step.init(params, hyper.lr), hyper)


def _action_values(parts: _Parts, params: PyTree, obs: PyTree) -> tuple[Array, PyTree]:
    """Return action values `[B, A]`, and the memory after the step, `()` without a core."""
    out = cast(Any, parts.network.apply(params, masks.for_policy(obs)))
    return (out, ()) if parts.memory is None else out


def _epsilon(parts: _Parts, hyper: PQNHyper, opt_step: Array) -> Array:
    return linear(hyper.epsilon_start, hyper.epsilon_end, parts.config.epsilon_decay, opt_step)


def _act(
    parts: _Parts, state: PQNState, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode
) -> tuple[Array, PyTree]:
    q, memory = _action_values(parts, state.params, obs)
    extras = () if parts.memory is None else {"memory": memory}
    greedy = masks.greedy_actions(cast(Discrete, parts.spec.action_space), q, masks.get_mask(obs))
    if key is None or mode == "exploit":
        return greedy, extras
    return exploration.epsilon_greedy(parts.spec, greedy, key, _epsilon(parts, state.hyper, opt_step), obs), extras


def _exploration_distribution(parts: _Parts, state: PQNState, obs: PyTree, opt_step: Array) -> Distribution:
    """Return the distributions from which `act` draws actions, as `DistributionFn`."""
    q, _ = _action_values(parts, state.params, obs)
    return exploration.exploration_distribution(q, _epsilon(parts, state.hyper, opt_step), obs)


def _prepare(parts: _Parts, state: PQNState, rollout: Rollout) -> TargetSample:
    """Return a rollout's steps `[T * N]`, or for a core its sequences `[N, T]`, with lambda-returns.

    They are bootstrapped from the best actions (equation 5 of the paper).
    """
    items, last = rollout.items, rollout.last
    next_obs = jax.tree.map(merge_axes, items.next_obs)
    # The largest value of the successor, not of the next observation of the rollout: at an episode's end they differ.
    q = _action_values(parts, state.params, next_obs)[0]
    v_t = largest(masks.apply_mask(q, masks.get_mask(next_obs))).reshape(last.shape)
    # Along the time of one environment, so mapped over axis 1 of `[T, N]`.
    returns = jax.vmap(partial(lambda_returns, lambda_=state.hyper.q_lambda), in_axes=1, out_axes=1)
    target = returns(items.reward, items.discount, last, v_t)
    sample = TargetSample(items.obs, items.action, target, jnp.asarray(items.weight))
    if parts.memory is None:
        return jax.tree.map(merge_axes, sample)
    return sequences.rollout_sequences(sample, items)


def _update(parts: _Parts, state: PQNState, batch: Batch, key: Key, opt_step: Array) -> tuple[PQNState, Metrics, Array]:
    hyper = state.hyper
    result = gradient_update(
        parts.gradient_step,
        partial(_loss, parts),
        state.params,
        state.opt_state,
        batch.items,
        key=nn.training_key(parts.network, key),
        lr=hyper.lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    error, q = result.aux
    metrics = {
        "loss": result.loss,
        **shards.step_means({"q": q, "td_error": jnp.abs(error)}, batch.items.weight.ravel()),
        "grad_norm": result.norm,
        "epsilon": _epsilon(parts, hyper, opt_step),
    }
    return PQNState(result.variables, result.opt_state, hyper), metrics, jnp.abs(error)


def _loss(
    parts: _Parts, params: PyTree, items: TargetSample, key: Key | None
) -> tuple[Array, tuple[tuple[Array, Array], PyTree]]:
    """Return the mean loss, errors and greedy values `[B]`, and the network's collections."""
    if parts.memory is None:
        q, collections = nn.forward(parts.network, params, masks.for_policy(items.obs), key=key)
    else:
        # Only networks of the user's have collections, and those have no core.
        inputs = RecurrentObs(masks.for_policy(items.obs), items.memory)
        q = cast(Any, parts.network).apply(params, inputs, items.is_first, method="apply_sequence")
        collections = {}
        # From here on each step is a row, as without a core.
        items = jax.tree.map(merge_axes, items._replace(memory=(), is_first=()))
    # Targets were formed once, before the first update on the rollout, by the parameters of that time.
    error = items.target - jax.vmap(entry)(q, items.action)
    loss = squared(error)
    if parts.extra_loss is not None:
        loss = loss + extra_term(parts.extra_loss, params, items, q, items.weight)
    greedy = largest(masks.apply_mask(q, masks.get_mask(items.obs)))
    return jnp.mean(items.weight * loss), ((items.weight * error, greedy), collections)

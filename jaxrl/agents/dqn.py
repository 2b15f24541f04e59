"""The DQN family (Mnih et al. 2015, https://www.nature.com/articles/nature14236): one agent, variants as options."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxrl.agents.base import Agent, AgentMaker, Mode
from jaxrl.agents.checks import changed, pieces
from jaxrl.agents.exploration import draw_epsilon_greedy, epsilon_greedy
from jaxrl.agents.flat import Flat
from jaxrl.agents.losses import huber, squared, td_error
from jaxrl.agents.optimisers import Descent, Optimiser, accumulate, descent, linear, optimiser_named
from jaxrl.errors import SettingsError
from jaxrl.nn import QNetwork, torso_kind
from jaxrl.types import (
    Array,
    Batch,
    Discrete,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    Transition,
    space_zeros,
    tree_where,
)


@dataclass(frozen=True)
class DQNConfig:
    """Settings of DQN."""

    lr: float = 2.5e-4
    """Learning rate."""
    lr_decay: int = 0
    """Optimisation steps over which the learning rate falls linearly to 0; 0: it stays."""
    optimizer: str = "adam"
    """Optax optimiser: adam, adamw, lion, nadam, radam, rmsprop or sgd."""
    max_grad_norm: float = 10.0
    """Global norm to which gradients are clipped."""
    accumulate: int = 1
    """Equal pieces in which a batch is taken, gradients averaged; must divide the batch size."""
    loss: str = "huber"
    """Loss of the temporal-difference error: huber or squared."""
    double: bool = True
    """Choose the next action by the online network (double Q-learning)."""
    dueling: bool = False
    """Split the head into a value and advantages."""
    epsilon_start: float = 1.0
    """Share of random actions at the first optimisation step."""
    epsilon_end: float = 0.05
    """Share of random actions once the decay is over."""
    epsilon_decay: int = 2_500
    """Optimisation steps of the linear decay; 0: epsilon_end all the time."""
    target_interval: int = 100
    """Optimisation steps from one target update to the next."""
    tau: float = 1.0
    """Share of the online network in a target update; 1 copies it (hard), less mixes it in (soft)."""
    torso: str = "auto"
    """Network torso: mlp, conv, or auto (conv for observations [H, W, C])."""
    features: tuple[int, ...] = (120, 84)
    """Widths of the dense layers."""
    activation: str = "relu"
    """Activation: relu, tanh, gelu, silu or elu."""


class DQNHyper(NamedTuple):
    """What a sweep may vary without compiling again: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    epsilon_start: Array
    epsilon_end: Array
    tau: Array


class DQNState(NamedTuple):
    """All of a DQN agent. `target` and `opt_state` are empty in a state that only acts."""

    params: Flat
    """The network's parameters as one vector; `params.tree` is what Flax calls them."""
    target: Flat
    opt_state: PyTree
    hyper: DQNHyper


class _Parts(NamedTuple):
    config: DQNConfig
    network: nn.Module
    descent: Descent
    spec: EnvSpec


def dqn(
    config: DQNConfig | None = None,
    *,
    make_optimiser: Optimiser | None = None,
    make_network: Callable[[EnvSpec], nn.Module] | None = None,
    **settings: Any,
) -> AgentMaker:
    """Choose a DQN agent; the result is called with an `EnvSpec`, which must have discrete actions.

    Args:
      config: settings to start from; the defaults of `DQNConfig` if left out.
      make_optimiser: from a learning rate to any Optax transformation, in place of `optimizer`.
      make_network: from an `EnvSpec` to a Flax module `[B, ...] -> [B, A]`, in place of the built-in networks.
      **settings: fields of `DQNConfig` to change, as in `dqn(lr=1e-3, dueling=True)`.

    Raises:
      SettingsError: an unknown setting or a value out of its range.
    """
    config = changed("dqn", config or DQNConfig(), settings)
    by_hand = make_optimiser is not None or make_network is not None
    optimiser = make_optimiser or optimiser_named(config.optimizer)
    return partial(_bind, config, optimiser, make_network or partial(_network, config), by_hand)


def _bind(
    config: DQNConfig,
    optimiser: Optimiser,
    make_network: Callable[[EnvSpec], nn.Module],
    by_hand: bool,
    spec: EnvSpec,
) -> Agent:
    check_spec(spec)
    parts = _Parts(config, make_network(spec), descent(optimiser), spec)
    return Agent(
        name="dqn",
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        draw_act=partial(draw_epsilon_greedy, spec),
        draw_update=lambda key: (),
        strip=lambda state: state._replace(target=(), opt_state=()),
        settings=None if by_hand else asdict(config),
    )


def check_spec(spec: EnvSpec, name: str = "dqn") -> None:
    """Raise `SettingsError` unless the actions are the numbers `0 .. n-1`."""
    if not isinstance(spec.action_space, Discrete):
        raise SettingsError(
            f"{name} takes discrete actions, but {spec.name} has {type(spec.action_space).__name__} actions; "
            "agents for other actions: ppo, a2c and reinforce"
        )


def _network(config: DQNConfig, spec: EnvSpec) -> nn.Module:
    torso_kind(config.torso, spec.observation_space)
    assert isinstance(spec.action_space, Discrete)
    return QNetwork(
        spec.observation_space, spec.action_space.n, config.torso, config.features, config.activation, config.dueling
    )


def _init(parts: _Parts, key: Key) -> DQNState:
    config = parts.config
    obs = jax.tree.map(lambda x: x[None], space_zeros(parts.spec.observation_space))
    params = Flat.of(parts.network.init(key, obs))
    hyper = DQNHyper(*(jnp.float32(getattr(config, name)) for name in DQNHyper._fields))
    # The target is a copy, not the same arrays: both are donated to the compiled loop.
    return DQNState(params, jax.tree.map(jnp.copy, params), parts.descent.init(params, hyper.lr), hyper)


def _act(
    parts: _Parts, state: DQNState, obs: PyTree, noise: PyTree, opt_step: Array, mode: Mode
) -> tuple[Array, tuple]:
    space = parts.spec.action_space
    assert isinstance(space, Discrete)
    greedy = jnp.argmax(_q(parts, state.params.tree, obs), axis=-1).astype(space.dtype)
    if mode == "exploit":
        return greedy, ()
    return epsilon_greedy(greedy, noise, _epsilon(parts, state.hyper, opt_step)), ()


def _q(parts: _Parts, params: PyTree, obs: PyTree) -> Array:
    """Return action values `[B, A]`."""
    return cast(Array, parts.network.apply(params, obs))


def _epsilon(parts: _Parts, hyper: DQNHyper, opt_step: Array) -> Array:
    return linear(hyper.epsilon_start, hyper.epsilon_end, parts.config.epsilon_decay, opt_step)


def _update(
    parts: _Parts, state: DQNState, batch: Batch, noise: PyTree, opt_step: Array
) -> tuple[DQNState, Metrics, Array]:
    config, hyper, rows = parts.config, state.hyper, batch.weight.shape[0]
    loss, (error, q), grads = accumulate(
        partial(_loss, parts, state.target.tree),
        state.params.tree,
        batch,
        pieces(config.accumulate, rows),
    )
    lr = linear(hyper.lr, 0.0, config.lr_decay, opt_step) if config.lr_decay else hyper.lr
    params, opt_state, norm = parts.descent.step(state.params, Flat.of(grads), state.opt_state, lr, hyper.max_grad_norm)
    target = _update_target(config, hyper.tau, params, state.target, opt_step)
    metrics = {
        "loss": loss,
        "q": q.mean(),
        "td_error": jnp.abs(error).mean(),
        "grad_norm": norm,
        "epsilon": _epsilon(parts, hyper, opt_step),
    }
    return DQNState(params, target, opt_state, hyper), metrics, jnp.abs(error)


def _loss(parts: _Parts, target: PyTree, params: PyTree, batch: Batch) -> tuple[Array, tuple[Array, Array]]:
    """Return the weighted mean loss of a batch, and errors and values `[B]`."""
    items: Transition = batch.items
    q_tm1 = _q(parts, params, items.obs)
    q_t_value = _q(parts, target, items.next_obs)
    q_t_select = _q(parts, jax.lax.stop_gradient(params), items.next_obs) if parts.config.double else q_t_value
    error = jax.vmap(td_error)(q_tm1, items.action, items.reward, items.discount, q_t_value, q_t_select)
    weight = batch.weight * items.weight
    loss = huber(error) if parts.config.loss == "huber" else squared(error)
    return jnp.mean(weight * loss), (error * items.weight, jnp.max(q_tm1, axis=-1))


def _update_target(config: DQNConfig, tau: Array, params: Flat, target: Flat, opt_step: Array) -> Flat:
    """Move the target network after every `target_interval`-th optimisation step, counted from 1."""
    mixed: Flat = optax.incremental_update(params, target, tau)
    if config.target_interval == 1:
        return mixed
    # A select, not a `cond`: a branch that has to copy makes the whole loop asynchronous on a CPU, which costs more
    # than the copying, and on a GPU waits for the host.
    return tree_where((opt_step + 1) % config.target_interval == 0, mixed, target)

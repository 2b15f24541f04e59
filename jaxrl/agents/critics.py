"""What SAC and TD3 share: critics of observation and action, a policy that climbs them, targets that trail behind."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxrl.agents.fields import Activation, Count, DType, Rate, Share, Steps, Torso, Weight, Widths
from jaxrl.agents.losses import conservative_gap, entry, squared
from jaxrl.agents.optimizers import Descent, Learnt, learn
from jaxrl.agents.own import ONE_VALUE, Own, choices, network_of, observations, values_of
from jaxrl.distributions import Head, from_box
from jaxrl.metrics import Metrics
from jaxrl.nn import Critic, Ensemble, Network, PolicyNetwork, check_torso, ensemble, require_network
from jaxrl.nn.own import ROWS
from jaxrl.spaces import Box, Discrete, EnvSpec, box_bounds, space_zeros
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Remembered
from jaxrl.xla.flat import Flat


@dataclass(frozen=True)
class CriticConfig:
    """Settings of an agent with critics."""

    lr: Rate = 3e-4
    """Learning rate of the critics."""
    policy_lr: Rate = 3e-4
    """Learning rate of the policy."""
    lr_decay: Steps = 0
    """Optimisation steps over which learning rates fall linearly to 0; 0: they stay."""
    optimizer: str = "adam"
    """Optax optimizer: adam, adamw, lion, nadam, radam, rmsprop or sgd."""
    max_grad_norm: Weight = 1e6
    """Global norm to which the gradients of critics, policy and temperature are clipped, each."""
    accumulate: Count = 1
    """Equal pieces in which a batch is taken, gradients averaged; must divide the batch size."""
    num_critics: Count = 2
    """Critics, of which the lowest counts."""
    tau: Share = 0.005
    """Share of the online networks in each update of the targets."""
    torso: Torso = "auto"
    """Network torso: mlp, minatar (also called conv), nature, impala; or auto: mlp without images [H, W, C], nature for
    images with sides of at least 36, minatar for smaller ones."""
    features: Widths = (256, 256)
    """Widths of the dense layers."""
    channels: Widths = ()
    """Channels of the convolutions; none: the torso's own (minatar 16, nature 32 64 64, impala 16 32 32)."""
    dtype: DType = "float32"
    """What torsos compute in: float32 or bfloat16; parameters, heads and outputs are float32 anyway."""
    activation: Activation = "relu"
    """Activation: relu, tanh, gelu, silu or elu."""
    layer_norm: bool = False
    """Normalise the critics' layers before their activation, for many updates an environment step."""


class Networks(NamedTuple):
    """A policy `[B, ...] -> [B, outputs]`, and critics `[B, ...], [B, D] -> [K, B, outputs]`."""

    policy: Network
    critic: Network
    value: Network | None = None
    """`[B, ...] -> [B]` or `[B, 1]`; of IQL alone."""


class Parts(NamedTuple):
    """What an agent with critics is made of."""

    config: Any
    """A `CriticConfig`, or one made of it."""
    networks: Networks
    descent: Descent
    spec: EnvSpec
    head: Head
    """What makes actions of the policy's outputs."""


def build_networks(config: CriticConfig, own: Own, spec: EnvSpec, head: Head) -> Networks:
    """Build the networks that `config` describes, or those made in Python; raise `SettingsError` for what cannot be."""
    obs, space = observations(spec), spec.action_space
    usual = lambda: PolicyNetwork(spec.observation_space, head.outputs, **_options(config, spec))
    policy = network_of(own, "make_policy", (spec, head), usual, (obs,), (choices(head),))
    if "make_critic" not in own.makers:
        options = {**_options(config, spec), "layer_norm": config.layer_norm}
        outputs = space.n if isinstance(space, Discrete) else 1
        return Networks(policy, ensemble(config.num_critics, spec.observation_space, outputs=outputs, **options))
    args, values = ((obs,), values_of(spec)) if isinstance(space, Discrete) else ((obs, _actions(space)), ONE_VALUE)
    member = require_network(own.made("make_critic", spec), "make_critic", args, (values,))
    return Networks(policy, Ensemble(member, config.num_critics))


def value_network(config: CriticConfig, own: Own, spec: EnvSpec) -> Network:
    """Build the network of the values of observations; arguments are as of `build_networks`."""
    usual = lambda: Critic(spec.observation_space, 1, layer_norm=config.layer_norm, **_options(config, spec))
    return network_of(own, "make_value", (spec,), usual, (observations(spec),), (ONE_VALUE,))


def _options(config: CriticConfig, spec: EnvSpec) -> dict[str, Any]:
    check_torso(config.torso, spec.observation_space, config.channels)
    return {name: getattr(config, name) for name in ("torso", "features", "activation", "channels", "dtype")}


def _actions(space: Any) -> Array:
    return jnp.zeros((ROWS, space_size(space)))


def init_networks(networks: Networks, spec: EnvSpec, key: Key) -> tuple[Flat, Flat]:
    """Return fresh parameters of policy and critics. The key is consumed."""
    policy_key, critic_key = jax.random.split(key)
    obs = space_zeros(spec.observation_space, 1)
    space = spec.action_space
    action = (jnp.zeros((1, space_size(space))),) if isinstance(space, Box) else ()
    return Flat.of(networks.policy.init(policy_key, obs)), Flat.of(networks.critic.init(critic_key, obs, *action))


def space_size(space: Box) -> int:
    """Return how many numbers an element of `space` is."""
    return int(box_bounds(space)[0].size)


def seen(obs: PyTree) -> PyTree:
    """Return an observation without what is remembered beside it."""
    return obs.obs if isinstance(obs, Remembered) else obs


def lasting(kept: Array, before: Array, fresh: Array) -> Array:
    """Return noise of which the share `kept` is that of the step before; with unit deviation in the long run.

    It is an autoregressive process: that of Ornstein and Uhlenbeck, in steps.
    """
    return kept * before + jnp.sqrt(1 - jnp.square(kept)) * fresh


class Rivals(NamedTuple):
    """Actions beside those of the data, whose values are held down; of discrete ones all are, and both are `()`."""

    action: PyTree
    """`[B, S, D]`, from -1 to 1."""
    log_density: PyTree
    """`[B, S]`, under what drew them, plus the logarithm of `S`."""


def learn_critic(
    parts: Parts, state: Any, batch: Batch, target: Array, opt_step: Array, rivals: Rivals | None = None
) -> tuple[Learnt, Metrics, Array]:
    """Bring the critics' values of what was done nearer to `target` `[B]`; return also metrics and priorities `[B]`.

    With `rivals`, also hold the values of those actions down, by `hyper.cql`.
    """
    action = unit_actions(parts.spec, batch.items.action)
    pick = None if action else batch.items.action
    penalty = None if rivals is None else partial(_gap, parts.networks.critic)
    learnt = learn(
        parts.config,
        parts.descent,
        partial(_critic_loss, parts.networks.critic, penalty, 0.0 if rivals is None else state.hyper.cql),
        state.critic,
        state.opt_state.critic,
        (seen(batch.items.obs), action, pick, target, batch.weight * batch.items.weight, rivals),
        state.hyper.lr,
        state.hyper.max_grad_norm,
        opt_step,
    )
    error, q, gap = learnt.aux
    error = error * batch.items.weight
    metrics = {"loss": learnt.loss, "q": q.mean(), "td_error": error.mean(), "grad_norm": learnt.norm}
    return learnt, metrics if rivals is None else {**metrics, "cql_gap": gap.mean()}, error


def _critic_loss(
    critic: Network, penalty: Any, push: Array | float, params: PyTree, batch: PyTree
) -> tuple[Array, tuple[Array, Array, PyTree]]:
    """Return the weighted mean of the critics' summed losses; distances from the target, values, gaps, `[B]` each."""
    obs, action, pick, target, weight, rivals = batch
    out = cast(Array, critic.apply(params, obs, *action))
    q = chosen(out, pick)
    error = target[None] - q
    each, gap = squared(error), ()
    if penalty is not None:
        gap = penalty(params, obs, rivals, out, q)
        each = each + push * gap
        gap = gap.mean(0)
    return jnp.mean(weight * each.sum(0)), (jnp.abs(error).mean(0), q.mean(0), gap)


def _gap(critic: Network, params: PyTree, obs: PyTree, rivals: Rivals, out: Array, q: Array) -> Array:
    """Return how far the values of the rivals are above `q` `[K, B]` of the data's actions; `[K, B]`."""
    if isinstance(rivals.action, tuple):
        return jax.vmap(jax.vmap(conservative_gap))(out, jnp.zeros_like(out), q)
    rows, several, _ = rivals.action.shape
    again = jax.tree.map(lambda x: jnp.repeat(x, several, axis=0), obs)
    others = cast(Array, critic.apply(params, again, rivals.action.reshape(rows * several, -1)))
    density = jnp.broadcast_to(rivals.log_density, (q.shape[0], rows, several))
    return jax.vmap(jax.vmap(conservative_gap))(others.reshape(density.shape), density, q)


def chosen(q: Array, pick: Array | None) -> Array:
    """Return, of `[K, B, outputs]`, the one at `pick` `[B]`, or the only one; `[K, B]`."""
    if pick is None:
        return q[..., 0]
    return jax.vmap(jax.vmap(entry), in_axes=(0, None))(q, pick)


def lowest(critic: Network, params: PyTree, obs: PyTree, *action: Array) -> Array:
    """Return the lowest of the critics' values, `[B, outputs]` (Fujimoto et al. 2018, algorithm 1)."""
    return cast(Array, critic.apply(params, seen(obs), *action)).min(0)


def trail(target: Flat, online: Flat, tau: Array) -> Flat:
    """Move `target` by the share `tau` towards `online`."""
    moved: Flat = optax.incremental_update(online, target, tau)
    return moved


def unit_actions(spec: EnvSpec, action: Array) -> tuple[Array, ...]:
    """Return actions as critics are given them, from -1 to 1 `[B, D]`; nothing for discrete ones."""
    return (from_box(spec.action_space, action),) if isinstance(spec.action_space, Box) else ()

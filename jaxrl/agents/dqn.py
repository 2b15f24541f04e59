"""The DQN family (Mnih et al. 2015, https://www.nature.com/articles/nature14236), with variants as options."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.agents.base import Agent, AgentMaker, Mode
from jaxrl.agents.checks import changed, check_actions, hyper_of
from jaxrl.agents.exploration import EPSILONS, draw_epsilon_greedy, epsilon_greedy
from jaxrl.agents.fields import (
    AtLeast,
    Between,
    Count,
    NetworkConfig,
    OneOf,
    OptimizerConfig,
    Rate,
    Real,
    Share,
    Steps,
    Weight,
    Widths,
)
from jaxrl.agents.losses import conservative_gap, entry, munchausen
from jaxrl.agents.optimizers import Descent, Optimizer, descent, learn, linear
from jaxrl.agents.own import MakeNetwork, Own, network_of, observations, own_parts, values_of
from jaxrl.agents.values import (
    After,
    Values,
    c51,
    chosen_row,
    ends_of,
    expected,
    midpoints,
    no_reach,
    quantiles,
    widened,
)
from jaxrl.errors import SettingsError
from jaxrl.masks import best, for_policy, mask_of, masked, viewed
from jaxrl.metrics import Metrics
from jaxrl.nn import Network, QNetwork, check_torso
from jaxrl.nn.own import ROWS
from jaxrl.spaces import Discrete, EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree, tree_where
from jaxrl.types import Batch, Transition
from jaxrl.xla.flat import Flat
from jaxrl.xla.short import argmax, largest


@dataclass(frozen=True)
class DQNConfig(NetworkConfig, OptimizerConfig):
    """Settings of DQN."""

    lr: Rate = 2.5e-4
    features: Widths = (120, 84)
    loss: Annotated[str, OneOf(("huber", "squared"))] = "squared"
    """Loss of the temporal-difference error: squared, or huber, which is linear beyond 1 and suits rewards of that
    scale."""
    double: bool = True
    """Choose the next action with the online network (double Q-learning)."""
    dueling: bool = False
    """Split the head into a value and advantages (dueling network)."""
    epsilon_start: Share = 1.0
    """Probability of a random action at the first optimisation step."""
    epsilon_end: Share = 0.05
    """Probability of a random action after the decay."""
    epsilon_decay: Steps = 2_500
    """Optimisation steps over which epsilon decays linearly; 0: epsilon_end from the start."""
    boltzmann: Weight = 0.0
    """Temperature of exploration: in place of the greedy action, draw one with probabilities in proportion to
    exp(value / temperature); 0: off. Random actions by epsilon come on top."""
    target_interval: Count = 100
    """Optimisation steps between updates of the target network."""
    tau: Share = 1.0
    """Weight of the online network in a target update: 1 copies it (hard update), less averages it in (soft update)."""
    values: Annotated[str, OneOf(("expected", "c51", "qr", "iqn"))] = "expected"
    """What to learn of the return: its mean (expected), or its distribution, as probabilities of fixed atoms (c51), as
    fixed quantiles (qr) or as quantiles at any level (iqn)."""
    atoms: Annotated[int, AtLeast(2)] = 51
    """Atoms of c51 or quantiles of qr for each action; for iqn, quantiles sampled for each transition."""
    v_min: Real | None = None
    """Lowest return that c51 can represent; unset: the lowest possible under the rewards and discounts learnt from so
    far."""
    v_max: Real | None = None
    """Highest return that c51 can represent; unset: as for `v_min`."""
    noisy: Weight = 0.0
    """Initial scale of the parameter noise used to explore (NoisyNet; 0.5 as published, with epsilon 0); 0: off."""
    munchausen: Weight = 0.0
    """Weight of the scaled log-policy that is added to rewards (0.9 as published; replaces double); 0: off."""
    munchausen_temperature: Annotated[float, Between(1e-6, 1e30)] = 0.03
    """Temperature of the Munchausen policy."""
    cql: Weight = 0.0
    """Weight of the conservative (CQL) penalty; 0 turns it off."""


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Settings of Rainbow."""

    dueling: bool = True
    values: Annotated[str, OneOf(("expected", "c51", "qr", "iqn"))] = "c51"
    noisy: Weight = 0.5
    epsilon_start: Share = 0.0
    epsilon_end: Share = 0.0
    epsilon_decay: Steps = 0


@dataclass(frozen=True)
class CQLDQNConfig(DQNConfig):
    """Settings of conservative Q-learning for discrete actions."""

    cql: Weight = 1.0


MUNCHAUSEN_CLIP = -1.0
"""Lower bound on the scaled log-policy that is added to a reward."""


class DQNHyper(NamedTuple):
    """Hyperparameters that a sweep can vary without recompiling: float32 scalars, `[P]` in a population."""

    lr: Array
    max_grad_norm: Array
    epsilon_start: Array
    epsilon_end: Array
    tau: Array
    cql: PyTree
    """`()` if it is off."""
    boltzmann: PyTree = ()
    """`()` if it is off."""


class DQNState(NamedTuple):
    """Agent state. `target` and `opt_state` are empty in an acting-only copy."""

    params: Flat
    """The network's parameters as one vector; `params.tree` is the tree that Flax uses."""
    target: Flat
    opt_state: PyTree
    hyper: DQNHyper
    reach: PyTree = ()
    """The `Reach` from which c51 derives its support; `()` if `v_min` and `v_max` are both given, or without c51."""


class Draws(NamedTuple):
    """Randomness of an update: parameter noise and, for iqn, quantile levels `[B, n]`; `()` where there is none."""

    noise_tm1: PyTree
    noise_t: PyTree
    noise_select: PyTree
    taus_tm1: PyTree
    taus_t: PyTree


class _Parts(NamedTuple):
    config: DQNConfig
    network: Network
    descent: Descent
    spec: EnvSpec
    noise: PyTree
    """Shapes of the parameter noise; `{}` if there is none."""


def dqn(
    config: DQNConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakeNetwork | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a DQN agent; call the result with an `EnvSpec` of discrete actions to build it.

    Args:
      config: settings to start from; if left out, the defaults of `DQNConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_network: function from an `EnvSpec` to a network `[B, ...] -> [B, A]` of action values; replaces the built-in
        ones. For distributions the network returns `[B, A, atoms]`; for iqn it also takes quantile levels `[B, n]`.
      **settings: fields of `DQNConfig` to change, as in `dqn(lr=1e-3, dueling=True)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    return _maker("dqn", config or DQNConfig(), make_optimizer, make_network, settings)


def rainbow(
    config: RainbowConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakeNetwork | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a Rainbow agent (Hessel et al. 2018, https://arxiv.org/abs/1710.02298); arguments are as for `dqn`.

    The rest of Rainbow lies outside the agent: combine it with a prioritised buffer and an n-step processor.
    """
    return _maker("rainbow", config or RainbowConfig(), make_optimizer, make_network, settings)


def cql_dqn(
    config: CQLDQNConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakeNetwork | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure conservative Q-learning for discrete actions, to learn from data.

    Kumar et al. 2020, https://arxiv.org/abs/2006.04779. Arguments are as for `dqn`.
    """
    return _maker("cql_dqn", config or CQLDQNConfig(), make_optimizer, make_network, settings)


def _maker(
    name: str,
    config: DQNConfig,
    make_optimizer: Optimizer | None,
    make_network: MakeNetwork | None,
    settings: dict[str, Any],
) -> AgentMaker:
    config = changed(name, config, settings)
    _check_values(config)
    return partial(_bind, name, config, own_parts(config.optimizer, make_optimizer, make_network=make_network))


def _check_values(config: DQNConfig) -> None:
    if config.values == "c51" and config.v_min is not None and config.v_max is not None:
        reach, apart = max(abs(config.v_min), abs(config.v_max)), (config.v_max - config.v_min) / (config.atoms - 1)
        if not apart > 1e-5 * reach:
            raise SettingsError(
                f"agent.v_min is {config.v_min} and agent.v_max {config.v_max}; expected v_min below v_max, "
                "and atoms apart by more than 1e-5 of the larger, which float32 can tell"
            )
    if config.values == "c51" and config.munchausen:
        raise SettingsError("agent.munchausen shifts the returns of each action, which c51 cannot tell; use qr or iqn")
    if config.values == "iqn" and len(config.features) < 2:
        raise SettingsError(
            f"agent.features is {config.features}; iqn needs a layer before its quantiles and another behind, "
            "as in (64, 64)"
        )


def _values(config: DQNConfig, reach: PyTree) -> Values:
    if config.values == "expected":
        return expected(config.loss)
    if config.values != "c51":
        return quantiles(config.atoms)
    if config.v_min is not None and config.v_max is not None:
        return c51(config.atoms, config.v_min, config.v_max)
    return c51(config.atoms, *ends_of(reach, config.v_min, config.v_max))


def _derives_support(config: DQNConfig) -> bool:
    return config.values == "c51" and (config.v_min is None or config.v_max is None)


def _tells_outside(config: DQNConfig) -> bool:
    """Return whether returns can lie beyond the support; they can if the user fixed one of its ends."""
    return config.values == "c51" and not (config.v_min is None and config.v_max is None)


def _bind(name: str, config: DQNConfig, own: Own, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    seen = viewed(spec, for_policy)
    network = network_of(
        own,
        "make_network",
        (seen,),
        partial(_network, config, seen),
        (observations(seen), *((jnp.zeros((ROWS, config.atoms)),) if config.values == "iqn" else ())),
        (values_of(spec, 0 if config.values == "expected" else config.atoms),),
        kept=("params", "noise"),
    )
    blank = _Parts(config, network, descent(own.optimizer), spec, {})
    parts = blank._replace(noise=jax.eval_shape(lambda: _begin(blank, jax.random.key(0))).get("noise", {}))
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        draw_act=partial(_draw_act, parts),
        draw_update=partial(_draw_update, parts),
        strip=lambda state: state._replace(target=(), opt_state=()),
        settings=asdict(config),
        custom=own.custom,
        exploration=EPSILONS,
        offline=isinstance(config, CQLDQNConfig),
        bounds_returns=_derives_support(config),
    )


def _network(config: DQNConfig, spec: EnvSpec) -> Network:
    check_torso(config.torso, spec.observation_space, config.channels)
    assert isinstance(spec.action_space, Discrete)
    return QNetwork(
        spec.observation_space,
        spec.action_space.n,
        config.torso,
        config.features,
        config.activation,
        config.dueling,
        atoms=config.atoms if config.values in ("c51", "qr") else 0,
        noisy=config.noisy,
        channels=config.channels,
        dtype=config.dtype,
    )


def _begin(parts: _Parts, key: Key) -> PyTree:
    """Initialise the network's variables."""
    return parts.network.init(key, space_zeros(for_policy(parts.spec.observation_space), 1), *_taus(parts, 1))


def _taus(parts: _Parts, batch: int) -> tuple[Array, ...]:
    """Return the evenly spaced quantile levels `[B, n]` at which iqn compares actions; nothing without iqn."""
    if parts.config.values != "iqn":
        return ()
    return (_midpoints(batch, parts.config.atoms),)


def _midpoints(batch: int, count: int) -> Array:
    return jnp.broadcast_to(midpoints(count)[None], (batch, count))


def _init(parts: _Parts, key: Key) -> DQNState:
    config = parts.config
    params = Flat.of({name: value for name, value in _begin(parts, key).items() if name != "noise"})
    hyper = DQNHyper(*hyper_of(asdict(config), DQNHyper._fields, optional=("cql", "boltzmann")))
    # The target must be a copy: its arrays and those of `params` are all donated to the compiled loop.
    target, opt_state = jax.tree.map(jnp.copy, params), parts.descent.init(params, hyper.lr)
    return DQNState(params, target, opt_state, hyper, no_reach() if _derives_support(config) else ())


def _act(
    parts: _Parts, state: DQNState, obs: PyTree, noise: PyTree, opt_step: Array, mode: Mode
) -> tuple[Array, tuple]:
    space = parts.spec.action_space
    assert isinstance(space, Discrete)
    coins, net_noise, gumbel = (cast(Any, None), (), ()) if mode == "exploit" else noise
    taus = _taus(parts, jax.tree.leaves(obs)[0].shape[0])
    q = jax.vmap(_values(parts.config, state.reach).mean)(_outputs(parts, state.params.tree, obs, net_noise, *taus))
    greedy = best(space, q, mask_of(obs))
    if mode == "exploit":
        return greedy, ()
    if parts.config.boltzmann:  # the largest of values with Gumbel noise is drawn from their softmax
        greedy = best(space, q / state.hyper.boltzmann + gumbel, mask_of(obs))
    return epsilon_greedy(parts.spec, greedy, coins, _epsilon(parts, state.hyper, opt_step), obs), ()


def _outputs(parts: _Parts, params: PyTree, obs: PyTree, noise: PyTree, *taus: Array) -> Array:
    """Return the network's outputs for each action, `[B, A, n]`; parameters are free of noise if `noise` is `()`."""
    if parts.noise:
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts.noise)
        params = {**params, "noise": blank if noise == () else noise}
    out = cast(Array, parts.network.apply(params, for_policy(obs), *taus))
    return out if out.ndim == 3 else out[..., None]


def _draw_act(parts: _Parts, key: Key, num_envs: int) -> PyTree:
    """Draw coins and random actions, one parameter noise that all environments share, and Gumbel noise `[N, A]`."""
    gumbel: PyTree = ()
    if parts.config.boltzmann:
        key, gumbel_key = jax.random.split(key)
        gumbel = jax.random.gumbel(gumbel_key, (num_envs, cast(Discrete, parts.spec.action_space).n))
    if not parts.noise:
        return draw_epsilon_greedy(parts.spec, key, num_envs), (), gumbel
    coin_key, noise_key = jax.random.split(key)
    return draw_epsilon_greedy(parts.spec, coin_key, num_envs), _draw_noise(parts, noise_key), gumbel


def _draw_noise(parts: _Parts, key: Key) -> PyTree:
    """Draw the parameter noise in a single call."""
    leaves, treedef = jax.tree.flatten(parts.noise)
    ends = np.cumsum([leaf.size for leaf in leaves])
    return jax.tree.unflatten(treedef, jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1]))


def _draw_update(parts: _Parts, key: Key, batch_size: int) -> Draws:
    noise, taus = [()] * 3, [()] * 2
    noise_key, taus_key = jax.random.split(key)
    if parts.noise:
        noise = [_draw_noise(parts, k) for k in jax.random.split(noise_key, 3)]
    if parts.config.values == "iqn":
        taus = list(jax.random.uniform(taus_key, (2, batch_size, parts.config.atoms)))
    return Draws(*noise, *taus)


def _epsilon(parts: _Parts, hyper: DQNHyper, opt_step: Array) -> Array:
    return linear(hyper.epsilon_start, hyper.epsilon_end, parts.config.epsilon_decay, opt_step)


def _update(
    parts: _Parts, state: DQNState, batch: Batch, noise: PyTree, opt_step: Array
) -> tuple[DQNState, Metrics, Array]:
    config, hyper = parts.config, state.hyper
    reach = widened(state.reach, batch.items) if _derives_support(config) else ()
    learnt = learn(
        config,
        parts.descent,
        partial(_loss, parts, _values(config, reach), state.target.tree, noise, hyper.cql),
        state.params,
        state.opt_state,
        (batch, (noise.taus_tm1, noise.taus_t)),
        hyper.lr,
        hyper.max_grad_norm,
        opt_step,
    )
    error, q, outside = learnt.aux
    target = _update_target(config, hyper.tau, learnt.params, state.target, opt_step)
    metrics = {
        "loss": learnt.loss,
        "q": q.mean(),
        "td_error": jnp.abs(error).mean(),
        "grad_norm": learnt.norm,
        "epsilon": _epsilon(parts, hyper, opt_step),
    }
    if _tells_outside(config):
        metrics["out_of_support"] = outside.mean()
    return DQNState(learnt.params, target, learnt.opt_state, hyper, reach), metrics, jnp.abs(error)


def _loss(
    parts: _Parts,
    values: Values,
    target: PyTree,
    noise: Draws,
    cql: PyTree,
    params: PyTree,
    batch: tuple[Batch, PyTree],
) -> tuple[Array, tuple[Array, Array, PyTree]]:
    """Return the weighted mean loss; and errors, greedy values and probability outside the support, `[B]` or `()`."""
    (sampled, (taus_tm1, taus_t)), config = batch, parts.config
    items: Transition = sampled.items
    mask_tm1, mask_t = mask_of(items.obs), mask_of(items.next_obs)
    apply, mean = partial(_outputs, parts), jax.vmap(values.mean)
    out_tm1 = apply(params, items.obs, noise.noise_tm1, *_given(taus_tm1))
    out_t = apply(target, items.next_obs, noise.noise_t, *_given(taus_t))
    reward, penalty = items.reward, jnp.zeros(out_t.shape[:2])
    if config.munchausen:
        soft = lambda q, mask: munchausen(q, config.munchausen_temperature, mask)
        old = mean(apply(target, items.obs, noise.noise_t, *_taus(parts, reward.shape[0])))
        _, log_old = jax.vmap(soft)(old, mask_tm1)
        bonus = jnp.clip(jax.vmap(entry)(log_old, items.action), MUNCHAUSEN_CLIP, 0.0)
        reward = reward + config.munchausen * bonus
        policy, penalty = jax.vmap(soft)(mean(out_t), mask_t)
    else:
        select = out_t
        if config.double:
            online = jax.lax.stop_gradient(params)
            select = apply(online, items.next_obs, noise.noise_select, *_taus(parts, reward.shape[0]))
        policy = jax.nn.one_hot(argmax(masked(mean(select), mask_t)), select.shape[1])
    after = After(reward, items.discount, out_t, policy, penalty)
    taus = taus_tm1 if config.values == "iqn" else _midpoints(reward.shape[0], out_tm1.shape[-1])
    loss, error = jax.vmap(values.loss)(jax.vmap(chosen_row)(out_tm1, items.action), taus, after)
    if config.cql:
        q = mean(out_tm1)
        rivals = masked(q, mask_tm1)
        gap = jax.vmap(conservative_gap)(rivals, jnp.zeros_like(q), jax.vmap(entry)(q, items.action))
        loss = loss + cql * gap
    weight = sampled.weight * items.weight
    outside = jax.vmap(values.outside)(after) * items.weight if values.outside and _tells_outside(config) else ()
    return jnp.mean(weight * loss), (error * items.weight, largest(masked(mean(out_tm1), mask_tm1)), outside)


def _given(taus: PyTree) -> tuple[Array, ...]:
    return () if isinstance(taus, tuple) else (taus,)


def _update_target(config: DQNConfig, tau: Array, params: Flat, target: Flat, opt_step: Array) -> Flat:
    """Move the target network after every `target_interval`-th optimisation step, counted from 1."""
    mixed: Flat = optax.incremental_update(params, target, tau)
    if config.target_interval == 1:
        return mixed
    # A select is faster than a `cond` here. On a CPU, a branch that has to copy makes the whole loop asynchronous,
    # which costs more than the copy; on a GPU, a branch waits for the host.
    return tree_where((opt_step + 1) % config.target_interval == 0, mixed, target)

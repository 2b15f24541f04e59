"""The DQN family (Mnih et al. 2015, https://www.nature.com/articles/nature14236), with variants as options."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import masks, nn, shards
from jaxrl.agents import exploration, optimizers, sequences
from jaxrl.agents.base import Agent, AgentInfo, AgentMaker, Mode, PolicyFns
from jaxrl.agents.checks import check_actions, make_hyper
from jaxrl.agents.custom import (
    CustomParts,
    ExtraLoss,
    MakeNetwork,
    agent_maker,
    build_network,
    check_per_step,
    extra_term,
    observation_structs,
    value_output,
)
from jaxrl.agents.exploration import EPSILONS, NO_PROBABILITIES
from jaxrl.agents.fields import (
    AtLeast,
    Between,
    Count,
    NetworkConfig,
    OneOf,
    OptimizerConfig,
    Rate,
    Real,
    SequenceConfig,
    Share,
    Steps,
    Weight,
    Widths,
)
from jaxrl.agents.losses import conservative_gap, munchausen
from jaxrl.agents.optimizers import GradientStep, Optimizer
from jaxrl.agents.sequences import Views
from jaxrl.agents.values import (
    BootstrapTarget,
    ReturnRepresentation,
    c51,
    check_support,
    expected,
    init_return_bounds,
    midpoints,
    quantiles,
    rescaled,
    select_row,
    support_bounds,
    update_return_bounds,
)
from jaxrl.distributions import MIN_TEMPERATURE, Distribution, gumbel_like
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics
from jaxrl.nn import Network, QNetwork, Recurrent
from jaxrl.nn.custom import ROWS
from jaxrl.spaces import Box, Discrete, EnvSpec, space_zeros
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Batch, RecurrentObs, Transition
from jaxrl.xla import reductions
from jaxrl.xla.flat import elementwise

MUNCHAUSEN_CLIP = -1.0
"""Lower bound on the scaled log-policy that is added to a reward."""


@dataclass(frozen=True)
class DQNConfig(SequenceConfig, NetworkConfig, OptimizerConfig):
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
    value_rescaling: bool = False
    """Learn sign(x) (sqrt(|x| + 1) - 1) + 0.001 x of a return x in place of x (R2D2), for returns that are large or of
    very different sizes. Values that are reported and returned are those of x."""
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


class ActionValues(NamedTuple):
    """Values `[B, A]` of all actions at the steps that are learnt from.

    Parameters are free of noise. Actions that a mask forbids have the lowest value there is.
    """

    target_tm1: Array
    """Of the observation, by the target network."""
    target_t: Array
    """Of the next observation, by the target network."""
    online_t: Array
    """Of the next observation, by the network that is trained, without a gradient."""


TargetFn = Callable[[Transition, ActionValues], Array]
"""`(items, values) -> [B]`: what the value of the action taken at each step is regressed on.

`items.discount` is 0 where the episode terminated."""


class DQNState(NamedTuple):
    """Agent state. `target` and `opt_state` are empty in an acting-only copy."""

    params: PyTree
    """The network's parameters, as Flax takes them."""
    target: PyTree
    opt_state: PyTree
    hyper: DQNHyper
    reach: PyTree = ()
    """The `ReturnBounds` from which c51 derives its support; `()` if `v_min` and `v_max` are given, or without c51."""


class Draws(NamedTuple):
    """Randomness of an update: parameter noise and, for iqn, quantile levels `[B, n]`; `()` where there is none."""

    noise_tm1: PyTree
    noise_t: PyTree
    noise_select: PyTree
    taus_tm1: PyTree
    taus_t: PyTree


class LossAux(NamedTuple):
    """What an update reports of the loss of each step; `R` is `B`, or with a core the learnt steps of all sequences."""

    error: Array
    """`[R]`, temporal-difference errors, whose size is the priority for replay."""
    q: Array
    """`[R]`, expected return of the greedy policy."""
    weight: Array
    """`[R]`, 1, or 0 for a step that must not be learnt from."""
    return_error: PyTree = ()
    """`[R]`, errors of returns, where values are on another scale; else `()`."""
    outside: PyTree = ()
    """`[R]`, probability of returns beyond the ends of a support that the user fixed; else `()`."""


class _Parts(NamedTuple):
    """What an agent's functions share: its settings, its network and parts made in Python."""

    config: DQNConfig
    network: Network
    gradient_step: GradientStep
    spec: EnvSpec
    noise: PyTree
    """Shapes of the parameter noise; `{}` if there is none."""
    extra_loss: ExtraLoss | None = None
    target: TargetFn | None = None
    memory: PyTree | None = None
    """With a recurrent core, its memory at the start of an episode."""


CUSTOM_ARGUMENTS = ("make_optimizer", "make_network", "extra_loss", "target")
"""Arguments for parts made in Python."""


def dqn(
    config: DQNConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_network: MakeNetwork | None = None,
    extra_loss: ExtraLoss | None = None,
    target: TargetFn | None = None,
    **settings: Any,
) -> AgentMaker:
    """Configure a DQN agent; call the result with an `EnvSpec` of discrete actions to build it.

    Args:
      config: settings to start from; if left out, the defaults of `DQNConfig`.
      make_optimizer: function from a learning rate to any Optax transformation; replaces `optimizer`.
      make_network: function from an `EnvSpec` to a network `[B, ...] -> [B, A]` of action values; replaces the built-in
        ones. With `value_rescaling` they are rescaled. For distributions the network returns `[B, A, atoms]`; for iqn
        it also takes quantile levels `[B, n]`. It has no memory: `core` must be none.
      extra_loss: a term of the loss for each step beside the agent's own, `(params, items, q) -> [B]`, see
        `jaxrl.agents.custom.ExtraLoss`.
      target: what action values are regressed on, in place of the reward plus the discounted value of the best next
        action, `(items, values) -> [B]`, see `TargetFn`. For expected values, without a core; `double` is not read.
      **settings: fields of `DQNConfig` to change, as in `dqn(lr=1e-3, dueling=True)`.

    Raises:
      SettingsError: a setting is unknown or a value is out of range.
    """
    custom = {
        "make_optimizer": make_optimizer,
        "make_network": make_network,
        "extra_loss": extra_loss,
        "target": target,
    }
    return _maker("dqn", config or DQNConfig(), {**settings, **custom})


def rainbow(config: RainbowConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure a Rainbow agent (Hessel et al. 2018, https://arxiv.org/abs/1710.02298); arguments are as for `dqn`.

    The rest of Rainbow lies outside the agent: combine it with a prioritised buffer and an n-step processor.
    """
    return _maker("rainbow", config or RainbowConfig(), arguments)


def cql_dqn(config: CQLDQNConfig | None = None, **arguments: Any) -> AgentMaker:
    """Configure conservative Q-learning for discrete actions, to learn from data.

    Kumar et al. 2020, https://arxiv.org/abs/2006.04779. Arguments are as for `dqn`.
    """
    return _maker("cql_dqn", config or CQLDQNConfig(), arguments)


def _maker(name: str, config: Any, arguments: Mapping[str, Any]) -> AgentMaker:
    """Return the maker of an agent of this family."""
    return agent_maker(name, _build, config, arguments, CUSTOM_ARGUMENTS, _check)


# --- learning ----------------------------------------------------------------------------------------------------


def _update(parts: _Parts, state: DQNState, batch: Batch, key: Key, opt_step: Array) -> tuple[DQNState, Metrics, Array]:
    config, hyper = parts.config, state.hyper
    draws = _draw(parts, key, batch.weight.shape[0])
    # The support must contain this batch's targets before they are projected onto it.
    reach = update_return_bounds(state.reach, batch.items) if _derives_support(config) else ()
    representation = _make_representation(config, reach)
    result = optimizers.gradient_update(
        parts.gradient_step,
        partial(_loss, parts, representation, state.target, draws, hyper.cql),
        state.params,
        state.opt_state,
        # Quantile levels are cut into pieces with the batch. Parameter noise is one for all rows, and stays outside.
        (batch, (draws.taus_tm1, draws.taus_t)),
        key=nn.training_key(parts.network, key),
        lr=hyper.lr,
        max_norm=hyper.max_grad_norm,
        opt_step=opt_step,
    )
    aux: LossAux = result.aux
    target = _update_target(config, hyper.tau, result.variables, state.target, opt_step)
    of_steps = {"q": aux.q, "td_error": jnp.abs(aux.return_error if representation.return_error else aux.error)}
    if _reports_out_of_support(config):
        of_steps["out_of_support"] = aux.outside
    metrics = {
        "loss": result.loss,
        **shards.step_means(of_steps, aux.weight),
        "grad_norm": result.norm,
        "epsilon": _epsilon(parts, hyper, opt_step),
    }
    priorities = jnp.abs(aux.error)
    # Errors are those of steps, while replay has one priority for each sequence.
    if parts.memory is not None:
        priorities = sequences.sequence_priorities(priorities, batch.weight.shape[0], config.priority_max)
    return DQNState(result.variables, target, result.opt_state, hyper, reach), metrics, priorities


def _loss(
    parts: _Parts,
    representation: ReturnRepresentation,
    target: PyTree,
    draws: Draws,
    cql: PyTree,
    params: PyTree,
    batch: tuple[Batch, PyTree],
    key: Key | None,
) -> tuple[Array, tuple[LossAux, PyTree]]:
    """Return the weighted mean of `action_value_loss`, a `LossAux`, and the network's collections.

    The loss is differentiated by `params`. `batch` holds the sampled items and the quantile levels of `draws`.
    """
    config = parts.config
    sampled, (taus_tm1, taus_t) = batch
    items, taus_tm1, taus_t, weight = _steps_of(parts, sampled, taus_tm1, taus_t)
    # With a core, these hold the memories that the trained network comes to have, under its gradient.
    online_inputs = _network_inputs(parts, params, sampled.items, draws.noise_tm1)
    out_tm1, _, collections = _apply_network(
        parts, params, online_inputs.now, draws.noise_tm1, *_as_tuple(taus_tm1), key=key
    )
    bootstrap = _bootstrap(
        parts, representation, target, draws, params, sampled.items, items, online_inputs.then, taus_t
    )
    # Levels that were drawn, or the fixed ones of qr. Other losses do not read them.
    taus: Array = taus_tm1 if config.values == "iqn" else _fixed_taus(weight.shape[0], out_tm1.shape[-1])
    loss, error = action_value_loss(
        representation, out_tm1, taus, items.action, bootstrap, masks.get_mask(items.obs), cql
    )
    q = jax.vmap(representation.mean)(out_tm1)
    if parts.extra_loss is not None:
        loss = loss + extra_term(parts.extra_loss, params, items, q, weight)
    return_error: PyTree = ()
    if representation.return_error:
        return_error = jax.vmap(representation.return_error)(jax.vmap(select_row)(out_tm1, items.action), error)
    outside: PyTree = ()
    # Returns beyond a support that the user fixed are clipped to its ends; report how often.
    if representation.outside and _reports_out_of_support(config):
        outside = jax.vmap(representation.outside)(bootstrap)
    # Reported as `q`: the return that the greedy policy expects.
    greedy = reductions.largest(masks.apply_mask(q, masks.get_mask(items.obs)))
    counted = jnp.broadcast_to(items.weight, error.shape)
    return jnp.mean(weight * loss), (LossAux(error * counted, greedy, counted, return_error, outside), collections)


def action_value_loss(
    representation: ReturnRepresentation,
    outputs: Array,
    taus: Array,
    action: Array,
    bootstrap: BootstrapTarget,
    mask: Array | None = None,
    cql: PyTree = (),
) -> tuple[Array, Array]:
    """Return the loss of each step `[R]` and its temporal-difference error `[R]`.

    The loss is `l(r + discount * sum_b p(b) (q_target(s', b) - penalty(b)) - q(s, a))` (Mnih et al. 2015, algorithm 1),
    where `l` is that of `representation`, which compares distributions if outputs are such. CQL adds
    `cql * (log sum_b exp q(s, b) - q(s, a))` (Kumar et al. 2020, equation 4).

    Args:
      representation: how outputs represent returns.
      outputs: the network's outputs for `s`, `[R, A, n]`.
      taus: levels of the outputs if they are quantiles, `[R, n]`.
      action: the action taken, `[R]`.
      bootstrap: `r`, `discount`, `p`, `q_target` and `penalty`, from `greedy_target` or `munchausen_target`.
      mask: actions that are allowed in `s`, `[R, A]`; if left out, all.
      cql: weight of the penalty of CQL; `()` if it is off.
    """
    loss, error = jax.vmap(representation.loss)(jax.vmap(select_row)(outputs, action), taus, bootstrap)
    if isinstance(cql, tuple):
        return loss, error
    # CQL compares means, also where the loss compares distributions.
    q = jax.vmap(representation.mean)(outputs)
    gap = jax.vmap(conservative_gap)(
        masks.apply_mask(q, mask), jnp.zeros_like(q), jax.vmap(reductions.entry)(q, action)
    )
    return loss + cql * gap, error


def _bootstrap(
    parts: _Parts,
    representation: ReturnRepresentation,
    target: PyTree,
    draws: Draws,
    params: PyTree,
    sampled: Transition,
    items: Transition,
    next_inputs: PyTree,
    taus_t: PyTree,
) -> BootstrapTarget:
    """Return what the steps `items` `[R]` are regressed on, by the network with parameters `target`.

    With double Q-learning the network with `params` chooses the action, at its inputs `next_inputs`.
    """
    if parts.target is not None:
        return _custom_bootstrap(parts, params, target, items)
    config, num_steps = parts.config, items.reward.shape[0]
    outputs = lambda *args: _apply_network(parts, *args)[0]
    # With a core, the target network has memories of its own of the same sequences.
    target_inputs = _network_inputs(parts, target, sampled, draws.noise_t)
    out_t = outputs(target, target_inputs.then, draws.noise_t, *_as_tuple(taus_t))
    if config.munchausen:
        out_tm1 = outputs(target, target_inputs.now, draws.noise_t, *_taus(parts, num_steps))
        bootstrap = munchausen_target(
            representation, items, out_tm1, out_t, config.munchausen, config.munchausen_temperature
        )
    elif config.double:
        # Both are stopped: with a core, `next_inputs` holds memories that depend on `params`.
        fixed, next_inputs = jax.lax.stop_gradient((params, next_inputs))
        out_select = outputs(fixed, next_inputs, draws.noise_select, *_taus(parts, num_steps))
        bootstrap = greedy_target(representation, items, out_t, out_select)
    else:
        bootstrap = greedy_target(representation, items, out_t, out_t)
    # Single items hold n-step returns already, made by the processor. Steps of sequences are summed here.
    return bootstrap if parts.memory is None else sequences.sequence_targets(bootstrap, sampled, config)


def greedy_target(
    representation: ReturnRepresentation, items: Transition, out_t: Array, out_select: Array
) -> BootstrapTarget:
    """Bootstrap from the value of the best next action: `r + discount * q_target(s', argmax_b q(s', b))`.

    Outputs are `[R, A, n]`: `out_t` those of the target network. If `out_select` are the same, this is DQN (Mnih et al.
    2015); if they are the online network's, double DQN (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461,
    equation 4).
    """
    q = masks.apply_mask(jax.vmap(representation.mean)(out_select), masks.get_mask(items.next_obs))
    # A one-hot policy makes the greedy value an expectation, so that all losses take one form of target.
    policy = jax.nn.one_hot(reductions.argmax(q), q.shape[1], dtype=jnp.float32)
    return BootstrapTarget(items.reward, items.discount, out_t, policy, jnp.zeros(q.shape, jnp.float32))


def munchausen_target(
    representation: ReturnRepresentation,
    items: Transition,
    out_tm1: Array,
    out_t: Array,
    scale: float,
    temperature: float,
) -> BootstrapTarget:
    """Bootstrap softly, and add the scaled log-policy to the reward.

    `r + scale * clip(temperature log p(a|s), l0, 0) + discount * sum_b p(b|s') (q_target(s', b) - temperature log
    p(b|s'))`, where `p` is the softmax of `q_target / temperature` (Vieillard et al. 2020,
    https://arxiv.org/abs/2007.14430, equation 1). Outputs of the target network are `[R, A, n]`: `out_tm1` those for
    `s`, `out_t` those for `s'`.
    """
    mean = jax.vmap(representation.mean)
    soft = jax.vmap(lambda q, mask: munchausen(q, temperature, mask))
    _, log_p = soft(mean(out_tm1), masks.get_mask(items.obs))
    # The logarithm of a small probability has no bound, and would outweigh the reward.
    bonus = jnp.clip(jax.vmap(reductions.entry)(log_p, items.action), MUNCHAUSEN_CLIP, 0.0)
    policy, penalty = soft(mean(out_t), masks.get_mask(items.next_obs))
    return BootstrapTarget(items.reward + scale * bonus, items.discount, out_t, policy, penalty)


def _custom_bootstrap(parts: _Parts, params: PyTree, target: PyTree, items: Transition) -> BootstrapTarget:
    """Return the targets of the user's function for a batch, without a gradient, and nothing that is bootstrapped."""
    assert parts.target is not None
    q = lambda params, obs: masks.apply_mask(_apply_network(parts, params, obs, ())[0][..., 0], masks.get_mask(obs))
    values = ActionValues(q(target, items.obs), q(target, items.next_obs), q(params, items.next_obs))
    number = check_per_step("target", parts.target(items, jax.lax.stop_gradient(values)), items.reward)
    # Zeros are constants, so the compiler removes the bootstrap, and the networks that the function does not read.
    zeros = jnp.zeros(values.target_t.shape, jnp.float32)
    return BootstrapTarget(
        jax.lax.stop_gradient(number), jnp.zeros_like(items.discount), zeros[..., None], zeros, zeros
    )


def _update_target(config: DQNConfig, tau: Array, params: PyTree, target: PyTree, opt_step: Array) -> PyTree:
    """Move the target network after every `target_interval`-th optimisation step, counted from 1."""
    mixed = optimizers.polyak_update(target, params, tau)
    if config.target_interval == 1:
        return mixed
    # A select is faster than a `cond` here. On a CPU, a branch that has to copy makes the whole loop asynchronous,
    # which costs more than the copy; on a GPU, a branch waits for the host.
    due = (opt_step + 1) % config.target_interval == 0
    return elementwise(lambda new, old: jnp.where(due, new, old), mixed, target)


def _steps_of(parts: _Parts, sampled: Batch, *taus: PyTree) -> tuple[Transition, PyTree, PyTree, Array]:
    """Return the steps that are learnt from, `[R, ...]`, their quantile levels and their weights in the loss.

    They are the items of the batch, or the steps of its sequences after the burn-in, one sequence after the other.
    """
    if parts.memory is None:
        items: Transition = sampled.items
        return items, *taus, sampled.weight * items.weight
    steps = sequences.training_rows_of_sequences(sampled, parts.config)
    # `[B, T, n] -> [B * T, n]`, in the order of the steps.
    taus_tm1, taus_t = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), taus)
    return steps.items, taus_tm1, taus_t, steps.weight * steps.items.weight


def _as_tuple(taus: PyTree) -> tuple[Array, ...]:
    return () if isinstance(taus, tuple) else (taus,)


def _draw(parts: _Parts, key: Key, batch_size: int) -> Draws:
    """Draw the randomness of an update. Quantile levels `[B, n]` are part of the batch, so that its pieces differ."""
    noise_key, taus_key = jax.random.split(key)
    taus: Any = ((), ())
    if parts.config.values == "iqn":
        # With a core each step that is learnt from has its own levels.
        steps = () if parts.memory is None else (parts.config.sequence,)
        taus = jax.random.uniform(taus_key, (2, batch_size, *steps, parts.config.atoms), jnp.float32)
    # Three draws: noise shared by estimate, target and choice of the action would correlate them.
    return Draws(*(_draw_noise(parts, k) for k in jax.random.split(noise_key, 3)), *taus)


def _make_representation(config: DQNConfig, reach: PyTree) -> ReturnRepresentation:
    if config.values == "expected":
        return rescaled(config.loss) if config.value_rescaling else expected(config.loss)
    if config.values != "c51":
        return quantiles(config.atoms)
    if config.v_min is not None and config.v_max is not None:
        return c51(config.atoms, config.v_min, config.v_max)
    return c51(config.atoms, *support_bounds(reach, config.v_min, config.v_max))


def _derives_support(config: DQNConfig) -> bool:
    return config.values == "c51" and (config.v_min is None or config.v_max is None)


def _reports_out_of_support(config: DQNConfig) -> bool:
    """Return whether returns can lie beyond the support; they can if the user fixed one of its ends."""
    return config.values == "c51" and not (config.v_min is None and config.v_max is None)


# --- acting ------------------------------------------------------------------------------------------------------


def _act(
    parts: _Parts, state: DQNState, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode
) -> tuple[Array, PyTree]:
    space = parts.spec.action_space
    assert isinstance(space, Discrete)
    if key is None or mode == "exploit":
        q, memory = _expected_values(parts, state, obs, ())
        return masks.greedy_actions(space, q, masks.get_mask(obs)), () if parts.memory is None else {"memory": memory}
    # Three independent draws: whether to act at random, the noise of parameters, and of Boltzmann exploration.
    coin_key, noise_key, gumbel_key = jax.random.split(key, 3)
    q, memory = _expected_values(
        parts, state, obs, _draw_noise(parts, noise_key)
    )  # one noise that all environments share
    if parts.config.boltzmann:  # the largest of values with Gumbel noise is drawn from their softmax
        q = q / _temperature(state.hyper) + gumbel_like(gumbel_key, q)
    action = exploration.epsilon_greedy(
        parts.spec,
        masks.greedy_actions(space, q, masks.get_mask(obs)),
        coin_key,
        _epsilon(parts, state.hyper, opt_step),
        obs,
    )
    return action, () if parts.memory is None else {"memory": memory}


def _exploration_distribution(parts: _Parts, state: DQNState, obs: PyTree, opt_step: Array) -> Distribution:
    """Return the distributions from which `act` draws actions, as `DistributionFn`."""
    q, _ = _expected_values(parts, state, obs, ())
    temperature = _temperature(state.hyper) if parts.config.boltzmann else None
    return exploration.exploration_distribution(q, _epsilon(parts, state.hyper, opt_step), obs, temperature)


def _expected_values(parts: _Parts, state: DQNState, obs: PyTree, noise: PyTree) -> tuple[Array, PyTree]:
    """Return the expected returns of actions `[N, A]`, and the memory after the step; `noise` is that of parameters."""
    taus = _taus(parts, jax.tree.leaves(obs)[0].shape[0])
    out, memory, _ = _apply_network(parts, state.params, obs, noise, *taus)
    return jax.vmap(_make_representation(parts.config, state.reach).mean)(out), memory


def _temperature(hyper: DQNHyper) -> Array:
    """Return the temperature of Boltzmann exploration, above 0 also where a schedule has taken it there."""
    return jnp.maximum(hyper.boltzmann, MIN_TEMPERATURE)


def _epsilon(parts: _Parts, hyper: DQNHyper, opt_step: Array) -> Array:
    return optimizers.linear(hyper.epsilon_start, hyper.epsilon_end, parts.config.epsilon_decay, opt_step)


# --- the network -------------------------------------------------------------------------------------------------


def _network(config: DQNConfig, spec: EnvSpec) -> Network:
    nn.check_torso(config.torso, spec.observation_space, config.channels, config.features)
    assert isinstance(spec.action_space, Discrete)
    q_network = partial(
        QNetwork,
        num_actions=spec.action_space.n,
        activation=config.activation,
        dueling=config.dueling,
        # With iqn the network returns as many quantiles as it is given levels.
        atoms=config.atoms if config.values in ("c51", "qr") else 0,
        noisy=config.noisy,
        dtype=config.dtype,
    )
    shape: dict[str, Any] = {"torso": config.torso, "channels": config.channels}
    core = config.make_core()
    if core is None:
        return q_network(spec.observation_space, features=config.features, **shape)
    # The last layer of iqn comes after the quantile embedding, and so after the core.
    before = len(config.features) - (config.values == "iqn")
    core_outputs = Box(-jnp.inf, jnp.inf, (config.core_features,))
    return Recurrent(
        q_network(core_outputs, torso="mlp", features=config.features[before:]),
        spec.observation_space,
        core,
        features=config.features[:before],
        activation=config.activation,
        noisy=config.noisy,
        dtype=config.dtype,
        **shape,
    )


def _init_variables(parts: _Parts, key: Key) -> PyTree:
    """Initialise the network's variables."""
    obs = space_zeros(masks.for_policy(parts.spec.observation_space), 1)
    if parts.memory is not None:
        obs = RecurrentObs(obs, jax.tree.map(lambda x: x[None], parts.memory))
    return parts.network.init(key, obs, *_taus(parts, 1))


def _apply_network(
    parts: _Parts, params: PyTree, obs: PyTree, noise: PyTree, *taus: Array, key: Key | None = None
) -> tuple[Array, PyTree, PyTree]:
    """Return outputs for each action `[B, A, n]`, the memory after the step, `()` without a core, and collections.

    Parameters are free of noise if `noise` is `()`. `key` and the network's collections are as for `jaxrl.nn.forward`.
    """
    variables = _variables(parts, params, noise)
    result, collections = nn.forward(parts.network, variables, masks.for_policy(obs), *taus, key=key)
    out, memory = (result, ()) if parts.memory is None else result
    return out if out.ndim == 3 else out[..., None], memory, collections


def _apply(parts: _Parts, params: PyTree, obs: PyTree, *taus: Array) -> Any:
    """Return the network's outputs as it makes them, without noise."""
    return parts.network.apply(_variables(parts, params, ()), masks.for_policy(obs), *taus)


def _variables(parts: _Parts, params: PyTree, noise: PyTree) -> PyTree:
    if not parts.noise:
        return params
    # Noisy layers always read the collection; with zeros only the means of their parameters remain.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts.noise)
    return {**params, "noise": zeros if noise == () else noise}


def _draw_noise(parts: _Parts, key: Key) -> PyTree:
    """Draw the parameter noise in a single call; `()` without noisy layers. The key is consumed."""
    if not parts.noise:
        return ()
    # One call for all layers: on a GPU each call of the generator is a kernel.
    leaves, treedef = jax.tree.flatten(parts.noise)
    ends = np.cumsum([leaf.size for leaf in leaves])
    return jax.tree.unflatten(treedef, jnp.split(jax.random.normal(key, (ends[-1],), jnp.float32), ends[:-1]))


def _network_inputs(parts: _Parts, params: PyTree, items: Transition, noise: PyTree) -> Views:
    """Return the inputs of the network with `params` for the learnt steps."""
    if parts.memory is None:
        return Views(items.obs, items.next_obs)
    variables = _variables(parts, params, noise)
    return sequences.observe_sequence(parts.network, variables, items, parts.config.burn_in)


def _taus(parts: _Parts, batch: int) -> tuple[Array, ...]:
    """Return the evenly spaced quantile levels `[B, n]` at which iqn compares actions; nothing without iqn."""
    if parts.config.values != "iqn":
        return ()
    return (_fixed_taus(batch, parts.config.atoms),)


def _fixed_taus(batch: int, count: int) -> Array:
    """Return the midpoints of `count` equal parts of `[0, 1]` for each row of a batch, `[B, count]`."""
    return jnp.broadcast_to(midpoints(count)[None], (batch, count))


# --- the agent ---------------------------------------------------------------------------------------------------


def _check(config: DQNConfig, custom: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for settings that contradict each other, or the arguments `custom`."""
    sequences.check_core(config, make_network=custom["make_network"])
    if custom["target"] is not None:
        needed = {"values": "expected", "core": "none", "munchausen": 0.0, "value_rescaling": False}
        for name, value in needed.items():
            if getattr(config, name) != value:
                raise SettingsError(
                    f"agent.{name} is {getattr(config, name)}; `target` needs expected values without a core, "
                    f"munchausen or value_rescaling: set it to {value}"
                )
    if config.value_rescaling:
        # Munchausen's bonus and CQL's penalty are sums of values and log-probabilities, which need one scale.
        for name, value in {"values": "expected", "munchausen": 0.0, "cql": 0.0}.items():
            if getattr(config, name) != value:
                raise SettingsError(
                    f"agent.{name} is {getattr(config, name)}, but agent.value_rescaling is for expected values alone, "
                    f"without munchausen and cql; set it to {value}, or value_rescaling to False"
                )
    if config.values == "c51":
        check_support(config.atoms, config.v_min, config.v_max)
    if config.values == "c51" and config.munchausen:
        raise SettingsError(
            "agent.munchausen shifts the returns of each action, which c51 cannot represent; use qr or iqn"
        )
    if config.values == "iqn" and len(config.features) < 2:
        raise SettingsError(
            f"agent.features is {config.features}; iqn needs a layer before its quantiles and another behind, "
            "as in (64, 64)"
        )


def _build(name: str, config: DQNConfig, custom: CustomParts, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    policy_spec = masks.view_spec(spec, masks.for_policy)
    network = build_network(
        custom,
        "make_network",
        (policy_spec,),
        partial(_network, config, policy_spec),
        (
            observation_structs(policy_spec),
            *((jnp.zeros((ROWS, config.atoms), jnp.float32),) if config.values == "iqn" else ()),
        ),
        (value_output(spec, 0 if config.values == "expected" else config.atoms),),
        kept=("params", "noise"),
    )
    parts = _Parts(
        config,
        network,
        custom.gradient_step,
        spec,
        {},
        custom.extra_loss,
        custom.target,
        config.initial_memory(),
    )
    # The shapes of the noise are those of the network's variables, for which the other parts are needed first.
    variables = jax.eval_shape(lambda: _init_variables(parts, make_key(0)))
    parts = parts._replace(noise=variables.get("noise", {}))
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        strip=lambda state: state._replace(target=(), opt_state=()),
        memory=parts.memory,
        window=sequences.sequence_spec(config),
        apply={"params": partial(_apply, parts)},
        policy_fns=PolicyFns(
            NO_PROBABILITIES if config.noisy else partial(_exploration_distribution, parts),
            lambda state, obs, action: exploration.mask_values(_expected_values(parts, state, obs, ())[0], obs),
        ),
        info=AgentInfo(
            settings=asdict(config),
            custom=custom.custom,
            exploration=EPSILONS,
            offline=isinstance(config, CQLDQNConfig),
            bounds_returns=_derives_support(config),
        ),
    )


def _init(parts: _Parts, key: Key) -> DQNState:
    config = parts.config
    # Noise is drawn anew for each use, and is no part of the state.
    params = {name: value for name, value in _init_variables(parts, key).items() if name != "noise"}
    hyper = DQNHyper(*make_hyper(asdict(config), DQNHyper._fields, optional=("cql", "boltzmann")))
    # The target must be a copy: its arrays and those of `params` are all donated to the compiled loop.
    target = jax.tree.map(jnp.copy, params)
    opt_state = parts.gradient_step.init(params, hyper.lr)
    return DQNState(params, target, opt_state, hyper, init_return_bounds() if _derives_support(config) else ())

"""Soft actor-critic: a policy that is paid for its entropy.

For continuous actions Haarnoja et al. 2018 (https://arxiv.org/abs/1812.05905), for discrete ones Christodoulou 2019
(https://arxiv.org/abs/1910.07207), which differ only in how an expectation over actions is taken.

Conservative Q-learning, for data that others have gathered, is an option (Kumar et al. 2020,
https://arxiv.org/abs/2006.04779). So is noise that lasts over steps, for tasks that are solved only by doing the same
for a while (Eberhard et al. 2023, https://openreview.net/forum?id=hQ9V5QN27eS; here autoregressive).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker, Mode
from jaxrl.agents.checks import changed, check_actions, hyper_of
from jaxrl.agents.critics import (
    CriticConfig,
    Parts,
    Rivals,
    build_networks,
    init_networks,
    lasting,
    learn_critic,
    lowest,
    seen,
    space_size,
    trail,
)
from jaxrl.agents.fields import Between, Count, Positive, Rate, Real, Weight
from jaxrl.agents.optimizers import OPTIMIZERS, Optimizer, decayed, descent, learn
from jaxrl.agents.own import MakeNetwork, MakePolicy, Own, own_parts
from jaxrl.distributions import Distribution, head_of
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics
from jaxrl.nn import Network
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Remembered
from jaxrl.xla.flat import Flat


@dataclass(frozen=True)
class SACConfig(CriticConfig):
    """Settings of SAC."""

    temperature: Positive = 1.0
    """Worth of a nat of entropy, at first where it is learnt."""
    learn_temperature: bool = True
    """Move the temperature so that the entropy comes to target_entropy."""
    temperature_lr: Rate = 3e-4
    """Learning rate of the temperature's logarithm."""
    target_entropy: Real = 0.0
    """Entropy that the temperature aims at, in nats (of actions from -1 to 1); 0: minus the number of continuous
    actions, or 0.3 of what choosing at random has."""
    noise_memory: Annotated[float, Between(0.0, 0.9999)] = 0.0
    """Share of the noise in continuous actions that stays from one step of an episode to the next, while exploring;
    0: noise without memory."""
    cql: Weight = 0.0
    """Weight by which the values of other actions than the data's are held down (conservative Q-learning); 0: off."""
    cql_actions: Count = 10
    """Actions drawn for that, of continuous ones: so many at random, by the policy, and by the policy a step later."""


@dataclass(frozen=True)
class CQLConfig(SACConfig):
    """Settings of conservative Q-learning with a policy."""

    cql: Weight = 5.0


ADAM = descent(OPTIMIZERS["adam"])
"""Moves the temperature, whatever moves the networks: decay of weights, say, is nothing for it."""


class SACHyper(NamedTuple):
    """What a sweep may vary without compiling again: float32 scalars, `[P]` in a population."""

    lr: Array
    policy_lr: Array
    temperature_lr: Array
    max_grad_norm: Array
    tau: Array
    temperature: Array
    target_entropy: Array
    cql: PyTree
    """`()` where it is off."""
    noise_memory: PyTree = ()
    """`()` where it is off."""


class OptStates(NamedTuple):
    """State of each optimizer; that of the temperature is empty where it is fixed."""

    policy: PyTree
    critic: PyTree
    temperature: PyTree


class SACState(NamedTuple):
    """All of a SAC agent; of one that only acts, all but `policy` and `hyper` is empty."""

    policy: Flat
    critic: Flat
    target: Flat
    log_temperature: PyTree
    """A `Flat` of one number, or `()` where the temperature is fixed."""
    opt_state: OptStates
    hyper: SACHyper


def sac(
    config: SACConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    **settings: Any,
) -> AgentMaker:
    """Choose a SAC agent; the result is called with an `EnvSpec`, whose actions are a bounded box or discrete.

    Args:
      config: settings to start from; the defaults of `SACConfig` if left out.
      make_optimizer: from a learning rate to any Optax transformation, in place of `optimizer`.
      make_policy: from an `EnvSpec` and the head for its actions to a network `[B, ...] -> [B, head.outputs]`.
      make_critic: from an `EnvSpec` to the network of one critic, of observations and actions from -1 to 1
        `[B, ...], [B, D] -> [B]`; of discrete actions `[B, ...] -> [B, A]`.
      **settings: fields of `SACConfig` to change, as in `sac(lr=1e-3, num_critics=5)`.

    Raises:
      SettingsError: an unknown setting or a value out of its range.
    """
    makers = {"make_policy": make_policy, "make_critic": make_critic}
    return _maker("sac", config or SACConfig(), settings, make_optimizer, **makers)


def cql(
    config: CQLConfig | None = None,
    *,
    make_optimizer: Optimizer | None = None,
    make_policy: MakePolicy | None = None,
    make_critic: MakeNetwork | None = None,
    **settings: Any,
) -> AgentMaker:
    """Choose conservative Q-learning with a policy, for data; arguments are as for `sac`."""
    makers = {"make_policy": make_policy, "make_critic": make_critic}
    return _maker("cql", config or CQLConfig(), settings, make_optimizer, **makers)


def _maker(
    name: str,
    config: SACConfig,
    settings: dict[str, Any],
    make_optimizer: Optimizer | None,
    **makers: Callable[..., Network] | None,
) -> AgentMaker:
    config = changed(name, config, settings)
    return partial(_bind, name, config, own_parts(config.optimizer, make_optimizer, **makers))


def _bind(name: str, config: SACConfig, own: Own, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    if config.noise_memory and isinstance(spec.action_space, Discrete):
        raise SettingsError(
            f"agent.noise_memory is {config.noise_memory}, but {spec.name} has Discrete actions, each drawn "
            "afresh; set it to 0"
        )
    head = head_of(spec, squash=True)
    parts = Parts(config, build_networks(config, own, spec, head), descent(own.optimizer), spec, head)
    return Agent(
        name=name,
        init=partial(_init, parts),
        act=partial(_act, parts),
        update=partial(_update, parts),
        draw_act=head.draw,
        draw_update=partial(_draw_update, parts),
        strip=lambda state: state._replace(critic=(), target=(), log_temperature=(), opt_state=()),
        settings=asdict(config),
        custom=own.custom,
        offline=isinstance(config, CQLConfig),
        memory=jnp.zeros(space_size(cast(Box, spec.action_space))) if config.noise_memory else None,
    )


def _init(parts: Parts, key: Key) -> SACState:
    config = parts.config
    policy, critic = init_networks(parts.networks, parts.spec, key)
    entropy = config.target_entropy or _usual_entropy(parts.spec)
    settings = {**asdict(config), "target_entropy": entropy}
    hyper = SACHyper(*hyper_of(settings, SACHyper._fields, optional=("cql", "noise_memory")))
    log_temperature: PyTree = ()
    learnt: PyTree = ()
    if config.learn_temperature:
        log_temperature = Flat.of(jnp.full((1,), math.log(config.temperature), jnp.float32))
        learnt = ADAM.init(log_temperature, hyper.temperature_lr)
    opt_state = OptStates(parts.descent.init(policy, hyper.policy_lr), parts.descent.init(critic, hyper.lr), learnt)
    # The target is a copy, not the same array: both are donated to the compiled loop.
    return SACState(policy, critic, jax.tree.map(jnp.copy, critic), log_temperature, opt_state, hyper)


def _usual_entropy(spec: EnvSpec) -> float:
    if isinstance(spec.action_space, Discrete):
        return 0.3 * math.log(spec.action_space.n)
    return -float(space_size(cast(Any, spec.action_space)))


def _policy(parts: Parts, params: PyTree, obs: PyTree) -> Distribution:
    return parts.head.of(cast(Array, parts.networks.policy.apply(params, seen(obs))))


def _act(parts: Parts, state: SACState, obs: PyTree, noise: Array, opt_step: Array, mode: Mode) -> tuple[Array, Any]:
    distribution = _policy(parts, state.policy.tree, obs)
    if mode == "exploit":
        return parts.head.to_env(distribution.mode()), {"memory": obs.memory} if isinstance(obs, Remembered) else ()
    if not isinstance(obs, Remembered):
        return parts.head.to_env(distribution.sample(noise)), ()
    # Each action alone is still a draw of the policy; only the draws of an episode hang together.
    after = lasting(state.hyper.noise_memory, obs.memory, noise)
    return parts.head.to_env(distribution.sample(after)), {"memory": after}


def _draw_update(parts: Parts, key: Key, batch_size: int) -> PyTree:
    """Draw actions for the observations before and after a step, and rivals; of discrete ones all are looked at."""
    if isinstance(parts.spec.action_space, Discrete):
        return (), (), ()
    tm1, t = (parts.head.draw(k, batch_size) for k in jax.random.split(key))
    if not parts.config.cql:
        return tm1, t, ()
    shape = (2, batch_size, parts.config.cql_actions, tm1.shape[-1])
    uniform_key, policy_key = jax.random.split(jax.random.fold_in(key, 1))
    uniform = jax.random.uniform(uniform_key, shape[1:], minval=-1.0, maxval=1.0)
    return tm1, t, (uniform, jax.random.normal(policy_key, shape))


def soft_value(
    parts: Parts, policy: PyTree, critic: PyTree, temperature: Array, obs: PyTree, noise: Any
) -> tuple[Array, Array]:
    """Return the soft value of `obs`, `E[q(a) - temperature log p(a)]`, and the entropy; `[B]` each.

    Of continuous actions by one sample, through which gradients reach the policy (equation 7); of discrete ones
    exactly.
    """
    distribution = _policy(parts, policy, obs)
    if isinstance(parts.spec.action_space, Discrete):
        q = lowest(parts.networks.critic, critic, obs)
        entropy = distribution.entropy()
        probability = jax.nn.softmax(cast(Any, distribution).logits)
        return jnp.sum(probability * q, axis=-1) + temperature * entropy, entropy
    raw = distribution.sample(noise)
    entropy = -distribution.log_prob(raw)
    return lowest(parts.networks.critic, critic, obs, jnp.tanh(raw))[:, 0] + temperature * entropy, entropy


def _update(
    parts: Parts, state: SACState, batch: Batch, noise: PyTree, opt_step: Array
) -> tuple[SACState, Metrics, Array]:
    """Critics first, then the policy by the new critics, then the temperature, as in the paper's algorithm 1."""
    config, hyper, items = parts.config, state.hyper, batch.items
    noise_tm1, noise_t, noise_rivals = noise
    temperature = jnp.exp(state.log_temperature.vector[0]) if config.learn_temperature else hyper.temperature
    v_t, _ = soft_value(parts, state.policy.tree, state.target.tree, temperature, items.next_obs, noise_t)
    rivals = _rivals(parts, state.policy.tree, items, noise_rivals) if config.cql else None
    target = items.reward + items.discount * v_t
    critic, metrics, priorities = learn_critic(parts, state, batch, target, opt_step, rivals)
    policy = learn(
        config,
        parts.descent,
        partial(_policy_loss, parts, critic.params.tree, temperature),
        state.policy,
        state.opt_state.policy,
        (items.obs, noise_tm1, batch.weight * items.weight),
        hyper.policy_lr,
        hyper.max_grad_norm,
        opt_step,
    )
    entropy = policy.aux
    log_temperature, opt_state = state.log_temperature, state.opt_state.temperature
    if config.learn_temperature:
        # The gradient of temperature * (entropy - target) by the temperature's logarithm.
        slope = temperature * jnp.mean((entropy - hyper.target_entropy) * items.weight)
        log_temperature, opt_state, _ = ADAM.step(
            log_temperature,
            Flat.of(slope[None]),
            opt_state,
            decayed(hyper.temperature_lr, config.lr_decay, opt_step),
            hyper.max_grad_norm,
        )
    metrics = {
        **metrics,
        "policy_loss": policy.loss,
        "policy_grad_norm": policy.norm,
        "entropy": entropy.mean(),
        "temperature": temperature,
    }
    trailing = trail(state.target, critic.params, hyper.tau)
    opt_states = OptStates(policy.opt_state, critic.opt_state, opt_state)
    return SACState(policy.params, critic.params, trailing, log_temperature, opt_states, hyper), metrics, priorities


def _rivals(parts: Parts, policy: PyTree, items: Any, noise: PyTree) -> Rivals:
    """Draw rivals at random, by the policy, and by the policy where the step led to, all for the observation before."""
    if isinstance(parts.spec.action_space, Discrete):
        return Rivals((), ())
    uniform, normal = noise
    actions, densities = [uniform], [jnp.full(uniform.shape[:2], -uniform.shape[2] * math.log(2))]
    for obs, part in ((items.obs, normal[0]), (items.next_obs, normal[1])):
        outputs = cast(Array, parts.networks.policy.apply(policy, seen(obs)))
        distribution = parts.head.of(outputs[:, None])
        raw = distribution.sample(part)
        actions.append(jnp.tanh(raw))
        densities.append(distribution.log_prob(raw))
    action = jnp.concatenate(actions, axis=1)
    return Rivals(action, jnp.concatenate(densities, axis=1) + math.log(action.shape[1]))


def _policy_loss(
    parts: Parts, critic: PyTree, temperature: Array, policy: PyTree, batch: PyTree
) -> tuple[Array, Array]:
    """Return the negative of the weighted mean soft value, and the entropy `[B]`."""
    obs, noise, weight = batch
    value, entropy = soft_value(parts, policy, critic, temperature, obs, noise)
    return -jnp.mean(weight * value), entropy

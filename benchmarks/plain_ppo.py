"""PPO in the usual style of JAX loops, as a reference.

Keys are split in the loop, every leaf of a rollout is shuffled by a permutation each epoch, parameters are a tree of
Flax's own layers. Nothing of jaxrl is used; what is computed is what the `ppo-*` cases compute, less records, guards
and the bootstrapping at time limits, and but for the parameters at first.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

from benchmarks.loops import Loop
from benchmarks.plain import Network

LR, DISCOUNT, LAMBDA, CLIP, VALUE, ENTROPY, MAX_NORM = 2.5e-4, 0.99, 0.95, 0.2, 0.5, 0.01, 0.5


class Setting(NamedTuple):
    """What the cases vary."""

    env: str
    num_envs: int
    rollout: int
    epochs: int
    minibatches: int
    features: tuple[int, ...]


class ActorCritic(nn.Module):
    """Logits `[B, outputs]` and values `[B]`, each of a network of its own."""

    features: tuple[int, ...]
    outputs: int

    @nn.compact
    def __call__(self, obs: Any) -> tuple[Any, Any]:
        return Network(self.features, self.outputs, nn.tanh)(obs), Network(self.features, 1, nn.tanh)(obs)[:, 0]


class State(NamedTuple):
    """Everything that is carried from one rollout to the next."""

    params: Any
    opt_state: Any
    env: Any
    obs: Any
    key: Any


class Step(NamedTuple):
    """What is kept of a vector step, leaves `[T, N, ...]`."""

    obs: Any
    action: Any
    reward: Any
    done: Any
    value: Any
    log_prob: Any


class _Parts(NamedTuple):
    setting: Setting
    env: Any
    env_params: Any
    network: Any
    optimizer: Any


def plain_ppo(setting: Setting) -> Loop:
    """Return the loop; one iteration is a rollout and all epochs on it."""
    env, env_params = gymnax.make(setting.env)
    network = ActorCritic(setting.features, env.num_actions)
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(LR))
    parts = _Parts(setting, env, env_params, network, optimizer)
    state = jax.jit(partial(_begin, parts))(jax.random.key(0))

    def run(state: State, start: Any, stop: Any) -> State:
        return jax.lax.fori_loop(start, stop, lambda t, state: _iterate(parts, state), state)

    return Loop(run, state, usual=True)


def _begin(parts: _Parts, key: Any) -> State:
    key, reset_key, params_key = jax.random.split(key, 3)
    reset_keys = jax.random.split(reset_key, parts.setting.num_envs)
    obs, env_state = jax.vmap(parts.env.reset, in_axes=(0, None))(reset_keys, parts.env_params)
    params = parts.network.init(params_key, obs)
    return State(params, parts.optimizer.init(params), env_state, obs, key)


def _iterate(parts: _Parts, state: State) -> State:
    state, steps = jax.lax.scan(lambda state, _: _act(parts, state), state, None, parts.setting.rollout)
    _, last_value = parts.network.apply(state.params, state.obs)
    advantage = _advantages(steps, last_value)
    data = (steps, advantage, advantage + steps.value)
    key, epochs_key = jax.random.split(state.key)
    carry, _ = jax.lax.scan(
        lambda carry, key: (_epoch(parts, data, carry, key), None),
        (state.params, state.opt_state),
        jax.random.split(epochs_key, parts.setting.epochs),
    )
    return state._replace(params=carry[0], opt_state=carry[1], key=key)


def _act(parts: _Parts, state: State) -> tuple[State, Step]:
    key, action_key, step_key = jax.random.split(state.key, 3)
    logits, value = parts.network.apply(state.params, state.obs)
    action = jax.random.categorical(action_key, logits)
    log_prob = _log_prob(logits, action)
    keys = jax.random.split(step_key, parts.setting.num_envs)
    obs, env, reward, terminated, truncated, _ = jax.vmap(parts.env.step, in_axes=(0, 0, 0, None))(
        keys, state.env, action, parts.env_params
    )
    step = Step(state.obs, action, reward.astype(jnp.float32), terminated | truncated, value, log_prob)
    return state._replace(env=env, obs=obs, key=key), step


def _log_prob(logits: Any, action: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def _advantages(steps: Step, last_value: Any) -> Any:
    def back(carry: Any, step: Step) -> Any:
        advantage, next_value = carry
        going_on = 1.0 - step.done
        delta = step.reward + DISCOUNT * next_value * going_on - step.value
        advantage = delta + DISCOUNT * LAMBDA * going_on * advantage
        return (advantage, step.value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), steps, reverse=True, unroll=16)[1]


def _epoch(parts: _Parts, data: Any, carry: Any, key: Any) -> Any:
    setting = parts.setting
    size = setting.rollout * setting.num_envs
    order = jax.random.permutation(key, size)
    flat = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), data)
    shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), flat)
    pieces = jax.tree.map(lambda x: x.reshape(setting.minibatches, -1, *x.shape[1:]), shuffled)
    return jax.lax.scan(lambda carry, batch: (_learn(parts, carry, batch), None), carry, pieces)[0]


def _learn(parts: _Parts, carry: Any, batch: Any) -> Any:
    params, opt_state = carry
    updates, opt_state = parts.optimizer.update(jax.grad(partial(_loss, parts, batch))(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _loss(parts: _Parts, batch: Any, params: Any) -> Any:
    steps, advantage, target = batch
    logits, value = parts.network.apply(params, steps.obs)
    ratio = jnp.exp(_log_prob(logits, steps.action) - steps.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    log_p = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
    return policy + VALUE * 0.5 * jnp.square(value - target).mean() - ENTROPY * entropy

"""DQN in the usual style of JAX loops, as a reference.

Keys are split in the loop, updates stand under conditions, pushes are scatters, parameters are a tree of Flax's own
layers. Nothing of jaxrl is used; what is computed is what the `dqn-*` cases compute, less records and guards.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

from benchmarks.loops import Loop

LR, DISCOUNT, TARGET_INTERVAL = 2.5e-4, 0.99, 100
EPSILON_DECAY = 2_500


class Setting(NamedTuple):
    """What the cases vary."""

    env: str
    num_envs: int
    opt_interval: int
    features: tuple[int, ...]
    batch_size: int
    capacity: int


class Network(nn.Module):
    """Dense layers, for images `[B, H, W, C]` behind a convolution; `[B, ...] -> [B, outputs]`."""

    features: tuple[int, ...]
    outputs: int
    activation: Any = nn.relu

    @nn.compact
    def __call__(self, obs: Any) -> Any:
        x = obs.astype(jnp.float32)
        if x.ndim == 4:
            x = self.activation(nn.Conv(16, (3, 3), padding="VALID")(x)).reshape(len(x), -1)
        for width in self.features:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(x)


class State(NamedTuple):
    """Everything that is carried from one vector step to the next."""

    params: Any
    target: Any
    opt_state: Any
    ring: dict[str, Any]
    env: Any
    obs: Any
    key: Any
    updates: Any


def plain_dqn(setting: Setting, seeds: int | None = None) -> Loop:
    """Return the loop; one iteration is one vector step, and every `opt_interval / num_envs`-th of them learns.

    With `seeds`, so many runs side by side by `vmap`.
    """
    env, env_params = gymnax.make(setting.env)
    network = Network(setting.features, env.num_actions)
    optimizer = optax.adam(LR)
    begin = partial(_begin, setting, env, env_params, network, optimizer)
    step = partial(_step, setting, env, env_params, network, optimizer)
    if seeds is None:
        state = jax.jit(begin)(jax.random.key(0))
    else:
        state = jax.jit(jax.vmap(begin))(jax.random.split(jax.random.key(0), seeds))
        step = jax.vmap(step, in_axes=(None, 0))

    def run(state: State, start: Any, stop: Any) -> State:
        return jax.lax.fori_loop(start, stop, step, state)

    return Loop(run, state, usual=True)


def _begin(setting: Setting, env: Any, env_params: Any, network: Any, optimizer: Any, key: Any) -> State:
    key, reset_key, params_key = jax.random.split(key, 3)
    reset_keys = jax.random.split(reset_key, setting.num_envs)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(reset_keys, env_params)
    params = network.init(params_key, obs)
    rows = lambda x: jnp.zeros((setting.capacity, *x.shape[1:]), x.dtype)
    scalars = jnp.zeros(setting.num_envs)
    ring = {
        "obs": rows(obs),
        "action": rows(scalars.astype(jnp.int32)),
        "reward": rows(scalars),
        "done": rows(scalars.astype(bool)),
        "next_obs": rows(obs),
    }
    target = jax.tree.map(jnp.copy, params)
    return State(params, target, optimizer.init(params), ring, env_state, obs, key, jnp.int32(0))


def _step(setting: Setting, env: Any, env_params: Any, network: Any, optimizer: Any, t: Any, state: State) -> State:
    key, coin_key, random_key, step_key, sample_key = jax.random.split(state.key, 5)
    n = setting.num_envs
    greedy = network.apply(state.params, state.obs).argmax(axis=-1)
    epsilon = jnp.maximum(0.05, 1.0 - 0.95 * state.updates / EPSILON_DECAY)
    random = jax.random.randint(random_key, (n,), 0, env.num_actions)
    action = jnp.where(jax.random.uniform(coin_key, (n,)) < epsilon, random, greedy).astype(jnp.int32)
    keys = jax.random.split(step_key, n)
    obs, env_state, reward, terminated, _, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
        keys, state.env, action, env_params
    )
    new = {
        "obs": state.obs,
        "action": action,
        "reward": reward.astype(jnp.float32),
        "done": terminated,
        "next_obs": info["final_observation"],
    }
    places = (t.astype(jnp.int32) * n + jnp.arange(n)) % setting.capacity
    ring = jax.tree.map(lambda old, x: old.at[places].set(x), state.ring, new)
    filled = jnp.minimum((t.astype(jnp.int32) + 1) * n, setting.capacity)
    state = state._replace(ring=ring, env=env_state, obs=obs, key=key)

    def learn(state: State) -> State:
        index = jax.random.randint(sample_key, (setting.batch_size,), 0, filled)
        return _learn(network, optimizer, state, jax.tree.map(lambda x: x[index], ring))

    vector_steps = max(1, setting.opt_interval // n)
    if vector_steps == 1:
        return learn(state)
    return jax.lax.cond(t % vector_steps == 0, learn, lambda state: state, state)


def _learn(network: Any, optimizer: Any, state: State, batch: dict[str, Any]) -> State:
    next_value = network.apply(state.target, batch["next_obs"]).max(axis=-1)
    goal = batch["reward"] + DISCOUNT * (1 - batch["done"]) * next_value

    def loss(params: Any) -> Any:
        values = network.apply(params, batch["obs"])
        return optax.l2_loss(jnp.take_along_axis(values, batch["action"][:, None], axis=1)[:, 0], goal).mean()

    updates, opt_state = optimizer.update(jax.grad(loss)(state.params), state.opt_state, state.params)
    params, count = optax.apply_updates(state.params, updates), state.updates + 1
    target = jax.lax.cond(count % TARGET_INTERVAL == 0, lambda: params, lambda: state.target)
    return state._replace(params=params, target=target, opt_state=opt_state, updates=count)

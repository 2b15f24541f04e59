"""Write an agent: DQN with Flax and Optax."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxrl


class State(NamedTuple):
    params: Any
    target: Any
    opt_state: Any


def my_dqn(spec: jaxrl.EnvSpec, lr=1e-3, tau=0.01, epsilon_decay=1_000) -> jaxrl.Agent:
    actions, optimizer = spec.action_space.n, optax.adam(lr)
    network = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(actions)])  # [B, F] -> [B, A]
    epsilon = optax.linear_schedule(1.0, 0.05, epsilon_decay)

    def init(key):
        params = network.init(key, jnp.zeros((1, *spec.observation_space.shape)))
        return State(params, params, optimizer.init(params))

    def act(state, obs, key, opt_step, mode):  # obs [N, F] -> actions [N], and extras to store with them
        action = network.apply(state.params, obs).argmax(axis=-1)
        if mode == "explore":
            coin_key, action_key = jax.random.split(key)
            coin = jax.random.bernoulli(coin_key, epsilon(opt_step), action.shape)
            action = jnp.where(coin, jax.random.randint(action_key, action.shape, 0, actions), action)
        return action.astype(jnp.int32), ()

    def update(state, batch, key, opt_step):
        items = batch.items  # a Transition, leaves [B, ...]; its discount is 0 where the episode terminated
        best = network.apply(state.params, items.next_obs).argmax(axis=-1)  # double Q-learning
        q_t = jnp.take_along_axis(network.apply(state.target, items.next_obs), best[:, None], axis=-1)[:, 0]
        target = items.reward + items.discount * q_t

        def loss_fn(params):
            q = jnp.take_along_axis(network.apply(params, items.obs), items.action[:, None], axis=-1)[:, 0]
            error = items.weight * (target - q)
            return jnp.mean(batch.weight * optax.huber_loss(error)), jnp.abs(error)

        (loss, priorities), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        moved = optax.incremental_update(params, state.target, tau)
        return State(params, moved, opt_state), {"loss": loss}, priorities

    return jaxrl.Agent("my_dqn", init, act, update, strip=lambda state: State(state.params, (), ()))


def main(max_opts: int = 10_000, eval_interval: int = 1_000, seed: int = 0) -> float:
    env, buffer = jaxrl.make_env("CartPole-v1"), jaxrl.uniform(20_000, batch_size=128)
    strategy = jaxrl.off_policy(env, my_dqn, buffer=buffer, processor=jaxrl.n_step(3), num_envs=10, warmup=500)
    result = jaxrl.Trainer(strategy, max_opts=max_opts, eval_interval=eval_interval, seed=seed).train()
    print("best score", result.best_score)
    return result.best_score


if __name__ == "__main__":
    main()

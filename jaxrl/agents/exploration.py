"""Exploration by random actions, shared by the agents that learn action values."""

import jax
import jax.numpy as jnp

from jaxrl.masks import draw_random, random_action
from jaxrl.spaces import EnvSpec
from jaxrl.trees import Array, Key, PyTree

EPSILONS = ("epsilon_start", "epsilon_end")
"""The hyperparameters that set the probability of a random action."""


def draw_epsilon_greedy(spec: EnvSpec, key: Key, num_envs: int) -> tuple[Array, Array]:
    """Draw a coin `[N]` from `[0, 1)` and a random action, as `draw_random` does; the key is consumed."""
    coin_key, action_key = jax.random.split(key)
    return jax.random.uniform(coin_key, (num_envs,)), draw_random(spec, action_key, num_envs)


def epsilon_greedy(spec: EnvSpec, greedy: Array, noise: tuple[Array, Array], epsilon: Array, obs: PyTree) -> Array:
    """Take a random action that `obs` allows with probability `epsilon`, otherwise the greedy one, both `[N]`."""
    coin, drawn = noise
    return jnp.where(coin < epsilon, random_action(spec, drawn, obs), greedy)

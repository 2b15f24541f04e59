"""Exploration by random actions, shared by the agents that learn action values."""

import jax
import jax.numpy as jnp

from jaxrl.spaces import EnvSpec, sample_space
from jaxrl.trees import Array, Key

EPSILONS = ("epsilon_start", "epsilon_end")
"""The hyperparameters that set the probability of a random action."""


def draw_epsilon_greedy(spec: EnvSpec, key: Key, num_envs: int) -> tuple[Array, Array]:
    """Draw a coin `[N]` from `[0, 1)` and a random action `[N]`; the key is consumed."""
    coin_key, action_key = jax.random.split(key)
    return jax.random.uniform(coin_key, (num_envs,)), sample_space(spec.action_space, action_key, num_envs)


def epsilon_greedy(greedy: Array, noise: tuple[Array, Array], epsilon: Array) -> Array:
    """Take the random action with probability `epsilon`, otherwise the greedy one, both `[N]`."""
    coin, random = noise
    return jnp.where(coin < epsilon, random, greedy)

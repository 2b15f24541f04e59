"""Exploration by random actions, shared by the agents that learn action values."""

import jax
import jax.numpy as jnp

from jaxrl import masks
from jaxrl.distributions import Categorical
from jaxrl.spaces import EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.xla.reductions import argmax

EPSILONS = ("epsilon_start", "epsilon_end")
"""The hyperparameters that set the probability of a random action."""
TEMPERATURE = ("exploration",)
"""The hyperparameter of agents that sample from a distribution: its temperature, if set per actor."""
NO_PROBABILITIES = "explores by noise in its network (agent.noisy), under which no action has a probability of its own"


def epsilon_greedy(spec: EnvSpec, greedy: Array, key: Key, epsilon: Array, obs: PyTree) -> Array:
    """Take a random action that `obs` allows with probability `epsilon`, otherwise the greedy one, both `[N]`.

    The key is consumed.
    """
    coin_key, action_key = jax.random.split(key)
    coin = jax.random.uniform(coin_key, greedy.shape, jnp.float32)
    return jnp.where(coin < epsilon, masks.random_action(spec, action_key, obs), greedy)


def exploration_distribution(q: Array, epsilon: Array, obs: PyTree, temperature: Array | None = None) -> Categorical:
    """Return what an agent with action values `[N, A]` chooses from under epsilon-greedy exploration.

    With a `temperature`, it draws from the softmax of the values in place of the greedy action.
    """
    mask = masks.get_mask(obs)
    may = jnp.ones(q.shape, bool) if mask is None else masks.unmask_empty_rows(mask)
    q = masks.apply_mask(q, mask)
    likely = (
        jax.nn.one_hot(argmax(q), q.shape[-1], dtype=q.dtype)
        if temperature is None
        else jax.nn.softmax(q / temperature)
    )
    # Logarithms of normalised probabilities are valid logits; actions of probability 0 have minus infinity.
    return Categorical(jnp.log(epsilon * may / may.sum(axis=-1, keepdims=True) + (1 - epsilon) * likely))


def mask_values(q: Array, obs: PyTree) -> Array:
    """Return action values `[N, A]` with minus infinity in place of those of actions that `obs` forbids."""
    mask = masks.get_mask(obs)
    return q if mask is None else jnp.where(masks.unmask_empty_rows(mask), q, -jnp.inf)

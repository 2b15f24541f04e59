"""Any agent by itself: an environment that suits it, what it learns from, and one update of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.agents import Agent
from jaxrl.spaces import sample_space
from jaxrl.types import Batch, NextAction, RecurrentObs, Rollout, Transition

OBS = jaxrl.Box(-1.0, 1.0, (3,))
ACTIONS = 4
DISCRETE = jaxrl.EnvSpec("Toy", OBS, jaxrl.Discrete(ACTIONS))
CONTINUOUS = jaxrl.EnvSpec("Toy", OBS, jaxrl.Box(-1.0, 1.0, (2,)))
KEY = jax.random.key(0)
ROWS = 6


def seeing(space: Any, spec: jaxrl.EnvSpec = DISCRETE) -> jaxrl.EnvSpec:
    """Return `spec` with another observation space."""
    return spec._replace(observation_space=space)


def transitions(agent: Agent, spec: jaxrl.EnvSpec, state: Any, *shape: int) -> Transition:
    """Draw transitions `[*shape, ...]` at random, the extras as the agent makes them."""
    rows = 1
    for size in shape:
        rows *= size
    obs, next_obs = (sample_space(spec.observation_space, jax.random.key(seed), rows) for seed in (1, 2))
    if agent.memory is not None:
        blank = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (rows, *jnp.shape(x))), agent.memory)
        obs, next_obs = RecurrentObs(obs, blank), RecurrentObs(next_obs, blank)
    action, extras = agent.act(state, obs, KEY, jnp.uint32(0), "explore")
    reward = jax.random.normal(jax.random.key(3), (rows,))
    no = jnp.zeros(rows, bool)
    if agent.info.next_actions:
        extras = NextAction(jnp.roll(action, 1, axis=0), ~no)
    items = Transition(obs, action, reward, jnp.full(rows, 0.9), next_obs, extras, jnp.ones(rows), no, no)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), items)


def updated(agent: Agent, spec: jaxrl.EnvSpec, state: Any) -> Any:
    """Return the state after an update on random data, and its metrics."""
    if agent.prepare is None:
        items = transitions(agent, spec, state, ROWS)
    else:
        rollout = transitions(agent, spec, state, 2, ROWS)
        items = agent.prepare(state, Rollout(rollout, jnp.zeros((2, ROWS), bool)))
    rows = jax.tree.leaves(items)[0].shape[0]
    batch = Batch(items, jnp.arange(rows), jnp.ones(rows))
    new, metrics, _ = agent.update(state, batch, KEY, jnp.uint32(1))
    return new, metrics


def five_steps() -> Batch:
    """Return a batch of five steps with observations `[3]` and actions `[2]`, of which the second ends its episode."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(0, 0.5, (2, 5, 3))
    action, reward = rng.uniform(-0.9, 0.9, (5, 2)), rng.normal(size=5)
    parts = (obs, action, reward, np.array([0.9, 0.0, 0.9, 0.9, 0.9]), next_obs)
    items = Transition(*(jnp.asarray(part, jnp.float32) for part in parts))
    ones = jnp.ones(5, jnp.float32)
    return Batch(items._replace(weight=ones), jnp.arange(5), ones)


def values_of_constant(agent: Agent, reward: float, updates: int) -> Any:
    """Return what critics put on 64 steps of a `reward` that never ends, discounted by 0.8, after some updates."""
    rng, ones = np.random.default_rng(0), jnp.ones(64)
    obs, action = jnp.asarray(rng.normal(0, 0.5, (64, 3))), jnp.asarray(rng.uniform(-1, 1, (64, 2)))
    items = Transition(obs, action, reward * ones, 0.8 * ones, obs)._replace(weight=ones)
    rows = Batch(items, jnp.arange(64), ones)
    move = lambda state, t: (agent.update(state, rows, jax.random.fold_in(KEY, t), t)[0], ())
    times = jnp.arange(updates, dtype=jnp.uint32)
    state, _ = jax.jit(lambda state: jax.lax.scan(move, state, times))(agent.init(KEY))
    assert agent.policy_fns is not None
    assert callable(agent.policy_fns.value)
    return agent.policy_fns.value(state, obs, action)


def vector_of(tree: Any) -> jax.Array:
    """Return all numbers of `tree` one after the other."""
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])

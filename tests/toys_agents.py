"""Any agent by itself: an environment that suits it, what it learns from, and one update of it."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
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


def decided(params: Any) -> Any:
    """Return parameters of a fresh policy, which hardly prefers any action, with matrices 20 times as large.

    Biases stay: larger ones would keep the gates of a core shut.
    """
    return jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, params)


def transitions(agent: Agent, spec: jaxrl.EnvSpec, state: Any, *shape: int) -> Transition:
    """Draw transitions `[*shape, ...]` at random, the extras as the agent makes them; all in one program."""
    return jax.jit(lambda state: draw_transitions(agent, spec, state, shape))(state)


def draw_transitions(agent: Agent, spec: jaxrl.EnvSpec, state: Any, shape: tuple[int, ...]) -> Transition:
    rows = math.prod(shape)
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


def updated(agent: Agent, spec: jaxrl.EnvSpec, state: Any, opt_step: Any = 1) -> Any:
    """Return the state after an update on random data, and its metrics."""
    if agent.prepare is None:
        items = transitions(agent, spec, state, ROWS)
    else:
        rollout = transitions(agent, spec, state, 2, ROWS)
        items = agent.prepare(state, Rollout(rollout, jnp.zeros((2, ROWS), bool)))
    rows = jax.tree.leaves(items)[0].shape[0]
    batch = Batch(items, jnp.arange(rows), jnp.ones(rows))
    new, metrics, _ = agent.update(state, batch, KEY, jnp.uint32(opt_step))
    return new, metrics


def begun(init: Callable[[Any], Any]) -> Any:
    """Return what `init` makes of a key, but for the kernels of networks, which NumPy draws, as nothing compiles.

    Those of the same place and shape are equal, so that a target begins as the network that it trails.
    """

    def draw(path: Any, x: Any) -> Any:
        field, found, place = jax.tree_util.keystr(path).partition("['params']")
        if "opt_state" in field or not found or not place.endswith("['kernel']"):
            return x
        rng = np.random.default_rng([*place.encode(), *x.shape])
        return jnp.asarray(rng.normal(0, x.shape[-2] ** -0.5, x.shape), x.dtype)

    return jax.jit(lambda key: jax.tree_util.tree_map_with_path(draw, init(key)))(KEY)


def acting(agent: Agent) -> Callable[..., Any]:
    """Return `agent.act`, compiled."""
    return jax.jit(agent.act, static_argnums=4)


def drawn_anew(agent: Agent, *parts: str, mean: float = 0.0, scale: float = 0.4) -> Any:
    """Return a state as it begins, but for the networks of `parts`, which NumPy draws and nothing compiles."""
    rng = np.random.default_rng(5)
    draw = lambda x: jnp.asarray(rng.normal(mean, scale, x.shape), jnp.float32)

    @jax.jit
    def begin(key: Any) -> Any:
        state = agent.init(key)
        networks = {part: getattr(state, part) for part in parts}
        redrawn = {
            part: {**variables, "params": jax.tree.map(draw, variables["params"])}
            for part, variables in networks.items()
        }
        return state._replace(**redrawn)

    return begin(KEY)


def five_steps() -> Batch:
    """Return a batch of five steps with observations `[3]` and actions `[2]`, of which the second ends its episode."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(0, 0.5, (2, 5, 3))
    action, reward = rng.uniform(-0.9, 0.9, (5, 2)), rng.normal(size=5)
    parts = (obs, action, reward, np.array([0.9, 0.0, 0.9, 0.9, 0.9]), next_obs)
    ones = np.ones(5, np.float32)
    items = Transition(*(part.astype(np.float32) for part in parts))._replace(weight=ones)
    return Batch(*jax.tree.map(jnp.asarray, (items, np.arange(5), ones)))


def six_steps(actions: Any, weight: Any = 1.0, importance: Any = 1.0) -> Batch:
    """Return a batch of six steps with observations `[3]`, of which the second and the fifth end their episodes."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(0, 0.5, (2, ROWS, 3)).astype(np.float32)
    action, reward = sample_space(actions, KEY, ROWS), rng.normal(size=ROWS).astype(np.float32)
    discount = np.where(np.arange(ROWS) % 3 == 1, 0.0, 0.9).astype(np.float32)
    whole = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (ROWS,))
    items = Transition(*map(jnp.asarray, (obs, action, reward, discount, next_obs)))._replace(weight=whole(weight))
    return Batch(items, jnp.arange(ROWS), whole(importance))


def values_of_constant(agent: Agent, reward: float, updates: int) -> Any:
    """Return what critics put on 64 steps of a `reward` that never ends, discounted by 0.8, after some updates."""
    rng, ones = np.random.default_rng(0), np.ones(64, np.float32)
    obs, action = rng.normal(0, 0.5, (64, 3)).astype(np.float32), rng.uniform(-1, 1, (64, 2)).astype(np.float32)
    items = Transition(obs, action, reward * ones, np.float32(0.8) * ones, obs)._replace(weight=ones)
    rows = Batch(*jax.tree.map(jnp.asarray, (items, np.arange(64), ones)))
    move = lambda state, t: (agent.update(state, rows, jax.random.fold_in(KEY, t), t)[0], ())
    times = np.arange(updates, dtype=np.uint32)
    assert agent.policy_fns is not None
    value = agent.policy_fns.value
    assert callable(value)
    return jax.jit(lambda key: value(jax.lax.scan(move, agent.init(key), times)[0], obs, action))(KEY)


def vector_of(tree: Any) -> np.ndarray:
    """Return all numbers of `tree` one after the other."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def equal(a: Any, b: Any) -> bool:
    """Return whether two trees have the same numbers."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def retuned(state: Any, **values: float) -> Any:
    """Return an agent's state with other hyperparameters."""
    return state._replace(hyper=state.hyper._replace(**{name: jnp.float32(value) for name, value in values.items()}))


class FirstAsValue(nn.Module):
    """A policy without preferences, and a value that is the first number of the observation, whatever is learnt."""

    outputs: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = self.param("logits", nn.initializers.zeros, (self.outputs,))
        return jnp.broadcast_to(logits, (obs.shape[0], self.outputs)), obs[:, 0]

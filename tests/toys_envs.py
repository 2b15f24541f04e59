"""Toy environments whose every number can be worked out by hand, each made of two plain functions."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs import Env, TimeStep, VecEnv, registry
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Step


def forget_envs(prefix: str) -> None:
    """Take back what was registered under names that begin with `prefix`."""
    for name in [name for name in registry.registered_envs() if name.startswith(prefix)]:
        del registry._REGISTERED[name]


def idle(steps: int, num_envs: int = 3) -> np.ndarray:
    """Return actions with which nothing but time passes."""
    return np.zeros((steps, num_envs), np.int32)


# --- counting: nothing but time passes ------------------------------------------------------------------------


class Count(NamedTuple):
    step: Array
    """Steps taken in this episode."""
    episode: Array
    """A number drawn at the reset, so that no two episodes look alike."""
    ballast: Array
    """Zeros, only there to make the state as large as a test wants it."""


def counting(length: int = 5, time_limit: int | None = None, ballast: int = 0, name: str = "counting") -> Env:
    """Observe `[steps taken, the episode's own number]`; the reward is the number of the step, counted from 1.

    An episode terminates after `length` steps, or is cut after `time_limit` if that comes first. Its return over `k`
    steps is `k * (k + 1) / 2`.
    """
    space = Box(0.0, math.inf, (2,))
    return Env(
        spec=EnvSpec(name, space, Discrete(2), time_limit),
        reset=partial(_count_reset, ballast),
        step=partial(_count_step, length),
    )


def time_limited(limit: int = 4) -> Env:
    """Never terminate; the limit of `limit` steps cuts every episode."""
    return counting(length=1_000_000, time_limit=limit, name="time-limited")


def _count_reset(ballast: int, key: Key) -> tuple[Count, Array]:
    state = Count(jnp.int32(0), jax.random.uniform(key), jnp.zeros(ballast))
    return state, _count_seen(state)


def _count_step(length: int, state: Count, action: Array, key: Any) -> tuple[Count, TimeStep]:
    state = state._replace(step=state.step + 1)
    return state, TimeStep(_count_seen(state), state.step.astype(jnp.float32), state.step >= length)


def _count_seen(state: Count) -> Array:
    return jnp.stack([state.step.astype(jnp.float32), state.episode])


# --- breaking: an environment that hands out NaN ----------------------------------------------------------------

BREAK = 2
"""The action at which `breaking` breaks."""


def breaking(where: str, length: int = 5, time_limit: int | None = None) -> Env:
    """Count as `counting` does, but the action `BREAK` yields NaN in `where`: `reward` or `obs`.

    Which environment breaks and when is thus chosen by the actions that it is given.
    """
    env = counting(length, time_limit, name="breaking")
    return env._replace(spec=env.spec._replace(action_space=Discrete(3)), step=partial(_breaking_step, where, length))


def nan_at(time: int, where: str = "reward", length: int = 1_000_000) -> Env:
    """Count as `counting` does, but the `time`-th step of every episode yields NaN in `where`: `reward` or `obs`."""
    return counting(length, name="nan-at")._replace(step=partial(_nan_at_step, where, time, length))


def _breaking_step(where: str, length: int, state: Count, action: Array, key: Any) -> tuple[Count, TimeStep]:
    state, out = _count_step(length, state, action, key)
    return state, _spoilt(where, out, action == BREAK)


def _nan_at_step(
    where: str, time: int, length: int, state: Count, action: Array, key: PyTree
) -> tuple[Count, TimeStep]:
    state, out = _count_step(length, state, action, key)
    return state, _spoilt(where, out, state.step == time)


def _spoilt(where: str, out: TimeStep, when: Array) -> TimeStep:
    return out._replace(**{where: jnp.where(when, jnp.nan, getattr(out, where))})


# --- probes: the smallest problems; more of them, with their values, are in `toys_closed_form` ------------------


def constant_reward(reward: float = 1.0) -> Env:
    """One step, observation 0, always `reward`: every action's value is `reward`."""
    return _probe("constant-reward", _nothing_to_see, lambda obs, action: (jnp.zeros(1), reward, True))


def action_from_observation() -> Env:
    """One step, observation -1 or 1; action 0 is worth minus the observation, and action 1 the observation."""
    return _probe(
        "action-from-observation", _sign_to_see, lambda obs, action: (obs, obs[0] * (2.0 * action - 1.0), True)
    )


def _probe(name: str, first: Any, rule: Any, actions: int = 2) -> Env:
    """Build an environment whose state is its observation `[1]`; `rule` gives successor, reward and termination."""
    return Env(
        spec=EnvSpec(name, Box(-1.0, 1.0, (1,)), Discrete(actions)),
        reset=lambda key: (first(key), first(key)),
        step=partial(_probe_step, rule),
    )


def _nothing_to_see(key: Key) -> Array:
    return jnp.zeros(1)


def _sign_to_see(key: Key) -> Array:
    return jnp.where(jax.random.bernoulli(key), 1.0, -1.0)[None]


def _probe_step(rule: Any, obs: Array, action: Array, key: Any) -> tuple[Array, TimeStep]:
    successor, reward, ended = rule(obs, action)
    return successor, TimeStep(successor, reward, ended)


# --- running them -------------------------------------------------------------------------------------------------


def rollout(venv: VecEnv, actions: PyTree, seed: int = 0) -> tuple[PyTree, Step]:
    """Step `venv` through `actions` `[T, N, ...]` in one compiled scan; return the first observations and the steps."""
    first, steps = _rollout(venv.reset, venv.step, jax.random.key(seed), actions)
    return jax.tree.map(np.asarray, (first, steps))


@partial(jax.jit, static_argnums=(0, 1))
def _rollout(reset: Any, step: Any, key: Key, actions: PyTree) -> tuple[PyTree, Step]:
    reset_key, step_key = jax.random.split(key)
    keys = jax.random.split(step_key, len(jax.tree.leaves(actions)[0]))
    state, first = reset(reset_key)

    def body(state: PyTree, inputs: tuple[PyTree, Key]) -> tuple[PyTree, Step]:
        action, key = inputs
        return step(state, action, key)

    return first, jax.lax.scan(body, state, (actions, keys))[1]

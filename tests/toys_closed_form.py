"""Toy environments whose action values are known in closed form, for tests."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs import Env, TimeStep
from jaxrl.spaces import Box, Discrete, EnvSpec

ACTIONS = 2


class Toy(NamedTuple):
    """An environment, some of its observations, and the value of every action there."""

    env: Env
    obs: jax.Array
    """`[K, ...]`"""
    values: np.ndarray
    """`[K, A]`"""


def constant_reward(discount: float, reward: float = 0.5, time_limit: int = 4) -> Toy:
    """Pay `reward` for ever at one observation; the time limit only cuts, so the value is `r / (1 - gamma)`."""
    spec = EnvSpec("ConstantReward", Box(0.0, 1.0, (1,)), Discrete(ACTIONS), time_limit)
    obs = jnp.ones(1)
    env = Env(spec, lambda key: ((), obs), lambda state, action, noise: ((), TimeStep(obs, reward, False)))
    return Toy(env, obs[None], np.full((1, ACTIONS), reward / (1 - discount)))


def value_from_observation(discount: float) -> Toy:
    """Pay once, at the only step of an episode, what the observation says; the discount must not matter."""
    del discount
    table = jnp.array([-1.0, 0.25, 2.0])
    spec = EnvSpec("ValueFromObservation", Discrete(3), Discrete(ACTIONS))

    def reset(key):
        number = jax.random.randint(key, (), 0, 3)
        return number, number

    env = Env(spec, reset, lambda state, action, noise: (state, TimeStep(state, table[state], True)))
    return Toy(env, jnp.arange(3), np.repeat(np.asarray(table)[:, None], ACTIONS, axis=1))


def delayed_reward(discount: float, length: int = 4) -> Toy:
    """Walk `length` steps whatever one does and be paid 1 at the end; the value is `gamma^(steps still to come)`."""
    spec = EnvSpec("DelayedReward", Discrete(length), Discrete(ACTIONS))

    def step(state, action, key):
        end = state == length - 1
        state = jnp.minimum(state + 1, length - 1)
        return state, TimeStep(state, jnp.where(end, 1.0, 0.0), end)

    env = Env(spec, lambda key: (jnp.int32(0), jnp.int32(0)), step)
    values = discount ** np.arange(length - 1, -1, -1.0)
    return Toy(env, jnp.arange(length), np.repeat(values[:, None], ACTIONS, axis=1))


def action_preference(discount: float) -> Toy:
    """Pay 1 for the action that the observation names and -1 for the other, in episodes of one step."""
    del discount
    spec = EnvSpec("ActionPreference", Discrete(ACTIONS), Discrete(ACTIONS))

    def reset(key):
        number = jax.random.randint(key, (), 0, ACTIONS)
        return number, number

    def step(state, action, key):
        return state, TimeStep(state, jnp.where(action == state, 1.0, -1.0), True)

    return Toy(Env(spec, reset, step), jnp.arange(ACTIONS), 2.0 * np.eye(ACTIONS) - 1.0)


def _clock(limit: int, terminates: bool) -> Env:
    """Pay 1 a step and show the hour of a clock of `limit` hours, whose round ends the episode or only cuts it."""
    spec = EnvSpec("Clock", Discrete(limit), Discrete(ACTIONS), None if terminates else limit)

    def step(state, action, key):
        hour = (state + 1) % limit
        return hour, TimeStep(hour, 1.0, (hour == 0) & terminates)

    return Env(spec, lambda key: (jnp.int32(0), jnp.int32(0)), step)


def clock_truncates(discount: float, limit: int = 3) -> Toy:
    """End episodes by a time limit alone: rewards go on behind it, so every hour is worth `1 / (1 - gamma)`."""
    return Toy(_clock(limit, False), jnp.arange(limit), np.full((limit, ACTIONS), 1 / (1 - discount)))


def clock_terminates(discount: float, limit: int = 3) -> Toy:
    """End the same episodes by termination: hour `h` is worth `(1 - gamma^(limit - h)) / (1 - gamma)`."""
    values = (1 - discount ** (limit - np.arange(limit))) / (1 - discount)
    return Toy(_clock(limit, True), jnp.arange(limit), np.repeat(values[:, None], ACTIONS, axis=1))


def hyperbolic(x: np.ndarray | float) -> np.ndarray:
    """Return the rescaled returns of R2D2, in float64."""
    x = np.asarray(x, np.float64)
    return np.sign(x) * np.expm1(np.log1p(np.abs(x)) / 2) + 1e-3 * x


def parabolic(y: np.ndarray | float) -> np.ndarray:
    """Return what R2D2 rescales to `y`, in float64 and as published (Pohlen et al. 2018, proposition A.2)."""
    root = (np.sqrt(1 + 4e-3 * (np.abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return np.sign(y) * (root**2 - 1)


TOYS = {
    toy.__name__: toy
    for toy in (
        constant_reward,
        value_from_observation,
        delayed_reward,
        action_preference,
        clock_truncates,
        clock_terminates,
    )
}


def counting_env(terminate_at: int = 7, time_limit: int | None = 4) -> Env:
    """Count: from 0, action `a` adds `1 + a` and pays `10 * count + a`; reaching `terminate_at` terminates.

    Everything that happens follows from the actions, so that a test can walk through it again by hand. The
    observation is the count itself as a float: state and observation are the same numbers.
    """
    spec = EnvSpec("Counting", Box(0.0, 100.0, (1,)), Discrete(ACTIONS), time_limit)

    def reset(key):
        count = jnp.zeros(1)
        return count, count

    def step(count, action, key):
        reward = 10 * count[0] + action
        count = count + 1 + action
        return count, TimeStep(count, reward, count[0] >= terminate_at)

    return Env(spec, reset, step)

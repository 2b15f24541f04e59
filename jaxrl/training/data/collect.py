"""Collecting data sets with a policy: complete episodes, in order."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.buffers.dataset import Dataset
from jaxrl.envs.agents import require_single_agent
from jaxrl.envs.base import Env, VecEnv, final_values, vectorise
from jaxrl.errors import SettingsError, check_between, check_count
from jaxrl.masks import random_action
from jaxrl.spaces import Box, EnvSpec, from_box, to_box
from jaxrl.strategies.base import Policy, fold
from jaxrl.training.settings import MAX_SIDE_BY_SIDE
from jaxrl.trees import Array, Key, PyTree, tree_where

CHUNK = 256
"""Vector steps per call."""


class _Taken(NamedTuple):
    """The recorded part of a step of `N` environments; all fields but the last as in `Dataset`."""

    obs: PyTree
    action: PyTree
    reward: Array
    next_obs: PyTree
    terminated: Array
    truncated: Array
    valid: Array


def gather(
    env: Env,
    policy: Policy,
    params: PyTree,
    key: Key,
    transitions: int,
    *,
    random: float = 0.0,
    noise: float = 0.0,
    num_envs: int = 16,
) -> Dataset:
    """Collect `transitions` steps with the greedy policy; the last episode is truncated at that number.

    Episodes are taken in order of their first steps, so that the data are not biased towards short ones.

    Args:
      env: the environment.
      policy: the policy.
      params: parameters of the policy.
      key: consumed.
      transitions: number of steps `R`.
      random: fraction of steps with a uniformly random action.
      noise: standard deviation of Gaussian noise on actions, in half widths of their bounds; for boxes only.
      num_envs: number of parallel environments, at most 2**20.

    Raises:
      SettingsError: an argument is out of range, noise is set for discrete actions, or a step is not finite.
    """
    check_settings(transitions, random, noise, num_envs)
    if noise and not isinstance(env.spec.action_space, Box):
        raise SettingsError(f"noise is for actions of a single Box, which {env.spec.name} does not have; use random")
    env = require_single_agent(env, "gathering a data set")
    # As in evaluation: nothing here advances schedules.
    several = vectorise(env._replace(values=final_values(env.values)), num_envs)
    run = jax.jit(partial(_run, several, policy, random, noise))
    reset_key, step_key = jax.random.split(key)
    state, obs = jax.jit(several.reset)(reset_key)
    scene = (state, jax.jit(policy.begin)(params, obs), obs)
    chunks: list[_Taken] = []
    rows = None
    # Chunks have a fixed length, so that one program serves any number of steps.
    while rows is None:
        scene, taken = run(params, scene, fold(step_key, len(chunks)))
        chunks.append(jax.tree.map(np.asarray, taken))
        if not chunks[-1].valid.all():
            raise SettingsError(f"{env.spec.name} gave an observation or reward that is not finite; nothing was kept")
        if len(chunks) * CHUNK * num_envs >= transitions:
            rows = in_order(np.concatenate([c.terminated | c.truncated for c in chunks]), transitions)
    whole = jax.tree.map(lambda *x: np.concatenate(x)[rows], *chunks)
    # The last episode may be incomplete.
    whole.truncated[-1] = not whole.terminated[-1]
    return Dataset(env.spec, *whole[:-1])


def check_settings(transitions: int, random: float, noise: float, num_envs: int) -> None:
    """Raise `SettingsError` if an argument of `gather` is out of range."""
    check_count("transitions", transitions)
    check_count("num_envs", num_envs, most=MAX_SIDE_BY_SIDE)
    check_between("random", random, 0.0, 1.0)
    check_between("noise", noise, 0.0, 1e3)


def _run(
    env: VecEnv, policy: Policy, random: float, noise: float, params: PyTree, scene: PyTree, key: Key
) -> tuple[PyTree, _Taken]:
    """Take `CHUNK` steps in all environments; leaves of the recorded steps are `[CHUNK, N, ...]`. Pure."""

    def step(scene: PyTree, key: Key) -> tuple[PyTree, _Taken]:
        state, carry, obs = scene
        act_key, env_key = jax.random.split(key)
        carry, action = policy.act(params, carry)
        action = add_noise(env.spec, obs, action, act_key, random, noise)
        state, out = env.step(state, action, env_key)
        kept = _Taken(obs, action, out.reward, out.final_obs, out.terminated, out.truncated, jnp.asarray(out.valid))
        return (state, policy.observe(params, carry, out), out.obs), kept

    scene, taken = jax.lax.scan(step, scene, jax.random.split(key, CHUNK))
    return scene, taken


def add_noise(spec: EnvSpec, obs: PyTree, action: PyTree, key: Key, random: float, noise: float) -> PyTree:
    """Add noise to actions `[N, ...]`, and replace a fraction of them by random ones. The key is consumed."""
    space, num_envs = spec.action_space, jax.tree.leaves(action)[0].shape[0]
    coin_key, random_key, noise_key = jax.random.split(key, 3)
    if noise and isinstance(space, Box):
        unit = from_box(space, action)
        action = to_box(space, unit + noise * jax.random.normal(noise_key, unit.shape, jnp.float32))
    if random:
        coins = jax.random.uniform(coin_key, (num_envs,), jnp.float32) < random
        action = tree_where(coins, random_action(spec, random_key, obs), action)
    return action


def in_order(ends: np.ndarray, wanted: int) -> Any:
    """Return the indices (time, environment) of the first `wanted` steps, given the ends `[T, N]` of episodes.

    Episodes are contiguous and in order of their first steps; all but the last are complete. `None` if more steps are
    needed.
    """
    steps, envs = ends.shape
    episodes = []
    for env in range(envs):
        # The episode in progress at step T is incomplete.
        stops = [*(np.flatnonzero(ends[:, env]) + 1), steps]
        begun = 0
        for stop in stops:
            if stop > begun:
                episodes.append((begun, env, int(stop), bool(ends[stop - 1, env])))
            begun = int(stop)
    times: list[np.ndarray] = []
    places: list[np.ndarray] = []
    found = 0
    for begun, env, stop, whole in sorted(episodes):
        times.append(np.arange(begun, stop))
        places.append(np.full(stop - begun, env))
        found += stop - begun
        if found >= wanted:
            return np.concatenate(times)[:wanted], np.concatenate(places)[:wanted]
        # Steps of an incomplete episode are missing, and must precede all later episodes.
        if not whole:
            return None
    return None

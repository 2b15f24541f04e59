"""Small data sets whose answers can be worked by hand, for tests."""

from typing import Any

import numpy as np

import jaxrl
from jaxrl.spaces import Box, Discrete, EnvSpec

ONE = np.float32(1)


def bandit(
    actions: Any, rewards: Any, space: Any = None, terminated: bool = True, name: str = "Bandit"
) -> jaxrl.Dataset:
    """Return episodes of one step at one observation; `action[i]` was paid `rewards[i]`. Cut ones lead back there."""
    actions = np.asarray(actions)
    space = space or Discrete(int(actions.max()) + 1)
    rows = len(actions)
    obs, ends = np.ones((rows, 1), np.float32), np.ones(rows, bool)
    spec = EnvSpec(name, Box(-1.0, 1.0, (1,)), space)
    action = actions.astype(space.dtype).reshape(rows, *space.shape)
    return jaxrl.Dataset(
        spec, obs, action, np.asarray(rewards, np.float32), obs, ends & terminated, ends & (not terminated)
    )


def walk(lengths: tuple[int, ...] = (4, 3, 5), terminated: tuple[bool, ...] = (True, False, True)) -> jaxrl.Dataset:
    """Return episodes that count `0, 1, ..`; step `i` of episode `e` does `i % 2` and is paid `10 e + i`."""
    obs = np.concatenate([np.arange(n) for n in lengths]).astype(np.float32)[:, None]
    last = np.concatenate([np.arange(n) == n - 1 for n in lengths])
    ended = np.repeat(terminated, lengths)
    reward = np.concatenate([10 * e + np.arange(n) for e, n in enumerate(lengths)]).astype(np.float32)
    spec = EnvSpec("Walk", Box(0.0, 100.0, (1,)), Discrete(2))
    action = (obs[:, 0] % 2).astype(np.int32)
    return jaxrl.Dataset(spec, obs, action, reward, obs + ONE, last & ended, last & ~ended)

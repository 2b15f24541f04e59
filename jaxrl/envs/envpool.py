"""Environments of EnvPool (https://envpool.readthedocs.io), stepped by its own threads; imported on demand."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.envs.host import HostEnv, HostStep, convert_action, convert_obs, floats_to_ints, vector_scalars
from jaxrl.errors import SettingsError, error_text, require_extra, suggest
from jaxrl.spaces import EnvSpec, convert_space, to_channels_last
from jaxrl.trees import PyTree

PREFIX = "envpool:"
"""Prefix of the names of EnvPool's environments, as in `envpool:CartPole-v1`."""
UNLIMITED = 2**31 - 1
"""EnvPool's limit of steps where a task has none."""


def envpool_env(name: str, /, **kwargs: Any) -> HostEnv:
    """Return EnvPool's environment `name` (with or without `envpool:`); `kwargs` go to `envpool.make`.

    Raises:
      SettingsError: EnvPool is not installed, knows no such name, or cannot make it on this machine.
    """
    envpool, id_ = require_extra("envpool", "environments of EnvPool"), name.removeprefix(PREFIX)
    known = envpool.list_all_envs()
    if id_ not in known:
        raise SettingsError(f"unknown environment {name!r}; {suggest(name, [PREFIX + other for other in known])}")
    make = partial(envpool.make_gymnasium, id_, **floats_to_ints(kwargs))
    try:
        one = make(num_envs=1)
    except Exception as error:
        raise SettingsError(f"EnvPool cannot make {id_}: {error_text(error)}") from error
    observations, actions = (convert_space(PREFIX + id_, space) for space in (one.observation_space, one.action_space))
    config = one.spec.config
    limit = config.max_episode_steps if config.max_episode_steps < UNLIMITED else None
    spec = EnvSpec(PREFIX + id_, to_channels_last(observations), actions, limit)
    env = HostEnv(spec, partial(_EnvPool, make, spec), settings={"env": PREFIX + id_, "env_args": dict(kwargs)})
    return _atari_env(env, make, config) if "episodic_life" in config._fields else env


def _atari_env(env: HostEnv, make: Any, config: Any) -> HostEnv:
    """Return a game of Atari; evaluation uses whole games and unclipped rewards.

    With `episodic_life`, lives are episodes as in `jaxrl.envs.atari`; EnvPool's own option starts a new game at every
    reset.
    """
    spec, played = env.spec, partial(make, episodic_life=False)
    whole = env._replace(open=partial(_EnvPool, partial(played, reward_clip=False), spec))
    # Training episodes may be lives with clipped rewards. Scores are those of whole games with the rewards of the game.
    lives = env._replace(open=partial(_EnvPool, played, spec, lives=config.episodic_life))
    return lives._replace(eval_env=whole) if config.episodic_life or config.reward_clip else lives


class _EnvPool:
    def __init__(
        self, make: Any, spec: EnvSpec, num_envs: int, seed: int, processes: bool, *, lives: bool = False
    ) -> None:
        del processes  # EnvPool has its own threads
        self._env, self._space = make(num_envs=num_envs, seed=seed), spec.observation_space
        self._name, self._obs = spec.name, None  # type: str, Any
        self._lives = lives
        self._left = np.zeros(num_envs, np.int32)
        self._over = np.ones(num_envs, bool)
        """Whether the game is over, so that an environment must be reset; with lives, an episode may end earlier."""

    def reset(self, which: np.ndarray | None = None) -> PyTree:
        if which is None:
            obs, info = self._env.reset()
            self._obs = convert_obs(self._name, self._space, obs)
            self._left = info["lives"] if self._lives else self._left
            return self._obs
        # A lost life that did not end the game needs no reset: the next episode begins with the current observation.
        ids = np.flatnonzero(which & self._over).astype(np.int32)
        if ids.size:
            obs, info = self._env.reset(ids)
            self._obs = _scatter(self._obs, ids, convert_obs(self._name, self._space, obs))
            self._left = _scatter(self._left, ids, info["lives"]) if self._lives else self._left
        return self._obs

    def step(self, action: PyTree) -> HostStep:
        obs, reward, terminated, truncated, info = self._env.step(convert_action(self._env.action_space, action))
        self._obs = convert_obs(self._name, self._space, obs)
        if self._lives:
            # Before a lost life is added to the ends: this is whether the game itself is over.
            self._over = terminated | truncated
            terminated = terminated | ((info["lives"] < self._left) & ~truncated)
            self._left = info["lives"]
        return HostStep(self._obs, reward, terminated, truncated, vector_scalars(info, len(reward)))

    def close(self, kill: bool = False) -> None:
        if not kill:
            self._env.close()


def _scatter(obs: PyTree, ids: np.ndarray, fresh: PyTree) -> PyTree:
    """Return `obs` `[N, ...]` with rows `ids` `[K]` replaced by `fresh` `[K, ...]`."""

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        # A copy, since steps already returned refer to the old array.
        new_rows = old.copy()
        new_rows[ids] = new
        return new_rows

    return jax.tree.map(put, obs, fresh)

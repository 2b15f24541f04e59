"""Environments of EnvPool (https://envpool.readthedocs.io), stepped by its own threads; imported on demand."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.envs.host import HostEnv, Stepped, like_spec, to_host, whole_where_so
from jaxrl.envs.scalars import scalars_in
from jaxrl.errors import SettingsError, nearest, require_extra
from jaxrl.spaces import EnvSpec, channels_last, space_of, space_struct
from jaxrl.trees import PyTree

PREFIX = "envpool:"
"""Prefix of the names of EnvPool's environments, as in `envpool:CartPole-v1`."""


def envpool_env(name: str, /, **kwargs: Any) -> HostEnv:
    """Return EnvPool's environment `name` (with or without `envpool:`); `kwargs` go to `envpool.make`.

    Raises:
      SettingsError: EnvPool is not installed, knows no such name, or cannot make it on this machine.
    """
    envpool, id_ = require_extra("envpool", "environments of EnvPool"), name.removeprefix(PREFIX)
    known = envpool.list_all_envs()
    if id_ not in known:
        raise SettingsError(f"unknown environment {name!r}; {nearest(name, [PREFIX + other for other in known])}")
    make = partial(envpool.make_gymnasium, id_, **whole_where_so(kwargs))
    try:
        one = make(num_envs=1)
    except Exception as error:
        raise SettingsError(f"EnvPool cannot make {id_}: {error}") from error
    observations, actions = (space_of(PREFIX + id_, space) for space in (one.observation_space, one.action_space))
    spec = EnvSpec(PREFIX + id_, channels_last(observations), actions)
    return HostEnv(spec, partial(_EnvPool, make, spec), settings={"env": PREFIX + id_, "env_args": dict(kwargs)})


class _EnvPool:
    def __init__(self, make: Any, spec: EnvSpec, num_envs: int, seed: int, processes: bool) -> None:
        del processes  # EnvPool has its own threads
        self._env, self._struct = make(num_envs=num_envs, seed=seed), space_struct(spec.observation_space)
        self._obs: Any = None

    def reset(self, which: np.ndarray | None = None) -> PyTree:
        if which is None:
            self._obs = like_spec(self._struct, self._env.reset()[0])
        else:
            ids = np.flatnonzero(which).astype(np.int32)
            fresh = like_spec(self._struct, self._env.reset(ids)[0])
            self._obs = _put(self._obs, ids, fresh)
        return self._obs

    def step(self, action: PyTree) -> Stepped:
        obs, reward, terminated, truncated, info = self._env.step(to_host(self._env.action_space, action))
        self._obs = like_spec(self._struct, obs)
        return Stepped(self._obs, reward, terminated, truncated, scalars_in(info, len(reward)))

    def close(self, kill: bool = False) -> None:
        if not kill:
            self._env.close()


def _put(obs: PyTree, ids: np.ndarray, fresh: PyTree) -> PyTree:
    """Return `obs` `[N, ...]` with `fresh` `[K, ...]` at `ids`."""

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        new_rows = old.copy()
        new_rows[ids] = new
        return new_rows

    return jax.tree.map(put, obs, fresh)

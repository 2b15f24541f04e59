"""Environments that speak stoa (https://github.com/EdanToledo/Stoa): objects of its class `Environment`."""

from typing import Any

import numpy as np

from jaxrl.envs.base import Env
from jaxrl.envs.objects import Theirs, Told, choices_of, object_env, one_line_of, require_object
from jaxrl.envs.suites import box_of
from jaxrl.errors import SettingsError
from jaxrl.masks import MASK
from jaxrl.spaces import Space
from jaxrl.trees import PyTree

OURS = {
    "AutoResetWrapper": "resets episodes",
    "CachedAutoResetWrapper": "resets episodes",
    "OptimisticResetVmapWrapper": "resets episodes",
    "VmapWrapper": "runs many copies",
}
"""Wrappers of stoa for what jaxrl does itself."""
MERGED = {
    "GymnaxToStoa": "resets by itself and takes limits for ends; give the name of gymnax, such as CartPole-v1",
    "JumanjiToStoa": "takes limits for ends; give the name instead, such as jumanji:Snake-v1",
    "KinetixToStoa": "resets by itself and takes limits for ends",
    "XMiniGridToStoa": "takes limits for ends; give the name instead, such as xminigrid:MiniGrid-Empty-8x8",
}
"""Adapters of stoa whose steps do not tell what happened."""
MASKS = (MASK, "legal_action_mask")
"""Extras that say which actions are allowed."""


def stoa_env(env: Any, *, name: str | None = None, time_limit: int | None = None, params: PyTree = None) -> Env:
    """Return `env`, an environment of stoa, as an `Env`.

    `TERMINATED` steps terminate, and `TRUNCATED` ones truncate; discounts are not used. A mask in `extras` becomes an
    entry `action_mask` of the observation, and scalars there are recorded. `randomise` gives each episode `env_params`.

    Args:
      env: a single environment, which neither resets itself nor is vectorised.
      name: its name here; by default that of its class.
      time_limit: steps after which episodes are truncated, beside the limit of an `EpisodeStepLimitWrapper`.
      params: the `env_params` of all episodes.

    Raises:
      SettingsError: stoa is not installed, `env` is none of its environments, resets itself or is vectorised, or its
        reset and its step disagree.
    """
    stoa = require_object("stoa", env)
    limits = [time_limit, *_limits(stoa, env)]
    name = name or type(env.unwrapped).__name__
    reset = lambda key, own: _told(env.reset(key, params if own is None else own))
    step = lambda state, action, own: _told(env.step(state, action, params if own is None else own))
    limit = min((limit for limit in limits if limit is not None), default=None)
    with one_line_of(name):
        seen, actions = env.observation_space(params), _actions(env.action_space(params))
        return object_env(Theirs(name, reset, step, seen, actions, _leaf, limit))


def _limits(stoa: Any, env: Any) -> list[int]:
    """Return the limits of all wrappers of `env`; raise `SettingsError` if one of them is for jaxrl to do."""
    limits = []
    while isinstance(env, stoa.Wrapper):
        for word in (kind.__name__ for kind in type(env).__mro__ if kind.__name__ in OURS):
            came = type(env).__name__
            raise SettingsError(f"{came} {OURS[word]}, which jaxrl does itself; give the environment without it")
        if isinstance(env, stoa.EpisodeStepLimitWrapper):
            limits.append(env.max_episode_steps)
        env = env._env
    if type(env).__name__ in MERGED:
        raise SettingsError(f"{type(env).__name__} of stoa {MERGED[type(env).__name__]}")
    return limits


def _told(result: tuple[PyTree, Any]) -> tuple[PyTree, Told]:
    state, out = result
    mask = next((out.extras[word] for word in MASKS if word in out.extras), None)
    return state, Told(out.observation, out.reward, out.terminated(), out.truncated(), out.extras, mask)


def _actions(space: Any) -> Space:
    """Return the space of actions, which may have several parts."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return {word: _actions(part) for word, part in parts.items()}
    return _leaf(space, space) if parts is None else tuple(map(_actions, parts))


def _leaf(space: Any, struct: Any) -> Space:
    values = getattr(space, "num_values", None)
    if values is not None and np.shape(values) == struct.shape:
        return choices_of(np.asarray(values), struct)
    return box_of(struct, getattr(space, "minimum", -np.inf), getattr(space, "maximum", np.inf))

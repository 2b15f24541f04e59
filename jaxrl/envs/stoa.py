"""Environments of stoa (https://github.com/EdanToledo/Stoa): objects of its class `Environment`."""

from typing import Any

import numpy as np

from jaxrl.envs.base import Env
from jaxrl.envs.objects import ObjectFns, ObjectStep, as_settings_error, choice_space, object_env, require_object
from jaxrl.envs.suites import make_box
from jaxrl.errors import SettingsError
from jaxrl.masks import MASK
from jaxrl.spaces import Space
from jaxrl.trees import PyTree

UNUSABLE_WRAPPERS = {
    "AutoResetWrapper": "resets episodes",
    "CachedAutoResetWrapper": "resets episodes",
    "OptimisticResetVmapWrapper": "resets episodes",
    "VmapWrapper": "runs many copies",
}
"""Wrappers of stoa that cannot be used, because jaxrl does the same itself."""
UNUSABLE_ADAPTERS = {
    "GymnaxToStoa": "resets by itself and takes limits for ends; give the name of gymnax, such as CartPole-v1",
    "JumanjiToStoa": "takes limits for ends; give the name instead, such as jumanji:Snake-v1",
    "KinetixToStoa": "resets by itself and takes limits for ends",
    "XMiniGridToStoa": "takes limits for ends; give the name instead, such as xminigrid:MiniGrid-Empty-8x8",
}
"""Adapters of stoa whose steps lose information, with the reason and an alternative."""
MASKS = (MASK, "legal_action_mask")
"""Names of action masks among the extras."""


def stoa_env(env: Any, *, name: str | None = None, time_limit: int | None = None, params: PyTree = None) -> Env:
    """Return `env`, an environment of stoa, as an `Env`.

    `TERMINATED` steps terminate, and `TRUNCATED` ones truncate; discounts are not used. A mask in `extras` becomes an
    entry `action_mask` of the observation, and scalars there are recorded. `randomise` gives each episode `env_params`.

    Args:
      env: a single environment that neither resets itself nor is vectorised.
      name: its name in jaxrl; default: the name of its class.
      time_limit: steps after which episodes are truncated, in addition to the limit of an `EpisodeStepLimitWrapper`.
      params: the `env_params` of all episodes.

    Raises:
      SettingsError: stoa is not installed, `env` is none of its environments, resets itself or is vectorised, or its
        reset and its step disagree.
    """
    stoa = require_object("stoa", env)
    limits = [time_limit, *_find_limits(stoa, env)]
    name = name or type(env.unwrapped).__name__
    reset = lambda key, drawn: _convert_step(env.reset(key, params if drawn is None else drawn))
    step = lambda state, action, drawn: _convert_step(env.step(state, action, params if drawn is None else drawn))
    limit = min((limit for limit in limits if limit is not None), default=None)
    with as_settings_error(name):
        seen, actions = env.observation_space(params), _action_space(env.action_space(params))
        return object_env(ObjectFns(name, reset, step, seen, actions, _leaf_space, limit))


def _find_limits(stoa: Any, env: Any) -> list[int]:
    """Return the time limits of all wrappers of `env`; raise `SettingsError` for unusable wrappers."""
    limits = []
    while isinstance(env, stoa.Wrapper):
        for word in (kind.__name__ for kind in type(env).__mro__ if kind.__name__ in UNUSABLE_WRAPPERS):
            came = type(env).__name__
            raise SettingsError(
                f"{came} {UNUSABLE_WRAPPERS[word]}, which jaxrl does itself; give the environment without it"
            )
        if isinstance(env, stoa.EpisodeStepLimitWrapper):
            limits.append(env.max_episode_steps)
        env = env._env
    if type(env).__name__ in UNUSABLE_ADAPTERS:
        raise SettingsError(f"{type(env).__name__} of stoa {UNUSABLE_ADAPTERS[type(env).__name__]}")
    return limits


def _convert_step(result: tuple[PyTree, Any]) -> tuple[PyTree, ObjectStep]:
    state, out = result
    mask = next((out.extras[word] for word in MASKS if word in out.extras), None)
    return state, ObjectStep(out.observation, out.reward, out.terminated(), out.truncated(), out.extras, mask)


def _action_space(space: Any) -> Space:
    """Return the space of actions, a tree if they have several parts."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return {word: _action_space(part) for word, part in parts.items()}
    return _leaf_space(space, space) if parts is None else tuple(map(_action_space, parts))


def _leaf_space(space: Any, struct: Any) -> Space:
    values = getattr(space, "num_values", None)
    if values is not None and np.shape(values) == struct.shape:
        return choice_space(np.asarray(values), struct)
    return make_box(struct, getattr(space, "minimum", -np.inf), getattr(space, "maximum", np.inf))

"""Environments of Craftax (https://github.com/MichaelTMatthews/Craftax), imported on demand."""

import functools
import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import KEY, cast_like, check_id, convert_like_defaults, copy_containers, make_box
from jaxrl.errors import require_extra
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree

PREFIX = "craftax:"
"""Prefix of the names of Craftax's environments, as in `craftax:Craftax-Symbolic-v1`."""
NAMES = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")
NEVER = int(np.iinfo(np.int32).max)
TILE = 16
"""Side of a rendered tile, in pixels."""


def craftax_env(name: str, **params: Any) -> Env:
    """Return Craftax's environment `name` (with or without `craftax:`).

    `params` replace its defaults, such as `max_timesteps`, after which an episode is truncated (Craftax itself would
    terminate it). Pixels are uint8 `[H, W, 3]`. Achievements are recorded at the end of an episode, in percent:
    `episode_achievements/...`.

    Raises:
      SettingsError: Craftax is not installed, or a name or a parameter is unknown or does not fit.
    """
    require_extra("craftax", "environments of Craftax")
    from craftax.craftax_env import make_craftax_env_from_name

    id_ = check_id(PREFIX, name, NAMES)
    name = PREFIX + id_
    env = make_craftax_env_from_name(id_, auto_reset=False)
    defaults = {word: value for word, value in vars(env.default_params).items() if isinstance(value, int | float)}
    given = convert_like_defaults(name, params, defaults)
    limit = given.get("max_timesteps", defaults["max_timesteps"])
    # Disable the suite's own limit, which would terminate; that of the spec truncates.
    env_params = env.default_params.replace(**{**given, "max_timesteps": NEVER})
    pixels = "-Pixels-" in id_
    obs, like = jax.eval_shape(env.reset_env, KEY, env_params)
    seen = jax.eval_shape(partial(_convert_obs, pixels=pixels), obs)
    space = Box(0, 255, seen.shape, "uint8") if pixels else make_box(seen)
    room = "craftax.craftax_classic" if "-Classic-" in id_ else "craftax.craftax"
    feats = [feat.name.lower() for feat in importlib.import_module(f"{room}.constants").Achievement]
    return Env(
        spec=EnvSpec(name, space, Discrete(env.num_actions), limit),
        reset=partial(_reset, env, env_params, pixels, like),
        step=partial(_step, env, env_params, pixels, like, feats),
        render=partial(_render, room),
        settings={"env": name, "env_args": dict(params)},
    )


def _reset(env: Any, params: Any, pixels: bool, like: PyTree, key: Key) -> tuple[PyTree, Array]:
    obs, state = env.reset_env(key, params)
    return cast_like(state, like), _convert_obs(obs, pixels)


def _step(
    env: Any, params: Any, pixels: bool, like: PyTree, feats: list[str], state: PyTree, action: Array, key: Key
) -> tuple[PyTree, TimeStep]:
    obs, state, reward, done, _ = env.step_env(key, copy_containers(state), action, params)
    # Means over episodes then are success rates in percent.
    achieved = state.achievements * 100.0
    info = {f"episode_achievements/{feat}": achieved[i] for i, feat in enumerate(feats)}
    return cast_like(state, like), TimeStep(_convert_obs(obs, pixels), reward, done, False, info)


def _convert_obs(obs: Array, pixels: bool) -> Array:
    return jnp.round(obs * 255.0).astype(jnp.uint8) if pixels else obs


def _render(room: str, state: PyTree) -> np.ndarray:
    return np.asarray(_renderer(room)(copy_containers(state)), np.uint8)


@functools.cache
def _renderer(room: str) -> Any:
    """Return the compiled renderer; the first one builds the textures, which are cached."""
    make = importlib.import_module(f"{room}.renderer").make_craftax_pixel_renderer
    return jax.jit(make(TILE))

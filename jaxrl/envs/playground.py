"""Environments of MuJoCo Playground (https://github.com/google-deepmind/mujoco_playground), imported on demand."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxrl.envs.base import Env
from jaxrl.envs.physics import physics_env, picture
from jaxrl.envs.suites import check_id, like_defaults
from jaxrl.errors import SettingsError, require_extra
from jaxrl.trees import PyTree

PREFIX = "playground:"
"""Prefix of the names of Playground's environments, as in `playground:CartpoleBalance`."""


def playground_env(name: str, **params: Any) -> Env:
    """Return Playground's environment `name` (with or without `playground:`).

    `params` replace entries of its configuration, such as `ctrl_dt`, `episode_length` or `impl`; nested ones are named
    with dots. Physics are MJX's in JAX (`impl="jax"`), as Warp, Playground's own default, needs CUDA and does not
    repeat its results. Episodes are truncated after `episode_length` steps of the suite; an action is repeated for
    `action_repeat` of them. Observations of several parts stay dicts (`state`, `privileged_state`).

    Raises:
      SettingsError: Playground is not installed, a name or a parameter is unknown or does not fit, or models of robots
        are missing: they are never fetched unasked.
    """
    playground = require_extra("mujoco_playground", "environments of MuJoCo Playground", extra="playground")
    registry = playground.registry
    id_ = check_id(PREFIX, name, registry.ALL_ENVS)
    name = PREFIX + id_
    if id_ not in playground.dm_control_suite.ALL_ENVS:
        _check_robots(name)
    defaults = _flat(registry.get_default_config(id_).to_dict())
    given = like_defaults(name, params, defaults)
    jax_unless_asked = {"impl": "jax"} if "impl" in defaults else {}
    try:
        env = registry.load(id_, config_overrides={**jax_unless_asked, **given})
        if env.n_substeps < 1:
            raise ValueError(f"ctrl_dt is {env.dt:g}; expected at least sim_dt, {env.sim_dt:g}")
        config, settings = env._config, {"env": name, "env_args": dict(params)}
        render = partial(_render, name, playground.render_array, env)
        return physics_env(name, env, config.episode_length, settings, render, config.get("action_repeat", 1))
    except Exception as error:
        raise SettingsError(f"Playground cannot make {id_}: {error}") from error


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the entries of a nested configuration by their names with dots."""
    flat: dict[str, Any] = {}
    for word, value in config.items():
        flat.update(_flat(value, f"{above}{word}.") if isinstance(value, Mapping) else {above + word: value})
    return flat


def _check_robots(name: str) -> None:
    """Raise `SettingsError` unless the models of robots are there, which Playground would fetch in silence."""
    from mujoco_playground._src.mjx_env import MENAGERIE_COMMIT_SHA as commit, MENAGERIE_PATH as path

    if not path.exists():
        raise SettingsError(
            f"{name} needs models of robots, which are never fetched unasked: "
            f"git clone https://github.com/google-deepmind/mujoco_menagerie {path} && git -C {path} checkout {commit}"
        )


def _render(name: str, render_array: Any, env: Any, state: PyTree) -> np.ndarray:
    return picture(name, partial(render_array, env.mj_model, state))

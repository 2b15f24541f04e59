"""Environments of MuJoCo Playground (https://github.com/google-deepmind/mujoco_playground), imported on demand."""

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxrl.envs.base import Env
from jaxrl.envs.physics import Randomiser, physics_env, randomise_models, render_picture
from jaxrl.envs.suites import check_id, convert_like_defaults
from jaxrl.errors import SettingsError, check_between, error_text, require_extra
from jaxrl.trees import PyTree

PREFIX = "playground:"
"""Prefix of the names of Playground's environments, as in `playground:CartpoleBalance`."""


def playground_env(name: str, *, randomise: Any = None, randomiser: Randomiser | None = None, **params: Any) -> Env:
    """Return Playground's environment `name` (with or without `playground:`).

    `params` replace entries of its configuration, such as `ctrl_dt`, `episode_length` or `impl`; nested ones are named
    with dots. Physics are MJX's in JAX (`impl="jax"`), as Warp, Playground's own default, needs CUDA and does not
    repeat its results. Episodes are truncated after `episode_length` steps of the suite; an action is repeated for
    `action_repeat` of them. Observations of several parts stay dicts (`state`, `privileged_state`).

    With `randomise`, a model is drawn for each episode (Tobin et al. 2017) by `randomiser`, or by Playground's own for
    the task. `true` uses the drawn model; a number from 0 to 1, or a schedule of it, interpolates from the task's model
    (0) to the drawn one (1).

    Raises:
      SettingsError: Playground is not installed, a name or a parameter is unknown or does not fit, there is nothing to
        randomise by, or models of robots are missing: they are never downloaded implicitly.
    """
    playground = require_extra("mujoco_playground", "environments of MuJoCo Playground", extra="playground")
    registry = playground.registry
    id_ = check_id(PREFIX, name, registry.ALL_ENVS)
    name = PREFIX + id_
    if id_ not in playground.dm_control_suite.ALL_ENVS:
        _check_robots(name)
    defaults = _flatten_config(registry.get_default_config(id_).to_dict())
    given = convert_like_defaults(name, params, defaults)
    default_impl = {"impl": "jax"} if "impl" in defaults else {}
    share = _get_share(name, randomise, randomiser)
    draws = randomiser if share is None else randomiser or _get_randomiser(name, registry.get_domain_randomizer, id_)
    plain = randomiser is None and not callable(share)
    args = dict(params) if share is None else {**params, "randomise": share}
    try:
        env = registry.load(id_, config_overrides={**default_impl, **given})
        # Less than one step of the simulation for an action: nothing would ever move.
        if env.n_substeps < 1:
            raise ValueError(f"ctrl_dt is {env.dt:g}; expected at least sim_dt, {env.sim_dt:g}")
        config, settings = env._config, {"env": name, "env_args": args}
        render = partial(_render, name, playground.render_array, env)
        made = physics_env(name, env, config.episode_length, settings, render, config.get("action_repeat", 1))
        varied = made if share is None or draws is None else randomise_models(made, env, draws, share)
    except Exception as error:
        raise SettingsError(f"Playground cannot make {id_}: {error_text(error)}") from error
    return varied._replace(settings=settings if plain else None)


def _get_share(name: str, randomise: Any, randomiser: Randomiser | None) -> Any:
    """Return the interpolation from the task's model to the drawn one, or `None` without randomisation."""
    given = randomiser is not None if randomise is None else randomise
    if isinstance(given, bool):
        return 1.0 if given else None
    return given if callable(given) else float(check_between(f"{name}: randomise", given, 0.0, 1.0))


def _get_randomiser(name: str, get: Any, id_: str) -> Randomiser:
    """Return Playground's own randomiser of a task; raise `SettingsError` if it has none."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that there is none
        found: Randomiser | None = get(id_)
    if found is None:
        raise SettingsError(
            f"Playground has no randomiser for {name}; leave randomise out, or give one of your own in Python: "
            f"make_env({name!r}, randomiser=...)"
        )
    return found


def _flatten_config(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a nested configuration; names are joined by dots."""
    flat: dict[str, Any] = {}
    for word, value in config.items():
        flat.update(_flatten_config(value, f"{above}{word}.") if isinstance(value, Mapping) else {above + word: value})
    return flat


def _check_robots(name: str) -> None:
    """Raise `SettingsError` unless the models of robots are present, which Playground would fetch silently."""
    from mujoco_playground._src.mjx_env import MENAGERIE_COMMIT_SHA as commit, MENAGERIE_PATH as path

    if not path.exists():
        raise SettingsError(
            f"{name} needs models of robots, which are never fetched unasked: "
            f"git clone https://github.com/google-deepmind/mujoco_menagerie {path} && git -C {path} checkout {commit}"
        )


def _render(name: str, render_array: Any, env: Any, state: PyTree) -> np.ndarray:
    return render_picture(name, partial(render_array, env.mj_model, state))

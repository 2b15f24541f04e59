"""Environments of Brax (https://github.com/google/brax), imported on demand."""

import inspect
from functools import partial
from typing import Any

import numpy as np

from jaxrl.envs.base import Env, check_signatures
from jaxrl.envs.physics import physics_env, render_picture
from jaxrl.envs.suites import check_id, convert_like_defaults
from jaxrl.errors import SettingsError, error_text, require_extra
from jaxrl.trees import PyTree

PREFIX = "brax:"
"""Prefix of the names of Brax's environments, as in `brax:ant`."""
EPISODE_LENGTH = 1000
"""Default episode length of Brax (`brax.envs.create`)."""


def brax_env(name: str, **params: Any) -> Env:
    """Return Brax's environment `name` (with or without `brax:`).

    `params` are arguments of its constructor, such as `backend` (`generalized`, `spring`, `positional` or `mjx`, which
    have different returns), and `episode_length`, the number of steps after which an episode is truncated.

    Raises:
      SettingsError: Brax is not installed, or a name or a parameter is unknown or does not fit.
    """
    require_extra("brax", "environments of Brax")
    from brax import envs

    id_ = check_id(PREFIX, name, envs._envs)
    name = PREFIX + id_
    given = convert_like_defaults(name, params, _defaults(envs._envs[id_]))
    limit = given.pop("episode_length", EPISODE_LENGTH)
    try:
        env = envs.get_environment(id_, **given)
        made = physics_env(name, env, limit, {"env": name, "env_args": dict(params)}, _drawer(name, env))
        check_signatures(made)  # Brax is unmaintained: some environments fail with recent JAX
        return made
    except Exception as error:
        raise SettingsError(f"Brax cannot make {id_}: {error_text(error)}") from error


def _defaults(kind: type) -> dict[str, Any]:
    """Return the arguments of an environment's constructor with their defaults."""
    parameters = inspect.signature(kind).parameters.values()
    named = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {"backend": "mjx", "n_frames": 1, **named, "episode_length": EPISODE_LENGTH}


def _drawer(name: str, env: Any) -> Any:
    """Return a function that renders a state of `env`; `None` if it has no bodies, such as `fast`."""
    return partial(_render, name, env) if "sys" in vars(env) else None


def _render(name: str, env: Any, state: PyTree) -> np.ndarray:
    return render_picture(name, lambda: env.render([state.pipeline_state])[0])

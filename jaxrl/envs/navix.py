"""Environments of Navix (https://github.com/epignatelli/navix), imported on demand.

There is no extra for Navix, because it depends on some sixty packages: `pip install navix`.
"""

import dataclasses
import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import KEY, check_flag, check_id, convert_params, make_box, reads_key
from jaxrl.errors import MissingError, SettingsError, suggest
from jaxrl.spaces import Box, Discrete, EnvSpec, space_struct
from jaxrl.trees import Array, Key, PyTree, make_key

PREFIX = "navix:"
"""Prefix of the names of Navix's environments, as in `navix:Navix-DoorKey-5x5-v0`."""
_FIXED_FIELDS = ("height", "width", "disable_autoreset")


def navix_env(name: str, *, observation: str | None = None, one_hot: Any = True, **params: Any) -> Env:
    """Return Navix's environment `name` (with or without `navix:`).

    `observation` names one of Navix's, such as `symbolic_first_person` or `rgb`; symbols are one-hot, unless `one_hot`
    is false. `params` are the environment's own numbers, such as `max_steps`.

    Raises:
      SettingsError: Navix is not installed, or a name or a parameter is unknown or does not fit.
    """
    navix = _import_navix()
    id_ = check_id(PREFIX, name, navix.registry())
    name = PREFIX + id_
    given = {**params, **({} if observation is None else {"observation": observation})}
    given |= {} if one_hot is True else {"one_hot": one_hot}
    env = navix.make(id_, **({} if observation is None else {"observation_fn": _get_observation_fn(name, observation)}))
    numbers = {
        field.name: getattr(env, field.name) for field in dataclasses.fields(env) if field.name not in _FIXED_FIELDS
    }
    kinds = {word: type(value) for word, value in numbers.items() if isinstance(value, int | float)}
    env = env.replace(
        **convert_params(name, params, kinds), **({"disable_autoreset": True} if _can_disable_autoreset(env) else {})
    )
    values = _count_symbols(env) if check_flag(f"{name}: one_hot", one_hot) else None
    reset = partial(_reset, env, values)
    state, obs = jax.eval_shape(reset, KEY)
    actions = Discrete(int(env.action_space.maximum) + 1)
    keyed = reads_key(partial(_step, env, values, True), state, space_struct(actions))
    return Env(
        EnvSpec(name, _space(env, obs, values), actions, int(env.max_steps)),
        reset,
        partial(_step, env, values, keyed),
        _render,
        {"env": name, "env_args": given},
    )


def _import_navix() -> Any:
    try:
        return importlib.import_module("navix")
    except ImportError as error:
        raise MissingError(
            f"environments of Navix need navix, which no extra of jaxrl installs ({error}): pip install navix"
        ) from None


def _can_disable_autoreset(env: Any) -> bool:
    """Return whether this version of Navix has a setting that disables auto-reset."""
    return "disable_autoreset" in {field.name for field in dataclasses.fields(env)}


def _get_observation_fn(name: str, observation: str) -> Any:
    from navix import observations

    names = ["categorical", "symbolic", "rgb"]
    names += [f"{word}_first_person" for word in names]
    if observation not in names:
        raise SettingsError(f"{name}: unknown observation {observation!r}; {suggest(str(observation), names)}")
    return getattr(observations, observation)


def _count_symbols(env: Any) -> int | None:
    """Return the number of values of a symbol, or `None` for pixels.

    Some versions declare fewer than there are kinds of entities, so the largest of the two counts; others declare
    bytes, and the number of entities alone counts.
    """
    from navix import observations
    from navix.entities import EntityIds

    if env.observation_fn in (observations.rgb, observations.rgb_first_person):
        return None
    # The largest index of an entity, in any version.
    kinds = max(int(value) for word, value in vars(EntityIds).items() if not word.startswith("_"))
    most = int(env.observation_space.maximum)
    return 1 + (max(most, kinds) if most < 255 else kinds)


def _space(env: Any, obs: Any, values: int | None) -> Box:
    return make_box(obs, 0, 1 if values else max(255, int(env.observation_space.maximum)))


def _reset(env: Any, values: int | None, key: Key) -> tuple[PyTree, Array]:
    first = env.reset(key)
    return (first.t, first.state.replace(key=())), _convert_obs(first.observation, values)


def _step(env: Any, values: int | None, keyed: bool, state: Any, action: Array, key: Key) -> Any:
    """Step from a time step marked as not the last: Navix would reset after a last one."""
    from navix.environments.environment import Timestep

    t, inner = state
    inner = inner.replace(key=key if keyed else make_key(0))
    before = Timestep(t, (), jnp.int32(0), jnp.float32(0), jnp.int32(0), inner, {"return": jnp.float32(0)})
    out = env.step(before, action)
    return (out.t, out.state.replace(key=())), TimeStep(
        _convert_obs(out.observation, values), out.reward, out.step_type == 2
    )


def _convert_obs(obs: Array, values: int | None) -> Array:
    if values is None:
        return obs
    return jax.nn.one_hot(obs, values, dtype=jnp.float32).reshape(*obs.shape[:2], -1)


def _render(state: Any) -> np.ndarray:
    from navix.observations import rgb

    return np.asarray(rgb(state[1]))

"""Inputs of a session: validated, copied, and made finite."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import spaces
from jaxrl.envs.base import Env
from jaxrl.envs.host import convert_action, gymnasium_settings, gymnasium_spec
from jaxrl.envs.objects import adapt_object
from jaxrl.errors import SettingsError, error_text
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space
from jaxrl.strategies.stepwise import StepResult
from jaxrl.trees import PyTree


class Outside(NamedTuple):
    """A description of the user's environments."""

    spec: EnvSpec
    made: Mapping[str, Any] | None = None
    """Settings with which `make_env` builds one; `None` if it cannot."""
    action_space: Any = None
    """The Gymnasium action space of a single environment, if there is one."""
    resets_itself: bool = False
    """Whether the step after the end of an episode ignores its action and resets."""


def describe_envs(given: Any, num_envs: int) -> Outside:
    """Describe an `EnvSpec`, an `Env`, an object of stoa or envelope, or an environment (or vector) of Gymnasium.

    Raises:
      SettingsError: it is none of these, a vector with another number of environments, or one with an unknown
        autoreset mode.
    """
    if isinstance(given, EnvSpec):
        return Outside(given._replace(observation_space=spaces.to_channels_last(given.observation_space)))
    # First adapt objects of other libraries, whose spaces are of other types.
    given = adapt_object(given) or given
    if isinstance(given, Env):
        return Outside(given.spec, given.settings)
    if not (hasattr(given, "action_space") and hasattr(given, "observation_space")):
        raise SettingsError(
            f"a session was given {type(given).__name__} for its environment; "
            "expected jaxrl.EnvSpec, jaxrl.Env or an environment of Gymnasium"
        )
    if getattr(given, "num_envs", num_envs) != num_envs:
        raise SettingsError(f"num_envs is {num_envs}, but the environment is a vector of {given.num_envs}")
    single = getattr(given, "single_action_space", None)
    resets_itself = _wraps_autoreset(given) if single is None else _resets_itself(given)
    return Outside(gymnasium_spec(given), gymnasium_settings(given), single or given.action_space, resets_itself)


def _wraps_autoreset(env: Any) -> bool:
    """Return whether a wrapper of a single Gymnasium environment resets it in the step after an end."""
    gymnasium: Any = sys.modules.get("gymnasium")  # not imported: no environment of it
    while gymnasium is not None and isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            return True
        env = env.env
    return False


def _resets_itself(vector: Any) -> bool:
    """Return whether a Gymnasium vector resets in the step after an end; raise if its autoreset mode is unknown."""
    mode = (getattr(vector, "metadata", None) or {}).get("autoreset_mode")
    name = str(getattr(mode, "name", mode)).upper().replace("_", "")
    if name not in ("NEXTSTEP", "SAMESTEP", "DISABLED"):
        raise SettingsError(
            f"{type(vector).__name__} does not say in metadata['autoreset_mode'] when it resets, and a session cannot "
            "tell resets from steps; give jaxrl.EnvSpec(name, env.single_observation_space, env.single_action_space) "
            "instead, and true successors to observe"
        )
    return name == "NEXTSTEP"


class Observations(NamedTuple):
    """Observations ready for the device."""

    obs: PyTree
    """Copies, `[N, ...]`; integers start at 0, and non-finite rows are zero."""
    valid: np.ndarray
    """Bool `[N]`: whether the row was finite."""
    single: bool
    """Whether the input had no axis of environments."""


def take_obs(name: str, space: Space, num_envs: int | None, obs: PyTree) -> Observations:
    """Return the observations of one environment or of `num_envs` (`None`: any number).

    Raises:
      SettingsError: structure, shape or dtype do not match `space`; the message begins with `name`.
    """
    if isinstance(space, Box | Discrete | MultiDiscrete):
        return _take_leaf(name, space, num_envs, obs)
    entries = list(space.items()) if isinstance(space, Mapping) else list(enumerate(space))
    same = set(obs) == set(space) if isinstance(obs, Mapping) else False
    if isinstance(space, tuple):
        same = isinstance(obs, tuple | list) and len(obs) == len(space)
    if not same:
        keys = f"a dict of {', '.join(map(str, space))}" if isinstance(space, Mapping) else f"a tuple of {len(space)}"
        raise SettingsError(f"{name} is {type(obs).__name__}; expected {keys}")
    # A part without arrays, such as the mask `()` of an action that has none, is what its space is.
    taken = {
        key: take_obs(f"{name}[{key!r}]", part, num_envs, obs[key])
        for key, part in entries
        if spaces.is_leaf(part) or jax.tree.leaves(part, is_leaf=spaces.is_leaf)
    }
    parts = list(taken.values())
    if len({(part.single, part.valid.shape) for part in parts}) > 1:
        raise SettingsError(f"{name} has parts of different numbers of environments; expected one number in all")
    values = [taken[key].obs if key in taken else part for key, part in entries]
    whole = dict(zip(space, values, strict=True)) if isinstance(space, Mapping) else tuple(values)
    return Observations(whole, np.logical_and.reduce([part.valid for part in parts]), parts[0].single)


def _take_leaf(name: str, space: Box | Discrete | MultiDiscrete, num_envs: int | None, value: Any) -> Observations:
    came = spaces.match_image_layout(_array(name, value), space.shape)
    # The axis of environments may be missing only for a single one.
    single = came.shape == space.shape and num_envs in (None, 1)
    batched = came.ndim == len(space.shape) + 1 and came.shape[1:] == space.shape and num_envs in (None, came.shape[0])
    castable = came.dtype == space.dtype or np.can_cast(came.dtype, space.dtype, "same_kind")
    if not (single or batched) or not castable:
        shape = [] if num_envs == 1 else ["N" if num_envs is None else num_envs]
        wanted = "[" + ", ".join(map(str, [*shape, *space.shape])) + "]"
        raise SettingsError(f"{name} is {came.dtype}{list(came.shape)}; expected {space.dtype}{wanted}")
    # A copy: the caller may overwrite its array while the device still reads.
    array = np.array(spaces.to_dtype(name, came, space.dtype)).reshape(-1, *space.shape)
    if not isinstance(space, Box):
        array = array - np.asarray(space.start, array.dtype) if np.any(space.start) else array
        if not every((array >= 0) & (array < np.asarray(space.n))):
            raise SettingsError(f"{name} is {spaces.short_repr(value)}; expected whole numbers of {space}")
    valid = np.ones(array.shape[0], bool)
    if array.dtype.kind == "f" and not every(finite := np.isfinite(array)):
        valid = finite.reshape(array.shape[0], -1).all(1)
        array[~valid] = 0
    return Observations(array, valid, single)


def take_result(
    space: Space,
    num_envs: int,
    reward: Any,
    next_obs: PyTree,
    terminated: Any,
    truncated: Any,
    spoilt: np.ndarray,
    resetting: np.ndarray | None,
) -> tuple[StepResult, np.ndarray, np.ndarray]:
    """Return the result of a step, made finite; `spoilt` `[N]` marks steps from a non-finite observation.

    Where `resetting` `[N]`, a vector resets instead: that is not a step, it is not learnt from, and the next
    observation begins an episode. Return also where it did, and where an episode ended by the given flags.

    Raises:
      SettingsError: an argument does not fit the space or the number of environments.
    """
    obs = take_obs("observe: next_obs", space, num_envs, next_obs)
    rewards, finite = take_reward(reward, num_envs)
    flags = {"terminated": terminated, "truncated": truncated}
    ended, cut = (_per_env(f"observe: {name}", x, num_envs, "b", "True or False") for name, x in flags.items())
    done = ended | cut
    reset = np.zeros_like(done) if resetting is None else resetting & ~done  # a reset ends no episode
    valid = obs.valid & finite & ~spoilt & ~reset
    ended = ended & valid
    cut = (cut | ~valid) & ~ended
    # One array of all four, for a single transfer to the device.
    numbers = np.empty((4, num_envs), np.float32)
    numbers[0], numbers[1], numbers[2], numbers[3] = rewards * valid, ended, cut, valid
    return StepResult(numbers, obs.obs), reset, done  # type: ignore[arg-type]


def ends(result: StepResult) -> np.ndarray:
    """Return for each environment whether its episode ends with a step; bool `[N]`."""
    return np.asarray(result.numbers[1] + result.numbers[2] > 0)


def take_reward(reward: Any, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards, float32 `[N]`, with 0 for non-finite ones, and which of them were finite."""
    came = _per_env("observe: reward", reward, num_envs, "biuf", "a number")
    with np.errstate(over="ignore"):
        array = came.astype(np.float32)
    valid = np.isfinite(array)
    if not every(valid):
        array[~valid] = 0
    return array, valid


def every(flags: np.ndarray) -> bool:
    """Return whether all are true; for few flags, `flags.all()` takes several times as long."""
    return np.count_nonzero(flags) == flags.size


def _per_env(name: str, value: Any, num_envs: int, kinds: str, what: str) -> np.ndarray:
    came = _array(name, value)
    if came.dtype.kind not in kinds or came.shape not in ((num_envs,), *([()] if num_envs == 1 else [])):
        each = what if num_envs == 1 else f"{what} for each of {num_envs} environments"
        raise SettingsError(f"{name} is {came.dtype}{list(came.shape)}; expected {each}")
    return came.reshape(num_envs)


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        if isinstance(value, tuple):
            raise SettingsError(
                f"{name} is a tuple of {len(value)}, expected an array; Gymnasium's reset returns (obs, info)"
            ) from error
        raise SettingsError(f"{name} is no array: {error_text(error)}") from error


def format_action(outside: Outside, action: PyTree, single: bool) -> Any:
    """Return copies of actions `[N, ...]` in the user's format; if `single`, without the axis of environments."""
    action = jax.tree.map(np.array, action)
    if outside.action_space is None:
        action = spaces.to_elements(outside.spec.action_space, action)
    else:
        action = convert_action(outside.action_space, action)
    return jax.tree.map(lambda x: x[0], action) if single else action


def check_entry(name: str, value: Any) -> None:
    """Raise `SettingsError` unless `value` is a number, text, `None`, or lists and dicts of these."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_entry(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_entry(f"{name}[{i}]", inner)
    elif not isinstance(value, str | int | float | bool | np.integer | np.floating | np.bool_ | None):
        raise SettingsError(f"{name} is {type(value).__name__}; expected a number, text, or lists and dicts of these")

"""Environment objects of other libraries: the supported libraries, and code shared by their adapters.

Their steps take no key; an object that needs randomness keeps keys in its state.
"""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep, check_signatures
from jaxrl.envs.suites import KEY, copy_containers, make_box
from jaxrl.errors import SettingsError, check_count, describe_error
from jaxrl.masks import MASK
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, is_leaf, space_struct
from jaxrl.trees import Array, Key, PyTree, is_key

OBSERVATION = "observation"
"""Entry of an observation that is no dict, next to its mask."""


class Library(NamedTuple):
    """A library whose objects of class `Environment` are accepted."""

    maker: str
    """The function of `jaxrl.envs.MODULE` that adapts one."""
    python: tuple[int, int] = (3, 11)
    """Oldest version of Python that the library supports."""


LIBRARIES: Mapping[str, Library] = {"stoa": Library("stoa_env"), "envelope": Library("envelope_env", (3, 12))}
"""Supported libraries by module; the extra has the same name."""


def library_of(given: object) -> str | None:
    """Return the library of an environment object, one of `LIBRARIES`, or `None`; imports nothing."""
    for module in LIBRARIES:
        # An object of a library can only exist if the library is imported already.
        base = getattr(sys.modules.get(module), "Environment", None)
        if isinstance(base, type) and isinstance(given, base):
            return module
    return None


def adapt_object(given: object, name: str | None = None) -> Env | None:
    """Convert an environment object of one of `LIBRARIES` to an `Env`; return `None` for anything else.

    Raises:
      SettingsError: it is an environment that cannot be used.
    """
    library = library_of(given)
    if library is None:
        return None
    return getattr(importlib.import_module(f"jaxrl.envs.{library}"), LIBRARIES[library].maker)(given, name=name)


def require_library(module: str) -> Any:
    """Import one of `LIBRARIES`; raise `SettingsError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(f"environments of {module} need it{install_hint(error)}") from None


def require_object(module: str, given: object) -> Any:
    """Return the library `module` if `given` is an environment of it; raise `SettingsError` otherwise."""
    library = require_library(module)
    if not isinstance(given, library.Environment):
        came = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise SettingsError(f"{LIBRARIES[module].maker} was given {came}; expected an object of {module}.Environment")
    return library


def install_hint(error: BaseException) -> str:
    """Return a suffix for an error message if an import of one of `LIBRARIES` failed: the command that installs it."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if module is None or module not in LIBRARIES:
        return ""
    least = LIBRARIES[module].python
    other = f"; {module} is for Python {least[0]}.{least[1]} or later" if sys.version_info < least else ""
    return f": pip install 'jaxrl[{module}]'{other}"


# --- helpers of adapters ----------------------------------------------------------------------------------------


class ObjectStep(NamedTuple):
    """Result of an object's reset or step."""

    obs: PyTree
    reward: Any
    terminated: Any
    truncated: Any
    info: PyTree
    """Anything else; real scalars in it are recorded."""
    mask: Any = None
    """Allowed actions, if not part of the observation."""


class ObjectFns(NamedTuple):
    """An object of another library as functions and spaces."""

    name: str
    reset: Callable[[Key, PyTree], tuple[PyTree, ObjectStep]]
    """`(key, params) -> (state, result)`; `params` are those of the episode, or `None`."""
    step: Callable[[Any, PyTree, PyTree], tuple[PyTree, ObjectStep]]
    """`(state, action, params) -> (state, result)`, without auto-reset."""
    observations: Any
    """The library's space of observations."""
    actions: Space
    leaf: Callable[[Any, Any], Space]
    """`(library space, struct) -> space` of an array; the library space is `None` if none is declared."""
    limit: int | None


class ObjectState(NamedTuple):
    """State of an object, and the parameters of the episode, if any."""

    state: PyTree
    params: PyTree = None


@contextlib.contextmanager
def as_settings_error(name: str) -> Iterator[None]:
    """Turn any exception inside a user's environment into a `SettingsError`."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{name} cannot be used: {describe_error(error)}") from error


def object_env(fns: ObjectFns) -> Env:
    """Return an object of another library as an `Env`.

    Raises:
      SettingsError: its reset and its step disagree, or the limit is no positive integer.
    """
    if fns.limit is not None:
        check_count(f"{fns.name}: time_limit", fns.limit)
    # All from shapes, without running the environment.
    like, result = jax.eval_shape(lambda key: fns.reset(key, None), KEY)
    masked = _has_mask(fns, like, result)
    seen = jax.eval_shape(partial(_convert_obs, masked), result)
    # An observation that is no dict becomes the entry of one, next to its mask; so does its declared space.
    alone = isinstance(seen, dict) and not isinstance(jax.eval_shape(partial(_convert_obs, False), result), dict)
    space = _space({OBSERVATION: fns.observations} if alone else fns.observations, seen, fns.leaf)
    spec = EnvSpec(fns.name, space, fns.actions, fns.limit)
    env = Env(spec, partial(_reset, fns, masked), partial(_step, fns, masked))
    check_signatures(env)
    return env


def _has_mask(fns: ObjectFns, like: PyTree, result: ObjectStep) -> bool:
    """Return whether there is a mask next to the observation, which reset and step must agree on."""
    if not any(isinstance(part, Discrete | MultiDiscrete) for part in jax.tree.leaves(fns.actions, is_leaf=is_leaf)):
        return False
    action = space_struct(fns.actions)
    _, after = jax.eval_shape(lambda state, action: fns.step(state, action, None), like, action)
    if (result.mask is None) != (after.mask is None):
        raise SettingsError(
            f"{fns.name} returns an action mask after its reset or after its step alone; return it after both"
        )
    return result.mask is not None


def _reset(fns: ObjectFns, masked: bool, key: Key, params: PyTree = None) -> tuple[PyTree, PyTree]:
    state, result = fns.reset(key, params)
    return ObjectState(_to_arrays(state), params), _convert_obs(masked, result)


def _step(fns: ObjectFns, masked: bool, held: ObjectState, action: PyTree, key: Key) -> tuple[ObjectState, TimeStep]:
    del key  # the state has its own
    state, result = fns.step(copy_containers(held.state), action, held.params)
    reward = jnp.asarray(result.reward, jnp.float32)
    ended = jnp.asarray(result.terminated, bool)
    cut = jnp.asarray(result.truncated, bool) & ~ended
    return held._replace(state=_to_arrays(state)), TimeStep(
        _convert_obs(masked, result), reward, ended, cut, real_scalars(result.info)
    )


def _to_arrays(state: PyTree) -> PyTree:
    """Convert Python numbers in a state to arrays and remove weak types; dtypes stay."""
    strong = lambda x: jax.lax.convert_element_type(y := jnp.asarray(x), y.dtype)
    return jax.tree.map(lambda x: x if _is_key(x) else strong(x), state)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_key(x)


def _convert_obs(masked: bool, result: ObjectStep) -> PyTree:
    """Return the observation as plain dicts, tuples and arrays, with a bool mask."""
    obs = to_plain(result.obs)
    if masked and not (isinstance(obs, dict) and MASK in obs):
        obs = {**(obs if isinstance(obs, dict) else {OBSERVATION: obs}), MASK: to_plain(result.mask)}
    obs = jax.tree.map(jnp.asarray, obs)
    if not (isinstance(obs, dict) and MASK in obs):
        return obs
    return {**obs, MASK: jax.tree.map(lambda mask: mask.astype(bool), obs[MASK])}


def to_plain(node: Any) -> PyTree:
    """Replace dataclasses and named tuples by dicts, because spaces are dicts and tuples only."""
    if isinstance(node, Mapping):
        return {word: to_plain(part) for word, part in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return to_plain(dict(zip(node._fields, node, strict=True)))
    if isinstance(node, tuple | list):
        return tuple(map(to_plain, node))
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else None
    return node if fields is None else {field.name: to_plain(getattr(node, field.name)) for field in fields}


def real_scalars(info: PyTree) -> dict[str, Array]:
    """Return the real scalars in `info` as float32; nested ones are named with slashes."""
    paths, _ = jax.tree_util.tree_flatten_with_path(to_plain(info))
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in paths)
    return {name: jnp.asarray(x, jnp.float32) for name, x in named if _is_real(x) and jnp.ndim(x) == 0}


def _is_real(x: Any) -> bool:
    arrays = isinstance(x, int | float | np.generic | np.ndarray | jax.Array) and not _is_key(x)
    return arrays and not jnp.iscomplexobj(x)


def _space(declared: Any, node: Any, leaf: Callable[[Any, Any], Space]) -> Space:
    """Return the space of an actual observation, with the declared bounds of each array."""
    if isinstance(node, dict):
        return {word: _space(_get_part(declared, word), part, leaf) for word, part in node.items()}
    if isinstance(node, tuple):
        return tuple(_space(_get_part(declared, place), part, leaf) for place, part in enumerate(node))
    return Box(0, 1, node.shape, "bool") if node.dtype == bool else leaf(declared, node)


def _get_part(declared: Any, word: Any) -> Any:
    """Return the declared space of one part: an entry, or an attribute of that name."""
    parts = getattr(declared, "spaces", getattr(declared, "tree", declared))
    try:
        return parts[word]
    except (TypeError, KeyError, IndexError):
        return getattr(parts, str(word), None)


def choice_space(values: Any, struct: Any) -> Space:
    """Return the space of integers `0 .. values - 1`, with the shape and dtype of `struct`."""
    if len(struct.shape) > 1:
        return make_box(struct, 0, values - 1)
    return MultiDiscrete(values, struct.dtype) if struct.shape else Discrete(int(values), struct.dtype)

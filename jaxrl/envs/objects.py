"""Environments that are objects of another library: which kinds are known, and what their adapters have in common.

An object has no key for a step: where it needs randomness, it keeps keys in its state.
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
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, space_struct
from jaxrl.trees import Array, Key, PyTree, is_key

OBSERVATION = "observation"
"""Entry for an observation that is no dict, beside its mask."""


class Library(NamedTuple):
    """A library whose environments are taken as objects, of its class `Environment`."""

    maker: str
    """The function of `jaxrl.envs.MODULE` that adapts one."""
    python: tuple[int, int] = (3, 11)
    """The first version of Python that the library is for."""


LIBRARIES: Mapping[str, Library] = {"stoa": Library("stoa_env"), "envelope": Library("envelope_env", (3, 12))}
"""Kinds of objects, by the module that they come from; the extra has the same name."""


def library_of(given: object) -> str | None:
    """Return the library that `given` is an environment of, one of `LIBRARIES`; nothing is imported for it."""
    for module in LIBRARIES:
        base = getattr(sys.modules.get(module), "Environment", None)
        if isinstance(base, type) and isinstance(given, base):
            return module
    return None


def adapt_object(given: object, name: str | None = None) -> Env | None:
    """Return an environment of one of `LIBRARIES` as an `Env`; `None` for anything else.

    Raises:
      SettingsError: it is one, but of a form that cannot be used.
    """
    kind = library_of(given)
    if kind is None:
        return None
    env: Env = getattr(importlib.import_module(f"jaxrl.envs.{kind}"), LIBRARIES[kind].maker)(given, name=name)
    return env


def require_library(module: str) -> Any:
    """Import one of `LIBRARIES`; raise `SettingsError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(f"environments that speak {module} need it{install_hint(error)}") from None


def require_object(module: str, given: object) -> Any:
    """Return one of `LIBRARIES`, imported, if `given` is an environment of it; raise `SettingsError` otherwise."""
    theirs = require_library(module)
    if not isinstance(given, theirs.Environment):
        came = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise SettingsError(f"{LIBRARIES[module].maker} was given {came}; expected an object of {module}.Environment")
    return theirs


def install_hint(error: BaseException) -> str:
    """Return what to install where importing one of `LIBRARIES` failed, to be put behind a message; else nothing."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if module is None or module not in LIBRARIES:
        return ""
    least = LIBRARIES[module].python
    other = f"; {module} is for Python {least[0]}.{least[1]} or later" if sys.version_info < least else ""
    return f": pip install 'jaxrl[{module}]'{other}"


# --- what adapters have in common -------------------------------------------------------------------------------


class ObjectStep(NamedTuple):
    """What an object tells after its reset or a step."""

    obs: PyTree
    reward: Any
    terminated: Any
    truncated: Any
    info: PyTree
    """Whatever else; the real scalars in it are recorded."""
    mask: Any = None
    """Which actions are allowed, if it is told beside the observation."""


class ObjectFns(NamedTuple):
    """An object of another library, by what is needed of it."""

    name: str
    reset: Callable[[Key, PyTree], tuple[PyTree, ObjectStep]]
    """`(key, params) -> (state, told)`; `params` are those of the episode, or `None`."""
    step: Callable[[Any, PyTree, PyTree], tuple[PyTree, ObjectStep]]
    """`(state, action, params) -> (state, told)`; it never resets itself."""
    observations: Any
    """Their space."""
    actions: Space
    leaf: Callable[[Any, Any], Space]
    """`(their space, struct) -> our space` of an array; their space is `None` if they declare none."""
    limit: int | None


class ObjectState(NamedTuple):
    """The state of an object, and the parameters of its episode, if it was given any."""

    state: PyTree
    params: PyTree = None


@contextlib.contextmanager
def as_settings_error(name: str) -> Iterator[None]:
    """Turn whatever goes wrong inside a user's environment into a `SettingsError`."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{name} cannot be used: {describe_error(error)}") from error


def object_env(theirs: ObjectFns) -> Env:
    """Return an object of another library as an `Env`.

    Raises:
      SettingsError: its reset and its step disagree, or the limit is no whole number.
    """
    if theirs.limit is not None:
        check_count(f"{theirs.name}: time_limit", theirs.limit)
    like, told = jax.eval_shape(lambda key: theirs.reset(key, None), KEY)
    masked = _has_mask(theirs, like, told)
    seen = jax.eval_shape(partial(_convert_obs, masked), told)
    alone = isinstance(seen, dict) and not isinstance(jax.eval_shape(partial(_convert_obs, False), told), dict)
    space = _space({OBSERVATION: theirs.observations} if alone else theirs.observations, seen, theirs.leaf)
    spec = EnvSpec(theirs.name, space, theirs.actions, theirs.limit)
    env = Env(spec, partial(_reset, theirs, masked), partial(_step, theirs, masked))
    check_signatures(env)
    return env


def _has_mask(theirs: ObjectFns, like: PyTree, told: ObjectStep) -> bool:
    """Return whether actions are masked beside the observation; a step must tell what a reset does."""
    if not isinstance(theirs.actions, Discrete | MultiDiscrete):
        return False
    action = space_struct(theirs.actions)
    _, after = jax.eval_shape(lambda state, action: theirs.step(state, action, None), like, action)
    if (told.mask is None) != (after.mask is None):
        raise SettingsError(f"{theirs.name} tells a mask of actions after its reset or after its step alone; tell both")
    return told.mask is not None


def _reset(theirs: ObjectFns, masked: bool, key: Key, params: PyTree = None) -> tuple[PyTree, PyTree]:
    state, told = theirs.reset(key, params)
    return ObjectState(_to_arrays(state), params), _convert_obs(masked, told)


def _step(theirs: ObjectFns, masked: bool, held: ObjectState, action: PyTree, key: Key) -> tuple[ObjectState, TimeStep]:
    del key  # the state has its own
    state, told = theirs.step(copy_containers(held.state), action, held.params)
    reward = jnp.asarray(told.reward, jnp.float32)
    ended = jnp.asarray(told.terminated, bool)
    cut = jnp.asarray(told.truncated, bool) & ~ended
    return held._replace(state=_to_arrays(state)), TimeStep(
        _convert_obs(masked, told), reward, ended, cut, real_scalars(told.info)
    )


def _to_arrays(state: PyTree) -> PyTree:
    """Return a state as it is kept: numbers of Python as arrays, and no weak types. No dtype is changed."""
    strong = lambda x: jax.lax.convert_element_type(y := jnp.asarray(x), y.dtype)
    return jax.tree.map(lambda x: x if _is_key(x) else strong(x), state)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_key(x)


def _convert_obs(masked: bool, told: ObjectStep) -> PyTree:
    """Return the observation as plain dicts, tuples and arrays, with its mask as flags."""
    obs = to_plain(told.obs)
    if masked and not (isinstance(obs, dict) and MASK in obs):
        obs = {**(obs if isinstance(obs, dict) else {OBSERVATION: obs}), MASK: told.mask}
    obs = jax.tree.map(jnp.asarray, obs)
    return {**obs, MASK: obs[MASK].astype(bool)} if isinstance(obs, dict) and MASK in obs else obs


def to_plain(node: Any) -> PyTree:
    """Return a tree with dicts in place of dataclasses and of tuples with names, which no space describes."""
    if isinstance(node, Mapping):
        return {word: to_plain(part) for word, part in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return to_plain(dict(zip(node._fields, node, strict=True)))
    if isinstance(node, tuple | list):
        return tuple(map(to_plain, node))
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else None
    return node if fields is None else {field.name: to_plain(getattr(node, field.name)) for field in fields}


def real_scalars(info: PyTree) -> dict[str, Array]:
    """Return the real scalars in `info` as float32, those of inner dicts by names with strokes."""
    paths, _ = jax.tree_util.tree_flatten_with_path(to_plain(info))
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in paths)
    return {name: jnp.asarray(x, jnp.float32) for name, x in named if _is_real(x) and jnp.ndim(x) == 0}


def _is_real(x: Any) -> bool:
    arrays = isinstance(x, int | float | np.generic | np.ndarray | jax.Array) and not _is_key(x)
    return arrays and not jnp.iscomplexobj(x)


def _space(declared: Any, node: Any, leaf: Callable[[Any, Any], Space]) -> Space:
    """Return the space of observations as they are, with what is declared of each array."""
    if isinstance(node, dict):
        return {word: _space(_get_part(declared, word), part, leaf) for word, part in node.items()}
    if isinstance(node, tuple):
        return tuple(_space(_get_part(declared, place), part, leaf) for place, part in enumerate(node))
    return Box(0, 1, node.shape, "bool") if node.dtype == bool else leaf(declared, node)


def _get_part(declared: Any, word: Any) -> Any:
    """Return what is declared of one part: an entry, or a field of that name."""
    parts = getattr(declared, "spaces", getattr(declared, "tree", declared))
    try:
        return parts[word]
    except (TypeError, KeyError, IndexError):
        return getattr(parts, str(word), None)


def choice_space(values: Any, struct: Any) -> Space:
    """Return the space of whole numbers of the shape and dtype of `struct`, each below its own of `values`."""
    if len(struct.shape) > 1:
        return make_box(struct, 0, values - 1)
    return MultiDiscrete(values, struct.dtype) if struct.shape else Discrete(int(values), struct.dtype)

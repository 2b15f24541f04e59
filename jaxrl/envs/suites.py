"""Helpers shared by the adapters for environments of other JAX libraries."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, check_count, close_matches, suggest
from jaxrl.spaces import Box, Space
from jaxrl.trees import PyTree, is_key, make_key

KEY: Any = jax.eval_shape(lambda: make_key(0))
"""The shape of one key."""


def check_id(prefix: str, name: str, known: Iterable[str]) -> str:
    """Return `name` without `prefix` if it is `known`; raise `SettingsError` with the nearest names otherwise."""
    id_, known = name.removeprefix(prefix), list(known)
    if id_ in known:
        return id_
    names = [prefix + other for other in known]
    near = [prefix + other for other in close_matches(id_, known)]
    raise SettingsError(f"unknown environment {prefix + id_!r}; {_did_you_mean(near) or suggest(id_, names)}")


def _did_you_mean(near: Sequence[str]) -> str:
    return "did you mean " + " or ".join(near) + "?" if near else ""


def check_params(name: str, params: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `SettingsError`, with similar names, unless all `params` of environment `name` are known."""
    known = list(known)
    for word in params:
        if word not in known:
            raise SettingsError(f"{name} has no parameter {word!r}; {suggest(word, known) if known else 'it has none'}")


def check_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; the command line passes 0 or 1."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise SettingsError(f"{name} is {value!r}; expected true or false (1 or 0)")
    return bool(value)


def check_int(name: str, value: Any, least: int = 1, most: int = np.iinfo(np.int32).max) -> int:
    """Return `value` as an int from `least` to `most`; the command line passes a float."""
    # The command line passes every number as a float.
    whole = isinstance(value, float) and value.is_integer()
    return check_count(name, int(value) if whole else value, least, most)


def numeric_params(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of `function` annotated as numbers or flags, with their types."""
    kinds = {int: int, float: float, bool: bool, int | None: int, float | None: float}
    found = inspect.signature(function, eval_str=True).parameters
    return {word: kinds[p.annotation] for word, p in found.items() if _hashable(p.annotation) in kinds}


def _hashable(annotation: Any) -> Any:
    try:
        hash(annotation)
    except TypeError:
        return None
    return annotation


def convert_params(name: str, params: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Check `params` of environment `name` and convert them to their types in `kinds`."""
    check_params(name, params, kinds)
    return {word: _convert_param(f"{name}: {word}", value, kinds[word]) for word, value in params.items()}


def _convert_param(name: str, value: Any, kind: type) -> Any:
    if kind is bool:
        return check_flag(name, value)
    if kind is int:
        return check_int(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise SettingsError(f"{name} is {value!r}; expected a finite number")
    return float(value)


def convert_like_defaults(name: str, params: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Check `params` of environment `name` and convert them to the types of their defaults.

    That holds for numbers, flags, strings and tuples; other values are returned unchanged.
    """
    check_params(name, params, defaults)
    return {word: _convert_like(f"{name}: {word}", value, defaults[word]) for word, value in params.items()}


def _convert_like(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, int) and not isinstance(default, bool):
        return check_int(name, value, min(1, default))
    if isinstance(default, bool | float):
        return _convert_param(name, value, type(default))
    if isinstance(default, str) and not isinstance(value, str):
        raise SettingsError(f"{name} is {value!r}; expected a string, such as {default!r}")
    if isinstance(default, tuple) and np.shape(value) != np.shape(default):
        raise SettingsError(f"{name} is {value!r}; expected {len(default)} values, such as {list(default)}")
    return tuple(value) if isinstance(default, tuple) else value


def cast_like(state: PyTree, like: PyTree) -> Any:
    """Cast `state` to the dtypes of `like`, the state after a reset: several suites change theirs in a step."""
    return jax.tree.map(lambda x, leaf: x if is_key(leaf) else jnp.asarray(x, leaf.dtype), state, like)


def copy_containers(state: PyTree) -> Any:
    """Return a state with new containers, because some environments mutate the dicts in theirs."""
    return jax.tree.map(lambda x: x, state)


def reads_key(step: Callable[[Any, Any, Any], Any], state: PyTree, action: PyTree) -> bool:
    """Return whether `step(state, action, key)` reads its key; if not, it can be given a constant one."""
    jaxpr = jax.make_jaxpr(lambda key, state, action: step(state, action, key))(KEY, state, action).jaxpr
    read = [var for eqn in jaxpr.eqns for var in eqn.invars]
    return any(var is jaxpr.invars[0] for var in (*read, *jaxpr.outvars))


def make_box(struct: Any, low: Any = -np.inf, high: Any = np.inf) -> Box:
    """Return a box with the shape and dtype of `struct`; bounds of another shape are dropped."""
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    fits = all(bound.ndim == 0 or bound.shape == struct.shape for bound in (low, high))
    return Box(low, high, struct.shape, struct.dtype) if fits else make_box(struct)


def make_boxes(structs: PyTree) -> Space:
    """Return a tree of boxes for these shapes and dtypes: bool from 0 to 1, others unbounded."""
    return jax.tree.map(lambda x: make_box(x, 0, 1) if x.dtype == bool else make_box(x), structs)

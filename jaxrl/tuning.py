"""Hyperparameters as arrays in the training state, so that runs that differ only in them share one compiled program.

Agents and processors put such settings into their states by `tunable`. A population overrides them for its members by
`override` around the function that makes the state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.trees import Array


class Override(NamedTuple):
    """A new value for a hyperparameter."""

    old: float
    """The value that is replaced."""
    new: Any
    """A number or a float32 scalar array, which may be a tracer."""


_swaps: ContextVar[Mapping[str, Override] | None] = ContextVar("swaps", default=None)
_seen: ContextVar[dict[str, float] | None] = ContextVar("seen", default=None)
_initial: ContextVar[set[str] | None] = ContextVar("initial", default=None)


def tunable(name: str, value: float) -> Array:
    """Return `value`, or its override, as a float32 scalar for a state.

    `name` is the name of the setting in a run, such as `agent.lr`.
    """
    seen, swaps = _seen.get(), _swaps.get()
    if seen is not None:
        seen[name] = value
    swap = swaps.get(name) if swaps is not None else None
    # Two parts of a processor may use one name with different values (discounts); only the setting's is replaced.
    return jnp.float32(value) if swap is None or swap.old != value else jnp.asarray(swap.new, jnp.float32)


def mark_initial(name: str) -> None:
    """Note that the setting `name` of a state is only the initial value of what is learnt, and has no effect later."""
    if (initial := _initial.get()) is not None:
        initial.add(name)


@contextmanager
def override(swaps: Mapping[str, Override]) -> Iterator[None]:
    """Override hyperparameters by name in states made inside a `with` block."""
    token = _swaps.set({**swaps, **(_swaps.get() or {})})  # outer overrides take precedence
    try:
        yield
    finally:
        _swaps.reset(token)


@contextmanager
def without_overrides() -> Iterator[None]:
    """Leave states made inside a `with` block as their settings have them: they belong to no member of a sweep."""
    tokens = _swaps.set(None), _seen.set(None)
    try:
        yield
    finally:
        _swaps.reset(tokens[0])
        _seen.reset(tokens[1])


def trace_hyperparams(make: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
    """Return the shapes of `make(*args)`, and its hyperparameters with their values, by tracing."""
    found: dict[str, float] = {}
    token = _seen.set(found)
    try:
        # A new function, because JAX caches traces by function: a cached one of `make` would call no `tunable`.
        return jax.eval_shape(lambda *args: make(*args), *args), dict(sorted(found.items()))
    finally:
        _seen.reset(token)


def trace_initial(make: Callable[..., Any], *args: Any) -> set[str]:
    """Return the hyperparameters of `make(*args)` that are only initial values, by tracing."""
    found: set[str] = set()
    token = _initial.set(found)
    try:
        trace_hyperparams(make, *args)
        return found
    finally:
        _initial.reset(token)

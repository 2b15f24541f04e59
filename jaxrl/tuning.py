"""Settings that live in a training state as arrays: programs that differ in them alone are one program.

Agents and processors put such settings into their states by `tunable`. A population gives its members other values by
`given`, around the function that makes the state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.trees import Array


class Override(NamedTuple):
    """A value to be put in place of another."""

    old: float
    new: Any
    """A number, or a float32 scalar array, which may be traced."""


_swaps: ContextVar[Mapping[str, Override] | None] = ContextVar("swaps", default=None)
_seen: ContextVar[dict[str, float] | None] = ContextVar("seen", default=None)


def tunable(name: str, value: float) -> Array:
    """Return the setting `name` as the float32 scalar that a state holds; what is `given` in place of `value`, if any.

    `name` is that of the setting in a run, as `agent.lr`.
    """
    seen, swaps = _seen.get(), _swaps.get()
    if seen is not None:
        seen[name] = value
    swap = swaps.get(name) if swaps is not None else None
    # A processor may have two discounts, of which the setting is one.
    return jnp.float32(value) if swap is None or swap.old != value else jnp.asarray(swap.new, jnp.float32)


@contextmanager
def override(swaps: Mapping[str, Override]) -> Iterator[None]:
    """Put other values into the states that are made inside a `with` block, by the names of their settings."""
    token = _swaps.set({**swaps, **(_swaps.get() or {})})  # what stands further out has the last word
    try:
        yield
    finally:
        _swaps.reset(token)


def trace_hyperparams(make: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
    """Return the shapes of `make(*args)`, and the settings that live in it, with their values; nothing is computed."""
    found: dict[str, float] = {}
    token = _seen.set(found)
    try:
        # A function of its own, lest JAX remember an earlier trace of `make`, in which nobody listened.
        return jax.eval_shape(lambda *args: make(*args), *args), dict(sorted(found.items()))
    finally:
        _seen.reset(token)

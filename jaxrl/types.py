"""The nouns that every part of jaxrl shares.

Shape legend, used in all docstrings: `N` environments, `T` time, `B` minibatch, `P` population, `D` devices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Key = jax.Array
"""A typed PRNG key, as `jax.random.key` makes it."""
PyTree = Any


# --- spaces ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Discrete:
    """The whole numbers `0 .. n-1`."""

    n: int
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class MultiDiscrete:
    """A vector of whole numbers, entry `i` from `0 .. n[i]-1`."""

    n: tuple[int, ...]
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.n),)


@dataclass(frozen=True)
class Box:
    """Arrays of one shape and dtype; `low` and `high` bound every entry (a number, or one number an entry, flat)."""

    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"


Space = Discrete | MultiDiscrete | Box | Mapping[str, Any] | tuple
"""A space is one of the three above, or a dict or tuple of spaces."""

_LEAVES = (Discrete, MultiDiscrete, Box)


def _is_space(x: Any) -> bool:
    return isinstance(x, _LEAVES)


def space_struct(space: Space) -> PyTree:
    """Return the `jax.ShapeDtypeStruct` of one element of `space`, leaf by leaf."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), space, is_leaf=_is_space)


def space_zeros(space: Space) -> PyTree:
    """Return an element of the shape and dtype of `space`, all zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), space, is_leaf=_is_space)


def sample_space(space: Space, key: Key) -> PyTree:
    """Draw a uniform element of `space`; the key is consumed. Unbounded entries of a `Box` come from the normal."""
    leaves, treedef = jax.tree.flatten(space, is_leaf=_is_space)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [_sample_leaf(leaf, k) for leaf, k in zip(leaves, keys, strict=True)])


def _sample_leaf(space: Discrete | MultiDiscrete | Box, key: Key) -> Array:
    if isinstance(space, Discrete | MultiDiscrete):
        return jax.random.randint(key, space.shape, 0, np.asarray(space.n), space.dtype)
    low, high = (_each_entry(bound, space.shape) for bound in (space.low, space.high))
    bounded = np.abs(low) + np.abs(high) <= float(jnp.finfo(jnp.float32).max)
    if bounded.all() and not jnp.issubdtype(space.dtype, jnp.inexact):
        ends = (np.clip(x, -(2**31), 2**31 - 1).astype(np.int32) for x in (low, high + 1))
        return jax.random.randint(key, space.shape, *ends).astype(space.dtype)
    limits = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0)
    within = jax.random.uniform(key, space.shape, jnp.float32, *limits)
    beyond = jnp.clip(jax.random.normal(key, space.shape), low, high)
    return jnp.where(bounded, within, beyond).astype(space.dtype)


def _each_entry(bound: float | tuple[float, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.reshape(bound, shape if np.size(bound) > 1 else ()), shape).astype(np.float64)


def space_to_plain(space: Space) -> Any:
    """Write `space` as plain dicts, lists and numbers, for a settings file."""
    if isinstance(space, Mapping):
        return {"dict": {name: space_to_plain(part) for name, part in space.items()}}
    if isinstance(space, tuple):
        return {"tuple": [space_to_plain(part) for part in space]}
    return {type(space).__name__: {k: _plain(v) for k, v in vars(space).items()}}


def space_from_plain(plain: Any) -> Space:
    """Read back what `space_to_plain` wrote."""
    ((kind, value),) = plain.items()
    if kind == "dict":
        return {name: space_from_plain(part) for name, part in value.items()}
    if kind == "tuple":
        return tuple(space_from_plain(part) for part in value)
    (cls,) = (c for c in _LEAVES if c.__name__ == kind)
    return cls(**{k: _unplain(v) for k, v in value.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    # JSON has no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unplain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unplain(v) for v in value)
    return float(value) if value in ("inf", "-inf") else value


class EnvSpec(NamedTuple):
    """What there is to know of an environment without running it."""

    name: str
    observation_space: Space
    action_space: Space
    time_limit: int | None = None
    """Environment steps after which an episode is truncated; `None`: never."""


# --- data -----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What one step of `N` environments yields. Every leaf begins with the axis `[N]`."""

    action: PyTree
    extras: PyTree
    """Whatever the agent's `act` returned beside the action, such as log-probabilities and values."""
    reward: Array
    terminated: Array
    """The episode reached an end of its own."""
    truncated: Array
    """The episode was cut from outside, by a time limit say; never true together with `terminated`."""
    final_obs: PyTree
    """The true successor, before any reset."""
    obs: PyTree
    """What the policy sees next: `final_obs`, or the first observation of a new episode."""
    info: Mapping[str, Array] = {}
    valid: Array | bool = True
    """False where the environment gave a non-finite observation or reward: nothing may be learnt from that step."""


class Transition(NamedTuple):
    """What is learnt from. Past the processor nobody sees `done`."""

    obs: PyTree
    action: PyTree
    reward: Array
    """The reward, already summed and discounted over the `n` steps of an n-step processor."""
    discount: Array
    """`gamma^k` to the successor, and 0 only where the episode TERMINATED."""
    next_obs: PyTree
    extras: PyTree = ()
    weight: Array | float = 1.0
    """1, or 0 for a row from which nothing may be learnt."""


class Batch(NamedTuple):
    """`B` sampled items."""

    items: PyTree
    """The items, each leaf `[B, ...]`; for replay a `Transition`."""
    index: Array  # type: ignore[assignment]
    """`[B]` int32, where the items lie in the buffer."""
    weight: Array
    """`[B]`, the weight of each item in the loss (importance weights of prioritised replay; 1 otherwise)."""


# --- metrics --------------------------------------------------------------------------------------------------


class Stat(NamedTuple):
    """Count, sum, smallest and largest of a measured number; all scalars."""

    count: Array  # type: ignore[assignment]
    sum: Array
    min: Array
    max: Array


class Total(NamedTuple):
    """A number of events, to be added up."""

    count: Array  # type: ignore[assignment]


Metrics = Mapping[str, Array | Stat | Total]
"""What a training step reports: a plain scalar counts as one measurement."""


def stat(values: Array, where: Array | bool = True) -> Stat:
    """Summarise the entries of `values` at which `where` holds (both of one shape)."""
    values = jnp.asarray(values, jnp.float32)
    where = jnp.broadcast_to(where, values.shape)
    return Stat(
        count=jnp.sum(where, dtype=jnp.int32),
        sum=jnp.sum(jnp.where(where, values, 0.0)),
        min=jnp.min(jnp.where(where, values, math.inf)),
        max=jnp.max(jnp.where(where, values, -math.inf)),
    )


def total(events: Array) -> Total:
    """Count the entries of `events` that are true."""
    return Total(jnp.sum(events, dtype=jnp.int32))


def reduce_metrics(stacked: Metrics) -> Metrics:
    """Reduce metrics stacked along a leading axis, as `lax.scan` returns them, to one of each."""

    def reduce(metric: Any) -> Stat | Total:
        if isinstance(metric, Total):
            return Total(metric.count.sum(dtype=jnp.int32))
        if isinstance(metric, Stat):
            return Stat(metric.count.sum(dtype=jnp.int32), metric.sum.sum(), metric.min.min(), metric.max.max())
        return stat(metric)

    return {name: reduce(metric) for name, metric in stacked.items()}


# --- pytrees --------------------------------------------------------------------------------------------------


def tree_where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Choose `new` or `old` leaf by leaf; `condition` is a scalar, or `[N]` against leaves `[N, ...]`."""

    def choose(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(choose, new, old)


def all_finite(tree: PyTree) -> Array:
    """Say whether every floating-point entry of `tree` is finite; a scalar bool."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.bool_(True)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all leaves; arrays, `ShapeDtypeStruct`s and keys alike."""

    def leaf_bytes(leaf: Any) -> int:
        itemsize = 16 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).itemsize
        return math.prod(leaf.shape) * itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))

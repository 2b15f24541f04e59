"""The nouns that every part of jaxrl shares.

Shape legend, used in all docstrings: `N` environments, `T` time, `B` minibatch, `P` population, `D` devices.
"""

import functools
import math
from collections.abc import Mapping, Sequence
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


def space_zeros(space: Space, count: int | None = None) -> PyTree:
    """Return an element of `space` that is all zeros, or `count` of them `[count, ...]`."""
    batch = () if count is None else (count,)
    return jax.tree.map(lambda leaf: jnp.zeros((*batch, *leaf.shape), leaf.dtype), space, is_leaf=_is_space)


def sample_space(space: Space, key: Key, count: int | None = None) -> PyTree:
    """Draw a uniform element of `space`, or `count` of them `[count, ...]`; the key is consumed.

    Unbounded entries of a `Box` come from the normal.
    """
    leaves, treedef = jax.tree.flatten(space, is_leaf=_is_space)
    keys = jax.random.split(key, len(leaves)) if len(leaves) > 1 else [key]
    batch = () if count is None else (count,)
    drawn = [_sample_leaf(leaf, k, (*batch, *leaf.shape)) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def below(key: Key, shape: tuple[int, ...], bound: Array | np.ndarray | int) -> Array:
    """Draw whole numbers from `0 .. bound-1`, uint32 and of `shape`; the key is consumed.

    One random word each, where `jax.random.randint` takes two and a split: half of what a vector step draws is this.
    A number's chance is off by at most `bound / 2^32` of itself; where `bound` is a power of two it is exact.
    """
    return jax.random.bits(key, shape, jnp.uint32) % jnp.broadcast_to(jnp.asarray(bound, jnp.uint32), shape)


def _sample_leaf(space: Discrete | MultiDiscrete | Box, key: Key, shape: tuple[int, ...]) -> Array:
    if isinstance(space, Discrete | MultiDiscrete):
        return below(key, shape, np.asarray(space.n, np.uint32)).astype(space.dtype)
    low, high, bounded = (np.broadcast_to(x, shape) for x in box_bounds(space))
    if bounded.all() and not jnp.issubdtype(space.dtype, jnp.inexact):
        ends = (np.clip(x, -(2**31), 2**31 - 1).astype(np.int32) for x in (low, high + 1))
        return jax.random.randint(key, shape, *ends).astype(space.dtype)
    limits = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0)
    within = jax.random.uniform(key, shape, jnp.float32, *limits)
    beyond = jnp.clip(jax.random.normal(key, shape), low, high)
    return jnp.where(bounded, within, beyond).astype(space.dtype)


def box_bounds(space: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `low` and `high` of every entry, and which entries have both; `space.shape` each.

    Bounds so far apart that float32 cannot say how far are none.
    """
    low, high = (
        np.broadcast_to(np.reshape(bound, space.shape if np.size(bound) > 1 else ()), space.shape).astype(np.float64)
        for bound in (space.low, space.high)
    )
    return low, high, np.abs(low) + np.abs(high) <= float(jnp.finfo(jnp.float32).max)


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


def spec_to_plain(spec: EnvSpec) -> dict[str, Any]:
    """Write `spec` as plain dicts, lists and numbers, as JSON holds them."""
    spaces = {name: space_to_plain(getattr(spec, name)) for name in ("observation_space", "action_space")}
    return {**spec._asdict(), **spaces}


def spec_from_plain(plain: Mapping[str, Any]) -> EnvSpec:
    """Read back what `spec_to_plain` wrote."""
    spaces = {name: space_from_plain(plain[name]) for name in ("observation_space", "action_space")}
    return EnvSpec(**{**plain, "name": str(plain["name"]), **spaces})


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
    obs_valid: Array | tuple[()] = ()
    """False where a first observation was not finite: `obs` is zeros in its place, and belongs in no statistics. `()`
    where all are."""


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


class Remembered(NamedTuple):
    """What a recurrent agent sees: an observation, and what it remembers of the episode so far."""

    obs: PyTree
    memory: PyTree


class Rollout(NamedTuple):
    """`T` steps of `N` environments, in order."""

    items: Transition
    """Over one step each, leaves `[T, N, ...]`."""
    last: Array
    """`[T, N]` bool: no later step may be counted towards this one, for the episode ended here, was cut, or goes on
    with a step from which nothing may be learnt. What is still to come is worth `discount` times that of `next_obs`."""


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


def stats(values: Mapping[str, Array], where: Array | bool = True) -> dict[str, Stat]:
    """Summarise several arrays of one shape as `stat` does each: together they take as few kernels as one."""
    columns = jax.vmap(functools.partial(stat, where=where))(
        jnp.stack([jnp.asarray(x, jnp.float32) for x in values.values()])
    )
    return {name: jax.tree.map(lambda x, i=i: x[i], columns) for i, name in enumerate(values)}


def totals(events: Mapping[str, Array]) -> dict[str, Total]:
    """Count the true entries of several arrays of one shape, together."""
    counts = jax.vmap(total)(jnp.stack(list(events.values()))).count
    return {name: Total(counts[i]) for i, name in enumerate(events)}


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


def column(scalars: Sequence[Array]) -> Array:
    """Stack scalars. As a chain of selects it is one kernel with what follows; a concatenation takes one a scalar."""
    place = jnp.arange(len(scalars))
    stacked = jnp.broadcast_to(scalars[0], place.shape)
    for i, scalar in enumerate(scalars[1:], 1):
        stacked = jnp.where(place == i, scalar, stacked)
    return stacked


def as_stat(metric: Array | Stat | Total) -> Stat:
    """Return any metric as a `Stat`, of which a `Total` fills the count alone."""
    if isinstance(metric, Stat):
        return metric
    if isinstance(metric, Total):
        return Stat(metric.count, jnp.float32(0), jnp.float32(math.inf), jnp.float32(-math.inf))
    return stat(metric)


def columns_of(metrics: Metrics) -> Stat:
    """Return metrics as one `Stat` whose fields are `[M]`, in the order of their sorted names."""
    each = [as_stat(metric) for _, metric in sorted(metrics.items())]
    return Stat(*(column(scalars) for scalars in zip(*each, strict=True)))


def metrics_of(columns: Stat, like: Metrics) -> Metrics:
    """Take `columns_of` back, for metrics of the names and kinds of `like`."""
    made: dict[str, Stat | Total] = {}
    for i, (name, metric) in enumerate(sorted(like.items())):
        one = jax.tree.map(lambda x, i=i: x[i], columns)
        made[name] = Total(one.count) if isinstance(metric, Total) else one
    return made


def merge_stats(a: Stat, b: Stat) -> Stat:
    """Summarise what two summaries do."""
    return Stat(a.count + b.count, a.sum + b.sum, jnp.minimum(a.min, b.min), jnp.maximum(a.max, b.max))


# --- pytrees --------------------------------------------------------------------------------------------------


def tree_where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Choose `new` or `old` leaf by leaf; `condition` is a scalar, or `[N]` against leaves `[N, ...]`."""

    def choose(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(choose, new, old)


def all_finite(tree: PyTree) -> Array:
    """Say whether every floating-point entry of `tree` is finite; a scalar bool.

    Leaves of one shape are looked at in one pass: parameters, their moments and a target network cost one reduction,
    which on a CPU is the dear part.
    """
    finite: dict[tuple[int, ...], Array] = {}
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            shape = jnp.shape(leaf)
            finite[shape] = jnp.isfinite(leaf) & finite[shape] if shape in finite else jnp.isfinite(leaf)
    return functools.reduce(jnp.logical_and, (jnp.all(x) for x in finite.values()), jnp.bool_(True))


def row_struct(tree: PyTree) -> PyTree:
    """Return the shapes of one row of leaves `[rows, ...]`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all leaves; arrays, `ShapeDtypeStruct`s and keys alike."""

    def leaf_bytes(leaf: Any) -> int:
        itemsize = 16 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).itemsize
        return math.prod(leaf.shape) * itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))

"""Observation and action spaces, described by plain values that can be written to a settings file."""

import math
import operator
from collections import namedtuple
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.trees import Array, Key, PyTree
from jaxrl.xla.shuffle import below


@dataclass(frozen=True)
class Discrete:
    """The integers `start .. start + n - 1`.

    Environments written in JAX, agents, networks and buffers count from 0. Only environments outside JAX may have
    another `start`: sessions, loaded policies and data sets take and return its numbers.
    """

    n: int
    dtype: str = "int32"
    """Anything that JAX accepts as a dtype; stored as its name."""
    start: int = 0

    def __post_init__(self) -> None:
        n, start = _check_n("Discrete", self.n), _check_start("Discrete", self.start)
        _set_fields(self, n=n, start=start, dtype=_dtype_name("Discrete", self.dtype))
        _check_range("Discrete", self.dtype, n, start)

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class MultiDiscrete:
    """Vectors of integers, entry `i` from `start[i] .. start[i] + n[i] - 1`; `start` as for `Discrete`."""

    n: tuple[int, ...]
    """May also be given as a list or an array."""
    dtype: str = "int32"
    start: int | tuple[int, ...] = 0
    """One number, or one per entry (tuple, list or array); stored as one number if all are equal."""

    def __post_init__(self) -> None:
        if np.ndim(self.n) != 1:
            raise SettingsError(f"MultiDiscrete: n is {self.n!r}; expected one whole number for each entry")
        n = tuple(_check_n("MultiDiscrete", n) for n in self.n)
        if np.shape(self.start) not in ((), (len(n),)):
            raise SettingsError(
                f"MultiDiscrete: start is {short_repr(self.start)}; expected one whole number, or one for each of "
                f"{len(n)}"
            )
        starts = [_check_start("MultiDiscrete", start) for start in np.broadcast_to(self.start, len(n)).tolist()]
        start = starts[0] if len(set(starts)) == 1 else tuple(starts)
        _set_fields(self, n=n, start=start if n else 0, dtype=_dtype_name("MultiDiscrete", self.dtype))
        for pair in zip(n, starts, strict=True):
            _check_range("MultiDiscrete", self.dtype, *pair)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.n),)


@dataclass(frozen=True)
class Box:
    """Arrays of one shape and dtype; `low` and `high` bound every entry (one number, or one per entry, flat).

    Bounds may be given as arrays that broadcast to `shape`, the shape as one number or a list, the dtype as anything
    that JAX accepts. They are stored as plain values: floats, tuples of floats, and the name of the dtype.
    """

    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        shape = _check_shape(self.shape)
        low, high = _flatten_bound("low", self.low, shape), _flatten_bound("high", self.high, shape)
        if np.any(np.asarray(low) > np.asarray(high)):
            raise SettingsError(f"Box: low {short_repr(low)} is above high {short_repr(high)}; swap them")
        dtype = _dtype_name("Box", self.dtype)
        if np.dtype(self.dtype).itemsize > np.dtype(dtype).itemsize and not _fits(dtype, low, high):
            raise SettingsError(
                f"Box: bounds {short_repr(low)} to {short_repr(high)} do not fit {dtype}, in which JAX holds "
                f"{np.dtype(self.dtype)}; use float32"
            )
        _set_fields(self, low=low, high=high, shape=shape, dtype=dtype)


Space = Discrete | MultiDiscrete | Box | Mapping[str, Any] | tuple
"""One of the three above, or a dict or tuple of spaces."""

_LEAVES = (Discrete, MultiDiscrete, Box)


def is_leaf(x: Any) -> TypeGuard[Discrete | MultiDiscrete | Box]:
    """Return whether `x` is one of the three spaces, and not a dict or tuple."""
    return isinstance(x, _LEAVES)


# --- plain numbers ------------------------------------------------------------------------------------------------


def _set_fields(space: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(space, name, value)


def _check_n(kind: str, n: Any) -> int:
    try:
        count = -1 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        count = -1
    if count < 1:
        raise SettingsError(f"{kind}: n is {n!r}; expected a whole number of at least 1")
    return count


def _check_start(kind: str, start: Any) -> int:
    try:
        if isinstance(start, bool):
            raise TypeError
        return operator.index(start)
    except TypeError:
        raise SettingsError(f"{kind}: start is {start!r}; expected a whole number") from None


def _check_range(kind: str, dtype: str, n: int, start: int) -> None:
    """Raise `SettingsError` unless `dtype` holds `n` numbers both from `start` and from 0."""
    least, most = _integer_range(dtype)
    if start < least or max(start, 0) + n - 1 > most:
        of = f"n is {n}" + (f" with start {start}" if start else "")
        raise SettingsError(f"{kind}: {of}, but {dtype} holds {least} to {most}; use fewer, or a wider dtype")


def _integer_range(dtype: str) -> tuple[int, int]:
    """Return the smallest and largest integer up to which `dtype` represents all integers exactly."""
    made = jnp.dtype(dtype)
    if made == np.bool_:
        return 0, 1
    if jnp.issubdtype(made, jnp.integer):
        return int(jnp.iinfo(made).min), int(jnp.iinfo(made).max)
    most = 2 ** (jnp.finfo(made).nmant + 1)
    return -most, most


def _fits(dtype: str, low: Any, high: Any) -> bool:
    """Return whether `dtype` represents the finite ones among the bounds; infinity means no bound."""
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        return True
    least, most = _integer_range(dtype)
    ends = np.concatenate([np.ravel(low), np.ravel(high)]).astype(np.float64)
    return not np.any(np.isfinite(ends) & ((ends < least) | (ends > most)))


def _dtype_name(kind: str, dtype: Any) -> str:
    """Return the name of JAX's dtype for `dtype`; without x64 mode, JAX has no 64-bit types."""
    try:
        made = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        made = None
    if made is None or not any(jnp.issubdtype(made, sort) for sort in (np.integer, np.floating, np.bool_)):
        raise SettingsError(f"{kind}: dtype is {dtype!r}; expected one of real numbers, such as 'float32' or 'uint8'")
    return str(made.name)


def _check_shape(shape: Any) -> tuple[int, ...]:
    try:
        whole = tuple(operator.index(size) for size in (shape if np.ndim(shape) else [shape]))
    except TypeError:
        whole = (-1,)
    if any(size < 1 for size in whole):
        raise SettingsError(f"Box: shape is {shape!r}; expected whole numbers of at least 1, such as (84, 84, 3)")
    return whole


def _flatten_bound(name: str, bound: Any, shape: tuple[int, ...]) -> float | tuple[float, ...]:
    """Return a bound as one number, or as one number per entry, flat."""
    try:
        array = np.asarray(bound)
        if array.dtype.kind in "OSUc":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise SettingsError(f"Box: {name} is {short_repr(bound)}; expected a number, or one an entry") from None
    if np.isnan(array).any():
        raise SettingsError(f"Box: {name} is {short_repr(bound)}; expected numbers, or infinity for none")
    if array.ndim == 0:
        return float(array)
    try:
        flat = (array if array.size == math.prod(shape) else np.broadcast_to(array, shape)).ravel().tolist()
    except ValueError:
        raise SettingsError(
            f"Box: {name} has shape {list(array.shape)}; expected one number, or {list(shape)} as the box has"
        ) from None
    alike = not isinstance(bound, tuple | list) and len(set(flat)) == 1
    return flat[0] if alike else tuple(flat)


def short_repr(value: Any) -> str:
    """Return `repr(value)` on one line, of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- conversion of other libraries' spaces ------------------------------------------------------------------------


def convert_space(name: str, space: Any) -> Space:
    """Convert `space` of environment `name`: one of Gymnasium, or a dict or tuple of such, to jaxrl's.

    A `Box` of integers becomes float32 if its bounds do not fit the dtype that JAX has for it.

    Raises:
      SettingsError: `space` is none of these.
    """
    kind = type(space).__name__
    if is_leaf(space):
        return space
    if isinstance(space, Mapping) or kind == "Dict":
        return {key: convert_space(name, part) for key, part in _check_keys(name, getattr(space, "spaces", space))}
    # Before plain tuples, so that named tuples keep their type.
    if isinstance(space, tuple) and hasattr(space, "_fields"):
        parts: list[Any] = [convert_space(name, part) for part in space]
        return type(space)(*parts)
    if isinstance(space, tuple | list) or kind == "Tuple":
        return tuple(convert_space(name, part) for part in getattr(space, "spaces", space))
    try:
        leaf = _convert_leaf(kind, space)
    except SettingsError as error:
        raise SettingsError(f"environment {name} has a space {short_repr(space)}: {error}") from error
    if leaf is None:
        raise SettingsError(
            f"environment {name} has a space {short_repr(space)}; expected Box, Discrete, MultiDiscrete, Dict or Tuple"
        )
    return leaf


def _check_keys(name: str, parts: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    for key in parts:
        if not isinstance(key, str):
            raise SettingsError(f"environment {name} has a dict of spaces with the key {key!r}; expected names")
    return parts.items()


def _convert_leaf(kind: str, space: Any) -> Discrete | MultiDiscrete | Box | None:
    if kind == "Discrete":
        return Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete" and space.nvec.ndim == 1:
        return MultiDiscrete(space.nvec, start=getattr(space, "start", 0))
    if kind == "MultiBinary" and len(space.shape) == 1:
        return MultiDiscrete((2,) * space.shape[0])
    if kind == "Box":
        low, high, dtype = np.asarray(space.low), np.asarray(space.high), np.dtype(space.dtype)
        if dtype.kind in "iu" and not _fits(_dtype_name("Box", dtype), low, high):
            dtype = np.dtype(np.float32)  # networks see float32 anyway, and nothing wraps
        return Box(low, high, space.shape, dtype)  # type: ignore[arg-type]
    return None


# --- images with channels first -----------------------------------------------------------------------------------

MAX_CHANNELS = 16
"""Largest number of channels for which an image is recognised by its shape as channels-first."""


def to_channels_last(space: Space) -> Space:
    """Return the space with all images in channels-last layout, as convolutions expect.

    An image counts as channels-first if it is a `Box` `[C, H, W]` of bytes with at most 16 channels, both sides longer
    than that and at least 8, and neither more than twice the other, like EnvPool's frames `[4, 84, 84]`.
    """

    def convert(leaf: Discrete | MultiDiscrete | Box) -> Discrete | MultiDiscrete | Box:
        if not (isinstance(leaf, Box) and leaf.dtype == "uint8" and _channels_first(leaf.shape)):
            return leaf
        low, high = (_transpose_bound(bound, leaf.shape) for bound in (leaf.low, leaf.high))
        return Box(low, high, (*leaf.shape[1:], leaf.shape[0]), leaf.dtype)

    return jax.tree.map(convert, space, is_leaf=is_leaf)


def _channels_first(shape: tuple[int, ...]) -> bool:
    if len(shape) != 3:
        return False
    channels, (short, long) = shape[0], sorted(shape[1:])
    return 0 < channels <= MAX_CHANNELS and short >= max(channels + 1, 8) and long <= 2 * short


def _transpose_bound(bound: Any, shape: tuple[int, ...]) -> Any:
    return np.moveaxis(np.reshape(bound, shape), 0, -1) if np.size(bound) > 1 else bound


def match_image_layout(x: Any, shape: tuple[int, ...]) -> Any:
    """Transpose images `[..., C, H, W]` to `[..., H, W, C]` if that gives the required `shape`."""
    if not _channels_first(x.shape[-3:]) or tuple(shape) != (*x.shape[-2:], x.shape[-3]):
        return x
    return x.transpose(*range(x.ndim - 3), x.ndim - 2, x.ndim - 1, x.ndim - 3)


# --- elements -----------------------------------------------------------------------------------------------------


def space_struct(space: Space) -> PyTree:
    """Return the tree of `jax.ShapeDtypeStruct`s of one element of `space`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), space, is_leaf=is_leaf)


def space_zeros(space: Space, count: int | None = None) -> PyTree:
    """Return an all-zeros element of `space`, or `count` of them `[count, ...]`."""
    batch = () if count is None else (count,)
    return jax.tree.map(lambda leaf: jnp.zeros((*batch, *leaf.shape), leaf.dtype), space, is_leaf=is_leaf)


def to_dtype(what: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Cast `array` to `dtype`; raise `SettingsError`, naming `what`, if integers would wrap around."""
    dtype = np.dtype(dtype)
    if array.dtype.kind in "iu" and dtype.kind in "iu" and array.size and not np.can_cast(array.dtype, dtype):
        info, ends = np.iinfo(dtype), (int(array.min()), int(array.max()))
        for end in ends:
            if not info.min <= end <= info.max:
                raise SettingsError(f"{what} holds {end}; {dtype.name} holds {info.min} to {info.max}")
    with np.errstate(over="ignore"):  # overflow to infinity is handled with other non-finite values
        return np.asarray(array, dtype)


def sample_space(space: Space, key: Key, count: int | None = None) -> PyTree:
    """Draw a uniform element of `space`, or `count` of them `[count, ...]`; the key is consumed.

    Discrete values are indices from 0. Entries of a `Box` without both bounds are drawn from a normal distribution
    around the centre of `box_span`, and clipped.
    """
    leaves, treedef = jax.tree.flatten(space, is_leaf=is_leaf)
    keys = jax.random.split(key, len(leaves)) if len(leaves) > 1 else [key]
    batch = () if count is None else (count,)
    drawn = [_sample_leaf(leaf, k, (*batch, *leaf.shape)) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def _sample_leaf(space: Discrete | MultiDiscrete | Box, key: Key, shape: tuple[int, ...]) -> Array:
    if isinstance(space, Discrete | MultiDiscrete):
        return below(key, shape, np.asarray(space.n, np.uint32)).astype(space.dtype)
    low, high, bounded = (np.broadcast_to(x, shape) for x in box_bounds(space))
    if bounded.all() and not jnp.issubdtype(space.dtype, jnp.inexact):
        ends = (np.clip(x, -(2**31), 2**31 - 1).astype(np.int32) for x in (low, high + 1))
        return jax.random.randint(key, shape, *ends).astype(space.dtype)
    limits = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0)
    within = jax.random.uniform(key, shape, jnp.float32, *limits)
    around = _open_centre(low, high).astype(np.float32)
    beyond = jnp.clip(around + jax.random.normal(key, shape, jnp.float32), low, high)
    return jnp.where(bounded, within, beyond).astype(space.dtype)


def box_bounds(space: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `low` and `high` of every entry, and which entries have both bounds; `space.shape` each.

    Bounds whose distance overflows float32 count as none, and so does the largest float32.
    """
    low, high = (
        np.broadcast_to(np.reshape(bound, space.shape if np.size(bound) > 1 else ()), space.shape).astype(np.float64)
        for bound in (space.low, space.high)
    )
    return low, high, np.abs(low) + np.abs(high) < float(jnp.finfo(jnp.float32).max)


def to_box(space: Box, x: Array) -> Array:
    """Rescale `x` `[N, D]` so that -1 to 1 spans the bounds of `space`, and clip it to them; `[N, *space.shape]`.

    For entries without both bounds see `box_span`.
    """
    low, high, _ = box_bounds(space)
    middle, reach = box_span(space)
    within = jnp.clip(middle + reach * x, low.reshape(1, -1).astype(np.float32), high.reshape(1, -1).astype(np.float32))
    return within.reshape(-1, *space.shape).astype(space.dtype)


def from_box(space: Box, action: Array) -> Array:
    """Invert `to_box`: elements of `space` `[N, ...]` -> `[N, D]`, from -1 to 1 within bounds."""
    middle, reach = box_span(space)
    return (action.reshape(action.shape[0], -1).astype(jnp.float32) - middle) / np.where(reach > 0, reach, 1)


def box_span(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return centre and half-width `[1, D]` of the bounds.

    For an entry without both bounds the half-width is 1, and the centre is the number nearest to 0 with a distance of
    at least 1 from its bound, if it has one.
    """
    low, high, bounded = (x.reshape(1, -1) for x in box_bounds(space))
    bottom, top = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    centre = np.where(bounded, (top + bottom) / 2, _open_centre(low, high))
    return centre.astype(np.float32), ((top - bottom) / 2).astype(np.float32)


def _open_centre(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.clip(0.0, low + 1, np.maximum(low + 1, high - 1))


def space_to_plain(space: Space) -> Any:
    """Convert `space` to plain dicts, lists and numbers, for a settings file."""
    if isinstance(space, Mapping):
        return {"dict": {name: space_to_plain(part) for name, part in space.items()}}
    if isinstance(space, tuple):
        names = getattr(space, "_fields", None)
        own = {} if names is None else {"names": [type(space).__name__, *names]}
        return {"tuple": [space_to_plain(part) for part in space], **own}
    return {type(space).__name__: {k: _plain(v) for k, v in vars(space).items()}}


def space_from_plain(plain: Any) -> Space:
    """Invert `space_to_plain`, but for the class of a named tuple: it is another one with the same names."""
    ((kind, value),) = ((key, part) for key, part in plain.items() if key != "names")
    if kind == "dict":
        return {name: space_from_plain(part) for name, part in value.items()}
    if kind == "tuple":
        parts = [space_from_plain(part) for part in value]
        return tuple(parts) if "names" not in plain else _named_tuple(*plain["names"])(*parts)
    (cls,) = (c for c in _LEAVES if c.__name__ == kind)
    return cls(**{k: _unplain(v) for k, v in value.items()})


@cache
def _named_tuple(name: str, *fields: str) -> Any:
    """Return the class of named tuples; one for all of these names, so that JAX takes them for the same structure."""
    return namedtuple(name, fields)


def without_names(space: Space) -> Space:
    """Return the space with plain tuples in place of named ones."""
    if isinstance(space, Mapping):
        return {name: without_names(part) for name, part in space.items()}
    return tuple(map(without_names, space)) if isinstance(space, tuple) else space


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    # JSON has no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unplain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unplain(v) for v in value)
    return float(value) if value in ("inf", "-inf") else value


class _EnvSpec(NamedTuple):
    name: str
    observation_space: Space
    action_space: Space
    time_limit: int | None = None
    """Environment steps after which an episode is truncated; `None`: no limit."""


class EnvSpec(_EnvSpec):
    """The static description of an environment: its name, spaces and time limit.

    Gymnasium's spaces are converted to jaxrl's.

    Raises:
      SettingsError: a space is neither Gymnasium's nor jaxrl's, or the time limit is no number of steps.
    """

    __slots__ = ()

    def __new__(cls, name: str, observation_space: Any, action_space: Any, time_limit: int | None = None) -> "EnvSpec":
        """Create a spec, converting Gymnasium's spaces."""
        observations, actions = (convert_space(name, space) for space in (observation_space, action_space))
        return super().__new__(cls, name, observations, actions, _check_time_limit(name, time_limit))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "EnvSpec":  # type: ignore[override]
        return cls(*iterable)


def _check_time_limit(name: str, limit: Any) -> int | None:
    if limit is None:
        return None
    try:
        steps = int(limit) if isinstance(limit, float) and limit.is_integer() else operator.index(limit)
    except TypeError:
        steps = 0
    if steps < 1 or isinstance(limit, bool):
        raise SettingsError(f"environment {name}: time_limit is {short_repr(limit)}; expected at least 1 step, or None")
    return steps


def spec_to_plain(spec: EnvSpec) -> dict[str, Any]:
    """Convert `spec` to plain dicts, lists and numbers, for JSON."""
    spaces = {name: space_to_plain(getattr(spec, name)) for name in ("observation_space", "action_space")}
    return {**spec._asdict(), **spaces}


def spec_from_plain(plain: Mapping[str, Any]) -> EnvSpec:
    """Invert `spec_to_plain`."""
    spaces = {name: space_from_plain(plain[name]) for name in ("observation_space", "action_space")}
    return EnvSpec(**{**plain, "name": str(plain["name"]), **spaces})


# --- indices counted from 0, for agents, and elements counted from `start`, for environments ------------------------


def space_starts(space: Space) -> list[Any]:
    """Return the `start` of each leaf: one integer, or one per entry if they differ; 0 for a `Box`."""
    return [getattr(leaf, "start", 0) for leaf in jax.tree.leaves(space, is_leaf=is_leaf)]


def space_sizes(space: Space) -> list[Any]:
    """Return the `n` of each leaf: a number, or one per entry; 0 for a `Box`."""
    return [getattr(leaf, "n", 0) for leaf in jax.tree.leaves(space, is_leaf=is_leaf)]


def to_indices(space: Space, elements: PyTree) -> PyTree:
    """Convert elements of `space` `[..., *shape]` to indices: discrete values counted from 0, boxes unchanged."""
    return _shift(space, elements, -1)


def to_elements(space: Space, indices: PyTree) -> PyTree:
    """Invert `to_indices`."""
    return _shift(space, indices, 1)


def _shift(space: Space, tree: PyTree, sign: int) -> PyTree:
    starts = space_starts(space)
    if not any(map(np.any, starts)):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    moved = (_shift_leaf(x, sign, np.asarray(start, x.dtype)) for start, x in zip(starts, leaves, strict=True))
    return jax.tree.unflatten(treedef, moved)


def _shift_leaf(x: Array, sign: int, start: np.ndarray) -> Array:
    if not np.any(start):
        return x
    start = start.reshape((1,) * (x.ndim - start.ndim) + start.shape)
    return x + start if sign > 0 else x - start  # no product: unsigned integers cannot hold -1


def to_zero_based(spec: EnvSpec) -> EnvSpec:
    """Return `spec` with all discrete spaces starting at 0."""
    unshifted = lambda leaf: leaf if isinstance(leaf, Box) else replace(leaf, start=0)
    observations, actions = (jax.tree.map(unshifted, space, is_leaf=is_leaf) for space in spec[1:3])
    return spec._replace(observation_space=observations, action_space=actions)


def check_zero_based(name: str, space: Space) -> None:
    """Raise `SettingsError` unless discrete parts of `space`, of an environment `name` written in JAX, start at 0."""
    for leaf, start in zip(jax.tree.leaves(space, is_leaf=is_leaf), space_starts(space), strict=True):
        if np.any(start):
            raise SettingsError(
                f"environment {name} has a space {short_repr(leaf)}, but whole numbers of an environment in JAX count "
                "from 0; leave start out, and add it in the environment"
            )

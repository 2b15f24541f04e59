"""Storage of items with several leaves as rows of bits, so that a push is one copy and a sample one gather.

Replay buffers and blocks of actors have this layout on every platform, so that checkpoints are portable. Only how rows
are joined and gathered depends on the platform.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.trees import Array, PyTree, row_struct, tree_bytes
from jaxrl.xla import by_platform, host_memory, shaped_for

SHARE = 1 << 18
"""Bytes of work for which XLA for CPUs uses another thread."""
SHORT = 4096
"""Longest row, in words, that `join_short` builds in one kernel."""
FEW = 128
"""Most rows that are kept on the device even where rows belong on the host: a loop may carry so short an array as part
of another one."""


class Field(NamedTuple):
    """Position of an item's leaf in its row."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    word: str
    """Unsigned integer type of the row that holds the leaf: as wide as `dtype`, or wider for a flag."""
    start: int
    """Index of the first of its `prod(shape)` words."""


class Layout(NamedTuple):
    """How an item is laid out in rows."""

    treedef: Any
    fields: tuple[Field, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["layout", "block", "on_host"])
@dataclass(frozen=True)
class Rows:
    """`R` packed items; leaves of equal width share an array."""

    words: dict[str, Array]
    """`[R, W]` for each unsigned integer type in use: `uint32` holds float32 and int32, `uint8` holds pixels."""
    layout: Layout
    block: int = 1
    """Number of rows per write; a ring holds whole blocks."""
    on_host: bool = False
    """Whether `words` are in the host's memory."""

    @property
    def items(self) -> PyTree:
        """The unpacked items, leaves `[R, ...]`."""
        return unpack(self.layout, self.words)

    def __len__(self) -> int:
        return int(next(iter(self.words.values())).shape[0])

    def write(self, items: PyTree, start: Array) -> "Rows":
        """Return rows with a block of items `[rows, ...]` written at row `start`."""
        return self.write_words(pack(self.layout, items), start)

    def write_words(self, words: dict[str, Array], start: Array) -> "Rows":
        """Return rows with packed items `[rows, W]` written at row `start`."""
        put = host_memory.write if self.on_host else _write
        return replace(self, words=jax.tree.map(lambda held, new: put(held, new, start), self.words, words))

    def scatter_words(self, words: dict[str, Array], place: Array) -> "Rows":
        """Return rows with packed items `[rows, W]` at the unique indices `place`; those out of bounds are dropped."""
        on_device = lambda held, place, new: held.at[place].set(new, mode="drop", unique_indices=True)
        put = host_memory.scatter if self.on_host else on_device
        return replace(self, words=jax.tree.map(lambda held, new: put(held, place, new), self.words, words))

    def read(self, index: Array) -> PyTree:
        """Return the items at `index` `[B]`."""
        get = partial(host_memory.gather, partial(take, write=host_memory.write)) if self.on_host else take
        return unpack(self.layout, jax.tree.map(lambda words: get(words, index), self.words))


def _write(held: Array, block: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(held, block, start, axis=0)


def take(array: Array, index: Array, write: Callable[[Array, Array, Array], Array] = _write) -> Array:
    """Return `array[index]`, `[R, ...], [B] -> [B, ...]`; every index must be in bounds.

    `write` writes rows to an array where `array` is.
    """
    # A small array is gathered in one thread anyway; a large result is worth several.
    held = tree_bytes(array)
    if held < 2 * SHARE or held // len(array) * len(index) > SHARE:
        return _gather(array, index)
    return by_platform(partial(_gather_alone, write), _gather, array, index)


def _gather(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds")


def _gather_alone(write: Callable[[Array, Array, Array], Array], array: Array, index: Array) -> Array:
    """Gather in one thread.

    XLA for CPUs splits a gather among threads according to the size of its source, not of its result, so a few rows of
    a large buffer take ten times as long as in one thread. It leaves an update that could happen in place to one
    thread, hence the `dynamic_update_slice` here; but if a single kernel reads the rows, the gather becomes part of it.
    """
    # One row more than is written, because XLA would replace an update of the entire array by the rows themselves.
    space = jnp.zeros((len(index) + 1, *array.shape[1:]), array.dtype)
    start = jax.lax.optimization_barrier(jnp.int32(0))  # XLA would turn an update at a constant index into a padding
    return write(space, _gather(array, index), start)[: len(index)]


def layout_of(example: PyTree, flag: str = "uint8") -> Layout:
    """Return the layout of items like `example`, an item or its `ShapeDtypeStruct`; bool scalars are words of type
    `flag`."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: example))
    fields, used = [], dict[str, int]()
    for path, leaf in leaves:
        word = flag if leaf.dtype == bool and leaf.shape == () else f"uint{8 * leaf.dtype.itemsize}"
        start = used.get(word, 0)
        # Leaves of one width are stored consecutively; `used` is the width so far.
        used[word] = start + prod(leaf.shape)
        fields.append(Field(jax.tree_util.keystr(path), leaf.shape, leaf.dtype, word, start))
    return Layout(treedef, tuple(fields))


def empty(layout: Layout, rows: int, block: int = 1, on_host: bool = False) -> Rows:
    """Return `rows` items of zeros, to be written in blocks, in the memory of the device or `on_host`."""
    widths = {f.word: f.start + prod(f.shape) for f in layout.fields}
    words = {word: jnp.zeros((rows, width), word) for word, width in widths.items()}
    return in_place(Rows(words, layout, block, on_host and rows > FEW))


def in_place(tree: PyTree, put: Callable[[Any], Any] = host_memory.to_host) -> PyTree:
    """Return `tree` with all rows that belong in the host's memory put there, by `put`; shapes do not tell where."""
    of_host = lambda x: isinstance(x, Rows) and x.on_host
    return jax.tree.map(lambda x: jax.tree.map(put, x) if of_host(x) else x, tree, is_leaf=of_host)


def bytes_on_host(tree: PyTree) -> int:
    """Return the bytes of all rows of `tree`, or of its shapes, that belong in the host's memory."""
    sizes = [0]
    in_place(tree, lambda x: sizes.append(tree_bytes(x)))
    return sum(sizes)


def join(columns: list[Array]) -> Array:
    """Concatenate columns `[rows, W]`."""
    return jnp.concatenate(columns, axis=1)


def join_short(columns: list[Array]) -> Array:
    """Concatenate columns of words; short ones in one kernel, together with the operations that compute them.

    XLA for CPUs uses a kernel per column for a concatenation without consumer, hands some of many kernels to other
    threads even if they are small, and waits for them. Instead, halves are padded and combined by `or`, so that each
    word takes a few comparisons to find; long rows are copied faster.
    """
    if len(columns) == 1 or not shaped_for("cpu") or sum(column.shape[1] for column in columns) > SHORT:
        return join(columns)
    # Each half is padded to the full width with zeros, which change nothing in an `or`.
    half = len(columns) // 2
    left, right = join_short(columns[:half]), join_short(columns[half:])
    return jnp.pad(left, ((0, 0), (0, right.shape[1]))) | jnp.pad(right, ((0, 0), (left.shape[1], 0)))


def pack(layout: Layout, items: PyTree, join: Callable[[list[Array]], Array] = join) -> dict[str, Array]:
    """Pack items `[rows, ...]` into words `[rows, W]`; raise `SettingsError` unless they are like the layout's example.

    Without this check, another dtype would be cast silently, and another shape would fail deep inside XLA. `join`
    concatenates columns.
    """
    check_items(layout, items)
    columns: dict[str, list[Array]] = {}
    for field, leaf in zip(layout.fields, jax.tree.leaves(items), strict=True):
        columns.setdefault(field.word, []).append(bits_of(leaf, field.word).reshape(leaf.shape[0], -1))
    return {word: join(column) for word, column in columns.items()}


def unpack(layout: Layout, words: dict[str, Array]) -> PyTree:
    """Invert `pack`: return the items in words `[rows, W]`."""

    def leaf(field: Field) -> Array:
        bits = words[field.word][:, field.start : field.start + prod(field.shape)].reshape(-1, *field.shape)
        return value_of(bits, field.dtype)

    return jax.tree.unflatten(layout.treedef, [leaf(field) for field in layout.fields])


def as_read(layout: Layout, items: PyTree) -> PyTree:
    """Return `items` `[rows, ...]` as if they had been read from rows.

    They are packed and unpacked, because XLA for CPUs would fuse their producers into an update, which then rounds
    differently. On other devices this would only copy images (`dqn-nature` on a v5e: 961 000 estimated cycles without,
    and with fewer reads of what is stored apart, 1 174 000 before; on an H200 121 and 127 kernels).
    """
    if shaped_for("cuda", "tpu"):
        return items
    return unpack(layout, jax.lax.optimization_barrier(pack(layout, items)))


class HostRows:
    """Packing on the host, which a program inverts by `unpack`."""

    def __init__(self, layout: Layout, rows: int) -> None:
        """Allocate the words of `rows` items."""
        widths = {f.word: f.start + prod(f.shape) for f in layout.fields}
        self._words = {word: np.zeros((rows, width), word) for word, width in widths.items()}
        self._leaves = [self._place(field) for field in layout.fields]

    def pack(self, items: PyTree) -> dict[str, np.ndarray]:
        """Pack items `[rows, ...]` with NumPy leaves like the layout's example into words `[rows, W]`."""
        for place, leaf in zip(self._leaves, jax.tree.leaves(items), strict=True):
            place[...] = leaf
        # Copies, since a program may still read its arguments after the call returns.
        return {word: x.copy() for word, x in self._words.items()}

    def _place(self, field: Field) -> np.ndarray:
        """Return a view of the words of a leaf; a flag is written as a number."""
        words = self._words[field.word]
        bits = words[:, field.start : field.start + prod(field.shape)].reshape(len(words), *field.shape)
        return bits if field.dtype == bool else bits.view(field.dtype)


def bits_of(leaf: Array, word: str) -> Array:
    """Return the bits of `leaf` as integers of the type `word`."""
    return leaf.astype(word) if leaf.dtype == bool else jax.lax.bitcast_convert_type(leaf, word)


def value_of(bits: Array, dtype: Any) -> Array:
    """Invert `bits_of`, for a leaf of `dtype`."""
    return bits.astype(bool) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, dtype)


def check_items(layout: Layout, items: PyTree) -> None:
    """Raise `SettingsError` at trace time unless `items` are `[rows, ...]` of items that fit `layout`."""
    wanted = {field.path: field for field in layout.fields}
    came = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(items)[0]}
    if wanted.keys() != came.keys():
        odd = min(wanted.keys() ^ came.keys())
        raise SettingsError(f"buffer: pushed items do not have the structure of the example; they differ at {odd}")
    rows = {leaf.shape[:1] for leaf in came.values()}
    for path, leaf in came.items():
        like = wanted[path]
        if leaf.dtype != like.dtype or leaf.shape[1:] != like.shape or leaf.ndim == 0 or len(rows) != 1:
            raise SettingsError(
                f"buffer: pushed {leaf.dtype}{list(leaf.shape)} at {path}; "
                f"expected {like.dtype}, [rows, *{list(like.shape)}], with the same rows in every leaf"
            )


def make_gather(items: PyTree) -> Callable[[Array], PyTree]:
    """Return a function that gathers the items at unique indices `[B]` from `items` `[R, ...]`.

    On CPUs it is one gather of packed rows; elsewhere one per leaf. On a TPU, unpacking rows would take more than half
    of a PPO update (686 000 estimated cycles, 287 000 without); on CUDA both take the same number of
    kernels.
    """
    if not shaped_for("cpu"):
        return lambda index: jax.tree.map(lambda x: _gather_once(x, index), items)
    layout = layout_of(row_struct(items))
    # Packed once, for all minibatches that are gathered.
    words = pack(layout, items)
    return lambda index: unpack(layout, jax.tree.map(lambda x: _gather_once(x, index), words))


def _gather_once(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds", unique_indices=True)

"""Packing of the small leaves of a loop's carry and inputs into one array.

A training state has dozens of small leaves: counters, episode returns, hyperparameters, statistics. XLA uses a kernel
for each of them in every iteration: it copies a carried leaf that is read after it was written, and slices a leaf of
`xs` at the iteration's index. On a GPU each kernel is a launch. On a CPU, XLA hands some kernels to other threads as
soon as more than eight are ready at once, and then waits for those threads.

So the carry between two iterations is a `Bundle`: one array of 32-bit words with the bits of all small leaves, and the
large leaves as they are. The body unpacks it, computes on ordinary trees, and packs the result. The bits do not change,
so neither do results. Rows of `xs` are packed once, before the loop.

Plain: `jax.lax.scan` and `fori_loop`. Used on CPUs (0.84 to 0.95 of the time up to 128 environments) and on CUDA (55
kernels instead of 66 for an iteration of DQN), but not on TPUs (171 000 estimated cycles instead of 135 000).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxrl.shards as shards
from jaxrl.trees import Array, PyTree, require_same, row_struct
from jaxrl.xla import flat, packing, shaped_for
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.packing import join

PACKED = ("cpu", "cuda")
"""Platforms on which small leaves are packed."""
PACKED_WITHIN = ("cuda",)
"""Platforms on which they are also packed in the loop over updates within an iteration."""
LEAF = 128
"""Largest leaf that is packed, in words."""
WORDS = 1024
"""Largest packed array, in words. XLA for CPUs would split the kernel that writes a much larger one among threads."""
WORDS_ON_CUDA = 8192
"""The same on CUDA, where each remaining leaf costs a copy (`dqn` over twenty steps: 41 kernels, 67 with 1 024)."""
WIDE = 32
"""Widest row of a leaf for `pack_columns`, in words."""
IMAGE = 4096
"""Smallest image that is stacked as a flat row on TPUs, in entries."""
_WORD_TYPES = [jnp.dtype(name) for name in ("float32", "int32", "uint32", "bool")]
"""Dtypes that are packed, as words of 32 bits."""


class Bundle(NamedTuple):
    """A tree with its small leaves packed."""

    words: Array
    """Uint32 `[W]`, the bits of the small leaves."""
    large: list[Array]
    """All other leaves, unchanged, in the order of the tree."""


def bundle(
    example: PyTree, join: Callable[[list[Array]], Array] = packing.join_short
) -> tuple[Callable[[PyTree], Bundle], Callable[[Bundle], PyTree]]:
    """Return `pack_tree`, which packs trees like `example`, and its inverse `unpack_tree`.

    The leaves of `example` are arrays, or their shapes and dtypes. `pack_tree` packs the smallest leaves, up to `WORDS`
    words in total (on CUDA `WORDS_ON_CUDA`), joined by `join`. It raises `SettingsError` for a tree with other shapes
    or dtypes.
    """
    example = jax.eval_shape(lambda: example)
    leaves, treedef = jax.tree.flatten(example)
    # Index of a leaf in the tree -> its first word. Smallest first, which packs the most leaves: each saves a kernel,
    # whatever its size.
    tied, words, most = dict[int, int](), 0, WORDS_ON_CUDA if shaped_for("cuda") else WORDS
    for place in sorted(range(len(leaves)), key=lambda i: leaves[i].size):
        if leaves[place].dtype in _WORD_TYPES and leaves[place].size <= LEAF and words + leaves[place].size <= most:
            tied[place] = words
            words += leaves[place].size

    def pack_tree(tree: PyTree) -> Bundle:
        require_same("the carry after an iteration", tree, "that before", example)
        given = jax.tree.leaves(tree)
        # In the order of `tied`, smallest first, which is the order of their first words.
        columns = [packing.bits_of(given[place], "uint32").reshape(1, -1) for place in tied]
        row = join(columns)[0] if columns else jnp.zeros(0, jnp.uint32)
        return Bundle(row, [leaf for place, leaf in enumerate(given) if place not in tied])

    def unpack_tree(bundle: Bundle) -> PyTree:
        large = iter(bundle.large)

        def leaf(place: int, like: Array) -> Array:
            if place not in tied:
                return next(large)
            bits = bundle.words[tied[place] : tied[place] + like.size]
            return packing.value_of(bits.reshape(like.shape), like.dtype)

        return jax.tree.unflatten(treedef, [leaf(place, like) for place, like in enumerate(leaves)])

    return pack_tree, unpack_tree


def pack_rows(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Pack a tree of leaves `[R, ...]` into rows; return them and a function that unpacks one row.

    Rows are packed once for many iterations, so a plain concatenation (`join`), with one kernel per leaf, is worth it.
    """
    if not jax.tree.leaves(tree) or not shaped_for(*PACKED):
        return tree, lambda row: row
    pack_tree, unpack_tree = bundle(jax.tree.map(lambda x: x[0], tree), join)
    return jax.vmap(pack_tree)(tree), unpack_tree


def scan(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    xs: PyTree,
    on: tuple[str, ...] = PACKED,
) -> tuple[PyTree, PyTree]:
    """Compute `jax.lax.scan(body, carry, xs)`, with the carry and the rows of `xs` packed between iterations.

    They are packed `on` these platforms alone; on all, networks are carried as `flat.hold` has them, which saves
    `ppo-1024` on a v5e 5 % of its estimated cycles. In a sharded run the loop over updates is not packed: packed
    together with values per shard, replicated values would count as per shard, too.
    """
    like = jax.eval_shape(lambda: carry)
    hold, release = lambda tree: flat.hold(tree), lambda held: flat.release(held, like)
    rows, row = xs, lambda x: x
    if shaped_for(*on) and not (on == PACKED_WITHIN and shards.is_sharded()):
        pack_tree, unpack_tree = bundle(jax.eval_shape(hold, carry))
        hold, release = lambda tree: pack_tree(flat.hold(tree)), lambda held: flat.release(unpack_tree(held), like)
        rows, row = pack_rows(xs)

    def turn(held: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        with flat.cutting():
            new, y = body(release(held), row(x))
            return hold(new), y

    end, ys = jax.lax.scan(turn, hold(carry), rows)
    return release(end), ys


def scan_rows(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], carry: PyTree, xs: PyTree
) -> tuple[PyTree, PyTree]:
    """Compute `jax.lax.scan(body, carry, xs)` for a body whose outputs all have leaves `[N, ...]`.

    The outputs of an iteration are also packed into rows of bits, which one kernel writes instead of one per leaf, and
    unpacked after the loop. Not on TPUs: stacking leaves of one shape and dtype takes fewer kernels there, but more
    estimated cycles (`a2c`: 952 kernels an iteration instead of 1 002, and 896 000 cycles instead of
    667 000).
    """
    if shaped_for("tpu"):
        return _scan_flat(body, carry, xs)
    if not shaped_for(*PACKED):
        return jax.lax.scan(body, carry, xs)
    _, like = jax.eval_shape(body, carry, jax.tree.map(lambda x: x[0], xs))
    # Flags as 32-bit words, like most leaves, so that there is one array instead of two.
    layout = packing.layout_of(row_struct(like), flag="uint32")
    # The wide leaves of the carry as columns; `scan` packs the small ones.
    hold, release = pack_columns(carry, jax.tree.leaves(like)[0].shape[0])

    def packed(carry: PyTree, x: PyTree) -> tuple[PyTree, dict[str, Array]]:
        carry, out = body(release(carry), x)
        return hold(carry), packing.pack(layout, out)

    carry, words = scan(packed, hold(carry), xs)
    return release(carry), jax.vmap(partial(packing.unpack, layout))(words)


def _scan_flat(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], carry: PyTree, xs: PyTree
) -> tuple[PyTree, PyTree]:
    """Compute `jax.lax.scan(body, carry, xs)` with the large images among its outputs, `[N, H, W, C]`, stacked as flat
    rows in row-major order.

    By default XLA lays out a few images with environments or channels along the 128 lanes, so that most lanes are empty
    and each image is copied twice (`ppo-nature` on a v5e: 2 206 000 estimated cycles an optimisation with, 4 261 000
    without, and 146 MB of temporary memory instead of 579).
    """
    _, like = jax.eval_shape(body, carry, jax.tree.map(lambda x: x[0], xs))

    def in_rows(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        carry, out = body(carry, x)
        row = lambda x: _lay_out_row_major(x.reshape(len(x), -1))
        return carry, jax.tree.map(lambda x: row(x) if _large_images(x) else x, out)

    carry, ys = jax.lax.scan(in_rows, carry, xs)
    return carry, jax.tree.map(lambda y, x: _images(y, x.shape) if _large_images(x) else y, ys, like)


def _images(rows: Array, shape: tuple[int, ...]) -> Array:
    """Return flat rows `[T, N, H * W * C]` as `[T, N, H, W, C]`.

    Without the barrier, XLA moves the reshape behind the gather of a minibatch, and fails: that many long rows do not
    fit into its fast memory.
    """
    return jax.lax.optimization_barrier(_lay_out_row_major(rows).reshape(len(rows), *shape))


def _lay_out_row_major(x: Array) -> Array:
    """Constrain an array to row-major layout."""

    def lay_out() -> Array:
        from jax.experimental.layout import Layout, with_layout_constraint

        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return with_fallback("layouts", lay_out, lambda: x)


def _large_images(x: Array) -> bool:
    return x.ndim == 4 and math.prod(x.shape[1:]) >= IMAGE


def pack_columns(example: PyTree, rows: int) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]]:
    """Return `hold`, which packs leaves `[rows, ...]` of trees like `example` as columns of one array, and its inverse.

    Only on CUDA, and only leaves that are too large for a `Bundle`. One kernel then writes all of them. Otherwise XLA
    writes some twice, since a carried leaf that is read after it was written is copied.
    """
    leaves, treedef = jax.tree.flatten(jax.eval_shape(lambda: example))
    # Leaves of one row per environment, too large for a `Bundle`, but with short rows.
    wide = [leaf.size > LEAF and leaf.shape[0] == rows and leaf.dtype in _WORD_TYPES for leaf in leaves]
    wide = [here and leaf.size <= WIDE * rows for here, leaf in zip(wide, leaves, strict=True)]
    if not shaped_for("cuda") or sum(wide) < 2:
        return lambda tree: tree, lambda tree: tree
    layout = packing.layout_of(
        [row_struct(leaf) for leaf, here in zip(leaves, wide, strict=True) if here], flag="uint32"
    )

    def hold(tree: PyTree) -> PyTree:
        given = list(zip(jax.tree.leaves(tree), wide, strict=True))
        return packing.pack(layout, [leaf for leaf, here in given if here]), [leaf for leaf, here in given if not here]

    def release(held: PyTree) -> PyTree:
        taken, others = iter(packing.unpack(layout, held[0])), iter(held[1])
        return jax.tree.unflatten(treedef, [next(taken if here else others) for here in wide])

    return hold, release


class LoopForm(NamedTuple):
    """Form of the carry of a loop whose start and stop all members of a population share."""

    hold: Callable[[PyTree], PyTree]
    release: Callable[[PyTree], PyTree]
    """The inverse of `hold`."""
    loop: Callable[[Array, Array, Callable[[Array, PyTree], PyTree], PyTree], PyTree]
    """`(start, stop, body, held) -> held`, as `jax.lax.fori_loop`."""


def loop_form(carry: PyTree) -> LoopForm:
    """Return the form of a carry like `carry`.

    On CPUs it is packed, with parameters as vectors; on TPUs only the latter. On CUDA it is packed together with the
    counter of the loop.
    """
    like = jax.eval_shape(lambda: carry)
    # A function of its own: `eval_shape` remembers functions, and the form depends on the platform.
    hold, release = lambda tree: flat.hold(tree), lambda held: flat.release(held, like)
    if not shaped_for(*PACKED):
        return LoopForm(hold, release, jax.lax.fori_loop)
    # Packed with values per shard, the counter would count as per shard, too, and so would the condition of the loop.
    if shaped_for("cuda") and not shards.is_sharded():
        return LoopForm(hold, release, _packed_loop)
    pack_tree, unpack_tree = bundle(jax.eval_shape(hold, carry))
    return LoopForm(lambda tree: pack_tree(hold(tree)), lambda held: release(unpack_tree(held)), jax.lax.fori_loop)


def _packed_loop(start: Array, stop: Array, body: Callable[[Array, PyTree], PyTree], carry: PyTree) -> PyTree:
    """Compute `jax.lax.fori_loop(start, stop, body, carry)`, with the counter packed into the carry.

    A separate counter takes two kernels, an increment and a copy, since the rest of the iteration still reads it
    (`dqn-10` on an H200: 33 kernels an iteration with, 35 without).
    """
    pack_tree, unpack_tree = bundle((start, carry))

    def turn(state: Bundle) -> Bundle:
        t, old = unpack_tree(state)
        return pack_tree((t + 1, body(_share_count(t), old)))

    more = lambda state: _share_count(unpack_tree(state)[0]) < stop
    return unpack_tree(jax.lax.while_loop(more, turn, pack_tree((start, carry))))[1]


@jax.custom_batching.custom_vmap
def _share_count(count: Array) -> Array:
    """Return a counter that all members of a population share, unbatched under `vmap` even if it is packed per member.

    With a batched condition, every iteration of the loop would select between the old and the new carry.
    """
    return count


@_share_count.def_vmap
def _(members: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    return (count[0] if batched[0] else count), False

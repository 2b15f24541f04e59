"""Reductions of a few numbers, and of all numbers of a state, in few kernels.

XLA uses a kernel for a reduction or a concatenation, however few the numbers. Elementwise operations fuse with their
neighbours instead.

- Along a short last axis, such as that of a few actions. Plain: `jnp.argmax`, `jnp.sum` and so on. On CUDA each of
  these is a separate kernel; unrolled, they are elementwise operations on columns (`dqn-10` on an H200, with narrow
  products as sums: 34 kernels an iteration with, 54 without). On CPUs XLA fuses the plain forms as well.
- Sums of a few columns over a batch, such as the gradient of a last bias. Plain: nothing is done. On CUDA XLA fuses
  such a sum into every elementwise kernel that reads it, where one thread adds up the entire batch and recomputes each
  term: in `dqn-10` three kernels of 128 terms, each of which read replay again. Behind a barrier, it is one kernel.
- Stacking of scalars, and summaries of several arrays. Plain: `jnp.stack`, and one summary of the stacked arrays. XLA
  uses a kernel for each scalar of a concatenation, while a chain of selects fuses into one kernel with its consumers.
  Used on CPUs and TPUs (145 000 estimated cycles for an iteration of DQN on a v5e, 154 000 without); on CUDA XLA
  concatenates in one kernel by itself (54 kernels, 57 with the selects).
- Tests whether numbers and states are finite, and selection between two states. Plain: one array of flags for all
  numbers, one for all leaves of a shape, `all`, and selects.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from jaxrl.trees import Array, PyTree
from jaxrl.xla import flat, shaped_for
from jaxrl.xla.flat import vectors_of

SHORT = 8
"""Longest axis that is unrolled."""
WRITTEN_OUT = ("cuda",)
"""Platforms on which it is unrolled."""
STACKED_BY_SELECT = ("cpu", "tpu")
"""Platforms on which scalars are stacked by selects."""


# --- along a short axis -----------------------------------------------------------------------------------------


def argmax(x: Array) -> Array:
    """Return the index of the first largest entry, `[..., A] -> [...]`."""
    if not _short(x):
        return jnp.argmax(x, axis=-1)
    first, *others = _columns(x)
    place, most = jnp.zeros(first.shape, jnp.int32), first
    # Strictly greater, so that the first of several equal entries is kept.
    for i, column in enumerate(others, 1):
        place, most = jnp.where(column > most, i, place), jnp.maximum(most, column)
    return place


def largest(x: Array) -> Array:
    """Return the largest entry, `[..., A] -> [...]`."""
    return reduce(jnp.maximum, _columns(x)) if _short(x) else jnp.max(x, axis=-1)


def total(x: Array, where: Array | None = None) -> Array:
    """Return the sum of the entries, or of those `where` is true, `[..., A] -> [...]`."""
    if not _short(x):
        return jnp.sum(x, axis=-1, where=where)
    return sum(_columns(x if where is None else jnp.where(where, x, 0)))  # type: ignore[return-value]


def entry(row: Array, index: Array) -> Array:
    """Return `row[..., index]` as a masked sum, which fuses; the gradient of an index would be a scatter."""
    places = jnp.arange(row.shape[-1], dtype=jnp.int32)
    if index.ndim:
        places, index = places.reshape((1,) * index.ndim + (-1,)), index[..., None]
    return total(row, places == index)


def all_true(x: Array) -> Array:
    """Return whether all flags are true, `[..., A] -> [...]`."""
    return reduce(jnp.logical_and, _columns(x)) if _short(x) else x.all(axis=-1)


def log_softmax(x: Array) -> Array:
    """Return the logarithm of the softmax, `[..., A] -> [..., A]`."""
    if not _short(x):
        return jax.nn.log_softmax(x)
    shifted = x - jax.lax.stop_gradient(largest(x))[..., None]
    return shifted - jnp.log(total(jnp.exp(shifted)))[..., None]


def _short(x: Array) -> bool:
    return shaped_for(*WRITTEN_OUT) and 1 <= x.shape[-1] <= SHORT


def _columns(x: Array) -> list[Array]:
    return [x[..., i] for i in range(x.shape[-1])]


def sum_once(grads: PyTree) -> PyTree:
    """Return a gradient whose leaves of at most `SHORT` entries are each computed in a separate kernel."""
    if not shaped_for("cuda"):
        return grads
    return jax.tree.map(lambda x: jax.lax.optimization_barrier(x) if x.size <= SHORT else x, grads)


# --- of several scalars and arrays ------------------------------------------------------------------------------


def stack_scalars(scalars: Sequence[Array]) -> Array:
    """Stack scalars, `M` times `[]` to `[M]`."""
    if not shaped_for(*STACKED_BY_SELECT):
        return jnp.stack(scalars)
    place = jnp.arange(len(scalars), dtype=jnp.int32)
    stacked = jnp.broadcast_to(scalars[0], place.shape)
    for i, scalar in enumerate(scalars[1:], 1):
        stacked = jnp.where(place == i, scalar, stacked)
    return stacked


def stack_summaries(summary: Callable[[Array], PyTree], arrays: Sequence[Array]) -> PyTree:
    """Return the stacked `summary` of each of several arrays of one shape, trees of `[M]`.

    Plain: `summary` under `vmap`. On TPUs each array is summarised separately: XLA still reduces them in one kernel,
    but without a copy into one array, and without kernels that slice the result (`dqn-128` on a v5e: 111 000 estimated
    cycles an iteration with, 124 000 without).
    """
    if shaped_for("tpu"):
        return jax.tree.map(lambda *each: jnp.stack(each), *[summary(x) for x in arrays])
    return jax.vmap(summary)(jnp.stack(arrays))


# --- finiteness -------------------------------------------------------------------------------------------------


def find_non_finite(numbers: Sequence[Array], labels: Array) -> tuple[Array, Array]:
    """Return whether `M` scalars are all finite, and the label, of `labels` `[M]`, of the first that is not.

    If all are finite, it is the first label.
    """
    fine = jnp.isfinite(stack_scalars([jnp.asarray(x, jnp.float32) for x in numbers]))
    # The smallest flag is the first false one, or the first of all if every one is true.
    return _all_flags(fine), labels[jnp.argmin(fine)]


def _all_flags(flags: Array) -> Array:
    """Return whether all of `flags` `[M]` are true.

    As a dot product, the result is a number in memory. On a CPU any simpler form would be fused into its readers, and
    every entry of the state selected by it would recompute the batch's means. Elsewhere it would be a kernel more.
    """
    if not shaped_for("cpu"):
        return jnp.all(flags)
    fine = flags.astype(jnp.float32)
    return jnp.vdot(fine, fine) == len(fine)


def stays_finite(tree: PyTree, before: PyTree) -> Array:
    """Return whether all floating-point entries of `tree` that were finite in `before` still are; a scalar bool.

    Entries that were infinite, such as bounds before the first update, may stay so. Leaves of one shape share a
    reduction, such as parameters, their moments and a target network; it is the expensive part on a CPU. On CUDA all
    leaves share one.
    """
    finite: dict[tuple[int, ...], Array] = {}
    # Flags are combined elementwise before they are reduced.
    for leaf, old in zip(*map(jax.tree.leaves, vectors_of(tree, before)), strict=True):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            shape, fine = jnp.shape(leaf), jnp.isfinite(leaf) | ~jnp.isfinite(old)
            finite[shape] = fine & finite[shape] if shape in finite else fine
    flags = list(finite.values())
    flags = _merge_flags(flags) if shaped_for("cuda") else flags
    return reduce(jnp.logical_and, (jnp.all(x) for x in flags), jnp.bool_(True))


def _merge_flags(flags: list[Array]) -> list[Array]:
    """Return one vector of flags for arrays of all shapes, padded to the longest; scalars stay separate.

    XLA for CUDA makes each shape a kernel that writes flags, and one that reduces them (`sac` on an H200, with a policy
    and critics: 61 kernels an iteration with, 63 without). It would split the reduction of a concatenation likewise.
    """
    longest = max((x.size for x in flags), default=0)
    several = [jnp.pad(x.ravel(), (0, longest - x.size), constant_values=True) for x in flags if x.size > 1]
    return [x for x in flags if x.size == 1] + ([reduce(jnp.logical_and, several)] if several else [])


def select(ok: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new` if the scalar `ok` is true, otherwise `old`; leaves that are one and the same array stay that."""
    return flat.elementwise(lambda new, old: old if new is old else jnp.where(ok, new, old), new, old)

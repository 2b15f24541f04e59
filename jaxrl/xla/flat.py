"""Small leaves of a tree of parameters as one vector of each dtype.

Elementwise operations on all parameters (optimizer, target network, undoing an update) then take one kernel instead of
one per leaf. On a GPU each kernel is a launch; on a CPU, XLA hands some of many small kernels to other threads and
waits. A large leaf has its own kernel anyway, and is not copied.

States hold trees, of parameters and of what optimizers keep for each. In a loop, a tree made from a vector is
remembered together with that vector (`ravel` returns it), so that leaves are sliced only where a network reads them: on
CPUs and TPUs, `dqn-128` takes 0.88 of the time. On CUDA a loop carries only what optimizers keep as vectors; without
that, `dqn-10` takes 37 kernels an iteration on an H200 instead of 31. Plain: `jax.tree.map`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.trees import Array, PyTree
from jaxrl.xla import shaped_for

LARGE, LARGE_ON_CPU = 1 << 17, 3 << 14
"""Largest leaf that is joined with others, in entries. On a CPU the matrix of a layer of 256 units is larger, because
joining it costs more than its own kernels: with the other limit, `ppo` with two layers of 256 units takes 1.3 of the
time, and so does `dqn-conv`. With the limit for CPUs, `dqn-conv` takes 77 kernels an iteration on an H200 instead of
74; on a v5e it takes 0.96 of the estimated cycles, but `ppo-conv` 1.09."""
MATRIX = 1 << 14
"""Largest matrix that a loop carries in addition to the vector, in entries. Larger ones are better sliced at the start
of the next iteration, in parallel with other work."""

Path = tuple[Any, ...]
"""Keys from the root of a tree to one of its nodes."""

_made: ContextVar[dict[int, tuple[list[Array], list[Array]]] | None] = ContextVar("made", default=None)
"""Trees made by `unravel` in the loop being traced: identity of the first leaf -> all leaves, and the vectors. The
leaves are kept alive, so that no identity is reused."""


def ravel(tree: PyTree) -> list[Array]:
    """Return the small leaves of `tree` as one vector `[P]` of each dtype, followed by the large leaves."""
    if (parts := _find_vectors(tree)) is not None:
        return parts
    leaves = jax.tree.leaves(tree)
    small, large = _divide(leaves)
    return [*(_join([leaves[i] for i in alike]) for alike in small), *(leaves[i] for i in large)]


def unravel(parts: list[Array], like: PyTree) -> PyTree:
    """Invert `ravel`: return the tree with the shapes and dtypes of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    small, large = _divide(leaves)
    # What is remembered for the tree has its numbers, rounded as they are.
    parts = [x.astype(leaves[i].dtype) for x, i in zip(parts, [*(alike[0] for alike in small), *large], strict=True)]
    for vector, alike in zip(parts, small, strict=False):
        pieces = jnp.split(vector, np.cumsum([leaves[i].size for i in alike])[:-1])
        for i, piece in zip(alike, pieces, strict=True):
            leaves[i] = piece.reshape(leaves[i].shape)
    for i, leaf in zip(large, parts[len(small) :], strict=True):
        leaves[i] = leaf
    _keep(leaves, parts)
    return jax.tree.unflatten(treedef, leaves)


def ravel_networks(tree: PyTree) -> PyTree:
    """Return `tree` with the parameters of each network in it as `ravel` returns them."""
    return jax.tree.map(lambda x: ravel(x) if is_network(x) else x, tree, is_leaf=is_network)


def unravel_networks(raveled: PyTree, like: PyTree) -> PyTree:
    """Invert `ravel_networks`: return the tree with the structure of `like`. Networks may have stayed trees."""
    tree_of = lambda x, parts: unravel(parts, x) if is_network(x) and isinstance(parts, list) else parts
    return jax.tree.map(tree_of, like, raveled, is_leaf=is_network)


def vectors_of(*trees: PyTree) -> list[PyTree]:
    """Return the trees with each network's variables raveled, if those of all trees were made from vectors."""
    if _made.get() is None:
        return list(trees)

    # A network counts as a vector only if it is one in every tree: leaves of one cannot be combined with the vector of
    # another.
    nodes = [jax.tree.leaves(tree, is_leaf=is_network) for tree in trees]
    rows = []
    for row in zip(*nodes, strict=True):
        parts = [_find_vectors(x) if is_network(x) else None for x in row]
        rows.append(row if any(x is None for x in parts) else parts)
    structures = [jax.tree.structure(tree, is_leaf=is_network) for tree in trees]
    return [jax.tree.unflatten(structure, [row[i] for row in rows]) for i, structure in enumerate(structures)]


def trees_of(vectors: PyTree, like: PyTree) -> PyTree:
    """Invert `vectors_of`: return the tree with the structure of `like`."""
    return vectors if _made.get() is None else unravel_networks(vectors, like)


def elementwise(f: Callable[..., Array], *trees: PyTree) -> PyTree:
    """Compute `jax.tree.map(f, *trees)` for an elementwise `f`, on vectors where the trees were made from them."""
    return trees_of(jax.tree.map(f, *vectors_of(*trees)), trees[0])


def hold(tree: PyTree) -> PyTree:
    """Return `tree` in the form that a loop carries: networks as vectors, and their small matrices in addition.

    On CUDA, only what an optimizer holds for a network, which nothing reads as matrices.
    """
    nodes, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_network)
    vectors, matrices = [], []
    for path, x in nodes:
        is_held = _is_held(path, x)
        parts = ravel(x) if is_held else x
        if is_held and not _of_optimizer(path):
            if any(map(_beside, jax.tree.leaves(x))):
                # The barrier makes the matrices slices of the very numbers that are carried. Otherwise XLA may compute
                # them again from what the vector was computed from, and round them differently. After the loop a tree
                # is made from both, so the bits of a run would depend on where its calls end.
                count = len(_divide(jax.tree.leaves(x))[0])
                parts = [*jax.lax.optimization_barrier(parts[:count]), *parts[count:]]
            matrices.append(list(filter(_beside, jax.tree.leaves(unravel(parts, x)))))
        vectors.append(parts)
    return jax.tree.unflatten(structure, vectors), matrices


def release(held: PyTree, like: PyTree) -> PyTree:
    """Invert `hold`: return the tree with the structure of `like`."""
    vectors, matrices = held
    given = iter(matrices)

    def released(path: Path, x: PyTree, parts: PyTree) -> PyTree:
        if not _is_held(path, x):
            return parts
        tree = unravel(parts, x)
        if _of_optimizer(path):
            return tree
        cut = iter(next(given))
        # The matrices that are carried in addition, and slices of the vector for the other leaves.
        leaves = [next(cut) if _beside(leaf) else leaf for leaf in jax.tree.leaves(tree)]
        # Again, because `unravel` has remembered the slices alone.
        _keep(leaves, parts)
        return jax.tree.unflatten(jax.tree.structure(x), leaves)

    return jax.tree_util.tree_map_with_path(released, like, vectors, is_leaf=is_network)


def form_of(state: PyTree) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]]:
    """Return `hold` and `release` for states like `state`, if the loop being traced carries them in that form."""
    if _made.get() is None:
        return lambda tree: tree, lambda held: held
    return hold, lambda held: release(held, state)


@contextmanager
def cutting() -> Iterator[None]:
    """Remember, while the body of a loop is traced, which leaves were sliced from which vector."""
    token = _made.set({})
    try:
        yield
    finally:
        _made.reset(token)


def is_network(x: PyTree) -> bool:
    """Return whether `x` are the variables of a Flax network that has nothing but parameters."""
    return isinstance(x, dict) and set(x) == {"params"}


def _is_held(path: Path, x: PyTree) -> bool:
    """Return whether a loop carries the node `x` of a state as vectors."""
    return is_network(x) and (shaped_for("cpu", "tpu") or (shaped_for("cuda") and _of_optimizer(path)))


def _of_optimizer(path: Path) -> bool:
    """Return whether a node belongs to the state of an optimizer, by the name that it has in states of agents."""
    return any(getattr(key, "name", None) == "opt_state" for key in path)


def _divide(leaves: list[Array]) -> tuple[list[list[int]], list[int]]:
    """Return the indices of the small leaves, by dtype, and those of the large ones."""
    small, large = dict[Any, list[int]](), list[int]()
    for i, leaf in enumerate(leaves):
        (small.setdefault(leaf.dtype, []) if _is_small(leaf) else large).append(i)
    return list(small.values()), large


def _is_small(leaf: Array) -> bool:
    return leaf.size <= (LARGE if shaped_for("cuda", "tpu") else LARGE_ON_CPU)


def _beside(leaf: Array) -> bool:
    return len(leaf.shape) > 1 and math.prod(leaf.shape) <= MATRIX


def _keep(leaves: list[Array], parts: list[Array]) -> None:
    made = _made.get()
    if made is not None and leaves:
        made[id(leaves[0])] = leaves, parts


def _find_vectors(tree: PyTree) -> list[Array] | None:
    """Return the vectors from which `tree` was made in the loop being traced, or `None`."""
    leaves = jax.tree.leaves(tree)
    made, parts = (_made.get() or {}).get(id(leaves[0]) if leaves else 0, ((), None))
    # All leaves must be the very same arrays. If one was replaced, the vector no longer holds the tree.
    same = len(made) == len(leaves) and all(a is b for a, b in zip(made, leaves, strict=True))
    return parts if same else None


def _join(leaves: list[Array]) -> Array:
    """Return leaves of one dtype as a vector."""
    if not shaped_for("cpu"):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
    ends = np.cumsum([leaf.size for leaf in leaves])
    vector = jnp.zeros(ends[-1], leaves[0].dtype)
    # Leaves are written one by one: XLA for CPUs would fuse the sums of a gradient into a concatenation and compute
    # them entry by entry. The largest comes first: XLA turns the first write into a padding, into which it fuses sums
    # as well.
    for leaf, end in sorted(zip(leaves, ends, strict=True), key=lambda pair: -pair[0].size):
        vector = vector.at[end - leaf.size : end].set(jnp.ravel(leaf))
    return vector

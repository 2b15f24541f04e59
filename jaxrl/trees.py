"""Operations on trees of arrays: selection, sizes, comparison of structure, and paths of leaves."""

import math
import urllib.parse
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError

Array = jax.Array
Key = jax.Array
"""A typed PRNG key, as returned by `jax.random.key`."""
PyTree = Any


def make_key(seed: int | Array) -> Key:
    """Return the Threefry-2x32 key of a seed, whatever `jax_default_prng_impl` is set to.

    So the random numbers of a run depend on its seed alone.
    """
    return jax.random.key(seed, impl="threefry2x32")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf, an array or its shape and dtype, holds typed keys."""
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def key_impl(keys: Any) -> str:
    """Return the name of the PRNG implementation of typed keys, which may be a `ShapeDtypeStruct`."""
    if isinstance(keys, jax.Array):
        return str(jax.random.key_impl(keys))
    found: list[str] = []
    # `jax.random.key_impl` does not take a `ShapeDtypeStruct`; inside a trace it becomes an array.
    jax.eval_shape(lambda keys: found.append(str(jax.random.key_impl(keys))), keys)
    return found[0]


def tree_where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Select `new` or `old` leaf by leaf; `condition` is a scalar, or `[N]` for leaves `[N, ...]`."""

    def choose(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(choose, new, old)


def row_struct(tree: PyTree) -> PyTree:
    """Return the `ShapeDtypeStruct`s of one row of leaves `[rows, ...]`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def tree_repeat(tree: PyTree, times: int) -> PyTree:
    """Return `tree` with leaves `[times, ...]`, each row of which is the leaf."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (times, *x.shape)), tree)


def tree_bytes(tree: PyTree) -> int:
    """Return the size in bytes of all leaves, which may be arrays, `ShapeDtypeStruct`s or keys."""

    def leaf_bytes(leaf: Any) -> int:
        itemsize = 16 if is_key(leaf) else np.dtype(leaf.dtype).itemsize
        return math.prod(leaf.shape) * itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def require_same(what: str, tree: PyTree, other: str, expected: PyTree) -> None:
    """Raise `SettingsError`, naming the first leaf of `tree` that differs from `expected` in path, shape or dtype."""
    came, wanted = (dict(jax.tree_util.tree_flatten_with_path(t)[0]) for t in (tree, expected))
    for path in sorted({*came, *wanted}, key=str):
        where = jax.tree_util.keystr(path) or "the array"
        if path not in came or path not in wanted:
            missing, has = (what, other) if path not in came else (other, what)
            raise SettingsError(f"{missing} has no leaf {where}, but {has} has; keep the structure the same")
        a, b = came[path], wanted[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise SettingsError(
                f"{what} has {a.dtype}{list(a.shape)} at {where}; {other} has {b.dtype}{list(b.shape)}; "
                "make them the same"
            )


# --- paths ------------------------------------------------------------------------------------------------------

ESCAPED, NO_NAME = {"%": "%25", "/": "%2F", ".": "%2E"}, "%"


def path_of(keys: Sequence[Any]) -> str:
    """Return the path of a leaf from its JAX key path: names of fields and entries, and places in sequences.

    `%`, `/`, `.` and unprintable characters are percent-encoded: `/` separates names here, and `.` in Orbax. An empty
    name is `%`, and a tree that is a single array has the path `array`.
    """
    names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    return "/".join("".join(map(_escape, name)) or NO_NAME for name in names) or "array"


def _escape(c: str) -> str:
    return ESCAPED.get(c) or (c if c.isprintable() else urllib.parse.quote(c, safe="", errors="replace"))


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return leaves by path with `/`, as `flax.traverse_util.flatten_dict(tree, sep="/")` does of nested dicts.

    Unlike those of `path_of`, names are as they are.
    """
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def is_part(path: str, pattern: str) -> bool:
    """Return whether `pattern` matches a leaf or one of its parents: a path, with `*` for any text in a name."""
    names, wanted = path.split("/"), pattern.split("/")
    return len(names) >= len(wanted) and all(map(fnmatchcase, names, wanted))


def parts_of(paths: Sequence[str]) -> set[str]:
    """Return all paths that a pattern without `*` may name: `paths` and their prefixes."""
    return {"/".join(names[: i + 1]) for path in paths for names in [path.split("/")] for i in range(len(names))}

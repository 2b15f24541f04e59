"""The leaves of a training state as plain arrays: paths, shapes, dtypes, checksums, and the digest of them all.

A leaf's path is made of the names on the way to it: `state/agent/params/params/Dense_0/kernel`. On disk it is the same
path in nested dictionaries (`nested`), which is what Orbax returns to whoever restores a checkpoint without jaxrl.
"""

import functools
import hashlib
import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.trees import PyTree, is_key, key_impl, path_of

MAX_DEPTH, MAX_PATH = 64, 4096
"""Nested dictionaries, and characters of a path, at most."""

Entry = dict[str, Any]
"""What a checkpoint's manifest says of one leaf: `path`, `shape`, `dtype`, and `crc32` of its bytes."""


def host_leaves(tree: PyTree) -> dict[str, np.ndarray]:
    """Copy every leaf of `tree` to the host, PRNG keys as their numbers; return them by their paths."""
    # A plain device_get may be a view of the device's memory, which a donated buffer's next owner overwrites.
    return {path: np.array(leaf, copy=True) for path, leaf in flatten(tree)}


def like_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the shapes and dtypes of `host_leaves(tree)`, by path; `tree` may hold arrays or shapes."""
    return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flatten(tree)}


def rebuild(like: PyTree, arrays: Sequence[np.ndarray]) -> PyTree:
    """Return `arrays`, in the order of `host_leaves`, as a tree on the device with the structure of `like`."""

    def wrap(leaf: Any, array: np.ndarray) -> jax.Array:
        if not is_key(leaf):
            return jax.numpy.asarray(array)
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=key_impl(leaf))

    # Keys are wrapped only here: on disk they are the numbers of their data.
    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(treedef, [wrap(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])


def digest(leaves: Mapping[str, np.ndarray]) -> str:
    """Return the sha256 over `leaves`: paths, dtypes, shapes and bytes, in their order."""
    sha = hashlib.sha256()
    for path, array in leaves.items():
        sha.update(f"{path} {array.dtype} {array.shape};".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def state_digest(state: PyTree) -> str:
    """Return the sha256 of a training state; two runs are bitwise equal if theirs are."""
    return digest(host_leaves(state))


def describe_leaf(path: str, leaf: Any) -> Entry:
    """Return the entry of a leaf without its checksum; arrays and shapes alike."""
    return {"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def mismatch(saved: Sequence[Entry], wanted: Mapping[str, Any]) -> str | None:
    """Say where `wanted` (shapes by path) first differs from the entries `saved`; `None` if nowhere."""
    entries = {entry["path"]: entry for entry in saved}
    for path, leaf in wanted.items():
        if path not in entries:
            return f"it has no leaf {path}"
        new = describe_leaf(path, leaf)
        for what in ("shape", "dtype"):
            if entries[path][what] != new[what]:
                return f"{path} has {what} {entries[path][what]}, expected {new[what]}"
    extra = [path for path in entries if path not in wanted]
    if extra:
        return f"it also has a leaf {extra[0]}"
    # Leaves are put back by their order, so the order must agree as well.
    return None if list(entries) == list(wanted) else "its leaves are in another order"


def flatten(tree: PyTree) -> list[tuple[str, Any]]:
    """List the leaves with their paths; keys as their data under a path that names their kind; shapes stay shapes."""

    def plain(path: str, leaf: Any) -> tuple[str, Any]:
        if not is_key(leaf):
            return path, leaf
        data = jax.eval_shape if isinstance(leaf, jax.ShapeDtypeStruct) else lambda f, key: f(key)
        return f"{path}<{key_impl(leaf)}>", data(jax.random.key_data, leaf)

    return [plain(path_of(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def is_path(path: str) -> bool:
    """Say whether a string can be the path of a leaf; one that cannot might lead anywhere on a disk."""
    return len(path) <= MAX_PATH and path.isprintable() and all(name and "." not in name for name in path.split("/"))


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arrays`, given by path, as nested dictionaries.

    Raises:
      ValueError: a path is nested too deeply, or conflicts with another, as no tree's do, but a stranger's file may.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *way, last = path.split("/")
        place = tree
        for name in way:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ValueError(f"{path[:200]} conflicts with the array at a part of it")
        if last in place:
            raise ValueError(f"{path[:200]} conflicts with the arrays below it")
        if len(way) > MAX_DEPTH:
            raise ValueError(f"{path[:200]} is nested too deeply; at most {MAX_DEPTH} levels can be saved")
        place[last] = array
    return tree


def by_path(tree: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return the arrays at `paths` in nested dictionaries; the inverse of `nested`."""
    return {path: functools.reduce(operator.getitem, path.split("/"), tree) for path in paths}

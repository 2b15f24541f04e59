"""Leaves of a training state as plain arrays: paths, shapes, dtypes, checksums, and a digest.

A leaf's path joins the keys that lead to it: `state/agent/params/params/Dense_0/kernel`. On disk the same keys form
nested dictionaries (`nest`), which Orbax returns to users who restore a checkpoint without jaxrl.
"""

import functools
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.training.processes import as_keys
from jaxrl.trees import PyTree, is_key, key_impl, path_of

MAX_DEPTH, MAX_PATH = 64, 4096
"""Maximum nesting of dictionaries, and characters of a path."""

Entry = dict[str, Any]
"""Entry of a leaf in a checkpoint's manifest: `path`, `shape`, `dtype`, and `crc32` of its bytes."""


class HostKeys:
    """PRNG keys as a leaf of a tree on the host: each access to typed keys would run a program on the device."""

    def __init__(self, data: np.ndarray, impl: str) -> None:
        """Hold the key data of keys of the implementation `impl`."""
        self.data, self.impl = data, impl


def host_leaves(tree: PyTree) -> dict[str, np.ndarray]:
    """Copy every leaf of `tree` to the host and return them by path; PRNG keys become their key data."""
    # `device_get` may return a view of device memory, which is overwritten once the buffer is donated.
    return {path: np.array(leaf, copy=True) for path, leaf in flatten(tree)}


def rebuild(like: PyTree, arrays: Sequence[np.ndarray]) -> PyTree:
    """Return `arrays`, in the order of `host_leaves`, as a tree on the device with the structure of `like`."""
    # On disk, PRNG keys are plain key data.
    leaves, treedef = jax.tree.flatten(like)
    pairs = zip(leaves, map(jax.numpy.asarray, arrays), strict=True)
    return jax.tree.unflatten(treedef, [as_keys(leaf, array) for leaf, array in pairs])


def digest(leaves: Mapping[str, np.ndarray]) -> str:
    """Return the sha256 over paths, dtypes, shapes and bytes of `leaves`, in order."""
    sha = hashlib.sha256()
    for path, array in leaves.items():
        sha.update(f"{path} {array.dtype} {array.shape};".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def state_digest(state: PyTree) -> str:
    """Return the sha256 of a training state; two runs are bitwise equal if theirs are."""
    return digest(host_leaves(state))


def describe_leaf(path: str, leaf: Any) -> Entry:
    """Return the manifest entry of an array or shape, without the checksum."""
    return {"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def mismatch(saved: Sequence[Entry], wanted: Mapping[str, Any]) -> str | None:
    """Describe the first difference between `wanted` (shapes by path) and the entries `saved`; `None` if equal."""
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
    # Leaves are restored by position, so the order must be equal too.
    return None if list(entries) == list(wanted) else "its leaves are in another order"


def flatten(tree: PyTree) -> list[tuple[str, Any]]:
    """Return `(path, leaf)` pairs; PRNG keys become key data, with the implementation in the path; shapes are kept."""

    def plain(path: str, leaf: Any) -> tuple[str, Any]:
        if isinstance(leaf, HostKeys):
            return f"{path}<{leaf.impl}>", leaf.data
        if not is_key(leaf):
            return path, leaf
        data = jax.eval_shape if isinstance(leaf, jax.ShapeDtypeStruct) else lambda f, key: f(key)
        return f"{path}<{key_impl(leaf)}>", data(jax.random.key_data, leaf)

    leaves, structure = jax.tree.flatten(tree)
    return [plain(path, leaf) for path, leaf in zip(_paths(structure), leaves, strict=True)]


@functools.lru_cache(maxsize=64)
def _paths(structure: Any) -> tuple[str, ...]:
    """Return the paths of the leaves of a tree: to spell them takes longer than to copy small leaves."""
    keyed = jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return tuple(path_of(keys) for keys, _ in keyed)


def is_path(path: str) -> bool:
    """Return whether `path` is valid for a leaf; any other might escape the checkpoint's directory."""
    return len(path) <= MAX_PATH and path.isprintable() and all(name and "." not in name for name in path.split("/"))


def nest(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arrays`, given by path, as nested dictionaries.

    Raises:
      ValueError: a path is nested too deeply or conflicts with another, as is possible in untrusted files.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *way, last = path.split("/")
        node = tree
        for name in way:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path[:200]} conflicts with the array at a part of it")
        if last in node:
            raise ValueError(f"{path[:200]} conflicts with the arrays below it")
        if len(way) > MAX_DEPTH:
            raise ValueError(f"{path[:200]} is nested too deeply; at most {MAX_DEPTH} levels can be saved")
        node[last] = array
    return tree

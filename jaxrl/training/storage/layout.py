"""Validation of a checkpoint's arrays on disk, before any library opens them.

TensorStore trusts the sizes in its files, and a C++ library that runs out of memory aborts the process. So its metadata
is first checked against the manifest, and the manifest against the available memory: both may be malicious.
"""

import json
import math
import resource
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.training.memory import host_bytes
from jaxrl.training.storage.files import read_text

ZARRAY, TREE, DATABASE = ".zarray", "_METADATA", "manifest.ocdbt"
"""Metadata files of an array (Zarr version 2), of the tree (Orbax), and of a database of arrays (OCDBT)."""
EXPANSION = 1 << 15
"""Maximum expansion of Zstandard: a block of 4 bytes decompresses to at most 128 KiB (RFC 8878)."""
SLACK = 1 << 26
"""Bytes that a checkpoint's files may take in addition to twice the size of its arrays."""
KINDS = ("np.ndarray", "jax.Array", "scalar")
"""Orbax's names for the types of leaves."""


class LayoutError(Exception):
    """Arrays on disk that are not in the form jaxrl writes."""


def address_space() -> int:
    """Return the maximum memory of this process in bytes."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return host_bytes() if allowed == resource.RLIM_INFINITY else min(host_bytes(), allowed)


def require_possible(directory: Path, arrays: int) -> None:
    """Raise `LayoutError` if the arrays' size in bytes exceeds the memory, or the files are far larger than that."""
    if arrays > (most := address_space()):
        raise LayoutError(f"its arrays would take {arrays:.3g} bytes, and this machine has {most:.3g}")
    files = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if files > 2 * arrays + SLACK:
        raise LayoutError(f"its files take {files:.3g} bytes, and its arrays {arrays:.3g}")


def require_layout(path: Path, wanted: Mapping[str, Any]) -> None:
    """Raise `LayoutError` unless the directory `path` has exactly the arrays `wanted` (shapes by path).

    Raises:
      OSError: a file cannot be read.
    """
    # The files determine the format; the tree's metadata must agree.
    is_database = (path / DATABASE).exists()
    _require_tree(_parse(TREE, read_text(path / TREE)), wanted, is_database)
    files = _Database(path) if is_database else _Folders(path)
    for name, leaf in wanted.items():
        chunks = _require_array(name, _parse(f"{name}/{ZARRAY}", files.description(name)), leaf)
        count, size = files.chunks(name, chunks)
        if count != math.prod(-(-n // c) for n, c in zip(leaf.shape, chunks, strict=True)):
            raise LayoutError(f"{name} has {count} chunks, which are not all of it")
        # Smaller than any compression could make it.
        if size * EXPANSION < math.prod(leaf.shape) * leaf.dtype.itemsize:
            raise LayoutError(f"{name} has {size} bytes on disk, which cannot be all of it")


def _orbax_name(path: str) -> str:
    """Return the name of an array's directory in Orbax."""
    return path.replace("/", ".")


class _Folders:
    """Arrays in one directory each, with a file for every chunk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def description(self, name: str) -> str:
        return read_text(self._path / _orbax_name(name) / ZARRAY)

    def chunks(self, name: str, sizes: Collection[int]) -> tuple[int, int]:
        """Return the number of an array's chunks and their total size in bytes."""
        found = [entry for entry in (self._path / _orbax_name(name)).iterdir() if entry.name != ZARRAY]
        _require_names(name, (entry.name for entry in found), len(sizes))
        return len(found), sum(entry.stat().st_size for entry in found)


class _Database:
    """Arrays in a database (OCDBT), as several processes and populations write them."""

    def __init__(self, path: Path) -> None:
        import tensorstore

        # Keys are `ARRAY/.zarray` and `ARRAY/CHUNK`, like the paths of files in directories.
        base = {"driver": "file", "path": f"{path.absolute()}/"}
        self._store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        self._entries: dict[str, list[str]] = {}
        for key in self._store.list().result():
            array, _, entry = key.decode(errors="replace").partition("/")
            self._entries.setdefault(array, []).append(entry)
        self._size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    def description(self, name: str) -> str:
        return bytes(self._store.read(f"{_orbax_name(name)}/{ZARRAY}").result().value).decode()

    def chunks(self, name: str, sizes: Collection[int]) -> tuple[int, int]:
        """Return the number of an array's chunks, and the size in bytes of the entire database."""
        found = [entry for entry in self._entries.get(_orbax_name(name), ()) if entry != ZARRAY]
        _require_names(name, found, len(sizes))
        return len(found), self._size


def _require_names(name: str, chunks: Iterable[str], dimensions: int) -> None:
    """Raise `LayoutError` unless all chunks of an array are named by their indices, such as `0.3`."""
    for chunk in chunks:
        parts = chunk.split(".")
        if len(parts) != max(dimensions, 1) or not all(part.isascii() and part.isdecimal() for part in parts):
            raise LayoutError(f"{name} has something else inside: {chunk[:40]}")


def _parse(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON object; raise `LayoutError` if `text` is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{name} cannot be read") from error
    if not isinstance(found, dict):
        raise LayoutError(f"{name} cannot be read")
    return found


def _require_tree(tree: Mapping[str, Any], wanted: Collection[str], is_database: bool) -> None:
    """Raise `LayoutError` unless Orbax's tree has exactly these arrays, in nested dictionaries and in this format."""
    if tree.get("use_zarr3") or bool(tree.get("use_ocdbt", is_database)) != is_database:
        raise LayoutError(f"{TREE} names another form of arrays")
    leaves = tree.get("tree_metadata")
    try:
        # Orbax stores the keys of its tree as strings of tuples.
        names = {str(tuple(path.split("/"))) for path in wanted}
        good = set(leaves) == names and all(map(_is_array, leaves, leaves.values()))  # type: ignore[arg-type, union-attr]
    except (TypeError, AttributeError, KeyError, ValueError):  # untrusted data may have any structure
        good = False
    if not good:
        raise LayoutError(f"{TREE} names other arrays than the manifest")


def _is_array(key: str, leaf: Mapping[str, Any]) -> bool:
    """Return whether `leaf` is an array in nested dictionaries under the names in `key`."""
    names = tuple(step["key"] for step in leaf["key_metadata"])
    dictionaries = all(step["key_type"] == 2 for step in leaf["key_metadata"])
    return key == str(names) and dictionaries and leaf["value_metadata"]["value_type"] in KINDS


def _require_array(name: str, found: Mapping[str, Any], leaf: Any) -> list[int]:
    """Return the shape of an array's chunks; raise `LayoutError` unless its metadata agree with `leaf`."""
    shape, chunks = list(leaf.shape), found.get("chunks")
    what = {"zarr_format": 2, "shape": shape, "dtype": _dtype(leaf.dtype), "order": "C", "filters": None}
    for key, value in what.items():
        if found.get(key) != value:
            raise LayoutError(f"{name} has {key} {str(found.get(key))[:60]} on disk, expected {value}")
    # Chunks larger than the array would be allocated in full.
    fits = isinstance(chunks, list) and len(chunks) == len(shape) and all(type(n) is int for n in chunks)
    if not fits or not all(0 < c <= n for c, n in zip(chunks, shape, strict=True)):  # type: ignore[arg-type]
        raise LayoutError(f"{name} has chunks {str(chunks)[:60]} on disk, for the shape {shape}")
    compressor = found.get("compressor")
    known = isinstance(compressor, dict) and compressor.get("id") == "zstd"
    if not known or found.get("fill_value") is not None or found.get("dimension_separator", ".") != ".":
        raise LayoutError(f"{name} is in a form on disk that jaxrl does not write")
    return list(chunks)  # type: ignore[arg-type]


def _dtype(dtype: Any) -> str:
    """Return Zarr's name of a dtype."""
    found = np.dtype(dtype)
    return found.str if found.kind in "biufc" else found.name

"""Named arrays of other programs: in NumPy's `.npz`, in `.safetensors`, in checkpoints of Orbax, or in memory."""

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.training.storage.arrays import read_foreign, reason, shapes_in_foreign
from jaxrl.training.storage.layout import TREE
from jaxrl.trees import PyTree

FILES = (".npz", ".safetensors")
"""Suffixes of supported files."""


UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of a directory's name while Orbax writes it, and for good if that never ends."""

Choose = Callable[[Iterable[str]], Mapping[str, str]]
"""Maps the names of arrays, paths with `/`, to a dict from new names to these."""


class _Array(NamedTuple):
    """An array with its data not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]


def is_arrays(path: Path) -> bool:
    """Return whether `path` is named as a file of arrays, or is the directory of a tree that Orbax has written."""
    return (path / TREE).is_file() if path.is_dir() else path.suffix in FILES


def read_file(path: Path, choose: Choose, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Read the chosen arrays of a file, or of the directory of a tree that Orbax has written, by their new names.

    `wanted` has shapes and dtypes by new name, which are checked before any data is read.

    Raises:
      SettingsError: the file is missing or damaged, or an array has another shape or dtype.
    """
    if not path.exists():
        raise SettingsError(f"init_from: there is no file {path}")
    if UNFINISHED in path.name:
        raise SettingsError(f"init_from: {path} was never finished by Orbax; take a tree that has been saved whole")
    try:
        with _opened(path) as arrays:
            return _read(str(path), arrays, choose, wanted)
    except SettingsError:
        raise
    except ImportError as error:
        raise SettingsError(f"{path} needs the package safetensors; pip install safetensors") from error
    except Exception as error:  # an untrusted file may raise anything
        raise SettingsError(f"init_from: {path} cannot be read: {reason(error)}") from error


def read_tree(what: str, tree: PyTree, choose: Choose, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the chosen arrays of a tree in memory, called `what`; otherwise as `read_file`."""
    arrays = {}
    try:
        leaves = named_leaves(tree)
        for name, leaf in leaves.items():
            array = np.asarray(leaf)
            arrays[name] = _Array(array.shape, array.dtype, partial(np.array, array))
    except Exception as error:  # keys that cannot be sorted, typed keys, arrays that were donated
        raise SettingsError(f"init_from: {what} cannot be read: {reason(error)}") from error
    if len(leaves) < len(jax.tree.leaves(tree)):
        raise SettingsError(f"init_from: {what}: two have the same path, as 'a/b' and the 'b' of 'a' have; rename one")
    return _read(what, arrays, choose, wanted)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return leaves by path with `/`, as `flax.traverse_util.flatten_dict(tree, sep="/")` does of nested dicts."""
    name = lambda keys: "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
    return {name(keys): leaf for keys, leaf in jax.tree.leaves_with_path(tree)}


def _read(what: str, arrays: Mapping[str, _Array], choose: Choose, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = {}
    for name, there in choose(arrays).items():
        like, array = wanted[name], arrays[there]
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise SettingsError(
                f"init_from: {there} of {what} is {array.dtype}{list(array.shape)}, expected "
                f"{like.dtype}{list(like.shape)}"
            )
        found[name] = array.read()
    return found


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, _Array]]:
    """Yield the arrays of a file by path with `/`."""
    if path.is_dir():
        # Orbax reads a tree as a whole, once something of it is taken.
        path = path.absolute()  # Orbax reads no others
        whole = cache(lambda: named_leaves(read_foreign(path)))
        of = lambda name: lambda: np.asarray(whole()[name])
        shapes = named_leaves(shapes_in_foreign(path))
        yield {name: _Array(tuple(x.shape), np.dtype(x.dtype), of(name)) for name, x in shapes.items()}
        return
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            yield {_path(name.removesuffix(".npy")): _entry(archive, name) for name in names}
        return
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as tensors:
        yield {_path(name): _tensor(tensors, name) for name in tensors.keys()}  # noqa: SIM118


def _entry(archive: zipfile.ZipFile, name: str) -> _Array:
    """Return an array of a NumPy archive, reading only its header."""

    def read() -> np.ndarray:
        with archive.open(name) as file:
            array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
            return array

    with archive.open(name) as file:
        return _Array(*read_header(file), read)


def read_header(packed: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Read shape and dtype from the header of an array in NumPy's format."""
    version = np.lib.format.read_magic(packed)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(packed)
    return shape, dtype


def _tensor(tensors: Any, name: str) -> _Array:
    part = tensors.get_slice(name)
    dtype = {"F32": np.float32, "F64": np.float64, "F16": np.float16}.get(part.get_dtype(), np.void)
    return _Array(tuple(part.get_shape()), np.dtype(dtype), lambda: tensors.get_tensor(name))


def _path(name: str) -> str:
    """Return the path of an array, with the dots of other libraries replaced by `/`, as in Flax and NumPy."""
    return name if "/" in name else name.replace(".", "/")

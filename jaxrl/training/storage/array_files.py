"""Named arrays in files of other programs: NumPy's `.npz` and `.safetensors`."""

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError

FILES = (".npz", ".safetensors")
"""Suffixes of supported files."""


class _Array(NamedTuple):
    """An array in a file, with its data not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]


def read_file(
    path: Path, choose: Callable[[Iterable[str]], Mapping[str, str]], wanted: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Read the chosen arrays of a file, by their new names.

    Args:
      path: the file.
      choose: maps the names in the file, as paths with `/`, to a dict from new names to these.
      wanted: shapes and dtypes by new name, checked before any data is read.

    Raises:
      SettingsError: the file is missing or damaged, or an array has another shape or dtype.
    """
    if not path.is_file():
        raise SettingsError(f"init_from: there is no file {path}")
    try:
        with _opened(path) as arrays:
            found = {}
            for name, there in choose(arrays).items():
                like, array = wanted[name], arrays[there]
                if (array.shape, array.dtype) != (like.shape, like.dtype):
                    raise SettingsError(
                        f"init_from: {there} of {path} is {array.dtype}{list(array.shape)}, expected "
                        f"{like.dtype}{list(like.shape)}"
                    )
                found[name] = array.read()
            return found
    except SettingsError:
        raise
    except ImportError as error:
        raise SettingsError(f"{path} needs the package safetensors; pip install safetensors") from error
    except Exception as error:  # an untrusted file may raise anything
        raise SettingsError(f"init_from: {path} cannot be read: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, _Array]]:
    """Yield the arrays of a file by path with `/`."""
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

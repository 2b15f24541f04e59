"""Small arrays in one file: their bytes in a row.

Orbax takes some 8 ms of processor time for a save and 0.3 more for each array, however small, in a dozen threads and
eight files. What is larger has that from its compression, and its threads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

ARRAYS = "arrays"
"""Name of the file."""
MOST = 1 << 22
"""Bytes of all arrays, at most."""


def fit_one_file(arrays: Mapping[str, Any]) -> bool:
    """Say whether all `arrays` are few bytes."""
    return sum(array.nbytes for array in arrays.values()) <= MOST


def write_one_file(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write `arrays` into `directory`, in their order."""
    with open(directory / ARRAYS, "xb") as file:
        for array in arrays.values():
            file.write(_bytes(np.ascontiguousarray(array)))


def is_one_file(directory: Path) -> bool:
    """Say whether `write_one_file` has written what is in `directory`."""
    return (directory / ARRAYS).exists()


def read_one_file(directory: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `write_one_file` wrote; `like` has the names, shapes and dtypes, and for devices the places.

    Raises:
      ValueError: the file does not have as many bytes as these.
    """
    arrays = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in like.items()}
    with open(directory / ARRAYS, "rb") as file:
        if not all(file.readinto(_bytes(array)) == array.nbytes for array in arrays.values()) or file.read(1):
            raise ValueError(f"{ARRAYS} does not have as many bytes as its leaves")
    return {name: _placed(array, like[name]) for name, array in arrays.items()}


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _placed(array: np.ndarray, like: Any) -> Any:
    """Return `array` where `like` has its place: on devices, or here."""
    place = getattr(like, "sharding", None)
    return array if place is None else jax.make_array_from_callback(array.shape, place, lambda index: array[index])

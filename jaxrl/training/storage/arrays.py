"""The arrays of a checkpoint on disk, written by one process or by several, each what it has.

They are a tree of Orbax's: `orbax.checkpoint.PyTreeCheckpointer().restore(path)` returns them in nested dictionaries,
by their names in the state.

Where arrays are spread over processes, the first tells the others to write. Each writes its shards through Orbax, and
answers with checksums of them and of its files; when all have answered the first joins the parts to one store. The
checksum of an array is made of those of its shards, and is that of its bytes in a row. Any number of processes reads
what one has written, or several: a checkpoint does not tell how many, but by its files.
"""

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxrl.training.processes as processes
from jaxrl.errors import JaxrlError, StorageError, safe_str
from jaxrl.hush import hushed
from jaxrl.training.storage.layout import require_layout
from jaxrl.training.storage.leaves import by_path, checksum, flatten, nested
from jaxrl.training.storage.run_dir import sync_dir
from jaxrl.trees import PyTree, tree_bytes

ORBAX = threading.Lock()
"""Held while Orbax works: two saves at once in one process would mix up their signals."""
FILES = "files.json"
"""The list of a checkpoint's other files."""
OVERHEAD, FOLDER = 1 << 16, 3 << 12
"""Bytes that a checkpoint takes beside its arrays, at least, and that the folder of an array takes, with two files."""
LONGEST = 250
"""Bytes of a path that can be the name of a folder."""
CRC_POLYNOMIAL = 0xEDB88320
"""Of CRC-32 (ISO 3309), its lowest power in the highest bit."""

Leaves = dict[str, np.ndarray]


def own_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of `tree` by path: what is divided among processes as it is, else copied to the host."""
    found = {}
    for path, leaf in flatten(jax.tree.map(_local, tree)):
        found[path] = leaf if processes.is_spread(leaf) else np.array(leaf, copy=True)
    return found


def _local(leaf: Any) -> Any:
    """Return this process' copy of what every process has all of."""
    return leaf.addressable_data(0) if processes.is_spread(leaf) and leaf.is_fully_replicated else leaf


def write_all(path: Path, leaves: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Write `leaves`, given by path, into the new directory `path`; all processes over which some are spread take part.

    Returns:
      the checksum of each leaf by its path, and of each file of another process, as `file_sums` has them.

    Raises:
      StorageError: another process could not write.
      OSError: this one could not, or what Orbax raises.
      LostError: another process is gone.
    """
    path.mkdir()
    if not any(array.size for array in leaves.values()):
        return {name: checksum(array) for name, array in leaves.items()}, {}  # Orbax writes no empty tree
    if not any(map(processes.is_spread, leaves.values())):
        in_folders = all(len(name.encode()) <= LONGEST for name in leaves)
        # One process: a folder for each array, unless a name is too long for one.
        _write_own(path, leaves, in_parts=not in_folders)
        if not in_folders:
            join_arrays(path)
        return {name: checksum(array) for name, array in leaves.items()}, {}
    (path / "array_metadatas").mkdir()  # Orbax in the others waits for it, and the first may fail before it makes it
    processes.tell("save", str(path))
    try:
        own = _write_own(path, leaves)
    finally:  # whatever has happened here, they answer
        # An answer that is not taken now would pass for that to the next order.
        answers = [json.loads(said) for said in processes.answers()]
    for i, said in enumerate(answers, 1):
        if "failed" in said:
            raise StorageError(f"process {i}: {said['failed']}")
    # All parts are on the disk. Orbax joins them to one store that any number of processes can read.
    join_arrays(path)
    parts = [own, *(said["shards"] for said in answers)]
    sums = {name: _whole_sum(array, name, parts) for name, array in leaves.items()}
    return sums, {name: found for said in answers for name, found in said["files"].items()}


def write_part(path: Path, tree: PyTree) -> str:
    """Write what a process beside the first has of a training state into `path`; return its answer.

    What all processes have, the first writes.
    """
    try:
        own = _write_own(path, {name: x for name, x in own_leaves(tree).items() if processes.is_spread(x)})
        return json.dumps({"shards": own, "files": file_sums(path, sync=True, of=_is_own)})
    except Exception as error:
        return json.dumps({"failed": reason(error)})


def read_together(path: Path, like: PyTree, sums: Sequence[int]) -> PyTree:
    """Read a training state from `path` onto the devices of all processes, each its own part; the others do as well.

    Args:
      path: what `write_all` has written.
      like: shapes with their places.
      sums: the checksum of each leaf.

    Raises:
      DamagedError: the data of a leaf are not those that were written; it says which.
      StorageError: another process could not read.
      LostError: another process is gone.
    """
    processes.tell("load", str(path), list(sums))
    try:
        tree, own = _read_own(path, like, sums)
    finally:  # whatever has happened here, they answer
        answers = [json.loads(said) for said in processes.answers()]
    for i, said in enumerate(answers, 1):
        if "failed" in said:
            raise StorageError(f"process {i}: {said['failed']}")
    parts, paths = [own, *answers], [path for path, _ in flatten(like)]
    # A divided leaf is checked by joining the checksums of its shards, a replicated one by each process for itself.
    wrong = {name for part in parts for name in part["wrong"]}
    for name, found in zip(paths, sums, strict=True):
        shards = sorted(shard for part in parts for shard in part["shards"].get(name, []))
        if name in wrong or (shards and joined_crc((crc, size) for _, size, crc in shards) != found):
            raise DamagedError(name)
    return tree


class DamagedError(Exception):
    """Name a leaf whose data are not those that were written."""


def read_part(path: Path, like: PyTree, sums: Sequence[int]) -> tuple[PyTree, str]:
    """Read what a process beside the first has of a training state; return it, and its answer."""
    try:
        tree, own = _read_own(path, like, sums)
    except Exception as error:
        return None, json.dumps({"failed": reason(error)})
    return tree, json.dumps(own)


def _read_own(path: Path, like: PyTree, sums: Sequence[int]) -> tuple[PyTree, dict[str, Any]]:
    """Read what this process has; return it, the sums of its shards, and paths of leaves that are `wrong` here."""
    leaves, form = jax.tree.flatten(like)
    wanted = {path: processes.plain_shape(leaf) for (path, _), leaf in zip(flatten(like), leaves, strict=True)}
    arrays = read_arrays(path, wanted)
    made, found = [], {"shards": {}, "wrong": []}  # type: list[Any], dict[str, Any]
    for leaf, name, crc in zip(leaves, wanted, sums, strict=True):
        array = arrays[name]
        if not array.is_fully_replicated:
            found["shards"][name] = _shard_sums(array)
        elif checksum(np.asarray(array.addressable_data(0))) != crc:
            found["wrong"].append(name)
        made.append(processes.as_keys(leaf, array))
    return jax.tree.unflatten(form, made), found


def _is_own(file: str) -> bool:
    """Say whether Orbax has named a file, or a directory that it is in, after this process."""
    return any(part.endswith(f"process_{processes.number()}") for part in Path(file).parts)


def _write_own(path: Path, leaves: Mapping[str, Any], in_parts: bool = True) -> dict[str, list[list[int]]]:
    """Write what this process has of `leaves`; return for each that is divided what `_shard_sums` says."""
    arrays = {name: array for name, array in leaves.items() if array.size}
    size = sum(_own_bytes(array) for array in arrays.values())
    require_room(path, size + OVERHEAD + len(arrays) * FOLDER)
    write_arrays(path, arrays, in_parts)
    return {name: _shard_sums(array) for name, array in leaves.items() if processes.is_spread(array)}


def _own_shards(array: jax.Array) -> list[Any]:
    """Return the shards of a divided array that this process writes."""
    # Of copies on several devices, one is written.
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _own_bytes(array: Any) -> int:
    return sum(shard.data.nbytes for shard in _own_shards(array)) if processes.is_spread(array) else array.nbytes


def _shard_sums(array: jax.Array) -> list[list[int]]:
    """Return of each shard that this process writes: its first row, its bytes and their CRC-32."""
    # Divided along its first axis only: sorted by their first rows, shards are in the order of their bytes.
    return [
        [shard.index[0].start or 0, shard.data.nbytes, checksum(np.asarray(shard.data))] for shard in _own_shards(array)
    ]


def _whole_sum(array: Any, name: str, parts: Iterable[Mapping[str, list[list[int]]]]) -> int:
    if not processes.is_spread(array):
        return checksum(array)
    shards = sorted(shard for part in parts for shard in part[name])
    if sum(size for _, size, _ in shards) != array.nbytes:
        raise StorageError(f"{name} was not written whole: {shards}")
    return joined_crc((crc, size) for _, size, crc in shards)


def joined_crc(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of bytes in a row, from that of each part and its length in bytes.

    As zlib's `crc32_combine`: a CRC is a remainder of polynomials over two elements, so bytes behind it multiply it by
    a power of x.
    """
    whole = 0
    for crc, size in parts:
        # As if `size` zero bytes followed the part before, which a product with a power of x stands for.
        whole = _product(_power(size), whole) ^ crc
    return whole


def _power(size: int) -> int:
    """Return x to the power of the bits in `size` bytes, by squaring."""
    # The polynomials 1 and x^8, as the lowest power is in the highest bit: one byte is eight bits.
    power, square = 1 << 31, 1 << 23
    while size:
        power = _product(power, square) if size & 1 else power
        square, size = _product(square, square), size >> 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = (b >> 1) ^ (CRC_POLYNOMIAL if b & 1 else 0)
    return product


def reason(error: Exception) -> str:
    """Return kind and first line of an error; one of jaxrl's own says enough without its kind."""
    lines = [line.strip() for line in safe_str(error).splitlines() if line.strip()]
    if lines and isinstance(error, JaxrlError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def require_room(directory: Path, size: int) -> None:
    """Raise `OSError` unless the disk of `directory` takes a file of `size` bytes; leave none there.

    Orbax, when its disk gets full, fills the terminal with tracebacks from threads of TensorStore; so it is asked to
    write only where there is room.
    """
    path = directory / f"room{processes.number()}"  # others ask for room in the same directory
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # not everywhere; there Orbax finds out
            # Allocated for real, not as a hole: a full disk is found out here.
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
        path.unlink()


def file_sums(
    directory: Path, sync: bool = False, of: Callable[[str], bool] = lambda name: True
) -> dict[str, list[int]]:
    """Return size and CRC-32 of the files under `directory` by relative name; with `sync`, flush them to disk.

    They are all, or those `of` whose name the answer is true.
    """
    found = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILES)
    files = {name: path for path in found if of(name := str(path.relative_to(directory)))}
    sums = {name: _file_sum(path, sync) for name, path in files.items()}
    for path in {path.parent for path in files.values()} if sync else ():
        sync_dir(path)
    return sums


def check_seen(directory: Path, sums: Mapping[str, list[int]]) -> None:
    """Raise `OSError` unless this process sees the files of others, of which they tell `sums`, in their sizes."""
    unseen = {name for name, (size, _) in sums.items() if not _has_size(directory / name, size)}
    if unseen:
        raise OSError(f"{min(unseen)}, which another process has written, is not seen by this one")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _file_sum(path: Path, sync: bool) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            size, crc = size + len(part), zlib.crc32(part, crc)
        if sync:
            os.fsync(file.fileno())
    return [size, crc]


# --- Orbax ------------------------------------------------------------------------------------------------------


def write_arrays(path: Path, arrays: Mapping[str, Any], in_parts: bool) -> None:
    """Write what this process has of `arrays` into the directory `path`, whole or as parts to be joined."""
    import orbax.checkpoint as ocp
    from etils import epath

    with ORBAX, hushed():
        # Its database of many small files (OCDBT) is for parts, and for very long names. Else each array has a folder,
        # whose files say in plain text what they hold: `require_layout` can look before any library opens them.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=in_parts)
        handler.save(epath.Path(path), args=ocp.args.PyTreeSave(nested(arrays)))


def join_arrays(path: Path) -> None:
    """Join the parts that processes have written into `path` by `write_arrays`."""
    import orbax.checkpoint as ocp
    from etils import epath

    with ORBAX, hushed():
        ocp.PyTreeCheckpointHandler().finalize(epath.Path(path))


def read_arrays(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `write_all` wrote; `like` has the paths, shapes and dtypes, and for devices the places.

    Raises:
      LayoutError: something else is there.
      OSError, ValueError: it is damaged, or what Orbax raises.
    """
    import orbax.checkpoint as ocp

    wanted = {name: x for name, x in like.items() if tree_bytes(x)}  # arrays without entries are not on disk
    tree, found = nested(wanted), dict[str, Any]()
    if wanted:
        require_layout(path, {name: processes.plain_shape(x) for name, x in wanted.items()})
        with ORBAX, hushed():
            found = by_path(ocp.StandardCheckpointHandler().restore(path, args=ocp.args.StandardRestore(tree)), wanted)
    return {name: found[name] if name in found else _without_entries(x) for name, x in like.items()}


def _without_entries(like: Any) -> Any:
    """Return an array of no numbers, on the devices where `like` has its place, if it has one."""
    empty = np.empty(like.shape, like.dtype)
    return empty if isinstance(like, np.ndarray) else processes.placed(like, empty)

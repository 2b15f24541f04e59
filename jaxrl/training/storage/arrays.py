"""Arrays of a checkpoint on disk, written by one process or by several, each its own shards.

They form an Orbax checkpoint: `orbax.checkpoint.PyTreeCheckpointer().restore(path)` returns nested dictionaries with
the names of the training state.

If arrays are sharded over processes, process 0 broadcasts the order to write. Each process writes its shards through
Orbax and replies with the checksums of its shards and files; process 0 then merges the parts into one store. The
checksum of an array is combined from those of its shards and equals that of its contiguous bytes. The number of
processes may differ between writing and reading: only the files depend on it.
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
from flax.traverse_util import flatten_dict

import jaxrl.training.processes as processes
from jaxrl.errors import JaxrlError, StorageError, safe_str
from jaxrl.hush import hushed
from jaxrl.training.storage.files import sync_dir
from jaxrl.training.storage.layout import LayoutError, require_layout
from jaxrl.training.storage.leaves import checksum, flatten, nest
from jaxrl.trees import PyTree, tree_bytes

ORBAX = threading.Lock()
"""Held during Orbax calls: two concurrent saves in one process would confuse their signals."""
FILES = "files.json"
"""The list of all other files of a checkpoint."""
OVERHEAD, FOLDER = 1 << 16, 3 << 12
"""Minimum bytes of a checkpoint in addition to its arrays, and bytes of an array's directory with its two files."""
LONGEST = 250
"""Maximum bytes of a path used as a directory name."""
FAULTS = (OSError, ValueError, MemoryError, StorageError)
"""Errors attributed to the disk or its contents: those of the system, and those that Orbax and TensorStore raise when
they cannot read or write. Any other is a bug and is not treated as damage."""
CRC_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32 (ISO 3309), with the lowest power in the highest bit."""

Leaves = dict[str, np.ndarray]


def own_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of `tree` by path: those sharded over processes unchanged, all others copied to the host."""
    found = {}
    for path, leaf in flatten(jax.tree.map(_local, tree)):
        found[path] = leaf if processes.is_spread(leaf) else np.array(leaf, copy=True)
    return found


def _local(leaf: Any) -> Any:
    """Return this process' copy of a replicated leaf; any other unchanged."""
    return leaf.addressable_data(0) if processes.is_spread(leaf) and leaf.is_fully_replicated else leaf


def write_all(
    path: Path, leaves: Mapping[str, Any], few_files: bool = False
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Write `leaves` (by path) into the new directory `path`, together with all processes that hold shards of them.

    With `few_files`, all leaves share about ten files.

    Returns:
      The checksum of each leaf by path, and the entries of other processes' files as `file_sums` returns them.

    Raises:
      StorageError: another process failed to write; `RuntimeError` if that was none of `FAULTS`.
      OSError: this process failed to write; Orbax may raise others.
      LostError: another process is gone.
    """
    path.mkdir()
    if not any(array.size for array in leaves.values()):
        return {name: checksum(array) for name, array in leaves.items()}, {}  # Orbax cannot write an empty tree
    if not any(map(processes.is_spread, leaves.values())):
        # One process: a directory for each array, unless few files are wanted or a name is too long.
        in_folders = not few_files and all(len(name.encode()) <= LONGEST for name in leaves)
        _write_own(path, leaves, in_parts=not in_folders)
        if not in_folders:
            join_arrays(path)
        return {name: checksum(array) for name, array in leaves.items()}, {}
    (path / "array_metadatas").mkdir()  # Orbax in other processes waits for it: make it before anything can fail
    processes.broadcast("save", str(path))
    try:
        own = _write_own(path, leaves)
    finally:  # the others reply even if this process failed
        # A reply left unread would be taken for that to the next order.
        answers = [json.loads(said) for said in processes.answers()]
    _raise_failures(answers)
    # All parts are on disk: merge them into one store that any number of processes can read.
    join_arrays(path)
    parts = [own, *(said["shards"] for said in answers)]
    sums = {name: _combined_sum(array, name, parts) for name, array in leaves.items()}
    return sums, {name: found for said in answers for name, found in said["files"].items()}


def write_part(path: Path, tree: PyTree) -> str:
    """Write the shards of a process other than 0 into `path`; return its reply.

    Replicated leaves are written by process 0.
    """
    try:
        own = _write_own(path, {name: x for name, x in own_leaves(tree).items() if processes.is_spread(x)})
        return json.dumps({"shards": own, "files": file_sums(path, sync=True, of=_is_own)})
    except Exception as error:
        return _report_failure(error)


def read_sharded(path: Path, like: PyTree, sums: Sequence[int]) -> PyTree:
    """Read a training state from `path` onto the devices of all processes; each reads its own shards.

    Args:
      path: directory that `write_all` has written.
      like: shapes and dtypes with shardings.
      sums: the checksum of each leaf.

    Raises:
      DamagedError: the data of a leaf have changed; its argument is the path of the leaf.
      StorageError: another process failed to read; `RuntimeError` if that was none of `FAULTS`.
      LostError: another process is gone.
    """
    processes.broadcast("load", str(path), list(sums))
    try:
        tree, own = _read_own(path, like, sums)
    finally:  # the others reply even if this process failed
        answers = [json.loads(said) for said in processes.answers()]
    _raise_failures(answers)
    parts, paths = [own, *answers], [path for path, _ in flatten(like)]
    # Sharded leaves are verified by combining the checksums of their shards, replicated ones by every process itself.
    wrong = {name for part in parts for name in part["wrong"]}
    for name, found in zip(paths, sums, strict=True):
        shards = sorted(shard for part in parts for shard in part["shards"].get(name, []))
        if name in wrong or (shards and combine_crcs((crc, size) for _, size, crc in shards) != found):
            raise DamagedError(name)
    return tree


class DamagedError(Exception):
    """A leaf whose data differ from those written; the argument is its path."""


def read_part(path: Path, like: PyTree, sums: Sequence[int]) -> tuple[PyTree, str]:
    """Read the shards of a process other than 0; return the training state and the reply."""
    try:
        tree, own = _read_own(path, like, sums)
    except Exception as error:
        return None, _report_failure(error)
    return tree, json.dumps(own)


def _report_failure(error: Exception) -> str:
    """Return the reply of a process that failed to write or to read."""
    return json.dumps({"failed": reason(error), "fault": isinstance(error, (*FAULTS, LayoutError))})


def _raise_failures(replies: Sequence[dict[str, Any]]) -> None:
    """Raise the first failure among the replies of processes 1, 2, ...: `StorageError` for one of `FAULTS`."""
    for i, said in enumerate(replies, 1):
        if "failed" in said:
            raise (StorageError if said["fault"] else RuntimeError)(f"process {i}: {said['failed']}")


def _read_own(path: Path, like: PyTree, sums: Sequence[int]) -> tuple[PyTree, dict[str, Any]]:
    """Read this process' part; return it with `shards` (checksums) and `wrong` (paths of damaged replicated leaves)."""
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
    """Return whether Orbax has named `file`, or a directory it is in, after this process."""
    return any(part.endswith(f"process_{processes.number()}") for part in Path(file).parts)


def _write_own(path: Path, leaves: Mapping[str, Any], in_parts: bool = True) -> dict[str, list[list[int]]]:
    """Write this process' part of `leaves`; return the `_shard_sums` of each sharded leaf."""
    arrays = {name: array for name, array in leaves.items() if array.size}
    size = sum(_own_bytes(array) for array in arrays.values())
    require_disk_space(path, size + OVERHEAD + len(arrays) * FOLDER)
    write_arrays(path, arrays, in_parts)
    return {name: _shard_sums(array) for name, array in leaves.items() if processes.is_spread(array)}


def _own_shards(array: jax.Array) -> list[Any]:
    """Return the shards of a sharded array that this process writes."""
    # Of replicas on several devices, one is written.
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _own_bytes(array: Any) -> int:
    return sum(shard.data.nbytes for shard in _own_shards(array)) if processes.is_spread(array) else array.nbytes


def _shard_sums(array: jax.Array) -> list[list[int]]:
    """Return `[first row, bytes, CRC-32]` of each shard that this process writes."""
    # Arrays are sharded along the first axis only: sorted by first row, shards are in the order of their bytes.
    return [
        [shard.index[0].start or 0, shard.data.nbytes, checksum(np.asarray(shard.data))] for shard in _own_shards(array)
    ]


def _combined_sum(array: Any, name: str, parts: Iterable[Mapping[str, list[list[int]]]]) -> int:
    if not processes.is_spread(array):
        return checksum(array)
    shards = sorted(shard for part in parts for shard in part[name])
    if sum(size for _, size, _ in shards) != array.nbytes:
        raise StorageError(f"{name} was not written whole: {shards}")
    return combine_crcs((crc, size) for _, size, crc in shards)


def combine_crcs(parts: Iterable[tuple[int, int]]) -> int:
    """Combine the CRC-32 and length in bytes of consecutive parts into the CRC-32 of all of them.

    As zlib's `crc32_combine`: a CRC is a remainder of polynomials over GF(2), so each appended bit multiplies it by x.
    """
    whole = 0
    for crc, size in parts:
        # Append `size` zero bytes to the parts so far, as a product with a power of x.
        whole = _product(_power(size), whole) ^ crc
    return whole


def _power(size: int) -> int:
    """Return x to the power `8 * size`, by squaring."""
    # The polynomials 1 and x^8, with the lowest power in the highest bit.
    power, square = 1 << 31, 1 << 23
    while size:
        power = _product(power, square) if size & 1 else power
        square, size = _product(square, square), size >> 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo `CRC_POLYNOMIAL`."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = (b >> 1) ^ (CRC_POLYNOMIAL if b & 1 else 0)
    return product


def reason(error: Exception) -> str:
    """Return the type and first line of an error; of jaxrl's own errors the line alone."""
    lines = [line.strip() for line in safe_str(error).splitlines() if line.strip()]
    if lines and isinstance(error, JaxrlError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def require_disk_space(directory: Path, size: int) -> None:
    """Raise `OSError` unless the disk of `directory` has room for `size` bytes; the test file is removed.

    On a full disk, Orbax floods the terminal with tracebacks from TensorStore's threads, so check before calling it.
    """
    path = directory / f"room{processes.number()}"  # other processes use the same directory
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # elsewhere the error is Orbax's
            # Allocates blocks rather than a hole, so a full disk fails here.
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
        path.unlink()


def file_sums(
    directory: Path, sync: bool = False, of: Callable[[str], bool] = lambda name: True
) -> dict[str, list[int]]:
    """Return size and CRC-32 of the files under `directory` by relative name; with `sync`, flush them to disk.

    Only files for whose name `of` returns true are included.
    """
    found = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILES)
    files = {name: path for path in found if of(name := str(path.relative_to(directory)))}
    sums = {name: _file_sum(path, sync) for name, path in files.items()}
    for path in {path.parent for path in files.values()} if sync else ():
        sync_dir(path)
    return sums


def check_visible(directory: Path, sums: Mapping[str, list[int]]) -> None:
    """Raise `OSError` unless this process sees other processes' files with the sizes that they report in `sums`."""
    sizes = {name: path.stat().st_size for name in sums if (path := directory / name).is_file()}
    unseen = {name for name, (size, _) in sums.items() if sizes.get(name) != size}
    if unseen:
        raise OSError(f"{min(unseen)}, which another process has written, is not seen by this one")


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
    """Write this process' part of `arrays` into the directory `path`; if `in_parts`, `join_arrays` must follow."""
    import orbax.checkpoint as ocp
    from etils import epath

    with ORBAX, hushed():
        # OCDBT, a database in a few files, is used for parts, for populations and for very long names. Otherwise each
        # array has a directory, whose plain-text metadata `require_layout` can check before any library opens it.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=in_parts)
        handler.save(epath.Path(path), args=ocp.args.PyTreeSave(nest(arrays)))


def join_arrays(path: Path) -> None:
    """Merge the parts that all processes have written into `path` with `write_arrays`."""
    import orbax.checkpoint as ocp
    from etils import epath

    with ORBAX, hushed():
        ocp.PyTreeCheckpointHandler().finalize(epath.Path(path))


def read_arrays(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arrays that `write_all` wrote; `like` has shapes and dtypes by path, and shardings if any.

    Raises:
      LayoutError: the files do not hold these arrays.
      OSError, ValueError: the files are damaged; Orbax may raise others.
    """
    import orbax.checkpoint as ocp

    wanted = {name: x for name, x in like.items() if tree_bytes(x)}  # empty arrays are not on disk
    tree, found = nest(wanted), dict[str, Any]()
    if wanted:
        require_layout(path, {name: processes.plain_shape(x) for name, x in wanted.items()})
        with ORBAX, hushed():
            restored = ocp.StandardCheckpointHandler().restore(path, args=ocp.args.StandardRestore(tree))
            found = flatten_dict(restored, sep="/")
    return {name: found[name] if name in wanted else _without_entries(x) for name, x in like.items()}


def read_foreign(path: Path) -> PyTree:
    """Return the tree that another program has written into `path` by Orbax, as arrays of the host."""
    import orbax.checkpoint as ocp

    with ORBAX, hushed():
        handler = ocp.PyTreeCheckpointHandler()
        # Arrays come to the host, whatever devices they were on; text has no dtype, and is read as it is.
        kind = lambda x: None if getattr(x, "dtype", None) is None else np.ndarray
        how = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=kind(x)), handler.metadata(path).tree)
        found: PyTree = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=how))
    return found


def _without_entries(like: Any) -> Any:
    """Return an empty array with the shape, dtype and, if any, sharding of `like`."""
    empty = np.empty(like.shape, like.dtype)
    return empty if isinstance(like, np.ndarray) else processes.place_array(empty, like.sharding)

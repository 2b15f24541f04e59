"""Checkpoints: written whole by Orbax, checked leaf by leaf on the way back.

Orbax writes a step into a temporary directory and renames it, so that a step is there whole or not at all; but it has
no checksums, casts a wrong dtype silently, and loses a save that nobody waits for. So every step carries a manifest
with each leaf's path, shape, dtype and CRC-32, "saved" is said only after the wait, and a damaged step is named and
passed over for the one before it.
"""

import hashlib
import json
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.errors import NoCheckpointError, StorageError
from jaxrl.training.run_dir import write_atomically
from jaxrl.types import PyTree

FORMAT = 1
FILES = "files.json"
"""Size and checksum of every other file of a checkpoint."""


class CheckpointError(Exception):
    """Say what is wrong with one checkpoint."""


class Store:
    """The checkpoints in one directory, `<directory>/<opt_steps>/`; the newest `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory.absolute()
        self.keep = keep
        self._writer: Any = None
        self._pending: int | None = None

    def save(self, step: int, tree: PyTree, facts: Mapping[str, Any]) -> None:
        """Begin to write `tree` and `facts` (JSON) as `step`; call `wait` before saying that it is saved.

        The arrays are copied before this returns: the caller may donate them.

        Raises:
          StorageError: this save could not begin, or the one before it failed.
        """
        self.wait()
        leaves = host_leaves(tree)
        manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "leaves": [_entry(*leaf) for leaf in leaves]}
        arrays = {_name(i): array for i, (_, array) in enumerate(leaves) if array.size}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open().save(self._path(step), args=_save_args(arrays, manifest), force=True)
        except Exception as error:
            raise StorageError(f"checkpoint {self._path(step)} could not be written: {_reason(error)}") from error
        self._pending = step

    def wait(self) -> None:
        """Wait until the save in progress is on disk, then prune; raise `StorageError` if it failed."""
        step, self._pending = self._pending, None
        if step is None:
            return
        try:
            self._open().wait_until_finished()
            write_atomically(self._path(step) / FILES, json.dumps(file_sums(self._path(step))))
        except Exception as error:
            raise StorageError(f"checkpoint {self._path(step)} could not be written: {_reason(error)}") from error
        self.prune()

    def prune(self) -> None:
        """Remove all but the newest `keep` steps, and what a killed save or removal has left half there."""
        kept = {str(step) for step in self.steps()[-self.keep :]}
        for entry in self.directory.iterdir():
            ours = entry.name.isdecimal() or ".orbax-checkpoint-tmp" in entry.name
            if ours and entry.name not in kept:
                shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        """Wait for the save in progress and let go of Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def steps(self) -> list[int]:
        """Return the steps that were written to their end, in order."""
        if not self.directory.is_dir():
            return []
        whole = [d for d in self.directory.iterdir() if d.name.isdecimal() and (d / "_CHECKPOINT_METADATA").is_file()]
        return sorted(int(d.name) for d in whole if d.name == str(int(d.name)))

    def load(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Read `step` into the structure of `like` (arrays or shapes); return it and the facts saved with it.

        Raises:
          CheckpointError: it is damaged, or was made for another structure; the leaf is named.
        """
        check_files(self._path(step))
        manifest = self.manifest(step)
        wanted = [(path, leaf) for path, leaf in _flatten(like)]
        _compare(manifest["leaves"], [_entry(path, leaf, digest=False) for path, leaf in wanted])
        empty = {_name(i): np.empty(x.shape, x.dtype) for i, (_, x) in enumerate(wanted) if np.prod(x.shape)}
        try:
            arrays = self._open().restore(self._path(step), args=_restore_args(empty)).state
        except Exception as error:
            raise CheckpointError(f"cannot be read: {_reason(error)}") from error
        leaves = []
        for i, (entry, (_, leaf)) in enumerate(zip(manifest["leaves"], wanted, strict=True)):
            array = np.asarray(arrays.get(_name(i), np.empty(leaf.shape, leaf.dtype)))
            if _entry(entry["path"], array) != entry:
                raise CheckpointError(f"the data of {entry['path']} is damaged: its checksum differs")
            leaves.append(array)
        return _unflatten(like, leaves), manifest["facts"]

    def manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest of `step`; raise `CheckpointError` if it has no readable one of this format."""
        try:
            manifest = self._open().restore(self._path(step), args=_restore_args(None)).manifest
            known = manifest["format"] == FORMAT and manifest["step"] == step
            parts = (manifest["facts"], [(e["path"], e["shape"], e["dtype"], e["crc32"]) for e in manifest["leaves"]])
        except Exception as error:
            raise CheckpointError(f"its manifest cannot be read: {_reason(error)}") from error
        if not known or not isinstance(parts[0], dict):
            raise CheckpointError(f"its manifest is of format {manifest['format']!r}, step {manifest['step']!r}")
        return manifest

    def load_newest(self, like: PyTree) -> tuple[int, PyTree, dict[str, Any]]:
        """Load the newest step that is whole, warning of each newer one that is not.

        Raises:
          NoCheckpointError: there is none.
        """
        for step in reversed(self.steps()):
            try:
                return step, *self.load(step, like)
            except CheckpointError as error:
                warnings.warn(f"checkpoint {self._path(step)} is passed over: {error}", stacklevel=2)
        raise NoCheckpointError(f"{self.directory} holds no valid checkpoint; nothing was changed")

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _open(self) -> Any:
        if self._writer is None:
            import orbax.checkpoint as ocp

            handler = ocp.CompositeCheckpointHandler(
                state=ocp.StandardCheckpointHandler(), manifest=ocp.JsonCheckpointHandler()
            )
            self._writer = ocp.AsyncCheckpointer(handler)
        return self._writer


def file_sums(directory: Path) -> dict[str, list[int]]:
    """Return size and CRC-32 of every file under `directory`, by its relative name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILES)
    return {str(path.relative_to(directory)): _file_sum(path) for path in files}


def _file_sum(path: Path) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return [size, crc]


def check_files(directory: Path) -> None:
    """Raise `CheckpointError` naming the first file of a checkpoint that is not as it was written.

    Orbax met with damaged files floods the terminal from its own threads; it is not asked to read them. The list is
    written last: a checkpoint whose process was killed just before has none, and its leaves' own checksums remain.
    """
    if not (directory / FILES).exists():
        return
    try:
        for name, wanted in json.loads((directory / FILES).read_text()).items():
            path = directory / name
            if not path.is_file() or _file_sum(path) != wanted:
                raise CheckpointError(f"its file {name} is {'damaged' if path.exists() else 'missing'}")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"its list of files cannot be read: {_reason(error)}") from error


def digest(tree: PyTree) -> str:
    """Return the sha256 over all leaves of `tree`: paths, shapes, dtypes and bytes."""
    sha = hashlib.sha256()
    for path, array in host_leaves(tree):
        sha.update(f"{path} {array.dtype} {array.shape};".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def host_leaves(tree: PyTree) -> list[tuple[str, np.ndarray]]:
    """Copy every leaf of `tree` to the host, PRNG keys as their numbers; return them with their paths."""
    # A plain device_get may be a view of the device's memory, which a donated buffer's next owner overwrites.
    return [(path, np.array(leaf, copy=True)) for path, leaf in _flatten(tree)]


def _flatten(tree: PyTree) -> list[tuple[str, Any]]:
    """List the leaves with their paths; keys as their data, shapes staying shapes."""

    def data(leaf: Any) -> Any:
        if not _is_key(leaf):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(jax.random.key_data, leaf)
        return jax.random.key_data(leaf)

    return [(jax.tree_util.keystr(path), data(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _unflatten(like: PyTree, arrays: list[np.ndarray]) -> PyTree:
    def wrap(leaf: Any, array: np.ndarray) -> jax.Array:
        if not _is_key(leaf):
            return jax.numpy.asarray(array)
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf.dtype._impl.name)

    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(treedef, [wrap(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _entry(path: str, leaf: Any, digest: bool = True) -> dict[str, Any]:
    entry = {"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    return {**entry, "crc32": zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data)} if digest else entry


def _compare(saved: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    by_path = {entry["path"]: entry for entry in saved}
    for entry in wanted:
        old = by_path.get(entry["path"])
        if old is None:
            raise CheckpointError(f"it has no leaf {entry['path']}: it was made by another strategy")
        for what in ("shape", "dtype"):
            if old[what] != entry[what]:
                raise CheckpointError(f"{entry['path']} has {what} {old[what]}, expected {entry[what]}")
    if len(saved) != len(wanted) or [e["path"] for e in saved] != [e["path"] for e in wanted]:
        extra = sorted(set(by_path) - {entry["path"] for entry in wanted}) or ["the same leaves in another order"]
        raise CheckpointError(f"it also has {extra[0]}: it was made by another strategy")


def _name(index: int) -> str:
    return f"leaf{index:05d}"


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _save_args(arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.Composite(state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest))


def _restore_args(like: dict[str, np.ndarray] | None) -> Any:
    import orbax.checkpoint as ocp

    if like is None:
        return ocp.args.Composite(manifest=ocp.args.JsonRestore())
    return ocp.args.Composite(state=ocp.args.StandardRestore(like))

"""Small files that are written whole or not at all, and read with care: text, JSON and YAML of plain values."""

import contextlib
import glob
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from jaxrl.errors import SettingsError
from jaxrl.paths import reason_of_path

MAX_DEPTH = 100
"""Levels of nesting in a YAML file, at most."""
LARGEST_TEXT = 1 << 26
"""Maximum bytes of a settings file, of metadata or of a manifest."""


# --- writing ----------------------------------------------------------------------------------------------------


def sync_dir(path: Path) -> None:
    """Flush a directory's entries to disk, so that its names survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Create a directory atomically: the caller fills the one yielded, which is then renamed to `path`.

    An existing directory at `path` is replaced; until then it stays complete, under its own or a temporary name. The
    remains of a killed attempt are removed first, and a directory that it had moved aside is restored.

    Raises:
      OSError: the directory cannot be written; an existing one stays.
    """
    made, backup = path.with_name(f".{path.name}.{os.getpid()}.tmp"), path.with_name(f".{path.name}.old")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Recover from an attempt that was killed in the steps below.
    _recover(path, backup)
    made.mkdir()
    try:
        yield made
        # If killed between these two renames, the next `_recover` restores the old directory.
        if path.exists():
            path.rename(backup)
        made.rename(path)
        sync_dir(path.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        with contextlib.suppress(OSError):
            _recover(path, backup)
        raise
    shutil.rmtree(backup, ignore_errors=True)


def _recover(path: Path, backup: Path) -> None:
    """Restore a directory left under its temporary name, and remove partial ones of processes that are gone."""
    if backup.is_dir() and not os.path.lexists(path):
        backup.rename(path)
    prefix, suffix = f".{path.name}.", ".tmp"
    for rest in path.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        process = rest.name.removeprefix(prefix).removesuffix(suffix)
        # Any other name belongs to the user, or to a directory whose name has this one's as a prefix.
        if process.isascii() and process.isdecimal() and not _is_alive(int(process)):
            _remove(rest)
    _remove(backup)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file atomically: the caller fills the temporary one yielded, which is then renamed to `path`.

    Raises:
      OSError: it cannot be written; an existing file at `path` stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # there is one writer; remains of a killed one are overwritten
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            # Sync the data before the rename: otherwise a power failure could leave an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically, see `new_file`; text as UTF-8."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


# --- reading ----------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Read a text file of a run directory.

    Raises:
      ValueError: it is larger than any that jaxrl writes, or is not text.
      OSError: it cannot be read.
    """
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"it has {size} bytes, more than any that jaxrl writes")
    return path.read_text()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `SettingsError`, naming the file, if it is not one."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"cannot read {path}: {reason_of_path(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected a JSON object, found {type(value).__name__}")
    return value


_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where PyYAML was built with libyaml


class _Loader(_Parser):
    """Loader for plain values only; duplicate keys are errors, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise ValueError(f"{twice[:80]} is given twice; give it once")
        return super().construct_mapping(node, deep)


def _check_events(text: str) -> None:
    """Raise `yaml.YAMLError` for what can take any amount of memory or stack: aliases, and deep nesting."""
    depth = 0
    events: Iterator[Any] = yaml.parse(text, _Parser)
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line} has the alias *{event.anchor}; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"line {line} is nested more than {MAX_DEPTH} levels deep")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of plain values without aliases; raise `SettingsError`, naming the file, if it is not one."""
    try:
        text = read_text(path)
        _check_events(text)
        value = yaml.load(text, _Loader)  # safe: plain values only
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {reason_of_path(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected settings as `name: value`, found {type(value).__name__}")
    return value


def plain(value: Any) -> Any:
    """Return `value` with tuples as lists and non-finite numbers as `None`, for JSON and YAML."""
    if type(value) in (float, int, str, bool):  # fast path for nearly all values
        return None if type(value) is float and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return plain(value.item())
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# --- mappings that share most entries ----------------------------------------------------------------------------


def common_entries(mappings: Sequence[Mapping[str, Any]], nested: bool = False) -> dict[str, Any]:
    """Return the entries that all `mappings` have with the same value and type; with `nested`, likewise inside them."""
    found: dict[str, Any] = {}
    for name in mappings[0]:
        if not all(name in one for one in mappings):
            continue
        values = [one[name] for one in mappings]
        # By their text: to Python, `1`, `1.0` and `True` are equal.
        if len(set(map(repr, values))) == 1:
            found[name] = values[0]
        elif nested and all(isinstance(value, dict) for value in values):
            found[name] = common_entries(values, nested)
    return found


def without_common(one: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `one` that are not in `common`; `with_common` adds those again."""
    found = {}
    for name, value in one.items():
        if name not in common:
            found[name] = value
        elif isinstance(value, dict) and value != common[name]:
            found[name] = without_common(value, common[name])
    return found


def with_common(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own` entries with those in `common`."""
    both = {name for name in common.keys() & own.keys() if isinstance(common[name], dict)}
    merged = {name: with_common(common[name], own[name]) for name in both if isinstance(own[name], dict)}
    return {**common, **own, **merged}

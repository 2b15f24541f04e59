"""A run's directory: who may write it, and its small files."""

import fcntl
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from jaxrl.errors import RunDirInUseError, SettingsError

FORMAT = 1
"""Version of the directory's layout."""

CONFIG, METADATA, METRICS, EPISODES = "config.yaml", "metadata.json", "metrics.jsonl", "eval_episodes.jsonl"


class RunDir:
    """A run directory held by this process: created, locked, and written only through here."""

    def __init__(self, path: str | Path, resume: bool) -> None:
        """Take hold of the directory `path`.

        Raises:
          SettingsError: it exists and is not empty (or is no run, with `resume`), or cannot be written.
          RunDirInUseError: another process holds it.
        """
        self._lock: IO[str] | None = None
        try:
            self.path = Path(path).absolute()
            if resume:
                require_run(self.path)
            elif self.path.exists() and not (self.path / ".lock").exists():
                _require_empty(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            if not resume:
                _require_empty(self.path)
            _sign(self._lock)
        except (OSError, ValueError) as error:
            self.release()
            if isinstance(error, SettingsError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"cannot write the run directory {path!r}: {reason}") from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write `config.yaml`."""
        write_atomically(self.path / CONFIG, yaml.safe_dump(plain(settings), sort_keys=False))

    def write_metadata(self, **facts: Any) -> None:
        """Merge `facts` into `metadata.json`."""
        old = read_json(self.path / METADATA) if (self.path / METADATA).exists() else {}
        write_atomically(self.path / METADATA, json.dumps({**old, **plain(facts)}, indent=2) + "\n")

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _require_empty(path: Path) -> None:
    if not path.is_dir() or any(entry.name != ".lock" for entry in path.iterdir()):
        raise SettingsError(
            f"{path} exists and holds something else; choose another --run-dir, or go on with --resume {path}"
        )


def require_run(path: Path) -> None:
    """Raise `SettingsError` unless `path` is a directory that holds a run."""
    if not path.is_dir():
        raise SettingsError(f"{path} is no run directory: there is no such directory")
    if not (path / CONFIG).is_file() or not (path / METADATA).is_file():
        raise SettingsError(f"{path} is no run directory: it has no {CONFIG} and {METADATA}")


def _lock(path: Path) -> IO[str]:
    """Lock the directory for the life of this process; the lock dies with it, however it ends."""
    file = open(path / ".lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RunDirInUseError(
            f"{path} is being written by another process ({owner}); wait for it or stop it"
        ) from None
    return file


def _sign(lock: IO[str]) -> None:
    """Write into the lock who holds it."""
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {platform.node()}")
    lock.flush()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary one beside it, then rename."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `SettingsError` naming the file if it is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of plain values; raise `SettingsError` naming the file if it is none."""
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected settings as `name: value`, found {type(value).__name__}")
    return value


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split()) or type(error).__name__


def plain(value: Any) -> Any:
    """Return `value` with tuples as lists and non-finite numbers as `None`, for JSON and YAML."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value

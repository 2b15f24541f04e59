"""A run's directory: who may write it, and its small files."""

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from jaxrl.errors import FULL, JaxrlError, RunDirInUseError, RunDirTakenError, SettingsError, StorageError, reason_of

FORMAT = 1
"""Version of the directory's layout."""

CONFIG, METADATA, METRICS, EPISODES = "config.yaml", "metadata.json", "metrics.jsonl", "eval_episodes.jsonl"
TRAIN_EPISODES = "train_episodes.jsonl"
CSV = "metrics.csv"
VIDEOS = "videos"
"""Directory of the episodes that are filmed on the way."""
LOCK = ".lock"


class RunDir:
    """A run directory held by this process: created, locked, and its small files written whole."""

    def __init__(self, path: str | Path, resume: bool) -> None:
        """Take hold of the directory `path`.

        Raises:
          SettingsError: it exists and is not empty (or is no run, with `resume`), or cannot be written.
          RunDirInUseError: another process holds it.
          StorageError: the disk is full.
        """
        self._lock: IO[str] | None = None
        try:
            self.path = Path(path).absolute()
            if resume:
                require_run(self.path)
            elif self.path.exists() and not os.path.lexists(self.path / LOCK):
                require_empty(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            require_inside(self.path)
            self._lock = _lock(self.path)
            if not resume:
                require_empty(self.path)
        except JaxrlError:
            self.release()
            raise
        except (OSError, ValueError) as error:
            self.release()
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, FileNotFoundError):  # as in /proc, where the system's own words would mislead
                reason = "no directory can be made there"
            kind = StorageError if getattr(error, "errno", None) in FULL else SettingsError
            raise kind(f"cannot write the run directory {str(path)!r}: {reason}") from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def sign(self) -> None:
        """Write into the lock who holds it."""
        assert self._lock is not None
        os.ftruncate(self._lock.fileno(), 0)
        os.write(self._lock.fileno(), f"pid {os.getpid()} on {platform.node()}".encode())

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write `config.yaml`."""
        write_atomically(self.path / CONFIG, yaml.safe_dump(plain(settings), sort_keys=False))

    def write_metadata(self, **facts: Any) -> None:
        """Merge `facts` into `metadata.json`."""
        write_atomically(
            self.path / METADATA, json.dumps({**read_metadata(self.path), **plain(facts)}, indent=2) + "\n"
        )

    def set_aside(self) -> Path:
        """Move all that the run has written into a new directory `discarded-N`; return it."""
        number = 1
        while (aside := self.path / f"discarded-{number}").exists():
            number += 1
        aside.mkdir()
        for entry in list(self.path.iterdir()):
            if entry.name == CONFIG:
                shutil.copy2(entry, aside)  # a run directory has one at every moment
            elif entry.name != LOCK and not entry.name.startswith("discarded-"):
                entry.rename(aside / entry.name)
        return aside

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def make_dir(path: Path) -> None:
    """Make a directory that is not there yet; raise `SettingsError` if that cannot be."""
    try:
        path.mkdir(parents=True)
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot make the run directory {path}: {_first_line(error)}") from error


def require_empty(path: Path) -> None:
    """Raise `SettingsError` unless `path` is a directory that holds nothing but a lock."""
    if not path.is_dir():
        raise SettingsError(f"{path} is a file; choose another --run-dir")
    if (path / CONFIG).exists():
        raise RunDirTakenError(
            f"{path} holds a run already; choose another --run-dir, or go on with that run by --resume {path} "
            "(in Python resume=True)"
        )
    if any(entry.name != LOCK for entry in path.iterdir()):
        raise SettingsError(f"{path} is not empty, and holds no run; choose another --run-dir")


def require_run(path: Path) -> None:
    """Raise `SettingsError` unless `path` is a directory that holds a run of a known format, and nothing outside it."""
    try:
        if not path.is_dir():
            there = "it is a file" if path.exists() else "there is no such directory"
            raise SettingsError(f"{path} is no run directory: {there}")
        require_inside(path)
        if not (path / CONFIG).is_file():
            inside = next((entry.parent for entry in path.glob(f"*/{CONFIG}")), None)
            advice = "" if inside is None else f"; runs are in it, such as {inside}"
            raise SettingsError(f"{path} is no run directory: it has no {CONFIG}{advice}")
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename or path}: {_first_line(error)}") from error
    version = read_metadata(path).get("format", FORMAT)
    if version != FORMAT:
        raise SettingsError(f"{path} has format {str(version)[:20]}; this version of jaxrl knows format {FORMAT} alone")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what `metadata.json` of `path` says, or nothing if it is missing or damaged: no training depends on it."""
    try:
        return read_json(path / METADATA)
    except SettingsError:
        return {}


def require_inside(path: Path) -> None:
    """Raise `SettingsError` if anything in the directory `path` is a link, or neither file nor directory.

    Following a link would read or write outside the run; so would appending to a file that has another name elsewhere.
    """
    appended = (LOCK, METRICS, EPISODES, TRAIN_EPISODES, CSV)
    for folder, folders, files in os.walk(path, onerror=_raise):
        for name in (*folders, *files):
            entry = os.path.join(folder, name)
            try:
                info = os.lstat(entry)
            except FileNotFoundError:
                continue  # a running process replaces its files
            if stat.S_ISLNK(info.st_mode) and _is_wandbs(entry):
                continue
            if stat.S_ISLNK(info.st_mode):
                raise SettingsError(f"{entry} is a link; a run directory may hold none")
            if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
                raise SettingsError(f"{entry} is neither a file nor a directory; a run directory holds nothing else")
            own = folder == str(path) and name in appended
            if own and stat.S_ISDIR(info.st_mode):
                raise SettingsError(f"{entry} is a directory; expected a file: move it away")
            if own and info.st_nlink > 1:
                raise SettingsError(f"{entry} has a second name (a hard link); replace it by a copy of itself")


def _is_wandbs(link: str) -> bool:
    """Say whether a link is the one that wandb's own process makes to its log, and that nothing here follows."""
    *_, folder, _, logs, name = ("", "", "", *Path(link).parts)
    return (folder, logs, name) == ("wandb", "logs", "debug-core.log")


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def require_free(path: str | Path) -> None:
    """Raise `RunDirInUseError` if another process holds the directory, before anything slow is begun."""
    lock = Path(path) / LOCK
    if lock.is_file() and not lock.is_symlink() and os.access(lock, os.W_OK):
        _lock(Path(path)).close()


def _lock(path: Path) -> IO[str]:
    """Lock the directory for the life of this process; the lock dies with it, however it ends."""
    file = open(path / LOCK, "a+", errors="replace")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = "".join(c for c in file.read(100) if c.isprintable()) or "unknown"
        file.close()
        raise RunDirInUseError(
            f"{path} is being written by another process ({owner}); wait for it or stop it"
        ) from None
    return file


def sync_dir(path: Path) -> None:
    """Bring the names in a directory to the disk, so that they outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary one beside it, then rename."""
    temporary = path.with_name(f".{path.name}.tmp")  # there is one writer, and what a kill left is overwritten
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `SettingsError` naming the file if it is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"cannot read {path}: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected a JSON object, found {type(value).__name__}")
    return value


class _Loader(yaml.SafeLoader):
    """A loader without aliases: a few lines of them can stand for endless values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}; write the value out")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of plain values, without aliases; raise `SettingsError` naming the file if it is none."""
    try:
        value = yaml.load(path.read_text(), _Loader)  # safe: only plain values
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected settings as `name: value`, found {type(value).__name__}")
    return value


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return reason_of(error)


def plain(value: Any) -> Any:
    """Return `value` with tuples as lists and non-finite numbers as `None`, for JSON and YAML."""
    if type(value) in (float, int, str, bool):  # nearly all values are, and to ask for more takes longer
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

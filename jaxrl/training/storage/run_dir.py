"""A run's directory: who may write it, and its small files."""

import contextlib
import glob
import json
import math
import os
import platform
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from jaxrl.errors import DISK_ERRORS, JaxrlError, SettingsError, StorageError
from jaxrl.paths import CONFIG, LOCK, hold, local, reason_of_path, require_empty

FORMAT = 1
"""Version of the directory's layout."""

METADATA, METRICS, EPISODES = "metadata.json", "metrics.jsonl", "eval_episodes.jsonl"
TRAIN_EPISODES = "train_episodes.jsonl"
CSV = "metrics.csv"
VIDEOS = "videos"
"""Directory of the episodes that are filmed on the way."""
LARGEST_TEXT = 1 << 26
"""Bytes of a settings file, of metadata or of a manifest, at most."""


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
            self.path = Path(local(path)).absolute()
            if resume:
                require_run(self.path)
            # A directory with a lock may be one that another process is just filling; whether it is empty is asked
            # again below.
            elif self.path.exists() and not os.path.lexists(self.path / LOCK):
                require_empty(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            require_inside(self.path)
            self._lock = hold(self.path)
            # Asked again under the lock: another process may have begun a run between the first look and the lock.
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
            kind = StorageError if getattr(error, "errno", None) in DISK_ERRORS else SettingsError
            raise kind(f"cannot write the run directory {str(path)!r}: {reason}") from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def sign(self) -> None:
        """Write into the lock who holds it."""
        assert self._lock is not None
        # Written only by the holder, so that others can name it. The lock itself is held on the open file, not by this
        # text.
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
        raise SettingsError(f"cannot make the run directory {path}: {reason_of_path(error)}") from error


def require_run(path: Path) -> None:
    """Raise `SettingsError` unless `path` is a directory that holds a run of a known format, and nothing outside it."""
    try:
        if not path.is_dir():
            there = "it is a file" if path.exists() else "there is no such directory"
            raise SettingsError(f"{path} is no run directory: {there}")
        if not os.path.lexists(path / CONFIG):
            inside = next((entry.parent for entry in path.glob(f"*/{CONFIG}")), None)
            advice = "" if inside is None else f"; runs are in it, such as {inside}"
            raise SettingsError(f"{path} is no run directory: it has no {CONFIG}{advice}")
        require_inside(path)
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename or path}: {reason_of_path(error)}") from error
    version = read_metadata(path).get("format", FORMAT)
    if type(version) is int and version > FORMAT:
        raise SettingsError(
            f"{path} was written by a newer version of jaxrl (format {version}; this one reads {FORMAT}); update jaxrl"
        )
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


def sync_dir(path: Path) -> None:
    """Bring the names in a directory to the disk, so that they outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Make a directory whole or not at all: fill the one that is yielded, which is then renamed to `path`.

    What is at `path` is replaced. Until the new one has its name the old one is there whole, if not under its own name
    then beside it. What a kill has left of an earlier try is removed, and an old one that it left beside comes back.

    Raises:
      OSError: it cannot be written; what was there stays.
    """
    made, aside = path.with_name(f".{path.name}.{os.getpid()}.tmp"), path.with_name(f".{path.name}.old")
    path.parent.mkdir(parents=True, exist_ok=True)
    # First, what a kill has left of an earlier try; the steps below are those that it may have cut short.
    _put_in_order(path, aside)
    made.mkdir()
    try:
        yield made
        # Between these two renames the old directory is only under its other name. `_put_in_order` gives it back if a
        # kill comes here.
        if path.exists():
            path.rename(aside)
        made.rename(path)
        sync_dir(path.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        with contextlib.suppress(OSError):
            _put_in_order(path, aside)
        raise
    # The old one goes only now that the new one has its name.
    shutil.rmtree(aside, ignore_errors=True)


def _put_in_order(path: Path, aside: Path) -> None:
    """Take back an old directory that lost its name, and remove what processes that are gone have half made."""
    if aside.is_dir() and not os.path.lexists(path):
        aside.rename(path)
    prefix, suffix = f".{path.name}.", ".tmp"
    for rest in path.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        process = rest.name.removeprefix(prefix).removesuffix(suffix)
        # Other names are another's: of the user, or of a directory whose name begins like this one's.
        if process.isascii() and process.isdecimal() and not _lives(int(process)):
            _remove(rest)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary one beside it, then rename."""
    temporary = path.with_name(f".{path.name}.tmp")  # there is one writer, and what a kill left is overwritten
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            # The bytes reach the disk before the name does: the other way round a loss of power could leave an empty
            # file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_text(path: Path) -> str:
    """Return what is in a text file of a run directory.

    Raises:
      ValueError: it is larger than any that jaxrl writes, or no text.
      OSError: it cannot be read.
    """
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"it has {size} bytes, more than any that jaxrl writes")
    return path.read_text()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `SettingsError` naming the file if it is none."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"cannot read {path}: {reason_of_path(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected a JSON object, found {type(value).__name__}")
    return value


class _Loader(yaml.SafeLoader):
    """Load plain values alone.

    A name that is given twice is refused, of which YAML would take the last, and so are aliases: a few lines of them
    can stand for endless values.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise ValueError(f"{twice[:80]} is given twice; give it once")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of plain values, without aliases; raise `SettingsError` naming the file if it is none."""
    try:
        value = yaml.load(read_text(path), _Loader)  # safe: only plain values
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {reason_of_path(error)}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"cannot read {path}: expected settings as `name: value`, found {type(value).__name__}")
    return value


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

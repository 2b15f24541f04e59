"""Paths given by users, and checks and locks of run directories. Imports nothing slow."""

import fcntl
import os
import platform
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from jaxrl.errors import JaxrlError, RunDirInUseError, RunDirTakenError, SettingsError, error_text

CONFIG, LOCK = "config.yaml", ".lock"
IN_PYTHON = (
    "go on with it by resume=True, begin again by start_over=True, which moves its files to discarded-N in there, or "
    "choose another run_dir"
)
P = TypeVar("P", bound=str | Path)


def local(path: P) -> P:
    """Expand a leading `~` of `path`; that of an unknown user is part of a name.

    Raises:
      SettingsError: it is a URL, such as `gs://bucket/run`.
    """
    text = str(path)
    if "\0" in text:
        raise SettingsError(f"{text!r} has a null character, which no path has")
    if (url := re.match(r"([A-Za-z][\w+.-]+):/(/|[^/])", text)) and (isinstance(path, Path) or url[2] == "/"):
        raise SettingsError(
            f"{text} is a URL, and runs live in directories: name a local one, or one where {url[1]}: is mounted"
        )
    if not text.startswith("~"):
        return path
    home = os.path.expanduser(text)
    if home.startswith("~") and text.partition("/")[0] != "~":
        return path  # a name that begins with `~`
    return type(path)(home)


def require_utf8(path: str | Path) -> None:
    """Raise `SettingsError` if the whole path of a run directory is not UTF-8: Orbax keeps checkpoints in no other."""
    whole = os.path.abspath(path)
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise SettingsError(
            f"{whole!r} is not UTF-8, and no checkpoint can be kept below such a path; choose another run directory, "
            "or rename it"
        ) from None


def require_new(path: str | Path, replaces: bool = False) -> None:
    """Raise an error if no run can begin in `path`, which need not exist yet.

    With `replaces`, it may hold a run.

    Raises:
      RunDirTakenError: it holds a run.
      RunDirInUseError: another process is writing it.
      SettingsError: it is a file, contains something else, cannot be accessed, or is not UTF-8.
    """
    path = Path(local(path))
    require_utf8(path)
    with writing(f"the run directory {_short(path)}"):
        if os.path.lexists(path / LOCK):
            require_free(path)
        if path.exists() and not (replaces and (path / CONFIG).exists()):
            require_empty(path, _on_command_line(path))


def _on_command_line(path: Path) -> str:
    return (
        f"go on with it by --resume {shlex.quote(str(path))}, begin again by --start-over, which moves its files to "
        "discarded-N in there, or choose another --run-dir"
    )


def require_empty(path: Path, advice: str = IN_PYTHON) -> None:
    """Raise `SettingsError` unless `path` is a directory that is empty except for a lock.

    The message for a directory with a run ends with `advice`.
    """
    if not path.is_dir():
        raise SettingsError(f"{path} is a file; choose another run directory")
    if (path / CONFIG).exists():
        raise RunDirTakenError(f"{path} holds a run already; {advice}")
    if any(entry.name != LOCK for entry in path.iterdir()):
        raise SettingsError(f"{path} is not empty, and holds no run; choose another run directory")


def require_free(path: str | Path) -> None:
    """Raise `RunDirInUseError` if another process holds the lock, to fail before anything slow begins.

    Raises:
      SettingsError: the lock cannot be accessed.
    """
    lock = Path(path) / LOCK
    with writing(f"the run directory {_short(path)}"):
        if lock.is_file() and not lock.is_symlink() and os.access(lock, os.W_OK):
            hold(Path(path)).close()


def this_process() -> str:
    """Return this process's number and host, as its locks hold them."""
    return f"pid {os.getpid()} on {platform.node()}"


def hold(path: Path) -> IO[str]:
    """Lock the directory until the returned file is closed or this process ends, in whatever way."""
    file = open(path / LOCK, "a+", errors="replace")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = "".join(c for c in file.read(100) if c.isprintable()) or "unknown"
        file.close()
        if owner == this_process():
            raise RunDirInUseError(f"{path} is open in this process already; end or close that one first") from None
        raise RunDirInUseError(
            f"{path} is being written by another process ({owner}); wait for it or stop it"
        ) from None
    return file


def _short(path: str | Path) -> str:
    text = str(path)
    return repr(text if len(text) <= 200 else f"{text[:100]}...{text[-50:]}")


@contextmanager
def writing(what: object, kind: type[JaxrlError] = SettingsError) -> Iterator[None]:
    """Raise a failure to write a file, or whatever `what` names, as an error of this `kind`."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot write {what}: {reason_of_path(error)}") from error


def require_writable_file(path: Path) -> None:
    """Raise `SettingsError` unless a file can be written at `path`; an existing file is not changed."""
    file = os.path.realpath(path)  # not a link to it, which is to stay
    there = os.path.exists(file)
    with writing(path):
        open(file, "ab").close()
        if not there:
            os.unlink(file)


def reason_of_path(error: BaseException) -> str:
    """Return the reason why a path or its file cannot be used, without the path."""
    return getattr(error, "strerror", None) or error_text(error)

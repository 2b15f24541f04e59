"""Run directories: locking, and reading what a run has written.

A member of a population has no files of its own, except for videos and what users' recorders write. It is named by a
path all the same, such as `runs/lr/members/00003`, which all functions here take in place of a run's directory. Its
settings and metadata are a line of `runs/lr/members.jsonl`; its rows are those of the population's logs that begin
with `{"member": 3, `.
"""

import functools
import io
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from jaxrl.errors import DISK_ERRORS, JaxrlError, SettingsError, StorageError
from jaxrl.paths import CONFIG, LOCK, hold, local, reason_of_path, require_empty, require_utf8, this_process
from jaxrl.training.settings import FORMATS
from jaxrl.training.storage.files import plain, read_json, read_text, read_yaml, with_common, write_atomically

DIR_FORMAT = 1
"""Version of the directory layout."""

METADATA, METRICS, EPISODES = "metadata.json", "metrics.jsonl", "eval_episodes.jsonl"
TRAIN_EPISODES = "train_episodes.jsonl"
CSV = "metrics.csv"
CHECKPOINTS, BEST = "checkpoints", "best"
"""Directories of a run's checkpoints and of its best policy."""
VIDEOS, BOARD = "videos", "tensorboard"
"""Directories of the episodes filmed during training, and of TensorBoard's files."""
MEMBERS, MEMBERS_FILE = "members", "members.jsonl"
"""The directory in the names of a population's members, and the file with the settings and metadata of all."""
MEMBER_LINE = re.compile(rb'\{"member": (0|[1-9]\d{0,8}), ')
"""The beginning of a line in a population's file that is about a member."""
MAX_MEMBERS = 10**9
"""Numbers of members are below this."""


class RunDir:
    """A run directory, created and locked by this process."""

    def __init__(self, path: str | Path, resume: bool) -> None:
        """Create and lock the directory `path`.

        Raises:
          SettingsError: it exists and is not empty (with `resume`: it is not a run), or cannot be written.
          RunDirInUseError: another process holds the lock.
          StorageError: the disk is full.
        """
        self._lock: IO[str] | None = None
        try:
            self.path = Path(local(path)).absolute()
            require_utf8(self.path)
            if resume:
                require_run(self.path)
            # With a lock file, another process may be starting a run here: taking the lock decides.
            elif self.path.exists() and not os.path.lexists(self.path / LOCK):
                require_empty(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            require_inside(self.path)
            self._lock = hold(self.path)
            # Check again under the lock: another process may have started a run since the first check.
            if not resume:
                require_empty(self.path)
        except JaxrlError:
            self.release()
            raise
        except (OSError, ValueError) as error:
            self.release()
            reason = reason_of_path(error)
            if isinstance(error, FileNotFoundError):  # as in /proc, where the system's message would mislead
                reason = "no directory can be made there"
            kind = StorageError if getattr(error, "errno", None) in DISK_ERRORS else SettingsError
            raise kind(f"cannot write the run directory {str(path)!r}: {reason}") from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_owner(self) -> None:
        """Write process id and host into the lock file, for the error that other processes raise."""
        assert self._lock is not None
        # The text is only informative: the lock is held on the open file.
        os.ftruncate(self._lock.fileno(), 0)
        os.write(self._lock.fileno(), this_process().encode())

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write `config.yaml`."""
        write_settings(self.path, plain(settings))

    def write_metadata(self, **facts: Any) -> None:
        """Merge `facts` into `metadata.json`."""
        write_atomically(
            self.path / METADATA, json.dumps({**read_metadata(self.path), **plain(facts)}, indent=2) + "\n"
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings in `config.yaml`."""
        return read_yaml(self.path / CONFIG)

    def metadata(self) -> dict[str, Any]:
        """Return the content of `metadata.json`, or `{}` if it is missing or damaged."""
        return read_metadata(self.path)

    def open_log(self, name: str) -> IO[bytes]:
        """Open a log for reading."""
        return open_log(self.path, name)

    def discard(self) -> Path:
        """Move all files of the run into a new directory `discarded-N`; return it."""
        number = 1
        while (aside := self.path / f"discarded-{number}").exists():
            number += 1
        aside.mkdir()
        for entry in list(self.path.iterdir()):
            if entry.name == CONFIG:
                shutil.copy2(entry, aside)  # copied: a run directory must have one at all times
            elif entry.name != LOCK and not entry.name.startswith("discarded-"):
                entry.rename(aside / entry.name)
        return aside

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def timestamp() -> str:
    """Return the present time as the metadata of a run hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def make_dir(path: Path) -> None:
    """Create a new directory; raise `SettingsError` if that is impossible."""
    try:
        path.mkdir(parents=True)
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot make the run directory {path}: {reason_of_path(error)}") from error


def holds_run(path: str | Path) -> bool:
    """Return whether `path` is the directory of a run or a population, of any format."""
    return (Path(path) / CONFIG).is_file()


def require_run(path: Path) -> None:
    """Raise `SettingsError` unless `path` is the directory of a run of a known format, without links out of it."""
    if (population := population_dir(path)) is not None:
        require_run(population)
        _of_member(path)
        return
    require_utf8(path)
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
    version = read_metadata(path).get("format", DIR_FORMAT)
    if type(version) is int and version > DIR_FORMAT:
        raise SettingsError(
            f"{path} was written by a newer version of jaxrl (format {version}; this one reads {DIR_FORMAT}); "
            "update jaxrl"
        )
    if version != DIR_FORMAT:
        raise SettingsError(
            f"{path} has format {str(version)[:20]}; this version of jaxrl knows format {DIR_FORMAT} alone"
        )


def require_inside(path: Path) -> None:
    """Raise `SettingsError` if the directory `path` contains a link, or anything but files and directories.

    Following a link would read or write outside the run; so would appending to a file with a hard link elsewhere.
    """
    appended = (LOCK, METRICS, EPISODES, TRAIN_EPISODES, CSV)
    for folder, folders, files in os.walk(path, onerror=_raise):
        for name in (*folders, *files):
            entry = os.path.join(folder, name)
            try:
                info = os.lstat(entry)
            except FileNotFoundError:
                continue  # a running process has just replaced it
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
    """Return whether `link` is the one that wandb's service process makes to its log; nothing here follows it."""
    *_, folder, _, logs, name = ("", "", "", *Path(link).parts)
    return (folder, logs, name) == ("wandb", "logs", "debug-core.log")


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def write_settings(run: Path, settings: Mapping[str, Any]) -> None:
    """Write the `config.yaml` of a run, of plain values."""
    write_atomically(run / CONFIG, yaml.safe_dump(settings, sort_keys=False))


# --- what a run has written ---------------------------------------------------------------------------------------


class MemberFacts(NamedTuple):
    """The settings and metadata of a member."""

    settings: dict[str, Any]
    metadata: dict[str, Any]


def member_dir(population: str | Path, number: int) -> Path:
    """Return the path that names a member."""
    return Path(population) / MEMBERS / f"{number:05d}"


def number_of(member: Path) -> int:
    """Return the number of the member that a path names; -1 if it names none."""
    number = int(member.name) if member.name.isascii() and member.name.isdecimal() else -1
    return number if member.name == member_dir("", number).name else -1


def population_dir(run: Path) -> Path | None:
    """Return the directory of the population of which `run` names a member, or `None`."""
    population = run.parent.parent
    named = run.parent.name == MEMBERS and holds_run(population) and not holds_run(run)
    return population if named else None


def read_settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run or a member; raise `SettingsError` if they cannot be read."""
    return read_yaml(run / CONFIG) if population_dir(run) is None else dict(_of_member(run).settings)


def read_metadata(run: Path) -> dict[str, Any]:
    """Return the metadata of a run or a member, or `{}` if they are missing or damaged: no training depends on them."""
    try:
        return read_json(run / METADATA) if population_dir(run) is None else dict(_of_member(run).metadata)
    except SettingsError:
        return {}


def open_log(run: Path, name: str) -> IO[bytes]:
    """Open a log of a run or a member for reading; raise `OSError` if there is none."""
    if (population := population_dir(run)) is None:
        return open(run / name, "rb")
    return log_of_members(population, name)(number_of(run))


def log_of_members(population: Path, name: str) -> Callable[[int], IO[bytes]]:
    """Return a function from a member's number to its lines in a log, as from `open_log`.

    The file is read once for all members; each `open_log` reads all of it if it has grown.
    """
    path = population / name
    lines = _split(path, _stamp(path))

    def opened(number: int) -> IO[bytes]:
        if number not in lines:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return io.BytesIO(lines[number])

    return opened


def films_in(directory: Path) -> list[Path]:
    """Return the films in a directory, sorted by name."""
    return sorted(path for form in FORMATS for path in directory.glob(f"*.{form}"))


def read_members(population: Path) -> Mapping[int, MemberFacts]:
    """Return the settings and metadata of a population's members, by number in ascending order.

    Raises:
      SettingsError: the file is damaged, or the population is of a version whose members had directories.
    """
    path = population / MEMBERS_FILE
    try:
        return _members(path, _stamp(path))
    except FileNotFoundError:
        if next((population / MEMBERS).glob(f"*/{CONFIG}"), None) is not None:
            raise SettingsError(
                f"the members of {population} have a directory each, as version 0.29 wrote them; read it with that"
            ) from None
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read {path}: {reason_of_path(error)}") from error


def _of_member(run: Path) -> MemberFacts:
    """Return the settings and metadata of a member; raise `SettingsError` if there is no such member."""
    there = read_members(run.parent.parent)
    if number_of(run) not in there:
        raise SettingsError(f"{run} is no run directory: {run.parent.parent} has no such member")
    return there[number_of(run)]


def _stamp(path: Path) -> tuple[int, ...]:
    """Return inode, size and modification time of a file, to detect changes; raise `OSError` if there is none."""
    info = path.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns


@functools.lru_cache(maxsize=4)
def _members(path: Path, stamp: tuple[int, ...]) -> Mapping[int, MemberFacts]:
    first, *lines = read_text(path).splitlines() or [""]
    found = {}
    try:
        # What all members have in common is written once.
        common = json.loads(first)["common"]
        for line in lines:
            one = json.loads(line)
            number = one["member"]
            if type(number) is not int or not 0 <= number < MAX_MEMBERS or number in found:
                raise ValueError
            parts = (with_common(common[part], one[part]) for part in MemberFacts._fields)
            found[number] = MemberFacts(*parts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"line {2 + len(found) if first else 1} is not about a member") from error
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=3)
def _split(path: Path, stamp: tuple[int, ...]) -> Mapping[int, bytes]:
    with path.open("rb") as file:
        return by_member(file)


def by_member(lines: Iterable[bytes]) -> dict[int, bytes]:
    """Return the lines of each member in a population's log, as they would stand in a log of its own."""
    found: dict[int, list[bytes]] = {}
    for line in lines:
        if about := MEMBER_LINE.match(line):
            found.setdefault(int(about[1]), []).append(b"{" + line[about.end() :])
    return {number: b"".join(own) for number, own in found.items()}

"""The runs below a directory, the newest first."""

import re
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from jaxrl.errors import SettingsError
from jaxrl.paths import local
from jaxrl.training.storage.run_dir import CONFIG, MEMBERS, read_metadata

PARTS = re.compile(rf"discarded-\d+|{MEMBERS}|mlruns|wandb")
"""Directories of a run in which a `config.yaml` is none of another run."""


def find_runs(root: str | Path = "runs", name: str = "*") -> list[Path]:
    """Return the runs at any depth under `root` whose names match `name`, the newest first.

    A run's age is `created` in its `metadata.json`, or else the modification time of its `config.yaml`. Runs created in
    the same second are in reverse natural order of names: `v10` comes before `v9`. Links are not followed, and neither
    members of populations nor runs that `start_over` has moved aside are listed.

    Args:
      root: directory to search.
      name: a shell pattern, such as `cartpole-*`, for the path below `root`, or without `/` for its last part.

    Raises:
      SettingsError: `root` is not a directory.
    """
    folder = Path(local(root))
    if not folder.is_dir():
        raise SettingsError(f"{root} holds no runs: there is no such directory")
    below = {path.parent.relative_to(folder) for path in folder.rglob(CONFIG)}
    own = [path for path in below if not any(_is_part(path, run) for run in path.parents if run in below)]
    age = lambda path: (_creation_time(folder / path), _natural(path))
    named = [path for path in own if fnmatchcase(path.as_posix() if "/" in name else path.name, name)]
    return [folder / path for path in sorted(named, key=age, reverse=True)]


def _is_part(path: Path, run: Path) -> bool:
    """Return whether `path` is in a part of `run`: a member, what was moved aside, or a copy that a service keeps."""
    return PARTS.fullmatch(path.relative_to(run).parts[0]) is not None


def _creation_time(run: Path) -> datetime:
    """Return the creation time of a run."""
    try:
        created = datetime.fromisoformat(read_metadata(run)["created"])
    except (KeyError, TypeError, ValueError):
        try:
            created = datetime.fromtimestamp((run / CONFIG).stat().st_mtime, UTC)
        except OSError:  # just removed
            return datetime.fromtimestamp(0, UTC)
    return created if created.tzinfo is not None else created.astimezone()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a key to sort names naturally: numbers by value, and before letters."""
    parts = re.findall(r"\d+|\D+", path.as_posix())
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]

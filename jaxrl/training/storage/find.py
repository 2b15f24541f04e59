"""Finding runs by name."""

import re
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from jaxrl.errors import SettingsError
from jaxrl.paths import local
from jaxrl.training.storage.run_dir import CONFIG, read_metadata


def find_runs(root: str | Path = "runs", name: str = "*") -> list[Path]:
    """Return the runs at any depth under `root` whose names match `name`, the newest first.

    A run's age is `created` in its `metadata.json`, or else the modification time of its `config.yaml`. Runs created in
    the same second are in reverse natural order of names: `v10` comes before `v9`. Links are not followed, and members
    of populations are not listed.

    Args:
      root: directory to search.
      name: a shell pattern, such as `cartpole-*`, for the path below `root`, or without `/` for its last part.

    Raises:
      SettingsError: `root` is not a directory.
    """
    folder = Path(local(root))
    if not folder.is_dir():
        raise SettingsError(f"{root} holds no runs: there is no such directory")
    below = [path.parent.relative_to(folder) for path in folder.rglob(CONFIG)]
    named = [path for path in below if fnmatchcase(path.as_posix() if "/" in name else path.name, name)]
    return [folder / path for path in sorted(named, key=lambda path: _age(folder, path), reverse=True)]


def _age(folder: Path, path: Path) -> tuple[datetime, list[tuple[int, int, str]]]:
    """Return a key to sort the runs below `folder` by creation time, then by name."""
    return _creation_time(folder / path), _natural(path)


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

"""Runs found by name."""

import re
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from jaxrl.errors import SettingsError
from jaxrl.paths import local
from jaxrl.training.storage.members import MEMBERS
from jaxrl.training.storage.run_dir import CONFIG, read_metadata


def find_runs(root: str | Path = "runs", name: str = "*") -> list[Path]:
    """Return the runs under `root` whose names match, the newest first, by the time at which each was begun.

    `created` in a run's `metadata.json` tells it, or else the time at which its `config.yaml` was last written. Runs of
    one second come in the natural order of names, turned round: numbers count as such, `v10` comes before `v9`. Only
    directories that are runs are found, at any depth; links are not followed.

    Args:
      root: where to look.
      name: a pattern as of a shell, `cartpole-*` say, for the path below `root`; without a `/` for its last part alone.

    Raises:
      SettingsError: `root` is no directory.
    """
    folder = Path(local(root))
    if not folder.is_dir():
        raise SettingsError(f"{root} holds no runs: there is no such directory")
    below = [path.parent.relative_to(folder) for path in folder.rglob(CONFIG) if not _is_member(path.parent)]
    named = [path for path in below if fnmatchcase(path.as_posix() if "/" in name else path.name, name)]
    return [folder / path for path in sorted(named, key=lambda path: _age(folder, path), reverse=True)]


def _is_member(run: Path) -> bool:
    """Return whether a run is a member of a population, which is found in its place."""
    return run.parent.name == MEMBERS and (run.parent.parent / CONFIG).is_file()


def _age(folder: Path, path: Path) -> tuple[datetime, list[tuple[int, int, str]]]:
    """Return a key by which the runs below `folder` come in the order in which they were begun."""
    return _created(folder / path), _natural(path)


def _created(run: Path) -> datetime:
    """Return when a run was begun."""
    try:
        created = datetime.fromisoformat(read_metadata(run)["created"])
    except (KeyError, TypeError, ValueError):
        try:
            created = datetime.fromtimestamp((run / CONFIG).stat().st_mtime, UTC)
        except OSError:  # removed meanwhile
            return datetime.fromtimestamp(0, UTC)
    return created if created.tzinfo is not None else created.astimezone()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a key by which numbers in names come in their order, and before letters."""
    parts = re.findall(r"\d+|\D+", path.as_posix())
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]

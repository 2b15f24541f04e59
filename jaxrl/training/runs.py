"""Runs found by name."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from jaxrl.errors import SettingsError
from jaxrl.training.run_dir import CONFIG


def find_runs(root: str | Path = "runs", name: str = "*") -> list[Path]:
    """Return the runs under `root` whose names match, the newest first: in the natural order of names, turned round.

    In it numbers count as such, so that `v10` is newer than `v9`. Only directories that are runs are found, at any
    depth; links are not followed.

    Args:
      root: where to look.
      name: a pattern as of a shell, `cartpole-*` say, for the path below `root`; without a `/` for its last part alone.

    Raises:
      SettingsError: `root` is no directory.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise SettingsError(f"{root} holds no runs: there is no such directory")
    below = [path.parent.relative_to(folder) for path in folder.rglob(CONFIG)]
    named = [path for path in below if fnmatchcase(path.as_posix() if "/" in name else path.name, name)]
    return [folder / path for path in sorted(named, key=_natural, reverse=True)]


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a key by which numbers in names come in their order, and before letters."""
    parts = re.findall(r"\d+|\D+", path.as_posix())
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]

"""Writing of an export: a directory that is created atomically."""

from collections.abc import Mapping
from pathlib import Path

from jaxrl.errors import SettingsError
from jaxrl.paths import writing
from jaxrl.reports.exports import require_outside
from jaxrl.training.storage.run_dir import new_directory

MARK = "policy.json"
"""File in every export, by which its directory is recognised."""


def require_room(out: Path, run: str, overwrite: bool, mark: str = MARK) -> None:
    """Raise `SettingsError` if `out` exists, or is inside the run that is read.

    With `overwrite`, an existing directory that contains a file `mark` may be replaced.
    """
    require_outside(out, [run])
    if not out.exists() and not out.is_symlink():
        return
    is_ours = (out / mark).is_file() and not out.is_symlink()
    if not (overwrite and is_ours):
        hint = "give --overwrite to replace what was written there" if is_ours else "name another directory by --out"
        raise SettingsError(f"{out} exists; {hint}")


def write(files: Mapping[str, bytes], out: Path) -> None:
    """Write a directory with these files atomically, replacing an existing one; names may include a folder.

    Raises:
      SettingsError: it cannot be written.
    """
    with writing(out), new_directory(out) as made:
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(content)

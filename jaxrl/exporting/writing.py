"""An export on disk: a directory that is written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

from jaxrl.errors import SettingsError
from jaxrl.reports.exports import require_outside
from jaxrl.training.storage.run_dir import new_directory

MARK = "policy.json"
"""What every export has, and what tells it from a directory with something else."""


def require_room(out: Path, run: str, overwrite: bool, mark: str = MARK) -> None:
    """Raise `SettingsError` where writing would cost anybody anything, the run that is read included.

    With `overwrite`, a directory that has a file `mark` may be replaced.
    """
    require_outside(out, [run])
    if not out.exists() and not out.is_symlink():
        return
    is_ours = (out / mark).is_file() and not out.is_symlink()
    if not (overwrite and is_ours):
        hint = "give --overwrite to replace what was written there" if is_ours else "name another directory by --out"
        raise SettingsError(f"{out} exists; {hint}")


def write(files: Mapping[str, bytes], out: Path) -> None:
    """Write a directory with these files, some of them in folders, in place of what may stand there, whole or not.

    Raises:
      SettingsError: it cannot be written.
    """
    try:
        with new_directory(out) as made:
            for name, content in files.items():
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_bytes(content)
    except OSError as error:
        raise SettingsError(f"cannot write {out}: {error.strerror or error}") from error

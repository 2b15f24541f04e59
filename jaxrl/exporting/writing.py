"""An export on disk: a directory that is written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jaxrl.errors import SettingsError

MARK = "policy.json"
"""What every export has, and what tells it from a directory with something else."""


def require_room(out: Path, overwrite: bool, mark: str = MARK) -> None:
    """Raise `SettingsError` where writing would cost anybody anything; `mark` is a file of what may be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    is_ours = (out / mark).is_file() and not out.is_symlink()
    if not (overwrite and is_ours):
        hint = "give --overwrite to replace what was written there" if is_ours else "name another directory by --out"
        raise SettingsError(f"{out} exists; {hint}")


def write(files: Mapping[str, bytes], out: Path) -> None:
    """Write a directory with these files, some of them in folders, in place of what may stand there.

    Raises:
      SettingsError: it cannot be written.
    """
    made = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(content)
        made.chmod(0o777 & ~_umask())
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    except BaseException as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise SettingsError(f"cannot write {out}: {error.strerror or error}") from error
        raise


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now

"""The C compiler of the machine, for exported policies."""

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_c(folder: Path, *args: str) -> None:
    """Compile C99 in `folder` with all warnings as errors; skip the test where there is no compiler.

    Args:
      folder: where the sources are.
      args: sources and further arguments of the compiler.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc")
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", *args, "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

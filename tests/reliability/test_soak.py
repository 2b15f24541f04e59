"""A long run, and all of it at once: kills, signals and full disks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_run_ends_in_the_same_bits_whatever_is_done_to_it(tmp_path: Path) -> None:
    minutes = os.environ.get("SOAK_MINUTES", "30")
    command = [sys.executable, str(Path(__file__).parent / "soak.py"), minutes, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

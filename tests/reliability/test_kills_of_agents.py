"""Kill a run of each agent in mid-training, twice; it goes on to the very bits of a run that nobody disturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agents import COMBINATIONS


def run(cache: Path, *args: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(Path(__file__).parent / "agent_run.py"), *map(str, args)]
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_killed_in_mid_training_each_agent_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "cache", name, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    for kill_at in (37, 65):
        killed = run(tmp_path / "cache", name, tmp_path / "run", kill_at)
        assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    ended = run(tmp_path / "cache", name, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == whole.stdout

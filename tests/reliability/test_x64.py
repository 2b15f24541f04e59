"""With `JAX_ENABLE_X64=1` everything trains as without it, and what is learnt is of 32 bits in any case."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import x64_run
from agents import COMBINATIONS

import jaxrl

EVERY_DAY = ("dqn with a memory, sequences by priority, compact",)
REST = [name for name in COMBINATIONS if name not in EVERY_DAY]
NORMALISED = "ppo, continuous and squashed, normalised"


def in_x64(*args: str) -> Any:
    """Return what `x64_run.py` prints in a process with 64 bits."""
    done = subprocess.run(
        [sys.executable, x64_run.__file__, *args],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(EVERY_DAY, id="one"),
        *(pytest.param(REST[i::5], id=f"part {i}", marks=pytest.mark.slow) for i in range(5)),
    ],
)
def test_every_agent_with_every_buffer_trains_with_64_bits(names: tuple[str, ...]) -> None:
    assert in_x64("train", *names) == {name: [] for name in names}


@pytest.mark.slow
def test_a_policy_trained_without_64_bits_acts_with_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jaxrl.Trainer(COMBINATIONS[NORMALISED](), max_opts=8, eval_interval=4, run_dir=run, quiet=True).train()
    assert in_x64("act", str(run)) == pytest.approx(x64_run.acted(str(run)), abs=1e-5)

"""Kill runs in mid-training, twice; each goes on to the very bits of a run that nobody disturbed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.training.storage.checkpoints import Store


def run(cache: Path, *args: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(Path(__file__).parent / "agent_run.py"), *map(str, args)]
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(command, env=env, capture_output=True, text=True)


DIFFERENT = (
    "rainbow, n-step, prioritised over all",
    "sac with memories, sequences by priority, compact",
    "ppo with a memory, stopped by divergence",
    "iql from data in epochs, rewards scaled",
)
"""Of each way to learn one; that every agent's state is saved whole is tested in `test_exact`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_killed_in_mid_training_it_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "cache", name, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    for kill_at in (37, 65):
        killed = run(tmp_path / "cache", name, tmp_path / "run", kill_at)
        assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    ended = run(tmp_path / "cache", name, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == whole.stdout


NEVER = 1000
"""A step that no run comes to."""


@pytest.mark.slow
def test_killed_in_mid_training_each_episode_has_its_row_once_and_the_films_are_the_same(tmp_path: Path) -> None:
    watched = json.dumps({"train_episodes": True, "video_interval": 30})

    def left(at: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (at / "train_episodes.jsonl", *at.glob("videos/*.gif"))}

    whole = run(tmp_path / "cache", "dqn, uniform", tmp_path / "whole", NEVER, watched)
    assert whole.returncode == 0, whole.stderr
    assert {"30.gif", "60.gif", "90.gif"} <= {*left(tmp_path / "whole")}
    assert len(left(tmp_path / "whole")["train_episodes.jsonl"].splitlines()) > 40
    for kill_at in (37, 65):
        killed = run(tmp_path / "cache", "dqn, uniform", tmp_path / "run", kill_at, watched)
        assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    ended = run(tmp_path / "cache", "dqn, uniform", tmp_path / "run", NEVER, watched)
    assert (ended.returncode, ended.stdout) == (0, whole.stdout), ended.stderr
    assert left(tmp_path / "run") == left(tmp_path / "whole")


@pytest.mark.slow
def test_killed_again_while_it_fills_its_replay_anew_a_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Its checkpoints, at every 24th step, hold no replay. The second is killed again before the next one."""
    bare = json.dumps({"save_replay": False})
    killed = run(tmp_path / "cache", "dqn, uniform", tmp_path / "once", 71, bare)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    store = Store(tmp_path / "once" / "checkpoints", 1)
    newest = max(store.steps())  # 48 may not have been whole yet
    assert not [path for path in store.read(newest)[0] if "buffer" in path]
    shutil.copytree(tmp_path / "once", tmp_path / "twice")
    once = run(tmp_path / "cache", "dqn, uniform", tmp_path / "once", NEVER, bare)
    again = run(tmp_path / "cache", "dqn, uniform", tmp_path / "twice", newest + 6, bare)
    assert (once.returncode, again.returncode) == (0, -signal.SIGKILL), once.stderr
    twice = run(tmp_path / "cache", "dqn, uniform", tmp_path / "twice", NEVER, bare)
    assert (twice.returncode, twice.stdout) == (0, once.stdout), twice.stderr
    assert "with replay filled anew" in (tmp_path / "twice" / "metrics.jsonl").read_text()

"""Clocks that jump, places that are missing, caches that others have damaged, low limits: nothing is lost."""

import itertools
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toys_runs import rows_in
from toys_trainer import ByStep, counting

import jaxrl
from jaxrl.training.storage.leaves import state_digest


def test_a_clock_that_goes_back_and_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = toy(tmp_path / "calm", 12)
    jumps = itertools.cycle([1.0e9, 4.0e9, 0.0, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    toy(tmp_path / "jumps" / "run", 8)
    assert toy(tmp_path / "jumps" / "run", 12, resume=True) == calm
    assert jaxrl.find_runs(tmp_path / "jumps") == [tmp_path / "jumps" / "run"]


def toy(run: Path, max_opts: int, resume: bool = False) -> tuple[str, list[tuple[str, int]]]:
    """Train; return the digest of the state, and of which kind and step the rows of the log are."""
    how = {"record_interval": 2, "eval_interval": 4, "save_interval": 4, "quiet": True, "resume": resume}
    trainer = jaxrl.Trainer(counting(), evaluator=ByStep([*range(20)]), max_opts=max_opts, run_dir=str(run), **how)
    digest = state_digest(trainer.train().state)
    return digest, [(row["kind"], row["opt_steps"]) for row in rows_in(run) if row["kind"] != "event"]


# --- as real processes -----------------------------------------------------------------------------------------------

CATCH = (
    *("--env", "Catch-bsuite", "--num-envs", "4", "--opt-interval", "4", "--warmup", "32", "--agent.features", "8"),
    *("--buffer.capacity", "200", "--buffer.batch-size", "8", "--eval-interval", "20", "--eval-episodes", "2"),
    *("--record-interval", "20", "--save-interval", "20", "--keep", "9", "--quiet"),
)


def run_jaxrl(
    module: str, *args: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"jaxrl.{module}", *map(str, args)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


def digests(run: Path) -> list[str]:
    done = run_jaxrl("verify", run)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_without_a_home_and_a_place_for_temporary_files_a_run_goes_on(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    found = []
    for name, places in {
        "none": {},
        "missing": {"HOME": "/proc/nowhere", "TMPDIR": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"},
        "relative": {"HOME": "here", "XDG_CACHE_HOME": "there"},
    }.items():
        run = tmp_path / name
        done = run_jaxrl("train", *CATCH, "--max-opts", 40, "--run-dir", run, env={**plain, **places}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        found.append(digests(run))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flipped", "torn", "empty", "directories"])
def test_a_damaged_cache_of_compiled_programs_changes_nothing(tmp_path: Path, how: str) -> None:
    chance, cache = random.Random(how), tmp_path / "cache"
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    found = []
    for name in ("first", "second"):
        done = run_jaxrl("train", *CATCH, "--max-opts", 40, "--run-dir", tmp_path / name, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        found.append(digests(tmp_path / name))
        if name == "first":
            files = [path for path in cache.rglob("*") if path.is_file()]
            assert files
            for file in files:
                spoil(file, how, chance)
    assert found[0] == found[1]


def spoil(file: Path, how: str, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if how == "directories":
        file.unlink()
        file.mkdir()
        return
    if how == "flipped":
        for _ in range(5):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes({"flipped": data, "torn": data[: len(data) // 2], "empty": b""}[how])


LIMITED = """
import os, resource, sys
resource.setrlimit(int(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[2])))
os.execv(sys.executable, [sys.executable, "-m", "jaxrl.train", *sys.argv[3:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((resource.RLIMIT_AS, size << 20) for size in (500, 1_000, 1_500, 2_500)),
        *((resource.RLIMIT_NOFILE, files) for files in (8, 16, 32)),
        *((resource.RLIMIT_FSIZE, size) for size in (0, 300, 20_000)),
    ],
)
def test_under_low_limits_nothing_that_was_saved_is_lost(tmp_path: Path, kind: int, value: int) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert run_jaxrl("train", *CATCH, "--max-opts", 20, "--run-dir", run).returncode == 0
    saved = digests(run)
    command = [sys.executable, "-c", LIMITED, kind, value, "--resume", run, "--max-opts", 60]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or done.stderr != ""
    assert kind == resource.RLIMIT_AS or "Traceback" not in done.stderr  # memory may end before Python has begun
    assert digests(run)[: len(saved)] == saved
    assert run_jaxrl("train", "--resume", run, "--max-opts", 60).returncode == 0
    assert run_jaxrl("train", *CATCH, "--max-opts", 60, "--run-dir", whole).returncode == 0
    assert digests(run) == digests(whole)

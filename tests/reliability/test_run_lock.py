"""Promise 20: one writer a run directory; the others are told who it is; the lock dies with its process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxrl.errors import RunDirInUseError, SettingsError
from jaxrl.training.storage.run_dir import RunDir

HOLD = (
    "import sys; from jaxrl.training.storage.run_dir import RunDir; run = RunDir(sys.argv[1], sys.argv[2] == 'resume');"
)
HOLD += "run.write_owner(); run.write_config({}); print('held', flush=True); sys.stdin.read()"


def hold(path: Path, how: str = "new") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLD, str(path), how]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


class Owner(NamedTuple):
    """The process that holds a run directory."""

    process: "subprocess.Popen[str]"
    path: Path


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    path = tmp_path_factory.mktemp("held") / "run"
    process = hold(path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield Owner(process, path)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("resume", [False, True])
def test_the_others_are_told_who_holds_it(owner: Owner, resume: bool) -> None:
    with pytest.raises(RunDirInUseError, match=f"pid {owner.process.pid} on"):
        RunDir(owner.path, resume)


def test_the_command_line_ends_with_exit_code_4(owner: Owner) -> None:
    command = [sys.executable, "-m", "jaxrl.train", "--env", "Catch-bsuite", "--run-dir", str(owner.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "compiling" in done.stdout) == (4, False)
    assert f"pid {owner.process.pid} on" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_of_several_that_come_at_once_one_gets_it(tmp_path: Path) -> None:
    processes = [hold(tmp_path / "run") for _ in range(4)]
    said = [process.stdout.readline() for process in processes if process.stdout]
    for process in processes:
        process.communicate()
    assert sorted(said) == ["", "", "", "held\n"]


def test_a_name_in_the_lock_is_only_shown(owner: Owner) -> None:
    lock = owner.path / ".lock"
    before = lock.read_bytes()
    lock.write_bytes(b"\x1b[2J\xff\n" * 10_000)
    with pytest.raises(RunDirInUseError) as raised:
        RunDir(owner.path, resume=True)
    assert len(str(raised.value)) < 400 + len(str(owner.path))
    assert "\x1b" not in str(raised.value)
    lock.write_bytes(before)


def test_the_lock_dies_with_its_process(owner: Owner) -> None:
    """The last test that needs its process."""
    owner.process.kill()
    owner.process.wait()
    RunDir(owner.path, resume=True).release()


def test_a_refused_directory_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match="is not empty, and holds no run"):
        RunDir(tmp_path, resume=False)
    assert os.listdir(tmp_path) == ["notes.txt"]

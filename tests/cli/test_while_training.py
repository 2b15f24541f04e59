"""What else goes on while a run trains: readers of its directory, and the end of the processes that it began."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from commands import SMALL, Cli, leaves
from test_train_actors import TINY, wait_for_rows


@pytest.mark.slow
def test_readers_of_a_run_that_trains_disturb_nothing_and_get_whole_answers(cli: Cli) -> None:
    process = cli.start("train", *SMALL, "--quiet", "--max-opts", "8000000", "--run-dir", "run")
    wait_for_rows(cli.cwd / "run", process)
    for _ in range(3):
        for args, codes in [
            (("evaluate", "run", "--episodes", "3"), (0, 6)),  # 6: the first policy is not on the disk yet
            (("play", "run", "--out", "film.gif"), (0, 6)),
            (("collect", "run", "--transitions", "20", "--out", "steps.npz"), (0, 6)),
            (("verify", "run"), (0,)),
        ]:
            done = cli.run(*args)
            assert done.returncode in codes, (args, done.stderr)
            assert "Traceback" not in done.stderr
    metadata = lambda: json.loads((cli.cwd / "run" / "metadata.json").read_text())
    assert (process.poll(), metadata()["status"]) == (None, "running")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors, metadata()["status"]) == (143, "", "SIGTERM")
    end = metadata()["opt_steps"]
    cli.train(*SMALL, "--quiet", "--max-opts", end, "--run-dir", "alone")
    assert leaves(cli.cwd / "run", end) == leaves(cli.cwd / "alone", end)


def children(pid: int) -> list[int]:
    """Return the processes that step environments for the process `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and "resource_tracker" not in command:
                found.append(int(entry.name))
    return found


def runs(pid: int) -> bool:
    """Say whether a process does anything still; one that nobody has asked for its exit code does not."""
    try:
        return (Path(f"/proc/{pid}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_worker_process_that_is_killed_ends_the_run_in_one_line_with_a_checkpoint(cli: Cli) -> None:
    args = (*TINY, "--quiet", "--processes", "--actor-timeout", "600", "--max-opts", "8000000", "--run-dir", "run")
    process = cli.start("train", *args)
    wait_for_rows(cli.cwd / "run", process)
    workers = children(process.pid)
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    try:
        _, errors = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("the run goes on, or hangs, without its worker")
    assert process.returncode == 1
    assert errors.startswith("error: actor ")
    assert errors.count("\n") == 1
    assert not any(runs(worker) for worker in workers)
    saved = json.loads((cli.cwd / "run" / "metadata.json").read_text())["saved_opt_steps"]
    assert saved > 0
    cli.train("--resume", "run", "--quiet", "--max-opts", saved + 8)

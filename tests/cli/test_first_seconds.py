"""The first seconds of a command: what it says before anything slow is imported, and how it is interrupted there."""

import os
import pty
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Cli, Finished, one_error_line

import jaxrl
from jaxrl import collect, doctor, evaluate, export, play, publish, train, verify
from jaxrl.cli import opening
from jaxrl.cli.config import parse
from jaxrl.errors import print_stderr

COMMANDS = {
    "train": [],
    "evaluate": ["run"],
    "play": ["run"],
    "verify": ["run"],
    "collect": ["run", "--transitions", "9", "--out", "x.npz"],
    "export": ["run"],
    "publish": ["run", "--out", "hub"],
    "report": ["run"],
    "doctor": [],
}


def run_with_fake_jax(path: Path, body: str, args: Sequence[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run Python with a package `jax` that does `body` when it is imported, and then nothing any more."""
    (path / "jax").mkdir()
    (path / "jax" / "__init__.py").write_text(body)
    env = {**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run([sys.executable, *args], cwd=path, env=env, capture_output=True, text=True, check=False)


SCRIPT = ["-c", "from jaxrl.__main__ import main; main()"]
"""What the command `jaxrl` does."""
WAITING = "print('here', flush=True); import time; time.sleep(60)"


def interrupted(process: subprocess.Popen[str], number: int) -> tuple[int, list[str], str]:
    """Signal a process once it says that it is `here`; return its exit code, what it said before, and its errors."""
    assert process.stdout is not None
    said = []
    while (line := process.stdout.readline()) not in ("here\n", ""):
        said.append(line.rstrip())
    process.send_signal(number)
    out, errors = process.communicate()
    assert (line, out) == ("here\n", "")
    return process.returncode, said, errors


def interrupted_in(module: str, path: Path, args: Sequence[str], number: int) -> tuple[int, list[str], str]:
    """Signal Python while it imports `module`, in place of which it finds a package that waits."""
    (path / module).mkdir()
    (path / module / "__init__.py").write_text(WAITING)
    env = {**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, *args], cwd=path, env=env, stdout=pipe, stderr=pipe, text=True)
    return interrupted(process, number)


@pytest.mark.parametrize(("begin", "number"), [(["-m", "jaxrl"], signal.SIGTERM), (SCRIPT, signal.SIGINT)])
def test_the_command_interrupted_while_importing_ends_in_one_line(
    tmp_path: Path, begin: list[str], number: signal.Signals
) -> None:
    code, said, errors = interrupted_in("jax", tmp_path, [*begin, "train"], number)
    assert said == [f"jaxrl {jaxrl.__version__}", "  importing"]
    assert (code, errors) == (128 + number, f"stopped by {number.name} before training began; nothing was written\n")


@pytest.mark.parametrize("begin", [["-m", "jaxrl.train"], [*SCRIPT, "train"]])
def test_signals_are_taken_before_anything_but_the_first_few_modules_is_imported(
    tmp_path: Path, begin: list[str]
) -> None:
    assert interrupted_in("argparse", tmp_path, begin, signal.SIGINT) == (130, [], "stopped by SIGINT\n")


def test_a_run_interrupted_while_its_environment_is_made_writes_nothing(cli: Cli) -> None:
    (cli.cwd / "waits.py").write_text(f"def make():\n    {WAITING}\n")
    code, said, errors = interrupted(cli.start("train", "ppo", "--env", "waits:make"), signal.SIGINT)
    assert said[-1] == "  building the environment"
    assert (code, errors) == (130, "stopped by SIGINT before training began; nothing was written\n")
    assert [path.name for path in cli.cwd.iterdir() if path.name != "__pycache__"] == ["waits.py"]


def test_the_command_alone_lists_the_commands(tmp_path: Path) -> None:
    """Without importing anything slow, which would end it here."""
    done = run_with_fake_jax(tmp_path, "raise SystemExit(9)", ["-m", "jaxrl"])
    assert (done.returncode, done.stderr) == (0, "")
    columns = {len(found[1]) for line in done.stdout.splitlines() if (found := re.match(r"(  [a-z]+ +)\w", line))}
    assert len(columns) == 1  # what each does stands below one another
    assert [command for command in COMMANDS if not re.search(rf"^  {command} +\w", done.stdout, re.MULTILINE)] == []


def test_an_unknown_command_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxrl", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean train?" in one_error_line(done)


@pytest.mark.parametrize("command", [evaluate, play, verify, collect, export, publish, doctor])
def test_help_says_in_plain_words_what_a_command_does(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "`" not in shown
    first = "--quick" if command is doctor else "runs/"
    assert f"Example: python -m {command.__name__} {first}" in " ".join(shown.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_interrupted_while_importing_ends_in_one_line(tmp_path: Path, command: str) -> None:
    code, _, errors = interrupted_in("jax", tmp_path, ["-m", f"jaxrl.{command}", *COMMANDS[command]], signal.SIGINT)
    assert (code, errors.count("\n")) == (130, 1)
    assert errors.startswith("stopped by SIGINT")


@pytest.mark.parametrize("begin", [["-m", "jaxrl.evaluate"], [*SCRIPT, "train"]])
def test_a_command_ends_in_one_line_where_no_temporary_file_can_be_written(cli: Cli, begin: list[str]) -> None:
    """Libraries ask for a directory of such files as they are imported."""
    no_files = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    done = subprocess.run([sys.executable, *begin], cwd=cli.cwd, capture_output=True, text=True, preexec_fn=no_files)
    assert done.returncode == 5
    assert "TMPDIR" in one_error_line(done)
    assert "/tmp" in done.stderr


def test_the_version_comes_before_jax_is_imported(tmp_path: Path) -> None:
    args = ["-m", "jaxrl.train", "ppo", "--env", "Catch-bsuite", "--seed", "7", "--run-dir", "x"]
    done = run_with_fake_jax(tmp_path, "raise SystemExit(9)", args)
    assert done.returncode == 9
    assert done.stdout.splitlines() == [f"jaxrl {jaxrl.__version__}", "  importing"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "dqn on CartPole-v1, seed 0"),
        (["sac", "--seed=3"], "sac on Pendulum-v1, seed 3"),
        (["iql", "--data", "x.npz"], "iql from data, seed 0"),
        (["--env-id=Zzz-v1"], "dqn on Zzz-v1, seed 0"),
        (["--config", "mine.yaml"], "td3 on Mine-v1, seed 4"),
        (["--config", "mine.yaml", "--seed", "5"], "td3 on Mine-v1, seed 5"),
        (["--resume", "run"], "dqn on Catch-bsuite, seed 0, going on in run"),
        (
            ["--resume", "run", "--from-step", "5", "--run-dir", "new", "--seed", "1"],
            "dqn on Catch-bsuite, seed 1, from step 5 of run",
        ),
    ],
)
def test_a_run_says_what_is_trained(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.chdir(finished.path.parent)
    Path("mine.yaml").write_text("algo: td3\nenv: Mine-v1\nseed: 4\n")
    assert train.title(parse(args)) == said


@pytest.mark.parametrize("args", ["--quiet", "--help", "-h", "--list-envs", "--distributed --process-id 1"])
def test_nothing_is_said_where_nothing_is_trained(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    opening.greet(args.split())
    assert capsys.readouterr().out == ""


def test_each_thing_that_takes_long_is_named_in_its_turn(finished: Finished) -> None:
    lines = finished.output.stdout.splitlines()
    assert lines[0] == f"jaxrl {jaxrl.__version__}"
    begun = ["importing", "dqn on Catch-bsuite, seed 0", "device "]
    stages = [*begun, "building ", "tracing", "compiling", "warming up: 200 ", "training"]
    found = [i for stage in stages for i, line in enumerate(lines) if line.startswith(f"  {stage}")]
    assert len(found) == len(stages)
    assert found == sorted(found)
    assert lines[found[2]].endswith(", run directory run")


def test_a_terminal_shows_one_line_that_is_taken_back(tmp_path: Path) -> None:
    """What stays on the screen are the lines that end in a newline."""
    code = "from jaxrl.terminal import Stage; s = Stage(); s.show('importing'); s.clear(); print('done')"
    shown = on_a_terminal(["-c", code], tmp_path)
    assert "  importing ..." in shown
    assert [line.rpartition("\r\x1b[2K")[2] for line in shown.replace("\r\n", "\n").split("\n")] == ["done", ""]


def on_a_terminal(args: Sequence[str], cwd: Path) -> str:
    """Run Python on a terminal of its own; return all that it wrote there."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, *args], cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    process.wait()
    return shown.decode()


def test_a_warning_in_colour_is_told_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_stderr("warning: \x1b[33mWARN: an old\nversion\x1b[0m")
    assert capsys.readouterr().err == "warning: WARN: an old version\n"


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["rocm", "nonsense"])
def test_devices_that_are_not_there_are_refused_in_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    done = cli.run("train", "--env", "Catch-bsuite")
    assert done.returncode == 2
    said = one_error_line(done)
    assert said.startswith(f"error: JAX_PLATFORMS={platform} asks for devices that JAX cannot use here")
    assert "there is: cpu" in said
    assert list(cli.cwd.iterdir()) == []

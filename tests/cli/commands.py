"""Run the commands as a user does, in processes of their own, over small runs whose programs compile once."""

import contextlib
import gc
import importlib
import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from toys_runs import read_lines as rows, repeated_rows

from jaxrl.cli.main import run_main
from jaxrl.training.storage.checkpoints import Store

SMALL = (
    *("--env", "Catch-bsuite", "--num-envs", "10", "--opt-interval", "10", "--warmup", "200", "--agent.lr", "1e-3"),
    *("--agent.features", "16", "--buffer.batch-size", "128", "--buffer.capacity", "50000", "--eval-interval", "30"),
    *("--eval-episodes", "3", "--record-interval", "20", "--save-interval", "20", "--keep", "2"),
    *("--agent.epsilon-decay", "2000"),
)
"""What goes into a compiled program is the same for all tests, so that it compiles once; no preset decides it."""


@contextlib.contextmanager
def few_objects() -> Iterator[None]:
    """Spare collections what tests before have left: a command collects after a failure."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Cli(NamedTuple):
    """The commands, as real processes in `cwd`."""

    cwd: Path
    cache: Path

    def start(self, module: str, *args: object) -> subprocess.Popen[str]:
        return self._open(["-m", f"jaxrl.{module}", *map(str, args)])

    def run(self, module: str, *args: object) -> subprocess.CompletedProcess[str]:
        return self._ended(self.start(module, *args))

    def here(self, module: str, *args: object) -> subprocess.CompletedProcess[str]:
        """Run it in this process, in half the time, where a process of its own would show nothing more."""
        command = importlib.import_module(f"jaxrl.{module}")
        given = list(map(str, args))
        with (
            contextlib.chdir(self.cwd),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            warnings.catch_warnings(),  # puts back how they are shown
            few_objects(),
            pytest.raises(SystemExit) as ended,
        ):
            run_main(command.main, given)
        return subprocess.CompletedProcess(given, int(ended.value.code or 0), out.getvalue(), err.getvalue())

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self._ended(self._open(["-c", code]))

    def train(self, *args: object) -> subprocess.CompletedProcess[str]:
        """Train to the end; anything but success fails the test."""
        done = self.run("train", *args)
        assert done.returncode == 0, done.stderr
        return done

    def _open(self, args: list[str]) -> subprocess.Popen[str]:
        env = {**os.environ, "XDG_CACHE_HOME": str(self.cache), "COLUMNS": "80"}
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *args], cwd=self.cwd, env=env, stdout=pipe, stderr=pipe, text=True)

    @staticmethod
    def _ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Finished(NamedTuple):
    """A run that went to its end, for all tests to look at and none to change."""

    path: Path
    args: tuple[str, ...]
    output: subprocess.CompletedProcess[str]


def timeless(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a log that a run must repeat: all but events, less what was measured by the clock."""
    return repeated_rows(rows(path))


def leaves(run: Path, opt_steps: int, part: str = "checkpoints") -> list[dict[str, Any]]:
    """Return path, shape, dtype and checksum of every array in a checkpoint."""
    store = Store(run / part, 1)
    try:
        found: list[dict[str, Any]] = store.manifest(opt_steps)["leaves"]
    finally:
        store.close()
    return found


def snapshot(path: Path) -> dict[str, Any]:
    """Return every entry below `path` with its bytes and time of change."""
    entries = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in entries}


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a refused process said, after checking that it was one line and no traceback."""
    assert begun_only(done.stdout), done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def begun_only(out: str) -> bool:
    """Say whether nothing was printed but the first lines of a run, which come before what is slow to import."""
    begun = r"jaxrl |  (importing|\S+ (on|from) .*, seed |device |generic settings|building |tracing|compiling)"
    return all(re.match(begun, line) for line in out.splitlines())

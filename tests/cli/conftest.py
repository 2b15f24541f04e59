"""One finished run for all tests of the commands, and the commands themselves."""

from pathlib import Path

import pytest
from commands import SMALL, Cli, Finished


@pytest.fixture
def cli(tmp_path: Path, cache: Path) -> Cli:
    """The commands, in the test's own directory."""
    return Cli(tmp_path, cache)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Finished:
    """A run of 60 optimisation steps, made by the command line."""
    cwd = tmp_path_factory.mktemp("finished")
    args = (*SMALL, "--max-opts", "60")
    output = Cli(cwd, cache).train(*args, "--run-dir", "run")
    return Finished(cwd / "run", args, output)

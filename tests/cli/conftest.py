"""One finished run for all tests of the front doors, and the front doors themselves."""

from pathlib import Path

import pytest
from front_doors import SMALL, Doors, Finished


@pytest.fixture
def doors(tmp_path: Path, cache: Path) -> Doors:
    """The front doors, in the test's own directory."""
    return Doors(tmp_path, cache)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Finished:
    """A run of 60 optimisation steps, made by the command line."""
    cwd = tmp_path_factory.mktemp("finished")
    args = (*SMALL, "--max-opts", "60")
    output = Doors(cwd, cache).train(*args, "--run-dir", "run")
    return Finished(cwd / "run", args, output)

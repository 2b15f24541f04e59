"""One finished run for all tests of the front doors, and the front doors themselves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from front_doors import SMALL, Doors, Finished

from jaxrl import collect, doctor, evaluate, play, publish, train


@pytest.fixture(scope="session", autouse=True)
def no_cache_in_this_process() -> Iterator[None]:
    """Keep a front door that is called in this process from turning on the user's own cache, for it and all after."""
    with pytest.MonkeyPatch.context() as patch:
        for door in (collect, evaluate, play, publish, train):
            patch.setattr(door, "cache_compilations", lambda: None)
        patch.setattr(doctor.door, "without_compilation_cache", lambda: None)  # nor from turning off that of the tests
        yield


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

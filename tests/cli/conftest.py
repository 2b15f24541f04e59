"""One finished run for all tests of the front doors, and the front doors themselves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_doors import SMALL, Doors, Finished

from jaxrl import Strategy, collect, doctor, evaluate, play, publish, train, verify


@pytest.fixture(scope="session", autouse=True)
def no_cache_in_this_process() -> Iterator[None]:
    """Keep a front door that is called in this process from turning on the user's own cache, for it and all after."""
    with pytest.MonkeyPatch.context() as patch:
        for door in (collect, evaluate, play, publish, train):
            patch.setattr(door, "cache_compilations", lambda: None)
        patch.setattr(doctor.door, "without_compilation_cache", lambda: None)  # nor from turning off that of the tests
        yield


_BUILT: dict[str, Strategy] = {}
"""Strategies by their settings."""


@pytest.fixture(scope="module", autouse=True)
def built_once() -> Iterator[None]:
    """Have front doors that are called in this process train one strategy for the same settings, which compiles once.

    Where a colon names code of the user's own, or data or a teacher are read, each call builds its own: another test
    may have written them otherwise.
    """
    build = train.build

    def built(algo: str, config: Any, teacher: Any = None) -> Strategy:
        strategy = build(algo, config, teacher)
        said = json.dumps([algo, strategy.info.settings, strategy.info.notes], separators=(",", "="))
        reads = any(getattr(config, name, None) for name in ("data", "demos", "teacher"))
        return strategy if reads or ":" in said else _BUILT.setdefault(said, strategy)

    with pytest.MonkeyPatch.context() as patch:
        for door in (train, verify):
            patch.setattr(door, "build", built)
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

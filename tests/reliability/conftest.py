"""The small run, for every test of this directory that damages one, and a process that meets strangers' runs."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_run
import pytest
from hostile_run import BY_SIZE, FEW, HOSTILE, SIZES, spoiled
from small_run import SmallRun, small_run


@pytest.fixture(scope="module", autouse=True)
def quiet_threads() -> Iterator[None]:
    """Leave out what Orbax logs of damaged arrays from threads of its own, even after a load has ended.

    While Python 3.11 formats their tracebacks there, it may fail to parse anything elsewhere.
    """
    logger = logging.getLogger("asyncio")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """The small run, made once in a process."""
    return small_run(tmp_path_factory)


@pytest.fixture
def run(small: SmallRun, tmp_path: Path) -> Path:
    """A copy of the small run, to be damaged."""
    return small.copy(tmp_path / "run")


@pytest.fixture(scope="session")
def strangers(
    small: SmallRun, cache: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one process did with those run directories of strangers that tests to be run ask for; or with most."""
    root = tmp_path_factory.mktemp("strangers")
    cases = [item.name for item in request.session.items if item.get_closest_marker("skip") is None]
    asked = [spoil for spoil in HOSTILE if any(case.endswith(f"[{spoil.__name__}]") for case in cases)]
    every_size = any(case.startswith("test_no_size_") and case.endswith("[all]") for case in cases)
    for name in ("first", "second"):
        small.copy(root / "harmless" / name)
    for spoil in asked or HOSTILE:
        spoil(small.copy(root / "hostile" / spoil.__name__))
    for name in SIZES if every_size else FEW:
        spoiled(small.copy(root / "sizes" / name), name)
    readers = BY_SIZE if every_size else ("latest", "verify", "resume")
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache / "jaxrl" / "compiled")}
    command = [sys.executable, str(Path(hostile_run.__file__)), str(root), *readers]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    last = [line for line in done.stdout.splitlines() if line.startswith("through")][-1:]
    assert done.returncode == 0, (last, done.stderr[-3000:])
    assert not (root / "executed").exists()
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {"exec", "pickle.find_class"} <= set(told["control"])  # a pickle's code is seen
    return told

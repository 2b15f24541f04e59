"""Programs that many of these tests compile alike are compiled once."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs are kept."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(programs: Path) -> Iterator[None]:
    old = [getattr(jax.config, option) for option in OPTIONS]
    for option, value in zip(OPTIONS, (str(programs), 0.0), strict=True):
        jax.config.update(option, value)
    yield
    for option, value in zip(OPTIONS, old, strict=True):
        jax.config.update(option, value)

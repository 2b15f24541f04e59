"""What all tests share: strict JAX settings, programs compiled once, and `slow` tests left out unless asked for."""

import ctypes
import gc
import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import hypothesis
import jax
import pytest
from built import built_once, no_cache_of_the_user

from jaxrl.training import program
from jaxrl.xla import attempts
from jaxrl.xla.options import FAST_COMPILE

# The classic bug of losses is `[B]` against `[B, 1]`; NumPy's silent promotion would hide it.
jax.config.update("jax_numpy_rank_promotion", "raise")
# Where in the source an operation comes from is of no use here, and to tell it takes a tenth of the time of a trace.
jax.config.update("jax_traceback_in_locations_limit", 0)

# No test fails for being slow: a machine may be busy.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")


IN_MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory. To have each checkpoint reach a disk is half of the time of tests that save."""


def fits_in_memory() -> bool:
    """Return whether files of tests can be kept in memory, with room to spare, and programs among them be begun."""
    if not IN_MEMORY.is_dir() or not os.access(IN_MEMORY, os.W_OK | os.X_OK):
        return False
    free = min(shutil.disk_usage(IN_MEMORY).free, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return not os.statvfs(IN_MEMORY).f_flag & os.ST_NOEXEC and free >= 4 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Have XLA compile quickly rather than well, here and in the processes that tests begin; keep files in memory.

    Compiling is most of what the ordinary tests do. Where slow ones are asked for, all is as users have it.
    """
    if not config.getoption("-m") and fits_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
    gc.set_threshold(100_000, 50, 100)  # tracing makes so many objects that a collection every 700 costs a twentieth
    if not config.getoption("-m"):
        flags = [f"--{name}={str(value).lower()}" for name, value in FAST_COMPILE.items()]
        if jax.__version_info__ < (0, 11):  # of later ones it was not tried
            flags.append("--xla_cpu_parallel_codegen_split_count=1")
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> Path:
    """Where compiled programs are kept: for all workers, for the processes that tests begin, and for the next time."""
    return request.config.cache.mkdir("programs")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(cache: Path) -> None:
    """Keep compiled programs: much of the time of many tests is the same compilations."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    jax.config.update("jax_compilation_cache_dir", str(cache / "jaxrl" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # smaller ones cost more to keep
    # Tests come back to the same strategies more often than users do.
    program._programs = lru_cache(maxsize=64)(program._programs.__wrapped__)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests() -> Iterator[None]:
    """Leave the cache as it is, whatever commands are called in this process."""
    with no_cache_of_the_user():
        yield


@pytest.fixture(scope="module", autouse=True)
def same_strategies() -> Iterator[None]:
    """Trace and compile once what commands that are called in this process train with the same settings."""
    with built_once():
        yield


@pytest.fixture
def shared_programs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that go through no command take compiled programs from there too, and leave theirs."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache / "jaxrl" / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


ROOM = 3 << 30
"""Bytes of a test process above which it lets go of compiled programs; without that it comes to seven gigabytes."""


@pytest.fixture(scope="module", autouse=True)
def room() -> Iterator[None]:
    """Let go of compiled programs after a module whose process has grown large; the disk has them still."""
    yield
    if resident() > ROOM:
        give_back()
    if resident() > ROOM:
        program._programs.cache_clear()
        jax.clear_caches()
        gc.collect()
        give_back()


def give_back() -> None:
    """Give the system the memory that is free: the C library keeps it, two thirds of all here, and so it would count.

    A process that had once grown large would let go of its programs after each later module, and get nothing for it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test be told what an earlier one of its process went without."""
    monkeypatch.setattr(attempts, "_failures", {})


def resident() -> int:
    """Return the bytes of memory that this process takes, or 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make the cases slow that a test's `every_day` does not name, and leave the slow ones out unless asked for."""
    require_cases(items)
    for item in items:
        mark = item.get_closest_marker("every_day")
        if mark is not None and case_of(item) not in mark.args:
            item.add_marker(pytest.mark.slow)
    if config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="slow: run with -m slow")
    for item in items:
        if item.get_closest_marker("slow"):  # `keywords` also has the names of folders
            item.add_marker(skip)


def require_cases(items: list[pytest.Item]) -> None:
    """Raise if a test's `every_day` names a case that it does not have, where all cases are collected."""
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, set()).add(case_of(item))
        named.setdefault(test, set()).update(*(mark.args for mark in item.iter_markers("every_day")))
    if len(cases) > 1_000 and (odd := [test for test in cases if not named[test] <= cases[test]]):
        raise pytest.UsageError(f"every_day names cases that are not there: {', '.join(odd)}")


def case_of(item: pytest.Item) -> str:
    """Return the name of a test's case: what stands in the brackets of its id."""
    return item.name.partition("[")[2].removesuffix("]")

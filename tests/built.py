"""Commands called in a test's own process: they trace the same strategy once, and leave the tests' cache alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxrl import Strategy, doctor, evaluate, train, verify

_BUILT: dict[str, Strategy] = {}
"""Strategies by their settings."""


@contextmanager
def built_once() -> Iterator[None]:
    """Have commands that are called in this process train one strategy for the same settings, which compiles once.

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
        for command in (train, verify):
            patch.setattr(command, "build", built)
        yield


@contextmanager
def no_cache_of_the_user() -> Iterator[None]:
    """Keep a command that is called in this process from turning on the user's own cache, for it and all after."""
    with pytest.MonkeyPatch.context() as patch:
        for command in (evaluate, train, verify):
            patch.setattr(command, "cache_compilations", lambda: None)
        # Nor from turning off that of the tests.
        patch.setattr(doctor.command_line, "without_compilation_cache", lambda: None)
        yield

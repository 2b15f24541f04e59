"""Front doors called in a test's own process train one strategy for the same settings, which is traced once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxrl import Strategy, train, verify

_BUILT: dict[str, Strategy] = {}
"""Strategies by their settings."""


@contextmanager
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

"""Suppression of what Orbax's threads print in addition to the error that Orbax raises."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOGGED = {"absl": "_SignalingThread", "asyncio": "orbax"}
"""Name of a logger -> text that identifies its suppressed messages."""


@contextmanager
def hushed() -> Iterator[None]:
    """Suppress, inside, the tracebacks that Orbax's threads print for each array when a save or a load fails.

    The failure itself is raised, and reported on one line. Hooks and filters of the process are restored afterwards, so
    that a save has no side effects for users of the library. Commands run entirely inside, because some threads find
    TensorStore's event loop closed only after a load has ended.
    """
    hook = sys.unraisablehook

    def report(what: Any) -> None:
        if not _of_an_event_loop(what.exc_value):
            hook(what)

    filters = {name: _without(part) for name, part in _LOGGED.items()}
    sys.unraisablehook = report
    for name, leave_out in filters.items():
        logging.getLogger(name).addFilter(leave_out)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for name, leave_out in filters.items():
            logging.getLogger(name).removeFilter(leave_out)


def _of_an_event_loop(error: BaseException | None) -> bool:
    """Return whether an event loop is closed, or is incomplete because file descriptors ran out."""
    if isinstance(error, RuntimeError):
        return str(error) == "Event loop is closed"
    return isinstance(error, AttributeError) and error.name == "_ssock"


def _without(part: str) -> Any:
    return lambda record: part not in record.getMessage()

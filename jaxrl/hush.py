"""Silence what Orbax's threads print in addition to the error that Orbax raises."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOGGED = {"absl": "_SignalingThread", "asyncio": "orbax"}
"""By logger, what is in the messages that are left out."""


@contextmanager
def hushed() -> Iterator[None]:
    """Leave out, inside, the tracebacks that Orbax's threads print for each array when a save or a load fails.

    The failure itself is an exception, and reported in one line. Afterwards the hooks and filters of the process are as
    before: saving changes nothing for a library's user. A front door encloses all that it does, for some threads find
    only after a load has ended that TensorStore's event loop is closed.
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
    """Say whether a loop is closed, or was never made whole, for there were no file descriptors."""
    if isinstance(error, RuntimeError):
        return str(error) == "Event loop is closed"
    return isinstance(error, AttributeError) and error.name == "_ssock"


def _without(part: str) -> Any:
    return lambda record: part not in record.getMessage()

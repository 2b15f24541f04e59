"""End a front door on a signal, while there is no run to save. Imports little, for it comes before all else."""

import signal
import sys
from types import FrameType

from jaxrl.terminal import end_at_once

_how_far = ""


def leave_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process at once, in one line, without a traceback."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


def print_progress(text: str) -> None:
    """Have `text` stand behind the name of a signal that comes from now on."""
    global _how_far
    _how_far = text


def is_front_door() -> bool:
    """Return whether this process was started as `python -m jaxrl.train` or similar; a library leaves signals alone."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module is not None and module.name.startswith("jaxrl.")


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    end_at_once(number, f"stopped by {signal.Signals(number).name}{_how_far}")


# While `python -m jaxrl.train` is still importing, too: the front doors import this module before all others.
if is_front_door():
    leave_on_signals()

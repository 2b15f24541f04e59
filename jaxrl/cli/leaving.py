"""Signal handlers of commands while there is no run to save. Imports little, because it is imported first."""

import signal
import sys
from types import FrameType

from jaxrl.terminal import end_at_once

_how_far = ""


def leave_on_signals() -> None:
    """Make SIGINT and SIGTERM end this process at once, with one line instead of a traceback."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


def set_exit_note(text: str) -> None:
    """Set the text that follows the name of the signal in that line."""
    global _how_far
    _how_far = text


def is_command() -> bool:
    """Return whether this process was started as `python -m jaxrl.train` or similar; a library leaves signals alone."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module is not None and module.name.startswith("jaxrl.")


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    end_at_once(number, f"stopped by {signal.Signals(number).name}{_how_far}")


# On import, so that signals during slow imports are handled too: commands import this module first.
if is_command():
    leave_on_signals()

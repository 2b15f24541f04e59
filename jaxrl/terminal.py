"""Show the current activity: one live line on a terminal, plain lines elsewhere. Imports nothing slow."""

import contextlib
import math
import os
import sys
import threading
import time
from typing import Any

CLEAR = "\r\x1b[2K"
"""Erases the line of the cursor."""
_CURSOR = "\x1b[?25h"


class Stage:
    """Display of the current activity until the next `clear`; on a terminal, with the elapsed seconds."""

    def __init__(self, file: Any = None, live: bool | None = None) -> None:
        self._file, self._live = file, live
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def show(self, what: str) -> None:
        """Show `what` instead of the previous activity."""
        self.clear()
        file = self._file or sys.stdout
        if not (is_terminal(file) if self._live is None else self._live):
            _write(file, f"  {what}\n")
            return
        self._end = threading.Event()
        self._thread = threading.Thread(target=_tick, args=(file, what, self._end), daemon=True)
        self._thread.start()

    def clear(self) -> None:
        """Clear the live line."""
        if self._thread is not None and self._end is not None:
            self._end.set()
            self._thread.join()
            self._thread = None
            _write(self._file or sys.stdout, CLEAR)


def _tick(file: Any, what: str, end: threading.Event) -> None:
    """Rewrite the line every second until `end`, truncated to the terminal's width: a wrapped one cannot be erased."""
    begun = time.monotonic()
    while True:
        seconds = int(time.monotonic() - begun)
        line = f"  {what} ..." + (f" {seconds} s" if seconds else "")
        _write(file, CLEAR + line[: columns() - 1])
        if end.wait(1.0):
            return


def columns() -> int:
    """Return the width of the terminal, or 80; `COLUMNS` is ignored, since a live line could then wrap."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    return 80


def wrap_line(line: str, room: float, indent: int = 16) -> list[str]:
    """Wrap `line` between words to lines of at most `room` columns, with continuation lines indented.

    No-break spaces are replaced by spaces.
    """
    if len(line) <= room:
        return [line.replace("\N{NO-BREAK SPACE}", " ")]
    import textwrap

    gap = " " * min(indent, int(room) // 4)
    wrapper = textwrap.TextWrapper(int(room), subsequent_indent=gap, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in wrapper.wrap(line)]


def print_folded(line: str, indent: int = 16) -> None:
    """Print a line, wrapped to the width if on a terminal. A closed output is not an error."""
    with contextlib.suppress(OSError):
        print("\n".join(wrap_line(line, columns() if is_terminal(sys.stdout) else math.inf, indent)), flush=True)


def is_terminal(file: Any) -> bool:
    """Return whether `file` is a terminal that can rewrite a line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(file.isatty()) and os.environ.get("TERM", "dumb") != "dumb"
    return False


def clear_line(more: str = "") -> None:
    """Erase the live line of a terminal, bypassing Python's buffer; then write `more`."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if is_terminal(sys.stdout):
            os.write(sys.stdout.fileno(), (CLEAR + more).encode())


def end_at_once(number: int, line: str) -> None:
    """Replace the live line by `line`, and exit with the code of the signal `number`. Safe in a signal handler."""
    clear_line(_CURSOR)
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())  # `sys.stderr` may be in the middle of a line
    os._exit(128 + number)


def _write(file: Any, text: str) -> None:
    """Write `text`, ignoring a closed file."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        file.write(text)
        file.flush()

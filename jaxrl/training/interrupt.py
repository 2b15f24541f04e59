"""Stopping a run from outside: by a handle, from any thread, or by SIGINT and SIGTERM."""

import _signal
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxrl.terminal import restore


class Interrupt:
    """A handle that stops a run at its next chunk's end, after saving. Safe to use from any thread."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.signal: int | None = None

    def stop(self, reason: str = "handle") -> None:
        """Ask the run to save and stop."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.reason is not None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into `stop`; a second one ends the process at once (130 or 143).

        Handlers can only be set by the main thread; in any other this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            restore()
            os._exit(128 + number)
        self.signal = number
        self.stop(signal.Signals(number).name)


class Undisturbed:
    """Put off SIGINT and SIGTERM to the end of a `with` block: what they raise cannot leave it half done.

    Only the main thread handles signals; in any other this does nothing. One that ends the process at once still does.

    A session needs this in every step, hence `_signal`: the functions of `signal` are these, but look up each handler
    among enums, which takes five times as long as all else here.
    """

    def __enter__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: int | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(_signal.getsignal(number)):
                    self._handlers[number] = _signal.signal(number, self._note)

    def __exit__(self, *error: object) -> None:
        try:
            self._restore(signal.SIGTERM)
        finally:
            self._restore(signal.SIGINT)
        if self._came is not None:
            signal.raise_signal(self._came)

    def _restore(self, number: int) -> None:
        if number in self._handlers:
            _signal.signal(number, self._handlers[number])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number

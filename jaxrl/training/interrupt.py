"""Stopping a run from outside: by a handle, from any thread, or by SIGINT and SIGTERM."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxrl.errors import DivergedError, StorageError, say
from jaxrl.terminal import end_at_once

try:
    # CPython's own functions, which those of `signal` wrap to look up each handler among enums: that makes a session's
    # step a fifth slower (68 us without, 83 us with them, beside the optimisation).
    import _signal as handlers
except ImportError:
    import signal as handlers


class Interrupt:
    """A handle that stops a run at its next chunk's end, after saving. Safe to use from any thread."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.signal: int | None = None

    def stop(self, reason: str = "handle") -> None:
        """Ask the run to save and stop."""
        self.reason = self.reason or reason

    def receive(self, number: int) -> None:
        """Ask the run to save and stop as the signal `number` does."""
        self.signal = number
        self.stop(signal.Signals(number).name)

    def clear(self) -> None:
        """Forget that anyone has asked, for a run that goes on after it was stopped."""
        self.reason = self.signal = None

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
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not _on_signal:
                _BEFORE[number] = signal.signal(number, _on_signal)
        _LISTENING.append(self)
        try:
            yield
        finally:
            _LISTENING.remove(self)
            if not _LISTENING and threading.current_thread() is threading.main_thread():
                _restore_handlers()


_LISTENING: list[Interrupt] = []
"""Handles of all runs that go on in the main thread; several, where their loops are interleaved or nested.

They may end in any order: only with the last of them do the handlers come back that were there before the first.
"""
_BEFORE: dict[int, Any] = {}
"""Those handlers, by signal."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Stop all runs that listen; end the process at the second signal."""
    del frame
    if not _LISTENING:  # the last run was dropped by another thread, which cannot restore handlers
        _restore_handlers()
        signal.raise_signal(number)
    if any(interrupt.signal is not None for interrupt in _LISTENING):
        end_at_once(number, f"stopped at once by a second {signal.Signals(number).name}")
    for interrupt in _LISTENING:
        interrupt.receive(number)


def _restore_handlers() -> None:
    for number, handler in _BEFORE.items():
        if handler is not None:  # one that was not set from Python cannot be given back
            signal.signal(number, handler)
    _BEFORE.clear()


class Undisturbed:
    """Put off SIGINT and SIGTERM to the end of a `with` block: what they raise cannot leave it half done.

    Only the main thread handles signals; in any other this does nothing. One that ends the process at once still does.

    A session needs this in every step, so that it has to be quick; see `handlers`.
    """

    def __enter__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: int | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handlers.getsignal(number)):  # one that was not set from Python could not be given back
                    self._handlers[number] = handlers.signal(number, self._note)

    def __exit__(self, *error: object) -> None:
        try:
            self._restore(signal.SIGTERM)
        finally:
            self._restore(signal.SIGINT)
        if self._came is not None:
            signal.raise_signal(self._came)

    def _restore(self, number: int) -> None:
        if number in self._handlers:
            handlers.signal(number, self._handlers[number])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number


def ended_by(error: BaseException, reason: str | None) -> str:
    """Return why a run ended that this error has left, if another `reason` was not known before."""
    if isinstance(error, DivergedError):
        return "diverged"
    return f"failed: {type(error).__name__}" if reason is None else reason


def tell_unsaved(error: BaseException, unsaved: StorageError | None) -> None:
    """Tell that the end of a run is not on disk, where the `error` that left it would not."""
    if isinstance(error, SystemExit) and unsaved is not None:
        raise unsaved from error  # an exit code of 0 would say that all is saved
    if isinstance(error, GeneratorExit) and unsaved is not None:
        say(f"error: {unsaved}")  # no exception can leave a loop that was left

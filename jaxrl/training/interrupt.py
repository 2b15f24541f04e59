"""Stopping a run from outside: by a handle, from any thread, or by SIGINT and SIGTERM."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from jaxrl.errors import DivergedError, StorageError, print_stderr
from jaxrl.terminal import clear_line, end_at_once

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
        self._acknowledged = False
        """Whether a signal has come that a second one would follow."""
        self._activity: Callable[[], str] | None = None

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
        self._acknowledged = False

    def __bool__(self) -> bool:
        return self.reason is not None

    @contextmanager
    def signals(self, activity: Callable[[], str] | None = None) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into `stop`; a second one ends the process at once (130 or 143).

        The first is acknowledged at once on standard error, with the present `activity`, which is to finish before the
        run stops; `None`: in silence.

        Handlers can only be set by the main thread; in any other this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Set by the first of nested or interleaved loops alone: its handlers serve all that listen.
        for number in HANDLED:
            if signal.getsignal(number) is not _on_signal:
                _BEFORE[number] = signal.signal(number, _on_signal)
        self._activity = activity
        _LISTENING.append(self)
        try:
            if not _WATCHES:
                _WATCHES.append(Watch())
            yield
        finally:
            # A loop that was dropped may be closed by another thread, which cannot restore handlers.
            _LISTENING.remove(self)
            if not _LISTENING and threading.current_thread() is threading.main_thread():
                _restore_handlers()


HANDLED = (signal.SIGINT, signal.SIGTERM)
_LISTENING: list[Interrupt] = []
"""Handles of all runs that go on in the main thread; several, where their loops are interleaved or nested.

They may end in any order: only with the last of them do the handlers come back that were there before the first.
"""
_BEFORE: dict[int, Any] = {}
"""Those handlers, by signal."""
_WATCHES: "list[Watch]" = []
"""The watch, while there is one."""
_ENDING = threading.RLock()
"""Taken for ever by the thread that ends the process."""


class Watch:
    """A thread that acknowledges the first signal, and obeys the second, while the main thread is in a compiler.

    Python calls handlers in the main thread alone, and only between two of its own instructions: not before a call of
    XLA has returned. But at once, whatever that thread does, Python's part in C writes the number of each signal into
    the file descriptor that `signal.set_wakeup_fd` has set. One that was set before (an event loop's) gets them too.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        # A handler in C must never wait for a full pipe.
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="jaxrl signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Acknowledge what has come, and end."""
        # What someone else has set meanwhile stays.
        now = signal.set_wakeup_fd(-1)
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            signal.set_wakeup_fd(self._before if now == self._write else now, warn_on_full_buffer=False)
        # No signal has the number 0: it ends the thread, once all before it is read.
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if self._before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._before, bytes([number]))
            if number in HANDLED and signal.getsignal(number) is _on_signal:
                _acknowledge(number)


def _acknowledge(number: int) -> None:
    """Say that the runs which listen will stop; end the process at the second signal."""
    listening = list(_LISTENING)
    # The watch may see a second signal while the main thread has not yet been given the first.
    if any(interrupt._acknowledged for interrupt in listening):
        _end_at_once(number)
    for interrupt in listening:
        interrupt._acknowledged = True
    activity = next((interrupt._activity for interrupt in listening if interrupt._activity is not None), None)
    if activity is not None:
        name = signal.Signals(number).name
        clear_line()
        print_stderr(f"{name}: stopping when {activity()} has finished; a second {name} stops at once")


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Stop all runs that listen; end the process at the second signal."""
    del frame
    if not _LISTENING:  # the last run was dropped by another thread, which cannot restore handlers
        _restore_handlers()
        signal.raise_signal(number)
    if any(interrupt.signal is not None for interrupt in _LISTENING):
        _end_at_once(number)
    for interrupt in _LISTENING:
        interrupt.receive(number)


def _end_at_once(number: int) -> None:
    with _ENDING:  # the main thread and the watch may both have seen the second signal
        end_at_once(number, f"stopped at once by a second {signal.Signals(number).name}")


def _restore_handlers() -> None:
    while _WATCHES:
        _WATCHES.pop().close()
    for number, handler in _BEFORE.items():
        if handler is not None:  # one that was not set from Python cannot be given back
            signal.signal(number, handler)
    _BEFORE.clear()


def _forget_watch() -> None:
    """Leave the watch to the parent: signals of a forked child are none of its own."""
    if _WATCHES:
        _WATCHES.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_watch)


def raise_signal(number: int) -> NoReturn:
    """Raise what ends a program after the signal `number`, as `KeyboardInterrupt` does after SIGINT."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


class Termination:
    """Turn SIGTERM into `SystemExit(143)` from `begin` to `end`, as Python turns SIGINT into `KeyboardInterrupt`.

    A second one ends the process at once. In a thread other than the main one, or where the program handles SIGTERM
    itself, this does nothing.
    """

    def __init__(self) -> None:
        self.came = False
        """Whether SIGTERM has come."""
        self._handles = False

    def begin(self) -> None:
        """Handle SIGTERM from now on."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handles = True
            signal.signal(signal.SIGTERM, self._exit)

    def end(self) -> None:
        """Handle it no longer."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._handles = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _exit(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            _end_at_once(number)
        self.came = True
        raise_signal(number)


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
            # With its handler back, a SIGTERM that waits may raise here. SIGINT gets its handler back all the same.
            self._restore(signal.SIGTERM)
        finally:
            self._restore(signal.SIGINT)
        # Now by the handlers that were there before.
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
        print_stderr(f"error: {unsaved}")  # no exception can leave a loop that was left

"""Stop requests: by a handle from any thread, or by SIGINT and SIGTERM."""

# CPython's functions without the wrappers in `signal`, whose enum lookups make a session's step a fifth slower (83 us
# instead of 68 us, besides the optimisation).
import _signal as handlers
import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from jaxrl.errors import print_stderr
from jaxrl.terminal import clear_line, end_at_once


class Interrupt:
    """A handle that stops a run at the end of its current chunk, after saving. Thread-safe."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.signal: int | None = None
        self._acknowledged = False
        """Whether the first signal was acknowledged."""
        self._activity: Callable[[], str] | None = None

    def stop(self, reason: str = "handle") -> None:
        """Request that the run saves and stops."""
        self.reason = self.reason or reason

    def receive(self, number: int) -> None:
        """Request that the run saves and stops, because of the signal `number`."""
        self.signal = number
        self.stop(signal.Signals(number).name)

    def clear(self) -> None:
        """Withdraw the request, for a run that continues after a stop."""
        self.reason = self.signal = None
        self._acknowledged = False

    def __bool__(self) -> bool:
        return self.reason is not None

    @contextmanager
    def signals(self, activity: Callable[[], str] | None = None) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into `stop`; a second one ends the process at once (130 or 143).

        The first is acknowledged immediately on standard error, with the current `activity`, which finishes before the
        run stops; `None`: silently.

        Only the main thread can set handlers; in any other this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Set by the first of nested or interleaved loops: its handlers serve all.
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
            # An abandoned loop may be closed by another thread, which cannot restore handlers.
            _LISTENING.remove(self)
            if not _LISTENING and threading.current_thread() is threading.main_thread():
                _restore_handlers()


HANDLED = (signal.SIGINT, signal.SIGTERM)
_LISTENING: list[Interrupt] = []
"""Handles of all active runs in the main thread; several, if their loops are interleaved or nested.

They may end in any order; the last one restores the previous handlers.
"""
_BEFORE: dict[int, Any] = {}
"""The previous handlers, by signal."""
_WATCHES: "list[Watch]" = []
"""The active watch, if any."""
_ENDING = threading.RLock()
"""Acquired, and never released, by the thread that ends the process."""


class Watch:
    """A thread that acknowledges the first signal and exits at the second, even while the main thread is in XLA.

    Python calls signal handlers only in the main thread, between two bytecode instructions, hence after a call of XLA.
    Its C handler, however, writes the number of each signal at once to the descriptor from `signal.set_wakeup_fd`,
    which this thread reads. A previous descriptor, such as an event loop's, gets the numbers too.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        # The C handler must never block on a full pipe.
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="jaxrl signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Acknowledge pending signals, and end the thread."""
        # Keep a descriptor that was set by others in the meantime.
        now = signal.set_wakeup_fd(-1)
        with contextlib.suppress(ValueError, OSError):  # it may be closed
            signal.set_wakeup_fd(self._before if now == self._write else now, warn_on_full_buffer=False)
        # 0 is not a signal: a sentinel that ends the thread after all pending numbers.
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
    """Print that the active runs will stop; end the process at the second signal."""
    listening = list(_LISTENING)
    # The watch may see a second signal before the main thread has handled the first.
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
    """Stop all active runs; end the process at the second signal."""
    del frame
    if not _LISTENING:  # the last run was closed by another thread, which could not restore handlers
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
        if handler is not None:  # `None`: it was not set from Python, and cannot be restored
            signal.signal(number, handler)
    _BEFORE.clear()


def _forget_watch() -> None:
    """Detach the watch in a forked child, since it belongs to the parent; SIGTERM ends the child as any process."""
    if _WATCHES:
        _WATCHES.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
    if (before := _BEFORE.get(signal.SIGTERM)) is not None:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, before)


os.register_at_fork(after_in_child=_forget_watch)


def raise_signal(number: int) -> NoReturn:
    """Raise the exception that ends a program after the signal `number`: `KeyboardInterrupt` or `SystemExit`."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


class Termination:
    """Turn SIGTERM into `SystemExit(143)` from `begin` to `end`, as Python turns SIGINT into `KeyboardInterrupt`.

    A second one ends the process at once. This does nothing outside of the main thread, or if the program has its own
    SIGTERM handler.
    """

    def __init__(self) -> None:
        self.came = False
        """Whether SIGTERM was received."""
        self._handles = False

    def begin(self) -> None:
        """Install the handler."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handles = True
            signal.signal(signal.SIGTERM, self._exit)

    def end(self) -> None:
        """Restore the default handler."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._handles = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _exit(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            _end_at_once(number)
        self.came = True
        raise_signal(number)


class DeferredSignals:
    """Defer SIGINT and SIGTERM to the end of a `with` block, so that their exceptions cannot interrupt it.

    Only the main thread handles signals; in any other this does nothing. A signal with the system's default action
    still ends the process at once.

    It runs in every step of a session, so it must be fast; see `handlers`.
    """

    def __init__(self, limit: float = math.inf) -> None:
        """Defer up to `limit` signals; a further one ends the process at once."""
        self._left = limit

    def __enter__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: int | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handlers.getsignal(number)):  # others cannot be restored, or do not raise
                    self._handlers[number] = handlers.signal(number, self._note)

    def __exit__(self, *error: object) -> None:
        try:
            # Once restored, the handler of a pending SIGTERM may raise here; restore that of SIGINT all the same.
            self._restore(signal.SIGTERM)
        finally:
            self._restore(signal.SIGINT)
        # Deliver the deferred signal to the restored handlers.
        if self._came is not None:
            signal.raise_signal(self._came)

    def _restore(self, number: int) -> None:
        if number in self._handlers:
            handlers.signal(number, self._handlers[number])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._left -= 1
        if self._left < 0:
            _end_at_once(number)
        self._came = number

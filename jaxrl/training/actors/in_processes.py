"""Workers in processes of this machine, each at the other end of a pipe.

They are programs of their own, not forks: a fork of a process in which JAX runs threads may hang. They belong to no
terminal, and end with the pipe, so that none outlives the process of the learner, however that ends.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from jaxrl.training.actors.distant import Gone
from jaxrl.training.actors.worker import Worker

ENDING_S = 5.0
"""Seconds given to a process whose pipe has ended to end itself."""


# --- in the process of the learner ------------------------------------------------------------------------------


class Processes:
    """Workers in processes of this machine."""

    name = "process"
    doubt = "is it stopped, or the machine out of memory?"

    def begin(self) -> "Piped":
        """Begin a worker."""
        return Piped()

    def put(self, parcel: bytes) -> bytes:
        """Return `parcel`, which goes through each pipe."""
        return parcel


class Piped:
    """A worker at the other end of a pipe."""

    def __init__(self) -> None:
        """Begin its process, which imports from where this one does."""
        self._line, there = Pipe()
        self._calls, self._answers = itertools.count(), dict[int, Any]()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main({there.fileno()})"],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the learner, which then ends its workers
            )

    def ask(self, method: str, *args: Any) -> int:
        """Begin a call of a method of `Worker`; return its number."""
        call = next(self._calls)
        with self._living():
            self._line.send((call, method, args))
        return call

    def came(self, call: int, seconds: float) -> bool:
        """Wait for the answer for at most so long since the last one came; return whether it has come."""
        with self._living():
            while call not in self._answers and self._line.poll(seconds):
                number, value = self._line.recv()
                self._answers[number] = value
        return call in self._answers

    def take(self, call: int) -> Any:
        """Return an answer that has come."""
        return self._answers.pop(call)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._line.close()

    @contextmanager
    def _living(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
            raise Gone(f"its process is gone: {_how(self._process.returncode)}") from error


def _how(code: int | None) -> str:
    """Say how a process ended."""
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"it ended with code {code}"
    return f"killed by {signal.Signals(-code).name}" + (", out of memory?" if -code == signal.SIGKILL else "")


# --- in a process of its own ------------------------------------------------------------------------------------


def main(handle: int) -> None:
    """Serve what is asked through the pipe `handle`, and let no signal of a terminal or a scheduler end it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the learner handles them, and may still save
        signal.signal(number, signal.SIG_IGN)
    serve(Connection(handle))


def serve(line: Connection) -> None:
    """Do what is asked through `line`, until it ends: in this thread, but for what is about a round under way."""
    worker, asked, sending = Worker(), SimpleQueue[tuple[int, str, Any]](), threading.Lock()

    def answer(call: int, method: str, args: Any) -> None:
        value = getattr(worker, method)(*args)
        with sending:
            line.send((call, value))

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                call, method, args = line.recv()
                if method == "glance":
                    answer(call, method, args)
                    continue
                if method == "close":
                    worker.end()
                asked.put((call, method, args))
        os._exit(0)  # whatever the environments are doing

    threading.Thread(target=listen, name="listener", daemon=True).start()
    with suppress(OSError):  # the learner is gone
        while True:
            answer(*asked.get())

"""Workers in processes of this machine, each at the other end of a pair of pipes.

They are programs of their own, not forks: a fork of a process in which JAX runs threads may hang. They belong to no
terminal, and end with the pipes, so that none outlives the process of the learner, however that ends.
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
from typing import Any

from jaxrl.training.actors.distant import Gone
from jaxrl.training.actors.worker import Worker

Call = tuple[Connection, int]
ASIDE = ("glance", "end")
"""What a worker is asked while it plays."""
ENDING_S = 5.0
"""Seconds given to a process whose pipes have ended to end itself."""


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
    """A worker at the other end of two pipes: one for what it does in turn, one for what is asked meanwhile."""

    def __init__(self) -> None:
        """Begin its process, which imports from where this one does."""
        self._calls, calls = Pipe()
        self._asides, asides = Pipe()
        self._numbers, self._answers = itertools.count(), dict[int, Any]()
        handles = calls.fileno(), asides.fileno()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with calls, asides:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main{handles}"],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the learner, which then ends its workers
            )

    def ask(self, method: str, *args: Any) -> Call:
        """Begin a call of a method of `Worker`; return where its answer comes, and its number."""
        if method == "close":
            self.ask("end")
        line = self._asides if method in ASIDE else self._calls
        call = line, next(self._numbers)
        with self._living():
            line.send((call[1], method, args))
        return call

    def came(self, call: Call, seconds: float) -> bool:
        """Wait for the answer for at most so long since the last one came; return whether it has come."""
        line, number = call
        with self._living():
            while number not in self._answers and line.poll(seconds):
                answered, value = line.recv()
                self._answers[answered] = value
        return number in self._answers

    def take(self, call: Call) -> Any:
        """Return an answer that has come."""
        return self._answers.pop(call[1])

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._calls.close()
        self._asides.close()

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
        return "it closed its pipes"
    if code >= 0:
        return f"it ended with code {code}"
    return f"killed by {signal.Signals(-code).name}" + (", out of memory?" if -code == signal.SIGKILL else "")


# --- in a process of its own ------------------------------------------------------------------------------------


def main(calls: int, asides: int) -> None:
    """Serve what is asked through two pipes, and let no signal of a terminal or a scheduler end it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the learner handles them, and may still save
        signal.signal(number, signal.SIG_IGN)
    for handle in (calls, asides):
        os.set_inheritable(handle, False)  # a process that an environment begins would keep them open
    worker = Worker()
    threading.Thread(target=_serve, args=(worker, Connection(asides)), name="asides", daemon=True).start()
    _serve(worker, Connection(calls))


def _serve(worker: Worker, line: Connection) -> None:
    """Do one thing after the other that is asked through `line`; end the process where that ends."""
    with suppress(EOFError, OSError):
        while True:
            number, method, args = line.recv()
            line.send((number, getattr(worker, method)(*args)))
    os._exit(0)  # whatever the environments are doing

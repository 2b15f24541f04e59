"""Workers in processes of this machine, each at the other end of a pair of pipes.

They are programs of their own, not forks: a fork of a process in which JAX runs threads may hang. They belong to no
terminal, and end with the pipes, so that none outlives the process of the learner, however that ends. Each has a
supervisor (`jaxrl.supervisor`), which ends what its environments have begun.
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

import cloudpickle

from jaxrl.supervisor import SUPPORTED, end_with_children
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
        lifeline, end = os.pipe()
        self._lifeline = os.fdopen(end, "wb")  # closed once, though two threads may end the worker
        program = (
            f"import sys; sys.path[:] = {sys.path}; import jaxrl.supervisor as s; s.end_with_parent(); "
            f"s.supervise({lifeline}); from {__name__} import main; main{handles}"
        )
        # The ends of the worker are closed in this process: so its death is seen as the end of the pipes.
        with calls, asides, os.fdopen(lifeline):
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=(*handles, lifeline),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the learner, which then ends its workers
            )

    def ask(self, method: str, *args: Any) -> Call:
        """Begin a call of a method of `Worker`; return where its answer comes, and its number."""
        if method == "close":
            # Told aside, since the call to close waits behind the round that this ends.
            self.ask("end")
        line = self._asides if method in ASIDE else self._calls
        call = line, next(self._numbers)
        with self._living():
            line.send((call[1], method, args))
        return call

    def came(self, call: Call, seconds: float) -> bool:
        """Wait for the answer for at most so long, after each that comes before it; return whether it has come."""
        line, number = call
        with self._living():
            while number not in self._answers and line.poll(seconds):
                answered, value = line.recv()
                self._answers[answered] = value
            if number not in self._answers and self._process.poll() is not None:
                raise EOFError  # where another process keeps the pipes open
        return number in self._answers

    def take(self, call: Call) -> Any:
        """Return an answer that has come."""
        return self._answers.pop(call[1])

    def kill(self) -> None:
        """End the process, and those that its environments have begun."""
        # The supervisor ends the worker with all that belongs to it once this pipe ends. Where there is none, or it
        # fails, the group of processes is killed.
        self._lifeline.close()
        if SUPPORTED:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        if not SUPPORTED or self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
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
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (", out of memory?" if -code == signal.SIGKILL else "")


# --- in a process of its own ------------------------------------------------------------------------------------


def main(calls: int, asides: int) -> None:
    """Serve what is asked through two pipes, and let no signal of a terminal or a scheduler end it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the learner handles them, and may still save
        signal.signal(number, _heedless)
    for handle in (calls, asides):
        os.set_inheritable(handle, False)  # a process that an environment begins would keep them open
    worker = Worker()
    # A thread of its own for what is asked aside: the main one may be in a call of the environment.
    threading.Thread(target=_serve, args=(worker, Connection(asides)), name="asides", daemon=True).start()
    _serve(worker, Connection(calls))


def _heedless(number: int, frame: Any) -> None:
    """Do nothing at a signal. To ignore it would be inherited by the programs that environments begin."""


def _serve(worker: Worker, line: Connection) -> None:
    """Do one thing after the other that is asked through `line`; then end all that belongs to the worker."""
    with suppress(EOFError, OSError):
        while True:
            number, method, args = line.recv()
            # What classes of the user's own script are made of goes along: no module here has them.
            line.send_bytes(cloudpickle.dumps((number, getattr(worker, method)(*args))))
    end_with_children()  # whatever the environments are doing

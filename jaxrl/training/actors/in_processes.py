"""Workers in local processes, reached through a pair of pipes.

They are spawned, not forked: a fork of a process with JAX's threads may hang. They have no controlling terminal, and
end when the pipes close, so that none outlives the learner, however that ends. Each has a supervisor
(`jaxrl.supervisor`), which ends the child processes of its environments.
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

from jaxrl.supervisor import SUPPORTED, end_with_children, ignore
from jaxrl.training.actors.remote import WorkerDied
from jaxrl.training.actors.worker import Worker

Call = tuple[Connection, int]
CONTROL_METHODS = ("overdue_call", "end")
"""Methods that are called while a worker runs a round."""
ENDING_S = 5.0
"""Grace period in seconds for a process to end after its pipes were closed."""


# --- in the learner's process -----------------------------------------------------------------------------------


class ProcessWorker:
    """A worker behind two pipes: one for sequential calls, one for calls that are served meanwhile."""

    name = "process"
    hint = "is it stopped, or the machine out of memory?"

    @staticmethod
    def put(pickled: bytes) -> bytes:
        """Return `pickled` itself, which is sent through each pipe."""
        return pickled

    def __init__(self) -> None:
        """Start the process, with the `sys.path` of this one."""
        self._calls, calls = Pipe()
        self._control, control = Pipe()
        self._numbers, self._answers = itertools.count(), dict[int, Any]()
        handles = calls.fileno(), control.fileno()
        lifeline, end = os.pipe()
        self._lifeline = os.fdopen(end, "wb")  # closed once, though two threads may end the worker
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores all others
        program = (
            f"import sys; sys.path[:] = {path}; import jaxrl.supervisor as s; s.end_with_parent(); "
            f"s.supervise({lifeline}); from {__name__} import main; main{handles}"
        )
        # Close the worker's ends in this process, so that its death shows as the end of the pipes.
        with calls, control, os.fdopen(lifeline):
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=(*handles, lifeline),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the learner, which then ends its workers
            )

    def call_method(self, method: str, *args: Any) -> Call:
        """Start an asynchronous call of a method of `Worker`; return its pipe and its number."""
        if method == "close":
            # End the round in progress by the second pipe, since `close` is queued behind it.
            self.call_method("end")
        line = self._control if method in CONTROL_METHODS else self._calls
        call = line, next(self._numbers)
        with self._raising_worker_died():
            line.send((call[1], method, args))
        return call

    def is_ready(self, call: Call, seconds: float) -> bool:
        """Wait up to `seconds` for each pending answer up to this one; return whether it has arrived."""
        line, number = call
        with self._raising_worker_died():
            while number not in self._answers and line.poll(seconds):
                answered, value = line.recv()
                self._answers[answered] = value
            if number not in self._answers and self._process.poll() is not None:
                raise EOFError  # the process is dead, but another one keeps the pipes open
        return number in self._answers

    def result(self, call: Call) -> Any:
        """Return an answer that has arrived."""
        return self._answers.pop(call[1])

    def kill(self) -> None:
        """Kill the process and the child processes of its environments."""
        # The supervisor ends the worker and its children once this pipe closes. Without one, or if it fails, kill the
        # process group.
        self._lifeline.close()
        if SUPPORTED:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
        if not SUPPORTED or self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._calls.close()
        self._control.close()

    @contextmanager
    def _raising_worker_died(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
            raise WorkerDied(f"its process is gone: {_describe_exit(self._process.returncode)}") from error


def _describe_exit(code: int | None) -> str:
    """Return how a process ended, as text."""
    if code is None:
        return "it closed its pipes"
    if code >= 0:
        return f"it ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (", out of memory?" if -code == signal.SIGKILL else "")


# --- in the worker's process ------------------------------------------------------------------------------------


def main(calls: int, control: int) -> None:
    """Serve calls through two pipes; ignore SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the learner handles them, and may still save
        signal.signal(number, ignore)
    for handle in (calls, control):
        os.set_inheritable(handle, False)  # a child process of an environment would keep them open
    worker = Worker()
    # A separate thread for the second pipe: the main one may be in a call of the environment.
    threading.Thread(target=_serve, args=(worker, Connection(control)), name="control", daemon=True).start()
    _serve(worker, Connection(calls))


def _serve(worker: Worker, line: Connection) -> None:
    """Serve calls from `line` one by one until it closes; then end the worker and its child processes."""
    with suppress(EOFError, OSError):
        while True:
            number, method, args = line.recv()
            # `cloudpickle` sends classes of the user's script by value: no importable module has them.
            line.send_bytes(cloudpickle.dumps((number, getattr(worker, method)(*args))))
    end_with_children()  # even if an environment is in the middle of a call

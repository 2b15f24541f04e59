"""Gymnasium environments in other processes: start, supervision, and reports of exceptions.

This module imports nothing slow, see `jaxrl.supervisor`.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import current_process, parent_process, resource_tracker
from typing import Any

import cloudpickle

from jaxrl.errors import describe_error, safe_str
from jaxrl.supervisor import ignore, supervise

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that the learner handles for the processes of its environments."""
UNGUARDED = 78
"""Exit code of a process that would train while it imports the user's script."""


def exit_if_importing() -> None:
    """End a process of an environment that has not made it yet: it imports the script that started it, which trains.

    Such a script lacks `if __name__ == "__main__":`, so it runs again in each process.
    """
    process = current_process()
    if getattr(process, "_inheriting", False) and process.name.startswith("Worker<AsyncVectorEnv>"):
        os._exit(UNGUARDED)  # no handler of the script is to run


@contextmanager
def mask_signals(how: int) -> Iterator[None]:
    """Block or unblock `SIGNALS`, as `how` says, in this thread and in processes that are started inside.

    Ctrl-C goes to all processes of a terminal, and would end those that still import their modules in tracebacks, so
    they start with the signals blocked, until their `EnvMaker` ignores them.
    """
    resource_tracker.ensure_running()  # Python unblocks them when it starts it
    before = signal.pthread_sigmask(how, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EnvError(Exception):
    """An exception of an environment in another process: type and message on one line, the traceback as a note.

    Gymnasium sends exceptions to the learner as they are, and hangs if one cannot be pickled.
    """

    def __init__(self, line: object) -> None:
        """Store the line, or copy another `EnvError` with its notes."""
        super().__init__(safe_str(line))
        for note in getattr(line, "__notes__", ()):
            self.add_note(note)


class EnvMaker:
    """Maker of an environment; in another process, the environment is supervised and reports its exceptions."""

    def __init__(self, make: Callable[[], Any] | None, file: str) -> None:
        """Store the function, and the path of a file through which it reaches the processes."""
        self._make, self._file = make, file

    def __reduce__(self) -> Any:
        """Pickle the path alone: the learner would wait forever for a process to read more than fits into a pipe."""
        return EnvMaker, (None, self._file)

    def __call__(self) -> Any:
        """Make the environment; where that fails in another process, one whose `reset` raises the exception."""
        if self._make is not None:
            pickled = cloudpickle.dumps(self._make)  # by cloudpickle, so that it may be a local function
            # Gymnasium makes one here before it starts processes, and asks each of those for its spaces.
            env = _Unmasked(self._make)
            spaces = cloudpickle.dumps((env.observation_space, env.action_space))
            with open(self._file, "wb") as file:
                pickle.dump((pickled, spaces), file)
            return env
        parent = parent_process()
        assert parent is not None, "pickled for a child process"
        for number in SIGNALS:
            signal.signal(number, ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        supervise(parent.sentinel)
        with open(self._file, "rb") as file:
            pickled, spaces = pickle.load(file)
        try:
            return _Reporting(pickle.loads(pickled)())  # which may import slow modules, so not before the supervision
        except Exception as error:
            observation_space, action_space = pickle.loads(spaces)
            return _Failed(observation_space, action_space, report_of(error))


def report_of(error: Exception) -> EnvError:
    """Return the report of an exception, with its traceback."""
    report = EnvError(describe_error(error))
    report.add_note("".join(traceback.format_exception(error)))
    return report


class _Unmasked:
    """An environment made and closed with `SIGNALS` unblocked, also for processes that it starts and ends by them."""

    def __init__(self, make: Callable[[], Any]) -> None:
        with mask_signals(signal.SIG_UNBLOCK):
            self._env = make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def close(self) -> None:
        with mask_signals(signal.SIG_UNBLOCK):
            self._env.close()


class _Failed:
    """An environment that could not be made: Gymnasium takes reports of exceptions only in answer to a call."""

    def __init__(self, observation_space: Any, action_space: Any, report: EnvError) -> None:
        self.observation_space, self.action_space, self._report = observation_space, action_space, report

    def reset(self, **given: Any) -> Any:
        raise self._report

    def close(self) -> None:
        pass


class _Reporting:
    """Wrapper of an environment whose exceptions can be sent to another process."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, **given: Any) -> Any:
        return self._report(self._env.reset, **given)

    def step(self, action: Any) -> Any:
        return self._report(self._env.step, action)

    @staticmethod
    def _report(method: Callable[..., Any], *args: Any, **given: Any) -> Any:
        try:
            return method(*args, **given)
        except Exception as error:
            raise report_of(error) from None

"""Gymnasium environments in other processes: start, supervision, and reports of exceptions.

This module imports nothing slow, see `jaxrl.supervisor`.
"""

import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import cloudpickle

from jaxrl.errors import describe_error, safe_str
from jaxrl.supervisor import supervise


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

    def __init__(self, make: Callable[[], Any] | None, pickled: bytes = b"") -> None:
        """Store the function, or its pickle, which is loaded only when needed, since it may import slow modules."""
        self._make, self._pickled = make, pickled

    def __reduce__(self) -> Any:
        """Pickle the function by cloudpickle, so that it may be a local one."""
        return EnvMaker, (None, cloudpickle.dumps(self._make))

    def __call__(self) -> Any:
        """Make the environment."""
        if self._make is not None:
            return self._make()
        parent = parent_process()
        assert parent is not None, "pickled for a child process"
        for number in (signal.SIGINT, signal.SIGTERM):  # handled by the parent
            signal.signal(number, signal.SIG_IGN)
        supervise(parent.sentinel)
        return _Reporting(pickle.loads(self._pickled)())


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
            report = EnvError(describe_error(error))
            report.add_note("".join(traceback.format_exception(error)))
            raise report from None

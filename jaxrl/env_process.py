"""Environments of Gymnasium in processes of their own: how these begin, end, and report what an environment raises.

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
    """Report what an environment in another process raised: its type and text in one line, with the traceback there.

    Gymnasium sends exceptions to the learner as they are, and waits for ever for one that cannot be pickled.
    """

    def __init__(self, line: object) -> None:
        """Keep the line; the exception may be made from another one of its kind."""
        super().__init__(safe_str(line))
        for note in getattr(line, "__notes__", ()):
            self.add_note(note)


class EnvMaker:
    """A function that makes an environment; in another process, one that is supervised and reports its exceptions."""

    def __init__(self, make: Callable[[], Any] | None, pickled: bytes = b"") -> None:
        """Keep the function, or what it is made from where it is needed: it may import slow modules."""
        self._make, self._pickled = make, pickled

    def __reduce__(self) -> Any:
        """Have it made in another process."""
        return EnvMaker, (None, cloudpickle.dumps(self._make))

    def __call__(self) -> Any:
        """Return an environment."""
        if self._make is not None:
            return self._make()
        parent = parent_process()
        assert parent is not None, "pickled for a child process"
        for number in (signal.SIGINT, signal.SIGTERM):  # which the parent handles
            signal.signal(number, signal.SIG_IGN)
        supervise(parent.sentinel)
        return _Reporting(pickle.loads(self._pickled)())


class _Reporting:
    """An environment whose exceptions can be sent to another process."""

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

"""Supervision of processes: the descendants of a process are killed however it or its parent ends.

A killed process cannot end its children, and a signal to its group does not reach those in other sessions. So the
process that is started stays as a supervisor, and its child does the work. Linux makes the supervisor the parent of all
orphans among its descendants (`PR_SET_CHILD_SUBREAPER`), so that none escapes. On other systems there is no supervisor.

This module imports nothing slow, because the supervisor keeps in memory whatever is loaded at the fork.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import warnings
from contextlib import suppress
from typing import NoReturn

SUPPORTED = sys.platform == "linux"
END = signal.SIGHUP
"""Signal on which a supervisor kills all descendants. It ignores SIGINT and SIGTERM, which the parent handles."""
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
"""Numbers of `prctl`'s options."""


def supervise(lifeline: int) -> None:
    """Fork: return in the child, and supervise it in this process, which never returns.

    When the child ends, the supervisor kills all remaining descendants and exits with the same code or signal. It does
    so at once on `END`, or when the parent's end of the pipe `lifeline` is closed. If the system does not support this,
    return without a fork.
    """
    if not SUPPORTED or not _set_process(_CHILD_SUBREAPER, 1):
        return
    with suppress(OSError):  # already a session leader
        os.setsid()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    handlers = {signal.SIGINT: ignore, signal.SIGTERM: ignore, signal.SIGCHLD: ignore, END: ignore}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    supervisor = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads: those of libraries have not begun to work
        child = os.fork()
    if child:
        _supervise(child, lifeline, awake, wake)
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(awake)
    os.close(wake)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def end_with_parent(number: int = END) -> None:
    """Have Linux send this process a signal when the thread that started it ends."""
    _set_process(_PDEATHSIG, number)


def end_with_children() -> NoReturn:
    """End this process, whatever its threads do, and its descendants, as far as the system allows."""
    if not SUPPORTED:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _set_process(setting: int, value: int) -> bool:
    with suppress(AttributeError, OSError):
        return bool(ctypes.CDLL(None).prctl(setting, value, 0, 0, 0) == 0)
    return False


def ignore(number: int, frame: object) -> None:
    """Handle a signal by doing nothing; unlike this handler, `SIG_IGN` would be inherited by child programs."""


def _supervise(child: int, lifeline: int, awake: int, wake: int) -> NoReturn:
    """Wait for the end of `child` or of `lifeline`; then kill all descendants, and exit as `child` did."""
    code: int | None = None
    try:
        for handle in map(int, os.listdir("/proc/self/fd")):
            if handle > 2 and handle not in (lifeline, awake, wake):
                with suppress(OSError):
                    os.close(handle)  # so that a reader of the child's pipe sees its end with the child's
        waiting = select.poll()  # `select` fails for file descriptors from 1024 on
        for handle in (lifeline, awake):
            waiting.register(handle, select.POLLIN)
        while code is None:
            if lifeline in dict(waiting.poll()) or END in os.read(awake, 4096):
                break
            code = _reap(child, os.WNOHANG)
        killed = _end_descendants(child)
        code = killed if code is None else code
    finally:
        _exit(code)


def _reap(child: int, options: int) -> int | None:
    """Reap descendants that have ended; return the code of `child`, if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, options)
        while pid:
            code = os.waitstatus_to_exitcode(status) if pid == child else code
            pid, status = os.waitpid(-1, os.WNOHANG)
        return code
    return code


def _end_descendants(child: int) -> int | None:
    """Kill descendants until none is left; return the code of `child`, if it had not been reaped."""
    code = None
    while descendants := _descendants():
        killed = 0
        for pid in descendants:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        if not killed:
            break  # they belong to another user
        ended = _reap(child, 0)
        code = ended if code is None else code
    return code


def _descendants() -> list[int]:
    """Return the descendants of this process, including zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                # `PID (NAME) STATE PARENT ...`, where a name may contain anything
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _exit(code: int | None) -> NoReturn:
    """End this process with an exit code, or by a signal if the code is negative."""
    if code is not None and code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped core already
        with suppress(OSError, ValueError):
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    os._exit(code if code is not None and code >= 0 else 1)

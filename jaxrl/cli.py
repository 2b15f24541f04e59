"""What the front doors share."""

import argparse
import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from jaxrl.errors import FULL, JaxrlError, SettingsError, StorageError, say


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Run a front door with the command line's arguments; end the process with its exit code.

    What a user can cause is one line on standard error, never a traceback; so is a warning.
    """
    warnings.showwarning = lambda message, *where: say(f"warning: {message}")
    code = 128 + signal.SIGPIPE
    try:
        code = main(sys.argv[1:])
        print(end="", flush=True)
    except JaxrlError as error:
        say(f"error: {error}")
        code = error.exit_code
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, *FULL):
            raise
        # Nobody reads what is printed any more, perhaps before all was done, or the disk that it goes to is full.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code if error.errno == errno.EPIPE else StorageError.exit_code
    sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process as a signal asks, where nothing is to be saved."""
    del frame
    os._exit(128 + number)


def leave_quietly_on_signals() -> None:
    """Let SIGINT and SIGTERM end a front door at once, without a traceback, whenever no run is there to be saved."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


def hold_standard_streams() -> None:
    """Open `/dev/null` wherever a front door was started with standard input, output or error closed.

    Else the run's own files would get these descriptors, and what libraries print there would go into them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one


def _is_front_door() -> bool:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module is not None and module.name.startswith("jaxrl.")


# While `python -m jaxrl.train` is still importing, too: the front doors import this module before the slow ones.
if _is_front_door():
    hold_standard_streams()
    leave_quietly_on_signals()


class Parser(argparse.ArgumentParser):
    """Refuse bad arguments by a `SettingsError`, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def cache_compilations() -> None:
    """Keep compiled programs on disk between processes, where JAX was not told otherwise."""
    import jax

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not getattr(jax.config, "jax_compilation_cache_dir", None) and os.path.isabs(cache):
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "jaxrl", "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

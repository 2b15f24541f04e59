"""The errors that a user can cause, each with the exit code of the command line."""

import contextlib
import difflib
import errno
import importlib
import numbers
import sys
from collections.abc import Iterable
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the system says when a disk takes no more."""


def say(line: str) -> None:
    """Print one line on standard error, if anything there takes it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(one_line(line), file=sys.stderr, flush=True)


def print_line(*parts: object) -> None:
    """Print one line on standard output. All that the front doors read in a run directory is shown by this or `say`."""
    print(*map(one_line, parts), flush=True)


def one_line(text: object) -> str:
    """Return `text` without line breaks, and without characters that a terminal would obey."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())


class JaxrlError(Exception):
    """Say in one line what came, what was expected, and how to mend it."""

    exit_code = 1


class SettingsError(JaxrlError, ValueError):
    """Refuse bad usage or settings, before anything compiles."""

    exit_code = 2


class ActorError(JaxrlError):
    """Report an actor that failed or hangs."""


class DivergedError(JaxrlError):
    """Report training that no longer makes finite updates."""

    exit_code = 3


class RunDirInUseError(JaxrlError):
    """Refuse a run directory that another process is writing."""

    exit_code = 4


class StorageError(JaxrlError):
    """Report a checkpoint that could not be written."""

    exit_code = 5


class NoCheckpointError(JaxrlError):
    """Refuse to resume where no valid checkpoint is left."""

    exit_code = 6


def require_extra(module: str, what: str) -> Any:
    """Return the optional `module`, which `what` needs; raise `SettingsError` with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SettingsError(f"{what} need the extra `{module}`: pip install 'jaxrl[{module}]'") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the entries of `known` closest to `word`, or all of them if none is close."""
    known = sorted(known)
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(lower[name] for name in close) + "?"
    return "known: " + ", ".join(known)


def check_count(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`; raise `SettingsError` otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) != value or int(value) < least:
        raise SettingsError(f"{name} is {value!r}; expected a whole number of at least {least}")
    if most is not None and int(value) > most:
        raise SettingsError(f"{name} is {value!r}; expected at most {most}")
    return int(value)


def check_between(name: str, value: float, low: float, high: float) -> float:
    """Return `value` if it is finite and within `[low, high]`; raise `SettingsError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= high:
        raise SettingsError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")
    return value

"""The errors that a user can cause, each with the exit code of the command line."""

import contextlib
import difflib
import errno
import importlib
import numbers
import re
import sys
from collections.abc import Iterable
from typing import Any

from jaxrl.hints import Hint, elsewhere, hint_of

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of the system that mean a full or failing disk."""

_ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What libraries put around their warnings; without its first character, the rest would be shown."""


def print_stderr(line: str) -> None:
    """Print one line on standard error, if it is still open."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(one_line(line), file=sys.stderr, flush=True)


def print_line(*parts: object) -> None:
    """Print one line on standard output.

    Text from a run directory is printed only by this function or `print_stderr`, which strip control characters.
    """
    print(*map(one_line, parts), flush=True)


def one_line(text: object) -> str:
    """Return `text` without line breaks, colours and control characters, which a terminal would obey."""
    return "".join(c for c in " ".join(_ANSI_COLOURS.sub("", safe_str(text)).split()) if c.isprintable())


def safe_str(value: object) -> str:
    """Return `str(value)`, or its `repr` or the name of its type where the methods of a user's class raise."""
    for convert in (str, repr):
        with contextlib.suppress(Exception, SystemExit, GeneratorExit):
            return str.__str__(convert(value))  # of a subclass of `str`, the plain text
    return type(value).__name__


def error_text(error: BaseException) -> str:
    """Return the text of an error in one line, or the name of its type if it has none."""
    return one_line(error) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error in one line, as in `ValueError: no such key`."""
    name, text = type(error).__name__, error_text(error)
    return text if text == name or text.startswith(f"{name}(") else f"{name}: {text}"


class JaxrlError(Exception):
    """Say in one line what came, what was expected, and how to mend it."""

    exit_code = 1


class SettingsError(JaxrlError, ValueError):
    """Refuse bad usage or settings, before anything compiles."""

    exit_code = 2


class RunDirTakenError(SettingsError):
    """Refuse to begin a run in a directory that holds one already."""


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


class ProcessError(JaxrlError):
    """Report that another process of the same run is gone or has failed."""

    exit_code = 7


def require_extra(module: str, what: str, extra: str = "") -> Any:
    """Import the optional `module`, which `what` needs; raise `SettingsError` with the command that installs it.

    `extra` is the extra of jaxrl that brings the module, if it has another name.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        extra = extra or module
        raise SettingsError(f"{what} need the extra `{extra}`: pip install 'jaxrl[{extra}]'") from None


MAX_SHOWN = 12
"""Number of names of a longer list that a message shows."""


def suggest(word: str, known: Iterable[str], settings: bool = False) -> str:
    """Return a hint with the entries of `known` that `word` may have meant, or with some of them if none is close.

    For names of `settings`, `word` may also be another library's name for one of them.
    """
    known = sorted(known)
    if settings and (hint := hint_of(word)) is not None and (translated := _translate(hint, known)):
        return translated
    close = close_matches(word, known)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if settings and known and known[0].startswith("--"):
        return "--help shows all flags"
    more = len(known) - MAX_SHOWN
    return "known: " + ", ".join(known if more <= 1 else [*known[:MAX_SHOWN], f"and {more} more"])


def close_matches(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three entries of `known` that resemble `word`, the closest first; dashes and case are ignored."""
    plain = _normalise(word)

    def likeness(name: str) -> float:
        whole = _normalise(name)
        last = whole.rpartition(".")[2]
        if len(plain) > 3 and whole.startswith(plain):
            return 1.0 if whole == plain else 0.99
        return max(difflib.SequenceMatcher(None, plain, part).ratio() for part in (whole, last))

    ranked = sorted(((likeness(name), name) for name in known), reverse=True)
    return [name for ratio, name in ranked[:3] if ratio >= max(0.65, ranked[0][0] - 0.15)]


def _normalise(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _translate(hint: Hint, known: list[str]) -> str:
    """Return jaxrl's name for another library's setting, spelled as in `known`: as a flag or a name, with or without
    path."""
    spelt = {_normalise(name): name for name in known}
    for name in hint.names:
        found = spelt.get(name) or spelt.get(name.rpartition(".")[2])
        if found is not None:
            return f"did you mean {found}?" + (f" ({hint.note})" if hint.note else "")
    if known and known[0].startswith("--"):
        return hint.note or f"jaxrl calls it --{hint.names[0].replace('_', '-')}, which this algorithm does not have"
    return hint.note if not hint.names else elsewhere(hint)


def check_count(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`; raise `SettingsError` otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) != value or int(value) < least:
        raise SettingsError(f"{name} is {value!r}; expected a whole number of at least {least}")
    if most is not None and int(value) > most:
        raise SettingsError(f"{name} is {value!r}; expected at most {most}")
    return int(value)


def check_between(name: str, value: float, low: float, high: float) -> float:
    """Return `value` if it is finite and within `[low, high]`; raise `SettingsError` otherwise."""
    if callable(value):
        raise SettingsError(
            f"{name} is a function; expected a number from {low:g} to {high:g}, or a schedule of jaxrl: linear, "
            "cosine, exponential or constant (one of Optax goes into make_optimizer, where an agent takes it)"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= high:
        raise SettingsError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")
    return value

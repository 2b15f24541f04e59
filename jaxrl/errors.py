"""Errors that a user can cause, with their exit codes, and helpers for messages."""

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
"""Values of `errno` for a full or failing disk."""

_ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Colour codes in warnings of libraries. Removing only the unprintable escape character would leave the rest."""


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
    """Return `text` on one line, without colours and control characters that a terminal would interpret."""
    return "".join(c for c in " ".join(_ANSI_COLOURS.sub("", safe_str(text)).split()) if c.isprintable())


def safe_str(value: object) -> str:
    """Return `str(value)`, or its `repr` or the name of its type if these methods of a user's class raise."""
    for convert in (str, repr):
        with contextlib.suppress(Exception, SystemExit, GeneratorExit):
            return str.__str__(convert(value))  # a plain `str` even if a subclass is returned
    return type(value).__name__


def error_text(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its type if it has none."""
    return one_line(error) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return type and message of an error on one line, such as `ValueError: no such key`."""
    name, text = type(error).__name__, error_text(error)
    return text if text == name or text.startswith(f"{name}(") else f"{name}: {text}"


class JaxrlError(Exception):
    """Base class. Messages are one line: what was given, what is expected, and how to fix it."""

    exit_code = 1


class SettingsError(JaxrlError, ValueError):
    """Invalid usage or settings, raised before anything compiles."""

    exit_code = 2


class RunDirTakenError(SettingsError):
    """A new run in a directory that already has one."""


class MissingError(SettingsError):
    """Settings name something that is not available here: code, a package, a file or data."""


class UnnamedPathError(MissingError):
    """A run directory, perhaps a stranger's, contains a path that is used only if the user names it."""


class ActorError(JaxrlError):
    """An actor failed or hangs, or an environment of an evaluation failed."""


class DivergedError(JaxrlError):
    """Training diverged: updates are no longer finite."""

    exit_code = 3


class RunDirInUseError(JaxrlError):
    """Another process is writing the run directory."""

    exit_code = 4


class StorageError(JaxrlError):
    """A checkpoint could not be written."""

    exit_code = 5


class NoCheckpointError(JaxrlError):
    """No valid checkpoint is left to resume from."""

    exit_code = 6


class ProcessError(JaxrlError):
    """Another process of the same run has died or failed."""

    exit_code = 7


def require_extra(module: str, what: str, extra: str = "") -> Any:
    """Import the optional `module` that `what` needs; raise `MissingError` with the command that installs it.

    `extra` is the extra of jaxrl that installs the module, if it has another name.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        extra = extra or module
        raise MissingError(f"{what} need the extra `{extra}`: pip install 'jaxrl[{extra}]'") from None


MAX_SHOWN = 12
"""Largest number of names that a message lists."""


def suggest(word: str, known: Iterable[str], settings: bool = False) -> str:
    """Return a suggestion for an unknown `word`: similar entries of `known`, or else the first of them.

    With `settings`, names of other libraries for a setting are translated too.
    """
    known = sorted(known)
    if settings and (hint := hint_of(word)) is not None and (translated := _translate(word, hint, known)):
        return translated
    close = close_matches(word, known)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if settings and known and known[0].startswith("--"):
        return "--help shows all flags"
    more = len(known) - MAX_SHOWN
    return "known: " + ", ".join(known if more <= 1 else [*known[:MAX_SHOWN], f"and {more} more"])


def close_matches(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three entries of `known` similar to `word`, the closest first; dashes and case are ignored."""
    plain = _normalise(word)

    def similarity(name: str) -> float:
        full = _normalise(name)
        last = re.split(r"[.:]", full)[-1]
        if len(plain) > 3 and full.startswith(plain):
            return 1.0 if full == plain else 0.99
        return max(difflib.SequenceMatcher(None, plain, part).ratio() for part in (full, last))

    ranked = sorted(((similarity(name), name) for name in known), reverse=True)
    return [name for ratio, name in ranked[:3] if ratio >= max(0.65, ranked[0][0] - 0.15)]


def _normalise(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _translate(word: str, hint: Hint, known: list[str]) -> str:
    """Translate another library's setting to jaxrl's, spelled as in `known`: a flag or name, with or without path."""
    spelt = {_normalise(name): name for name in known}
    for name in hint.names:
        found = spelt.get(name) or spelt.get(name.rpartition(".")[2])
        if found is not None:
            return f"did you mean {found}?" + (f" ({hint.note})" if hint.note else "")
    if hint.names and _normalise(word) == hint.names[0].rpartition(".")[2] and known and known[0].startswith("--"):
        return hint.note or "this algorithm has no such setting"
    if known and known[0].startswith("--"):
        return hint.note or f"jaxrl calls it --{hint.names[0].replace('_', '-')}, which this algorithm does not have"
    return hint.note if not hint.names else elsewhere(word, hint)


def check_count(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is an integer from `least` to `most`; raise `SettingsError` otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) != value or int(value) < least:
        raise SettingsError(f"{name} is {value!r}; expected a whole number of at least {least}")
    if most is not None and int(value) > most:
        raise SettingsError(f"{name} is {value!r}; expected at most {most}")
    return int(value)


def check_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raise `SettingsError` unless `value` is a `kind`, or `None`; `expected` describes one."""
    if value is not None and not isinstance(value, kind):
        raise SettingsError(f"{name} is {type(value).__name__}; expected {expected}")


def check_callable(name: str, value: object) -> None:
    """Raise `SettingsError` unless `value` can be called, or is `None`."""
    if value is not None and not callable(value):
        raise SettingsError(f"{name} is {one_line(repr(value))}; expected a function")


def check_number(name: str, value: Any) -> float:
    """Return `value` as a float; raise `SettingsError` if it is no number."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, str | bytes):
            return float(value)
    raise SettingsError(f"{name} is {one_line(repr(value))}; expected a number")


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

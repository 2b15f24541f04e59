"""Command-line arguments of all commands: normalising, reading flags, and quoting.

Imports nothing slow, because the first line of a run is printed before slow imports.
"""

import itertools
import re
import shlex
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.hints import FLAG_ALIASES
from jaxrl.parsing import parse_float, parse_value, split_list

REPEATABLE = ("--sweep",)
"""Flags that may be repeated, each time with more settings."""
EXAMPLES = {
    "--sweep": "agent.lr=1e-4,3e-4",
    "--halving": "3",
    "--pbt": "2000",
    "--env-args": "gravity 9.8",
    "--eval-env-args": "gravity 9.8",
    "--agent.schedules": "'lr=linear(1e-3,0,10000)'",
}
"""Values that the message for a missing one shows."""


def normalise(args: Sequence[str]) -> list[str]:
    """Normalise the words of a command line to `--flag value`, with dashes in the names of flags.

    A value that looks like a flag stays attached, as in `--notes=--fast`. Normalising is idempotent.
    """
    words: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        if not is_flag(word) or not word.startswith("--"):
            words.append(word)
        elif equals and not is_flag(value):
            words += [name.replace("_", "-"), value]
        else:
            words.append(name.replace("_", "-") + equals + value)
    return words


def refuse_repeats(words: Sequence[str], repeatable: Collection[str] = REPEATABLE) -> None:
    """Raise `SettingsError` if a flag is repeated, or given with and without `no-`; `words` are normalised."""
    found: dict[str, tuple[str, str]] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, _, value = word.partition("=")
        value = value or " ".join(_following(words, at))
        plain = without_no(flag)
        if plain in found and flag not in repeatable:
            before, earlier = found[plain]
            if before != flag:
                raise SettingsError(f"{before} and {flag} contradict each other; give one of them")
            values = f", as {_quote_value(earlier)} and as {_quote_value(value)}" if earlier or value else ""
            raise SettingsError(f"{flag} is given twice{values}; give it once")
        found[plain] = flag, value


def translate(args: Sequence[str], known: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """Replace flags of other libraries by jaxrl's equivalents; return the arguments, and a note on each replacement.

    Raises:
      SettingsError: a flag is then given twice.
    """
    words, notes = list(args), []
    for at, word in enumerate(args):
        flag, equals, value = word.partition("=")
        ours = FLAG_ALIASES.get(flag[2:].lower()) if flag.startswith("--") and flag not in known else None
        # If the policy has a separate learning rate, another library's single rate is ambiguous.
        if ours in known and not (ours == "--agent.lr" and "--agent.policy-lr" in known):
            value = value if equals else "".join(args[at + 1 : at + 2])
            words[at] = f"{ours}{equals}{value if equals else ''}"
            notes.append(f"{flag} {value} taken as {ours} {value}")
    refuse_repeats(words)
    return words, tuple(notes)


def _quote_value(value: str) -> str:
    return repr(value[:80]) if value else "nothing"


def _following(words: Sequence[str], at: int) -> list[str]:
    """Return the words after index `at`, up to the next flag."""
    stop = at + 1
    while stop < len(words) and not is_flag(words[stop]):
        stop += 1
    return list(words[at + 1 : stop])


def is_flag(word: str) -> bool:
    """Return whether a word is a flag rather than a negative number."""
    return word.startswith("-") and parse_float(word) is None


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return the value of `flag`, or `None`."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            return following or None
        if word.startswith(f"{flag}="):
            return word[len(flag) + 1 :] or None
    return None


def read_flags(words: Sequence[str], kinds: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the flags of `kinds`, with the types of their values; return what a file would have for each, and the rest.

    Raises:
      SettingsError: a flag has no value.
    """
    given: dict[str, Any] = {}
    rest, words = [], list(words)
    off = {no(flag): flag for flag, kind in kinds.items() if kind is bool}
    while words:
        flag, equals, value = (word := words.pop(0)).partition("=")
        if flag in off and not equals:
            given[off[flag]] = False
        elif flag in kinds:
            value = _read_value(flag, [value] if equals else _take_values(words, kinds[flag]), kinds[flag])
            given[flag] = [*given[flag], *value] if flag in REPEATABLE and flag in given else value
        else:
            rest.append(word)
    return given, rest


def _take_values(words: list[str], kind: Any) -> list[str]:
    """Remove and return the words at the beginning of `words` that are values of a flag of type `kind`."""
    if kind is bool:
        most = 1 if words and words[0].lower() in ("true", "false") else 0
    else:
        most = len(words) if typing.get_origin(kind) in (tuple, dict) else 1
    values = list(itertools.takewhile(lambda word: not is_flag(word), words[:most]))
    del words[: len(values)]
    return values


def _read_value(flag: str, words: Sequence[str], kind: Any) -> Any:
    """Return the words after a flag as what a file would have in their place."""
    origin = typing.get_origin(kind) or kind
    if origin is bool:
        return words[0] if words else True
    if not words or (not any(words) and (kind is str or flag in EXAMPLES)):
        raise SettingsError(f"{flag} needs a value{f', as in {flag} {EXAMPLES[flag]}' if flag in EXAMPLES else ''}")
    if origin is dict:
        return {name: parse_value(value) for name, value in parse_pairs(flag, words).items()}
    if origin is tuple:
        text = " ".join(words)
        return list(words) if typing.get_args(kind)[0] is str else split_list(text) or ([] if text == "[]" else [""])
    return None if words[0] == "None" else words[0]


def no(flag: str) -> str:
    """Return the flag that turns off the setting of `flag`, as `--agent.no-clip`."""
    head, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{head}{dot}no-{name}"


def without_no(flag: str) -> str:
    """Return `flag` without the `no-` that turns its setting off."""
    return re.sub(r"(^--|\.)no-", r"\1", flag)


def parse_pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """Parse `NAME VALUE NAME VALUE ...`; raise `SettingsError` for a name that has no value or is repeated."""
    if len(words) % 2:
        raise SettingsError(f"{flag} is {' '.join(words)!r}; expected names with values, as in {flag} gravity 9.8")
    pairs: dict[str, str] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name in pairs:
            raise SettingsError(f"{flag} names {name} twice, as {pairs[name]!r} and as {value!r}; give it once")
        pairs[name] = value
    return pairs


def command(name: str) -> str:
    """Return the command line of a command, in the style in which this process was called, such as `jaxrl train`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None and sys.argv and re.search(r"(^|[\\/])jaxrl(\.exe)?$", sys.argv[0]):
        return f"jaxrl {name}"
    if spec is not None and spec.name == "jaxrl.__main__":
        return f"python -m jaxrl {name}"
    return f"python -m jaxrl.{name}"


def quote(text: str) -> str:
    """Quote `text` for a shell, on one line and with control characters escaped."""
    if text.isprintable():
        return shlex.quote(text)
    plain = "".join(c if c.isprintable() and c not in "\\'" else _escape(c) for c in text)
    return f"$'{plain}'"


def _escape(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))

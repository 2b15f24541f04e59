"""The words of a command line: one form for all front doors, and the names by which these were called.

Imports nothing slow, for the first line of a run is printed before all that is.
"""

import re
import shlex
import sys
from collections.abc import Collection, Sequence

from jaxrl.errors import SettingsError
from jaxrl.hints import SAME
from jaxrl.parsing import parse_float

REPEATABLE = ("--sweep",)
"""Flags that may stand more than once: each names further settings."""


def normalise(args: Sequence[str]) -> list[str]:
    """Return the words of a command line in one form: `--flag value`, with dashes in the names of flags.

    A value that looks like a flag stays where it stands, as in `--notes=--fast`. What is in this form stays as it is.
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
    """Raise `SettingsError` if a flag is given twice, or both as it is and with `no-`; `words` are from `normalise`."""
    found: dict[str, tuple[str, str]] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, _, value = word.partition("=")
        value = value or " ".join(_following(words, at))
        plain = re.sub(r"(^--|\.)no-", r"\1", flag)
        if plain in found and flag not in repeatable:
            before, earlier = found[plain]
            if before != flag:
                raise SettingsError(f"{before} and {flag} contradict each other; give one of them")
            values = f", as {_shown(earlier)} and as {_shown(value)}" if earlier or value else ""
            raise SettingsError(f"{flag} is given twice{values}; give it once")
        found[plain] = flag, value


def translate(args: Sequence[str], known: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return `args` with our flags in place of those of other libraries that mean the same, and notes on these.

    Raises:
      SettingsError: a flag is now given twice.
    """
    words, notes = list(args), []
    for at, word in enumerate(args):
        flag, equals, value = word.partition("=")
        ours = SAME.get(flag[2:].lower()) if flag.startswith("--") and flag not in known else None
        # Where a policy has a learning rate of its own, another library's one rate may mean both.
        if ours in known and not (ours == "--agent.lr" and "--agent.policy-lr" in known):
            value = value if equals else "".join(args[at + 1 : at + 2])
            words[at] = f"{ours}{equals}{value if equals else ''}"
            notes.append(f"{flag} {value} taken as {ours} {value}")
    refuse_repeats(words)
    return words, tuple(notes)


def _shown(value: str) -> str:
    return repr(value[:80]) if value else "nothing"


def _following(words: Sequence[str], at: int) -> list[str]:
    """Return the words after place `at` up to the next flag."""
    stop = at + 1
    while stop < len(words) and not is_flag(words[stop]):
        stop += 1
    return list(words[at + 1 : stop])


def is_flag(word: str) -> bool:
    """Return whether a word is a flag, and no number below 0."""
    return word.startswith("-") and parse_float(word) is None


def value_of(words: Sequence[str], flag: str) -> str | None:
    """Return what follows `flag`, or `None`."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            return following or None
        if word.startswith(f"{flag}="):
            return word[len(flag) + 1 :] or None
    return None


def take(words: list[str], flag: str) -> str | None:
    """Remove `flag` and its value from `words`; return the value, or `None` without the flag.

    Raises:
      SettingsError: it has no value.
    """
    for at, word in enumerate(words):
        if word == flag or word.startswith(f"{flag}="):
            alone = word == flag
            value = "".join(words[at + 1 : at + 2]) if alone else word[len(flag) + 1 :]
            if not value or (alone and value.startswith("--")):
                raise SettingsError(f"{flag} needs a value")
            del words[at : at + 1 + alone]
            return value
    return None


def switch(words: list[str], flag: str) -> bool:
    """Remove `flag` from `words`; return whether it was there."""
    there = flag in words
    words[:] = [word for word in words if word != flag]
    return there


def take_words(words: list[str], flag: str, example: str) -> list[str]:
    """Remove `flag WORD WORD ...` from `words`; return what follows the flag, nothing without it.

    Raises:
      SettingsError: nothing follows it.
    """
    if flag not in words:
        return []
    at = words.index(flag)
    following = _following(words, at)
    if not any(following):
        raise SettingsError(f"{flag} needs a value, as in {flag} {example}")
    del words[at : at + 1 + len(following)]
    return following


def parse_pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """Return `NAME VALUE NAME VALUE` by name; raise `SettingsError` for a name without a value, or twice."""
    if len(words) % 2:
        raise SettingsError(f"{flag} is {' '.join(words)!r}; expected names with values, as in {flag} gravity 9.8")
    pairs: dict[str, str] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name in pairs:
            raise SettingsError(f"{flag} names {name} twice, as {pairs[name]!r} and as {value!r}; give it once")
        pairs[name] = value
    return pairs


def command(door: str) -> str:
    """Return what calls a front door in the way in which this process was called: `jaxrl train`, say."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None and sys.argv and re.search(r"(^|[\\/])jaxrl(\.exe)?$", sys.argv[0]):
        return f"jaxrl {door}"
    if spec is not None and spec.name == "jaxrl.__main__":
        return f"python -m jaxrl {door}"
    return f"python -m jaxrl.{door}"


def quote(text: str) -> str:
    """Return `text` as a shell reads it, in one line and without anything that a terminal would obey."""
    if text.isprintable():
        return shlex.quote(text)
    plain = "".join(c if c.isprintable() and c not in "\\'" else _escaped(c) for c in text)
    return f"$'{plain}'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))

"""Parse numbers as people write them: `1e4`, `1_000`, `64,64` or `[64, 64]`; and short reprs of large objects."""

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_REPR = 240
"""Largest number of characters of the parts in a repr."""


def as_int(value: Any) -> Any:
    """Return `value` as an `int` if it is an integral float or string below 10^18; otherwise unchanged."""
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() and abs(value) < 1e18 else value
    if not isinstance(value, str):
        return value
    try:
        number = Decimal(value.strip())
    except InvalidOperation:
        return value
    small = number.is_finite() and number.adjusted() < 18
    return int(number) if small and number == number.to_integral_value() else value


def parse_float(value: str) -> float | None:
    """Return `value` as a float; `None` if it is no number."""
    try:
        return float(value)
    except ValueError:
        return None


def parse_value(text: str) -> Any:
    """Parse an argument of a command line: a number, `true` or `false`, a list `[a, [b, c]]`, or else a string."""
    word = text.strip()
    if word.startswith("[") and word.endswith("]"):
        return [parse_value(part) for part in _split_items(word[1:-1]) if part.strip()]
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    value = as_int(word)
    if isinstance(value, int):
        return float(value) if "." in word else value
    found = parse_float(word)
    return word if found is None else found


def _split_items(text: str) -> list[str]:
    """Split at the commas that are not inside of brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def split_list(text: str) -> list[str]:
    """Split a list written as `64,64`, `[64, 64]`, `(64, 64)` or `64 64`."""
    return text.strip().strip("[]()").replace(",", " ").split()


def format_repr(kind: str, *parts: object) -> str:
    """Return a repr `kind(part, ...)` without empty parts: one line, below 300 characters, as fits a notebook cell."""
    text = " ".join(", ".join(str(part) for part in parts if part not in (None, "")).split())
    return f"{kind}({text if len(text) <= MAX_REPR else f'{text[:MAX_REPR]}...'})"


def flatten_settings(settings: Mapping[str, Any], prefix: str = "", *, keep_empty: bool = False) -> dict[str, Any]:
    """Flatten nested settings to dotted names, such as `agent.lr`; empty mappings vanish unless `keep_empty`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and (value or not keep_empty):
            found |= flatten_settings(value, f"{prefix}{name}.", keep_empty=keep_empty)
        else:
            found[f"{prefix}{name}"] = value
    return found


def format_settings(settings: Mapping[str, Any] | None) -> str:
    """Format settings as keyword arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in (settings or {}).items())

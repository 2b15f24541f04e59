"""Parse numbers as people write them: `1e4`, `1_000`, `64,64` or `[64, 64]`; write objects as people read them."""

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_REPR = 240
"""Characters of an object's parts that are shown."""


def as_int(value: Any) -> Any:
    """Return `value` as an `int` if it is a whole number, written or as a float, below 10^18; else just as it came."""
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
    """Return what `value` says as a float; `None` if it is no number."""
    try:
        return float(value)
    except ValueError:
        return None


def parse_value(text: str) -> Any:
    """Return what a word of a command line says: a number, `true` or `false`, a list `[a, b]`, or else the text."""
    word = text.strip()
    if word.startswith("[") and word.endswith("]"):
        return [parse_value(part) for part in word[1:-1].split(",") if part.strip()]
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    value = as_int(word)
    if isinstance(value, int):
        return float(value) if "." in word else value
    found = parse_float(word)
    return word if found is None else found


def split_list(text: str) -> list[str]:
    """Return the parts of a list as people write it: `64,64`, `[64, 64]`, `(64, 64)` or `64 64`."""
    return text.strip().strip("[]()").replace(",", " ").split()


def format_repr(kind: str, *parts: object) -> str:
    """Return what stands for a large object at the end of a notebook's cell: its `kind`, and the `parts` that are any.

    It is one line of fewer than 300 characters.
    """
    text = " ".join(", ".join(str(part) for part in parts if part not in (None, "")).split())
    return f"{kind}({text if len(text) <= MAX_REPR else f'{text[:MAX_REPR]}...'})"


def format_settings(settings: Mapping[str, Any] | None) -> str:
    """Return settings as they are given in Python."""
    return ", ".join(f"{name}={value!r}" for name, value in (settings or {}).items())

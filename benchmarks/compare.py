"""`python -m benchmarks.compare A.json B.json`: what changed from A to B, beyond the noise of the repeats.

A row is called faster or slower only where the ranges of the repeats do not overlap and the medians differ by more than
3 %. It is judged twice: by its times, and by its ratios to what took turns with it (a plain loop where there is one,
else its limit), which a machine that was busier in one of the two runs leaves as they are. A change of the number of
kernels, of memory or of settings is always told, for it has no noise.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

THRESHOLD = 0.03
"""Medians that differ by less are the same."""


REFERENCES = {"plain": "plain_ratio_spread", "limit": "ratio_spread"}
"""What took turns with a row, and where the row has its ratios to it."""
TOLD = ("kernels_per_iteration", "copies_per_iteration", "temp_bytes", "settings")


def verdict(old: Sequence[float], new: Sequence[float]) -> str:
    """Say how the spread `new` differs from `old`: faster, slower, or the same within noise."""
    (low_a, a, high_a), (low_b, b, high_b) = old, new
    apart = high_b < low_a or high_a < low_b
    if not apart or abs(b / a - 1) <= THRESHOLD:
        return "same"
    return "faster" if b < a else "slower"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each row that both results have, and one for each that only one has."""
    before, after = (
        {row.get("name", row["case"]): row for row in result["rows"] if "spread" in row} for result in (old, new)
    )
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in before or name not in after:
            lines.append(f"{name:<22}only in {'A' if name in before else 'B'}")
            continue
        a, b = before[name], after[name]
        us = f"{a['us_per_opt_step']:>12,.1f}{b['us_per_opt_step']:>12,.1f}"
        ratio = b["us_per_opt_step"] / a["us_per_opt_step"]
        lines.append(f"{name:<22}{us}{ratio:>8.3f}  {verdict(a['spread'], b['spread']):<8}{_beside(a, b)}{_told(a, b)}")
    return lines


def _beside(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Judge by the ratios to what took turns with both rows; nothing is said of those that have none in common."""
    for name, field in REFERENCES.items():
        if field in a and field in b:
            return f"{b[field][1] / a[field][1]:>8.3f}  {verdict(a[field], b[field])} beside its {name}"
    return ""


def _told(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    changed = [field for field in TOLD if field in a and field in b and a[field] != b[field]]
    return "".join(
        "  other settings" if field == "settings" else f"  {field} {a[field]} -> {b[field]}" for field in changed
    )


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=__doc__)
    parser.add_argument("a", type=Path, help="the earlier result")
    parser.add_argument("b", type=Path, help="the later result")
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.a, options.b))
    for name in ("device", "cpu", "cores", "jax", "versions", "python", "flags", "variables"):
        if old["header"].get(name) != new["header"].get(name):
            print(f"not the same {name}: {old['header'].get(name)} and {new['header'].get(name)}")
    print(f"{'case':<22}{'A us/opt':>12}{'B us/opt':>12}{'B/A':>8}{'':10}{'B/A':>8} of the ratios")
    print("\n".join(compare(old, new)))


if __name__ == "__main__":
    main()

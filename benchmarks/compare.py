"""`python -m benchmarks.compare A.json B.json`: what changed from A to B, beyond the noise of the repeats.

A row is called faster or slower only where the ranges of the repeats do not overlap and the medians differ by more than
3 %; a change of the number of kernels is always told, for it has no noise.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

THRESHOLD = 0.03
"""Medians that differ by less are the same."""


def verdict(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say how the row `new` differs from `old`: faster, slower, or the same within noise."""
    (low_a, a, high_a), (low_b, b, high_b) = old["spread"], new["spread"]
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
        kernels = [row.get("kernels_per_iteration") for row in (a, b)]
        told = "" if kernels[0] == kernels[1] else f"  kernels {kernels[0]} -> {kernels[1]}"
        lines.append(f"{name:<22}{us}{ratio:>8.3f}  {verdict(a, b)}{told}")
    return lines


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=__doc__)
    parser.add_argument("a", type=Path, help="the earlier result")
    parser.add_argument("b", type=Path, help="the later result")
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.a, options.b))
    for name in ("device", "cores", "jax", "python", "flags"):
        if old["header"].get(name) != new["header"].get(name):
            print(f"not the same {name}: {old['header'].get(name)} and {new['header'].get(name)}")
    print(f"{'case':<22}{'A us/opt':>12}{'B us/opt':>12}{'B/A':>8}")
    print("\n".join(compare(old, new)))


if __name__ == "__main__":
    main()

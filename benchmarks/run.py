"""`python -m benchmarks.run [CASE ...] [--quick] [--json FILE] [--profile DIR]`: measure, print a table, keep a JSON.

Each case runs its subject and its limit in turn, several times, in one process; warm-up and compile time are left out,
and every call is blocked on.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.cases import CASES, Effort


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats, to see that it works")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="trace one call of each case and tell its kernels")
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown case {unknown[0]}; known: {', '.join(CASES)}")
    rows = []
    for name in options.cases or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        effort = Effort(2, 200) if options.quick else Effort()
        rows += CASES[name](effort._replace(profile=options.profile))
    print(harness.table(rows))
    if options.json:
        harness.write(options.json, rows)


if __name__ == "__main__":
    main()

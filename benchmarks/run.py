"""`python -m benchmarks.run [CASE ...] [--quick] [--json FILE] [--profile DIR]`: measure, print a table, keep a JSON.

Each case runs its subject and its limit in turn, several times, in one process; warm-up and compile time are left out,
and every call is blocked on. The exit code is 1 where a row failed what its case demands.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.cases import CASES, SIZES, Case, case_named
from benchmarks.device import Limits, limits, shorten
from benchmarks.harness import Effort


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__)
    sizes = " or ".join(f"{kind}-N" for kind in SIZES)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all), or {sizes}")
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="trace a call of each case of one compiled loop")
    options = parser.parse_args()
    effort = harness.QUICK if options.quick else Effort()
    if options.quick:
        shorten()
    cases = [(name, _case(parser, name)) for name in options.cases or CASES]
    rows = []
    for name, case in cases:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += case(effort._replace(profile=options.profile))
        if options.json:  # after each case: the next may take minutes, and may fail
            device = _device(rows)
            harness.write(options.json, rows, device_limits=device and device._asdict())
    print(*filter(None, [_device(rows), harness.table(rows)]), sep="\n")
    failed = [f"{row.get('name', row['case'])} {row['failed']}" for row in rows if row.get("failed")]
    if failed:
        sys.exit("\n".join(failed))


def _device(rows: Sequence[harness.Row]) -> Limits | None:
    """Return what the device allows, where a row is held against it: measuring takes some seconds, and 130 MB."""
    return limits() if any("device_us" in row for row in rows) else None


def _case(parser: argparse.ArgumentParser, name: str) -> Case:
    try:
        return case_named(name)
    except KeyError:
        parser.error(
            f"unknown case {name}; known: {', '.join(CASES)}; of other sizes {', '.join(SIZES)}, as in dqn-4096"
        )


if __name__ == "__main__":
    main()

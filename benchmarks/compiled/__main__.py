"""Compile cases for a target, and say what their programs are made of.

python -m benchmarks.compiled [CASE ...] [--target h200|v5e|cpu] [--json FILE]
    [--against FILE] [--text DIR] [--plain FILE ...]
"""

import argparse
import json
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

from benchmarks.compiled.targets import TARGETS, prepare


def main(argv: list[str]) -> int:
    """Print the table; return the exit code: 1 if a figure is worse than it was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them, if none is named")
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--json", type=Path, help="file to write; rows of other cases in it stay")
    parser.add_argument("--against", type=Path, help="earlier result of the same target, not to be worse than")
    parser.add_argument("--text", type=Path, help="folder for the text of each program")
    parser.add_argument("--plain", nargs="+", default=(), metavar="FILE", help="files of jaxrl/xla that shape nothing")
    asked = parser.parse_args(argv)
    prepare(TARGETS[asked.target])  # before the first import of JAX
    try:
        return _compile(asked)
    except KeyError as error:
        from benchmarks.compiled.cases import CASES

        print(f"unknown case {error}; there are {', '.join(CASES)}, and kinds with a number", file=sys.stderr)
    except (ImportError, RuntimeError) as error:
        target = TARGETS[asked.target]
        print(f"cannot compile for {target.title} (it takes {target.needs}): {error}", file=sys.stderr)
    return 2


def _compile(asked: argparse.Namespace) -> int:
    from benchmarks import harness
    from benchmarks.compiled.cases import CASES, case_named
    from benchmarks.compiled.measure import HEADER, line, measure, worse

    cases = {case: case_named(case) for case in asked.cases or CASES}
    rows: list[dict[str, Any]] = []
    others, now = _others(asked.json, cases), harness.header()
    print(HEADER, flush=True)
    for case, program in cases.items():
        row = measure(case, program, asked.target, asked.text, asked.plain)
        rows.append({**row, "date": now["date"], "commit": now["commit"]})
        print(line(row), flush=True)
        if asked.json:
            place = lambda row: [*CASES, row["case"]].index(row["case"])
            harness.write(asked.json, sorted([*rows, *others], key=place))
    found = worse(json.loads(asked.against.read_text())["rows"], rows) if asked.against else []
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def _others(file: Path | None, cases: Container[str]) -> list[dict[str, Any]]:
    """Return the rows of other cases that a result has already, each with the date and commit it is of."""
    if file is None or not file.exists():
        return []
    found = json.loads(file.read_text())
    of = {name: found["header"][name] for name in ("date", "commit")}
    return [{**of, **row} for row in found["rows"] if row["case"] not in cases]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

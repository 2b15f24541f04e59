"""Compile cases for a target, and say what their programs are made of.

python -m benchmarks.compiled [CASE ...] [--target h200|v5e|cpu] [--json FILE]
    [--against FILE] [--text DIR] [--plain FILE ...]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.compiled.targets import TARGETS, prepare


def main(argv: list[str]) -> int:
    """Print the table; return the exit code: 1 if a figure is worse than it was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them, if none is named")
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--json", type=Path, help="file to write; rewritten after each case")
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
    print(HEADER, flush=True)
    for case, program in cases.items():
        rows.append(measure(case, program, asked.target, asked.text, asked.plain))
        print(line(rows[-1]), flush=True)
        if asked.json:
            harness.write(asked.json, rows)
    found = worse(json.loads(asked.against.read_text())["rows"], rows) if asked.against else []
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

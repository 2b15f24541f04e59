"""Result files, the latest row of each name, and how figures are written."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.harness import spaced

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = Mapping[str, Any]


class Result(NamedTuple):
    """A result file."""

    file: Path
    header: Row
    rows: Sequence[Row]


def results(pattern: str) -> list[Result]:
    """Return the results of the files in `results/` whose names are like `pattern`, the earliest first."""
    found = []
    for file in sorted(RESULTS.glob(pattern)):
        told = json.loads(file.read_text())
        found.append(Result(file, told["header"], told["rows"]))
    return found


def compiled_for(*targets: str) -> list[Result]:
    """Return the newest compiled result of each target, such as `h200`, or `shards-8-h200` for one in shards."""
    return [results(f"*-compiled-{target}.json")[-1] for target in targets]


class Rows:
    """The rows of a script, the latest of each name; it remembers the files of those that were taken."""

    def __init__(self, script: str, device: str = "cpu") -> None:
        """Take those of the files that were written on a device whose name contains `device`."""
        there = [result for result in results("*.json") if device in result.header["device"]]
        own = [result for result in there if script in result.header["command"].split()[:3]]
        self._all = {row.get("name", row.get("case")): (row, result) for result in own for row in result.rows}
        self.used: list[Result] = []

    def __getitem__(self, name: str) -> Row:
        """Return a row; raise `KeyError` where no file has it."""
        row, result = self._all[name]
        self.used.append(result)
        return row

    def get(self, name: str) -> Row | None:
        """Return a row; None where no file has it, or it has failed."""
        return self[name] if name in self._all and not self._all[name][0].get("failed") else None


def source(used: Iterable[Result], verb: str = "Measured") -> str:
    """Return the line below figures that says of which versions and files they are."""
    once = sorted({result.file: result for result in used}.items())
    names = ", ".join(f"`{file.relative_to(ROOT).as_posix()}`" for file, _ in once)
    return prose(f"{verb} with jaxrl {harness.versions(result.header['jaxrl'] for _, result in once)} ({names}).")


def figure(x: float) -> str:
    """Return a number with three digits that count, thousands apart."""
    return spaced(round(x, 3 - len(f"{abs(x):.0f}"))) if abs(x) >= 1_000 else f"{x:.3g}"


def prose(text: str) -> str:
    """Return sentences in lines of the pages' width."""
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)

"""The figures that README and docs quote are those of the committed results, and say of which version they are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables.__main__ import PAGES, TABLES, places
from benchmarks.tables.results import figure

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
SOURCE = r"(?:[Mm]easured|Compiled) with jaxrl ([\d.]+)(?: to ([\d.]+))?\s\(([^)]+)\)"
PLACES = [(page, name) for page in PAGES for name, _ in places(page.read_text())]


def told(page: Path) -> str:
    return " ".join(page.read_text().split())


def of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize(("page", "name"), PLACES, ids=lambda part: part if isinstance(part, str) else part.stem)
def test_what_a_page_quotes_is_what_the_result_files_hold(page: Path, name: str) -> None:
    """Otherwise `python -m benchmarks.tables --write` makes it so."""
    assert dict(places(page.read_text()))[name] == TABLES[name]()


def test_every_table_has_its_place_on_a_page() -> None:
    assert {name for _, name in PLACES} == set(TABLES)


def test_figures_are_of_the_version_that_the_line_below_them_states() -> None:
    found = [match for page in PAGES for match in re.findall(SOURCE, told(page))]
    assert len(found) > 15
    for first, last, names in found:
        headers = [of(ROOT / name)["header"] for name in re.findall(r"`([^`]+)`", names)]
        versions = {header["jaxrl"] for header in headers}
        assert versions >= {first, last or first}, names
        assert all(order(first) <= order(version) <= order(last or first) for version in versions), names


def order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_a_table_of_several_versions_has_a_column_for_them() -> None:
    for page, name in PLACES:
        text = dict(places(page.read_text()))[name]
        if "in the last column" in text:
            head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
            assert head.endswith("| jaxrl |")
            assert [row for row in rows if not re.search(r"\| \d+\.\d+\.\d+( to \d+\.\d+\.\d+)? \|$", row)] == []


def test_a_page_that_names_a_benchmark_says_of_which_version_its_figures_are() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        if re.search(r"`python\s-m\sbenchmarks\.", prose):
            assert re.search(r"with (jaxrl [\d.]+|the versions of jaxrl)", prose), page.name


def test_every_result_file_is_quoted_and_none_is_superseded() -> None:
    """A file is named by a page, or has a row of what presets learn that no later file has."""
    named = {name for page in PAGES for name in re.findall(r"`(benchmarks/results/[^`*]+)`", page.read_text())}
    latest: dict[tuple[str, ...], Path] = {}
    for file in RESULTS:
        if "-learning-" in file.name:
            latest.update({learnt(row): file for row in of(file)["rows"]})
    own = {*latest.values(), *(ROOT / name for name in named)}
    assert [file.name for file in RESULTS if file not in own] == []


def learnt(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, (row["algo"], row["env"], row["preset"], row["flags"], row["seed"])))


@pytest.mark.parametrize(
    ("number", "text"),
    [(9_669.6, "9 670"), (96_693, "96 700"), (817.2, "817"), (3.949, "3.95"), (-1575.9, "-1 580"), (0.5, "0.5")],
)
def test_a_figure_has_three_digits_that_count(number: float, text: str) -> None:
    assert figure(number) == text

"""The benchmark of searches: who wins, what it cost, and that the documentation says what the result file holds."""

import json
import sys
from pathlib import Path

import pytest

import jaxrl
from benchmarks import search
from jaxrl.training.population.scores import MemberResult, PopulationResult

ROOT = Path(__file__).parents[2]


def member(number: int, status: str, last: float | None) -> MemberResult:
    return MemberResult(number, 0, {"agent.lr": 0.1 * number}, status, last, last, None, {"agent.lr": 0.5})


def test_the_winner_has_come_to_the_end_and_of_equals_is_the_first() -> None:
    members = [
        member(0, "halved", 9.0),
        member(1, "max_opts", 3.0),
        member(2, "max_opts", 3.0),
        member(3, "diverged", 5),
    ]
    best = search.winner(PopulationResult(tuple(members), None))
    assert best.number == 1
    assert search.rate(best) == 0.5  # its present one


def test_an_interval_holds_the_mean_and_is_as_wide_as_the_values_are_apart() -> None:
    assert search.bounds([3.0, 3.0, 3.0]) == (3.0, 3.0)
    low, high = search.bounds([0.0, 1.0, 2.0, 3.0, 4.0])
    assert 0.0 < low < 2.0 < high < 4.0
    assert search.bounds([10 * x for x in range(5)]) == (pytest.approx(10 * low), pytest.approx(10 * high))


def row(how: str, repeat: int, fresh: float, opt_steps: int) -> search.Row:
    curve = [(steps, 0.0) for steps in (opt_steps // 4, opt_steps)]
    members = [{"fresh": fresh, "curve": curve}, {"fresh": 0.0, "curve": curve}, {"fresh": None, "curve": curve}]
    return {"task": "t", "how": how, "repeat": repeat, "fresh": fresh, "opt_steps": opt_steps, "members": members}


def test_a_search_is_held_against_the_grid_of_the_same_repeat() -> None:
    rows = [row("grid", 0, 10.0, 100), row("grid", 1, 20.0, 100), row("halving", 1, 22.0, 40), row("pbt", 7, 9.0, 1)]
    lines = search.documented(rows).splitlines()[2:]
    assert lines[0].startswith("| t | grid | 2 | 1.00 | 15.0 [10.0, 20.0] |  | 7.5 |")
    assert lines[1] == "| t | halving | 1 | 0.40 | 22.0 [22.0, 22.0] | 2.0 [2.0, 2.0] |  |"
    assert lines[2] == "| t | pbt | 1 |  | 9.0 [9.0, 9.0] |  |  |", "its repeat has no grid"


def test_what_halving_comes_to_is_told_by_the_curves_of_the_grid() -> None:
    """Of four members two go on from the first evaluation at a quarter, and the best at the end of those wins."""
    scores = [(1.0, 9.0), (3.0, 5.0), (2.0, 6.0), (2.0, 7.0)]
    members = [{"fresh": 10.0 * n, "curve": [(25, a), (100, b)]} for n, (a, b) in enumerate(scores)]
    found = search.foretold({"task": "t", "repeat": 0, "members": members}, jaxrl.Halving(2))
    assert (found["winner"], found["fresh"]) == (2, 20.0)  # 3 is as good at a quarter, but comes later
    assert found["opt_steps"] == 25 + 25 + 100 + 100


def test_the_result_file_has_every_search_and_halving_is_what_the_curves_of_the_grid_tell() -> None:
    (file,) = (ROOT / "benchmarks" / "results").glob("*-search.json")
    rows = json.loads(file.read_text())["rows"]
    assert {(r["task"], r["how"], r["repeat"]) for r in rows} == {
        (task, how, repeat) for task in search.TASKS for how in search.HOW for repeat in range(5)
    }
    there = {(row["task"], row["repeat"], row["how"]): row for row in rows}
    for (task, repeat, how), row in there.items():
        if how == "halving":
            curves = search.foretold(there[task, repeat, "grid"], jaxrl.Halving())
            assert [curves[name] for name in ("winner", "fresh", "opt_steps")] == [
                row[name] for name in ("winner", "fresh", "opt_steps")
            ]


@pytest.mark.slow
def test_a_task_is_searched_in_every_way_and_other_rows_of_the_file_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    for ways in (["grid"], ["halving", "pbt"]):
        words = ["search", "--quick", "--task", "ppo-pendulum", "--repeats", "3", "--json", str(file), "--how", *ways]
        monkeypatch.setattr(sys, "argv", words)
        search.main()
    rows = {row["how"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["grid", "halving", "pbt"]
    assert rows["grid"]["opt_steps"] == rows["pbt"]["opt_steps"] == 160
    assert rows["halving"]["opt_steps"] == 2 * 10 + 2 * 40  # the first rung is at a quarter, where one in three stays
    assert [m["lr"] for m in rows["grid"]["members"]] == [m["lr"] for m in rows["halving"]["members"]]
    best = rows["grid"]["members"][rows["grid"]["winner"]]
    assert best["fresh"] == rows["grid"]["fresh"]
    assert best["curve"][-1][1] == max(m["curve"][-1][1] for m in rows["grid"]["members"])
    halved = search.foretold(rows["grid"], jaxrl.Halving())
    assert all(halved[name] == rows["halving"][name] for name in ("winner", "fresh", "opt_steps"))
    assert ["curve" in row["members"][0] for row in rows.values()] == [True, False, False]
    assert "| ppo-pendulum | pbt | 1 | 1.00 |" in capsys.readouterr().out

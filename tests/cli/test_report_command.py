"""`python -m jaxrl.report` over runs that training has written."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from commands import Cli, Finished, rows, snapshot
from toys_runs import write_search

from benchmarks.reports import chromium, opened


@pytest.fixture
def browser() -> str:
    pytest.importorskip("plotly")
    found = chromium()
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


def test_a_trained_run_is_told_of_and_not_changed(cli: Cli, finished: Finished) -> None:
    before = snapshot(finished.path)
    done = cli.here("report", finished.path, "--csv", "t.csv", "--json", "m.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "t.csv: 1 run, 1 setting\nm.json: 1 run, 1 setting\n"
    with (cli.cwd / "t.csv").open() as file:
        told = list(csv.DictReader(file))
    written = rows(finished.path / "metrics.jsonl")
    scores = [(str(row["opt_steps"]), row["score"]) for row in written if row["kind"] == "eval"]
    returns = [row["episode_return"] for row in written if row["kind"] == "train" and row["episode_return"] is not None]
    assert [(row["opt_steps"], float(row["score"])) for row in told if row["score"]] == scores
    assert [float(row["return"]) for row in told if row["return"]] == returns
    assert len(scores) == 2
    (task,) = json.loads((cli.cwd / "m.json").read_text())["bsuite"].values()
    run = task["dqn"]["run_0"]
    episodes = [row["return"] for row in rows(finished.path / "eval_episodes.jsonl")]
    assert run["step_0"]["return"] + run["step_1"]["return"] == episodes
    assert snapshot(finished.path) == before


@pytest.mark.slow
def test_a_browser_draws_the_page(cli: Cli, finished: Finished, browser: str) -> None:
    assert cli.run("report", finished.path, "--out", "page.html").returncode == 0
    page = opened(browser, (cli.cwd / "page.html").read_text(), cli.cwd)
    assert re.search(r'id="curves"[^>]*>.*?class="scatterlayer[^>]*><g class="trace', page.dom, re.DOTALL)
    assert re.search(r'id="episodes"[^>]*>.*?class="trace boxes', page.dom, re.DOTALL)
    assert page.console == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_a_browser_lets_the_page_play_a_film(cli: Cli, finished: Finished, browser: str, kind: str) -> None:
    pytest.importorskip("av")
    shutil.copytree(finished.path, cli.cwd / "run")
    assert cli.run("play", "run", "--out", f"run/episode.{kind}").returncode == 0
    assert cli.run("report", "run", "--out", "page.html").returncode == 0
    page = opened(browser, (cli.cwd / "page.html").read_text(), cli.cwd)
    assert f"episode.{kind}</figcaption>" in page.dom
    assert page.console == ()  # it would name what the page's policy refuses


@pytest.mark.slow
def test_a_browser_draws_a_search(cli: Cli, browser: str, tmp_path: Path) -> None:
    population = write_search(tmp_path / "pbt", [(10, 2, 0)])
    assert cli.here("report", population, "--out", "page.html").returncode == 0
    page = opened(browser, (cli.cwd / "page.html").read_text(), cli.cwd)
    for plot, lines in (("population-0", 3), ("lineage-0", 3)):
        drawn = page.dom.split(f'id="{plot}"')[1].split('class="scatterlayer')[1]
        assert drawn.split('class="infolayer')[0].count('<g class="trace scatter') == lines
    assert page.console == ()


@pytest.mark.slow
def test_runs_are_told_of_while_they_go_on(cli: Cli, finished: Finished, tmp_path: Path) -> None:
    """What is told in between is a beginning of what is told in the end, and the run is as if nobody had looked."""
    training = cli.start("train", *finished.args[:-1], "600", "--run-dir", "run")
    seen: list[list[str]] = []
    while training.poll() is None:
        if (tmp_path / "run" / "metrics.jsonl").exists():
            assert cli.here("report", "run", "--csv", "t.csv").returncode == 0
            seen.append((tmp_path / "t.csv").read_text().splitlines())
    assert training.communicate()[1] == ""
    assert training.returncode == 0
    assert cli.here("report", "run", "--csv", "t.csv").returncode == 0
    whole = (tmp_path / "t.csv").read_text().splitlines()
    assert seen
    assert all(set(told[:-1]) <= set(whole) for told in seen)  # of the last line the return may have been yet to come
    assert cli.here("verify", "run").returncode == 0

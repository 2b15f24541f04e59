"""`python -m jaxrl.report`, as a process of its own, over runs that training has written."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from front_doors import Doors, Finished, one_error_line, rows, snapshot

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


def test_a_trained_run_is_told_of_and_not_changed(doors: Doors, finished: Finished) -> None:
    before = snapshot(finished.path)
    done = doors.run("report", finished.path, "--csv", "t.csv", "--json", "m.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "t.csv: 1 runs, 1 settings\nm.json: 1 runs, 1 settings\n"
    with (doors.cwd / "t.csv").open() as file:
        told = list(csv.DictReader(file))
    written = rows(finished.path / "metrics.jsonl")
    scores = [(str(row["opt_steps"]), row["score"]) for row in written if row["kind"] == "eval"]
    returns = [row["episode_return"] for row in written if row["kind"] == "train" and row["episode_return"] is not None]
    assert [(row["opt_steps"], float(row["score"])) for row in told if row["score"]] == scores
    assert [float(row["return"]) for row in told if row["return"]] == returns
    assert len(scores) == 2
    (task,) = json.loads((doors.cwd / "m.json").read_text())["bsuite"].values()
    run = task["dqn"]["run_0"]
    episodes = [row["return"] for row in rows(finished.path / "eval_episodes.jsonl")]
    assert run["step_0"]["return"] + run["step_1"]["return"] == episodes
    assert snapshot(finished.path) == before


def test_a_directory_that_is_no_run_is_refused_in_one_line(doors: Doors) -> None:
    done = doors.run("report", doors.cwd, "--csv", "t.csv")
    assert done.returncode == 2
    assert "is no run directory" in one_error_line(done)
    assert not (doors.cwd / "t.csv").exists()


def test_two_reports_in_one_file_are_refused(doors: Doors, finished: Finished) -> None:
    done = doors.run("report", finished.path, "--csv", "t.txt", "--json", "./t.txt")
    assert done.returncode == 2
    assert "name the same file" in one_error_line(done)
    assert not (doors.cwd / "t.txt").exists()


@pytest.mark.slow
def test_a_browser_draws_the_page(doors: Doors, finished: Finished) -> None:
    pytest.importorskip("plotly")
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    assert doors.run("report", finished.path, "--out", "page.html").returncode == 0
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={doors.cwd / 'profile'}")
    command = [browser, *flags, "--dump-dom", (doors.cwd / "page.html").as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r'id="curves"[^>]*>.*?class="scatterlayer[^>]*><g class="trace', page, re.DOTALL)
    assert re.search(r'id="episodes"[^>]*>.*?class="trace boxes', page, re.DOTALL)


@pytest.mark.slow
def test_runs_are_told_of_while_they_go_on(doors: Doors, finished: Finished, tmp_path: Path) -> None:
    """What is told in between is a beginning of what is told in the end, and the run is as if nobody had looked."""
    training = doors.start("train", *finished.args[:-1], "600", "--run-dir", "run")
    seen: list[list[str]] = []
    while training.poll() is None:
        if (tmp_path / "run" / "metrics.jsonl").exists():
            assert doors.here("report", "run", "--csv", "t.csv").returncode == 0
            seen.append((tmp_path / "t.csv").read_text().splitlines())
    assert training.communicate()[1] == ""
    assert training.returncode == 0
    assert doors.here("report", "run", "--csv", "t.csv").returncode == 0
    whole = (tmp_path / "t.csv").read_text().splitlines()
    assert seen
    assert all(set(told[:-1]) <= set(whole) for told in seen)  # of the last line the return may have been yet to come
    assert doors.here("verify", "run").returncode == 0

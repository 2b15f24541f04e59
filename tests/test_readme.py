"""The code blocks of the README, run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(name: str) -> str:
    """Return the code block that follows the marker `name`."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found.group(1)


def run(code: str, directory: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_custom_environment(tmp_path: Path) -> None:
    # The best action stays near 0, where the reward is 1; random actions drift off to half of it.
    best = float(run(block("environment"), tmp_path).splitlines()[-1].split()[0])
    assert 40 < best <= 50


def test_custom_strategy(tmp_path: Path) -> None:
    means = eval(run(block("strategy"), tmp_path).splitlines()[-1])
    # Random linear policies of an untrained population hold the pole for some 40 of the 200 steps.
    assert len(means) == 3
    assert means[0] < means[2]
    assert means[2] > 180


@pytest.mark.parametrize("name", ["on-policy", "off-policy"])
def test_continuous_actions(name: str, tmp_path: Path) -> None:
    best, action = run(block(name), tmp_path).splitlines()[-1].split(maxsplit=1)
    # Doing nothing gets about -1 200; the pendulum swung up and held, -100 to -200 as it begins.
    assert -200 < float(best) < -100
    assert -2.0 <= float(action.strip("[]")) <= 2.0


@pytest.mark.parametrize("length", [pytest.param("20_000", marks=pytest.mark.slow), "200"])
def test_session(tmp_path: Path, length: str) -> None:
    code = block("session")
    short = code.replace("1_000 == 0", "100 == 0").replace("range(20)", "range(2)").replace("range(100)", "range(3)")
    first = code if length == "20_000" else short.replace("max_opts=20_000", f"max_opts={length}")
    best, fresh = run(first, tmp_path).split()
    assert min(float(best), float(fresh)) >= (475 if length == "20_000" else 8)
    # Once more, with more to do: it goes on from there.
    run(short.replace("max_opts=20_000", f"max_opts={length} + 100"), tmp_path)
    steps = [int(path.name) for path in (tmp_path / "runs" / "mine" / "checkpoints").iterdir()]
    assert {int(length), int(length) + 100} <= set(steps)


@pytest.mark.slow
def test_learning_from_data(tmp_path: Path) -> None:
    best, action = run(block("offline"), tmp_path).splitlines()[-1].split()
    assert 50 < float(best) <= 500
    assert int(action) in (0, 1)


@pytest.mark.parametrize("length", [pytest.param("50_000", marks=pytest.mark.slow), "2_000"])
def test_library(tmp_path: Path, length: str) -> None:
    code = block("library")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    check = "\nassert int(policy([0.0, 0.0, 0.1, 0.5])) in (0, 1)\nassert result.best_score > 0"
    run(code.replace("50_000", length) + check, tmp_path)
    assert [path.name for path in (tmp_path / "runs" / "cartpole" / "checkpoints").iterdir()]

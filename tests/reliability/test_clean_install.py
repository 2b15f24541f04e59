"""Promise 30: the wheel alone, in a fresh environment, trains; with the oldest and the newest versions it allows."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def found(name: str) -> str | None:
    """Return the path of a Python that runs: a manager of versions may have put there one that does not."""
    path = shutil.which(name)
    return path if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0 else None


PYTHONS = {"this Python": sys.executable, "Python 3.12": found("python3.12")}
USE = """
import jaxrl
policy = jaxrl.load_policy("run")
assert jaxrl.__file__.find("site-packages") > 0, jaxrl.__file__
assert int(policy([[0.0] * 5] * 10)) in range(3)
"""


def oldest() -> list[str]:
    """Return the lower bound of every dependency as the only version."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in wanted]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


def run(*command: object, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # what is installed, alone
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "versions"), [("this Python", "oldest"), ("this Python", "newest"), ("Python 3.12", "newest")]
)
def test_the_wheel_installs_and_trains(tmp_path: Path, python: str, versions: str) -> None:
    interpreter = PYTHONS[python]
    if interpreter is None:
        pytest.skip("there is no Python 3.12 here")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("jaxrl-*.whl")
    run(interpreter, "-m", "venv", "fresh", cwd=tmp_path)
    fresh = tmp_path / "fresh" / "bin" / "python"
    run(fresh, "-m", "pip", "install", "-q", wheel, *(oldest() if versions == "oldest" else []), cwd=tmp_path)
    run(fresh, "-m", "pip", "check", cwd=tmp_path)
    assert re.fullmatch(r"jaxrl \d+\.\d+\.\d+\n", run(fresh.parent / "jaxrl", "--version", cwd=tmp_path))
    flags = ("--env", "Catch-bsuite", "--max-opts", "200", "--save-interval", "100", "--run-dir", "run", "--quiet")
    run(fresh, "-m", "jaxrl.train", *flags, cwd=tmp_path)
    run(fresh, "-m", "jaxrl.train", "--resume", "run", "--max-opts", "300", cwd=tmp_path)
    verified = run(fresh, "-m", "jaxrl.verify", "run", cwd=tmp_path).splitlines()
    assert [" ok " in line for line in verified if line[0].isdigit()] == [True] * 3
    run(fresh, "-c", USE, cwd=tmp_path)

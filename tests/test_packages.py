"""The wheel and the source distribution: what is in them, what they say of themselves, types, and a light import."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxrl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"jaxrl-{jaxrl.__version__}"


def build(source: Path, out: Path) -> dict[str, Path]:
    """Build both distributions of `source` in `out`; return them by the end of their names."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def tracked(*folders: str) -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    found = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_the_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    assert built[".whl"].name == f"{NAME}-py3-none-any.whl"
    names = set(zipfile.ZipFile(built[".whl"]).namelist())
    package = {name for name in names if name.startswith("jaxrl/")}
    assert tracked("jaxrl") <= package
    assert {"jaxrl/py.typed", "jaxrl/__init__.pyi", "jaxrl/reports/page.js"} <= package
    assert {name.split("/")[0] for name in names} == {"jaxrl", f"{NAME}.dist-info"}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_says_what_the_project_says(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        told = email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
        entry_points = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert (told["Name"], told["Version"], told["License-Expression"]) == ("jaxrl", jaxrl.__version__, "Apache-2.0")
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert set(told.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    needed = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert re.search(r"^jaxrl = jaxrl.__main__:main$", entry_points, re.MULTILINE)


def test_the_classifiers_are_the_pythons_of_the_matrix() -> None:
    cells = (ROOT / ".ci" / "run").read_text()
    matrix = set(re.findall(r"^ *start \S+ bash \.ci/cell .*python(3\.\d+)", cells, re.MULTILINE))
    assert matrix == set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    assert f">={min(matrix, key=lambda python: int(python[2:]))}" == PROJECT["requires-python"]


def test_the_source_distribution_builds_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as source:
        source.extractall(tmp_path, filter="data")
    again = build(tmp_path / NAME, tmp_path / "again")
    first, second = (zipfile.ZipFile(wheel) for wheel in (built[".whl"], again[".whl"]))
    assert {i.filename: i.CRC for i in first.infolist()} == {i.filename: i.CRC for i in second.infolist()}


def test_the_source_distribution_has_what_is_tested_and_read(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as source:
        names = {name.removeprefix(f"{NAME}/") for name in source.getnames()}
    assert tracked("jaxrl", "tests", "docs", "examples", "benchmarks") <= names
    assert {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "mkdocs.yml"} <= names
    assert not [name for name in names if name.split("/")[0] in ("runs", "site", ".git", ".venv")]


@pytest.mark.slow
def test_a_script_that_uses_the_wheel_is_checked_by_its_types(built: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    run = lambda *command: subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    assert run(sys.executable, "-m", "venv", "fresh").returncode == 0
    fresh = tmp_path / "fresh" / "bin" / "python"
    assert run(fresh, "-m", "pip", "install", "-q", "--no-deps", built[".whl"]).returncode == 0
    lines = ["import jaxrl", "agent = jaxrl.dqn(lr=1e-3)", "reveal_type(agent)", "jaxrl.Box('low', 1.0, (2,))"]
    (tmp_path / "mine.py").write_text("\n".join(lines) + "\n")
    flags = ("--ignore-missing-imports", "--follow-imports", "silent", "--no-incremental")
    said = run(sys.executable, "-m", "mypy", "--python-executable", fresh, *flags, "mine.py").stdout
    assert 'Revealed type is "jaxrl.agents.base.AgentMaker"' in said
    assert 'mine.py:4: error: Argument 1 to "Box" has incompatible type "str"' in said


def test_importing_jaxrl_stays_light() -> None:
    """Nothing heavy comes with it; `rich` comes with flax, so it counts only where flax alone would not bring it."""
    heavy = "[m for m in ('gymnax', 'orbax', 'matplotlib', 'plotly', 'rich') if m in sys.modules]"
    program = f"import sys, flax.linen, optax; before = {heavy}; import jaxrl, jaxrl.envs.gymnax"
    run = subprocess.run(
        [sys.executable, "-c", f"{program}; print(set({heavy}) - set(before))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "set()"

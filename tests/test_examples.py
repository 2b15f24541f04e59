"""The scripts in `examples/`: short, of public names alone, and they do what they say."""

import ast
import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxrl

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.endswith("_in_one_file"))
SHORT = {"max_opts": 64, "eval_interval": 32}
TINY: dict[str, dict[str, Any]] = {
    "first_run": SHORT,
    "replay": {**SHORT, "features": (8,)},
    "own_environment": SHORT,
    "own_network": SHORT,
    "own_agent": SHORT,
    "sweep": {**SHORT, "seeds": 1},
    "from_data": {**SHORT, "pilot_opts": 32, "steps": 500},
    "own_loop": SHORT,
    "hooks": SHORT,
    "resume": SHORT,
    "schedules": {"max_opts": 320, "eval_interval": 320},
}
REACHED: dict[str, Callable[[Any], bool]] = {
    "first_run": lambda best: best >= 475,
    "replay": lambda best: best > -220,
    "own_environment": lambda best: 50 < best <= 60,
    "own_network": lambda best: best >= 475,
    "own_agent": lambda best: best >= 200,  # six seeds: 271 to 500
    "sweep": lambda lr: lr == 1e-3,
    "from_data": lambda best: best >= 475,
    "own_loop": lambda best: best >= 300,
    "hooks": lambda norms: len(norms) == 4 and norms[0] < norms[-1],
    "resume": lambda same: same,
    "schedules": lambda best: best > -220,
}
"""What a script returns in full: of those that train, published results or the most there is, with some room."""


def main_of(name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_there_are_eleven_each_tried_small_and_in_full() -> None:
    assert len(SCRIPTS) == 11
    assert sorted(TINY) == sorted(REACHED) == SCRIPTS
    listed = (FOLDER / "README.md").read_text()
    assert [name for name in SCRIPTS if f"[{name}.py]({name}.py)" not in listed] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_uses_public_names_alone(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) < (70 if name == "own_agent" else 60)  # which is an algorithm
    assert ast.get_docstring(tree)
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in inside if (node.module or "").startswith("jaxrl")] == []
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxrl"
    }
    assert used <= set(jaxrl.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_a_taste(name: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        found = main_of(name)(**TINY[name])
    assert found is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_reaches_what_it_is_for(name: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        found = main_of(name)()
    assert REACHED[name](found), found

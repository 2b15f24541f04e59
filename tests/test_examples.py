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


def script(file: str) -> Any:
    """Return an example as a module of its own."""
    spec = importlib.util.spec_from_file_location("example", FOLDER / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_eleven_each_tried_in_full() -> None:
    assert len(SCRIPTS) == 11
    assert sorted(REACHED) == SCRIPTS
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
def test_a_script_reaches_what_it_is_for(name: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        found = script(f"{name}.py").main()
    assert REACHED[name](found), found

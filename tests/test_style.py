"""What keeps the code readable: short functions, shallow nesting."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FUNCTION = 60
"""Lines of a body, its docstring left out."""
MEDIAN_FUNCTION = 10
DEEPEST = 2
"""How deep `def`s may be nested."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, depth: int = 0) -> Iterator[tuple[Function, int]]:
    """Yield every function below `node`, with how many functions it stands in, itself counted."""
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, Function)
        if isinstance(child, Function):
            yield child, depth + 1
        yield from functions(child, depth + inside)


def lines(function: Function) -> int:
    """Count the lines of a body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def label(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("file", FILES, ids=label)
def test_functions_are_short_and_shallow(file: Path) -> None:
    found = list(functions(ast.parse(file.read_text())))
    assert [f.name for f, _ in found if lines(f) > LONGEST_FUNCTION] == []
    assert [f.name for f, depth in found if depth > DEEPEST + 1] == []


def test_half_of_all_functions_are_very_short() -> None:
    lengths = sorted(lines(f) for file in FILES for f, _ in functions(ast.parse(file.read_text())))
    assert len(lengths) > 500
    assert lengths[len(lengths) // 2] <= MEDIAN_FUNCTION


def test_lengths_and_depths_are_seen() -> None:
    inner = "    def g():\n        def h():\n            return 1\n        return h\n"
    found = functions(ast.parse(f"def f():\n    'doc'\n    x = 1\n{inner}    return x"))
    assert [(f.name, lines(f), depth) for f, depth in found] == [("f", 6, 1), ("g", 3, 2), ("h", 1, 3)]


MAY_ASK = {
    ("agents/own.py", "apply"): "a network given in place of its maker, of Flax or another library",
    ("envs/host.py", "single_action_space"): "a Gymnasium vector, a class of an optional dependency",
    ("envs/objects.py", "_fields"): "a NamedTuple, which has no class of its own",
    ("errors.py", "__index__"): "whole numbers of any library",
    ("own_envs.py", "action_space"): "an environment of Gymnasium, or what looks like one",
    ("own_envs.py", "observation_space"): "as above",
    ("nn/own.py", "shape"): "a parameter that is a Python number",
    ("spaces.py", "_fields"): "a NamedTuple, which has no class of its own",
    ("strategies/remote.py", "observation_space"): "an environment of Gymnasium, told what to give instead",
    ("strategies/remote.py", "step"): "as above",
    ("training/program.py", "compile"): "an evaluator may be a bare function",
    ("training/program.py", "bytes_of"): "as above",
    ("training/session/inputs.py", "action_space"): "an environment of Gymnasium, or what looks like one",
    ("training/session/inputs.py", "observation_space"): "as above",
    ("training/storage/arrays.py", "posix_fallocate"): "a system call that not every system has",
    ("training/storage/run_dir.py", "item"): "a number of NumPy or JAX",
}
"""What `hasattr` may be asked of, by file and attribute, and why: never of a state, whose strategy says what it has."""


def asked(tree: ast.AST) -> set[str]:
    """Return the attributes that are asked for by `hasattr`."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return {ast.literal_eval(n.args[1]) for n in calls if isinstance(n.func, ast.Name) and n.func.id == "hasattr"}


def test_no_state_is_asked_what_it_has() -> None:
    found = {(label(file), name) for file in FILES for name in asked(ast.parse(file.read_text()))}
    assert found == MAY_ASK.keys()
    assert asked(ast.parse("if hasattr(state, 'buffer'): pass")) == {"buffer"}


def test_a_case_of_every_day_is_one_that_there_is(request: pytest.FixtureRequest) -> None:
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in request.session.items:
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, set()).add(item.name.partition("[")[2].removesuffix("]"))
        named.setdefault(test, set()).update(*(mark.args for mark in item.iter_markers("every_day")))
    if len(cases) < 1_000:
        pytest.skip("of a few tests alone, not all cases are collected")
    assert [test for test in cases if not named[test] <= cases[test]] == []

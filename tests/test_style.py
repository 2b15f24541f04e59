"""What keeps the code readable: short functions, shallow nesting, modules of one subject."""

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
LONGEST_MODULE = 500
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
    assert len(file.read_text().splitlines()) <= LONGEST_MODULE


def test_half_of_all_functions_are_very_short() -> None:
    lengths = sorted(lines(f) for file in FILES for f, _ in functions(ast.parse(file.read_text())))
    assert len(lengths) > 500
    assert lengths[len(lengths) // 2] <= MEDIAN_FUNCTION


def test_lengths_and_depths_are_seen() -> None:
    inner = "    def g():\n        def h():\n            return 1\n        return h\n"
    found = functions(ast.parse(f"def f():\n    'doc'\n    x = 1\n{inner}    return x"))
    assert [(f.name, lines(f), depth) for f, depth in found] == [("f", 6, 1), ("g", 3, 2), ("h", 1, 3)]

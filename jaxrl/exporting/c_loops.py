"""Arrays as expressions and loops in C.

An array is an expression of entries of other arrays. Operations that compute or move single entries make another
expression. It becomes a loop where it is summed, multiplied, concatenated, read twice or returned.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.exporting.operations import refuse

TYPES = {
    "float32": "float", "float64": "double", "bool": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t", "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
}  # fmt: skip
LETTERS = "ijklmnopqrst"
"""Names of loop variables, from the outermost on."""


class View(NamedTuple):
    """Entries of a C array: the one at an index is at `offset` plus the index times `strides`."""

    name: str
    strides: tuple[int, ...]
    offset: int = 0


class Array(NamedTuple):
    """An array as an expression in C, where `{0}` stands for an entry of the first view and so on."""

    text: str
    views: tuple[View, ...]
    shape: tuple[int, ...]
    dtype: Any
    is_compound: bool = False
    """Whether it needs parentheses as an operand."""

    def move(
        self, shape: Sequence[int], strides: Callable[[tuple[int, ...]], Any], begin: Sequence[int] = ()
    ) -> "Array":
        """Return the array with the strides of each view changed, from the entry at `begin` on."""
        start = lambda view: view.offset + sum(map(operator.mul, begin, view.strides))
        views = tuple(View(view.name, tuple(strides(view.strides)), start(view)) for view in self.views)
        return self._replace(shape=tuple(shape), views=views)


class Buffer(NamedTuple):
    """Space for an intermediate result, live from its place in the source to the last line that names it."""

    name: str
    type: str
    size: int


class Body:
    """The statements of a function in C."""

    def __init__(self, constants: dict[tuple[str, bytes], str]) -> None:
        self.constants = constants
        self.lines: list[str | Buffer] = []

    def constant(self, value: Any) -> Array:
        """Return a constant: a literal if all entries are equal, otherwise an array of the source."""
        array = np.asarray(value)
        if not array.size:  # nothing reads it, and C has no arrays without entries
            return Array("0", (), array.shape, array.dtype)
        if np.all(array == array.flat[0]):
            return Array(literal(array.flat[0]), (), array.shape, array.dtype)
        name = self.constants.setdefault((str(array.dtype), array.tobytes()), f"w{len(self.constants)}")
        return stored_array(name, array.shape, array.dtype)

    def new(self, shape: Sequence[int], dtype: Any) -> Array:
        """Allocate an array in the workspace."""
        name = f"x{sum(isinstance(line, Buffer) for line in self.lines)}"
        self.lines.append(Buffer(name, c_type(dtype), math.prod(shape)))
        return stored_array(name, shape, dtype)

    def assign(self, to: Array, x: Array) -> None:
        """Write the entries of `x` to those of the stored array `to`."""
        self.loop(f"{{0}} = {shift(x.text, 1, len(x.views))};", to.shape, *to.views, *x.views)

    def evaluate(self, x: Array, again: bool = False) -> Array:
        """Return `x` as a stored array; with `again`, always as a new one."""
        if x.text == "{0}" and not again:
            return x
        made = self.new(x.shape, x.dtype)
        self.assign(made, x)
        return made

    def accumulate(self, out: Array, start: str, statement: str, axes: Sequence[Sequence[int]], *given: View) -> Array:
        """Set `out` to `start`, then run `statement` over axes: a size and the strides of `out` and other views."""
        self.assign(out, Array(start, (), out.shape, out.dtype))
        sizes, *strides = zip((1, 0, *(0 for _ in given)), *axes, strict=True)
        views = [view._replace(strides=x) for view, x in zip((*out.views, *given), strides, strict=True)]
        self.loop(statement, sizes, *views)
        return out

    def loop(self, statement: str, shape: Sequence[int], *views: View) -> None:
        """Append loops over `shape` around a statement, in which `{0}` is an entry of the first view and so on."""
        if 0 in shape:
            return
        axes: list[tuple[int, list[int]]] = []
        for size, *strides in zip(shape, *(view.strides for view in views), strict=True):
            # Neighbouring axes that are contiguous in all views become one loop.
            if axes and all(a == size * b for a, b in zip(axes[-1][1], strides, strict=True)):
                axes[-1] = axes[-1][0] * size, strides
            elif size != 1:
                axes.append((size, strides))
        places = []
        for i, view in enumerate(views):
            terms = [x if s[i] == 1 else f"{x} * {s[i]}" for x, (_, s) in zip(LETTERS, axes, strict=False) if s[i]]
            index = " + ".join([*terms, *[str(view.offset)] * (view.offset != 0 or not terms)])
            places.append(f"{view.name}[{index}]" if view.name else index)
        heads = [f"for (int {x} = 0; {x} < {size}; {x}++)" for x, (size, _) in zip(LETTERS, axes, strict=False)]
        lines = [*heads, statement.format(*places)]
        self.lines.append("\n".join("    " * i + line for i, line in enumerate(lines)))

    def allocate(self) -> tuple[list[str], Counter[str]]:
        """Return the lines, with buffers allocated such that live ones do not overlap, and the total sizes by type."""
        last = {x: i for i, line in enumerate(self.lines) for x in re.findall(r"\bx\d+\b", str(line))}
        live: list[tuple[int, Buffer]] = []
        lines: list[str] = []
        room: Counter[str] = Counter()
        for i, line in enumerate(self.lines):
            if isinstance(line, str):
                lines.append(line)
                continue
            live = sorted((start, other) for start, other in live if last[other.name] >= i)
            begin = 0
            for start, other in live:
                if other.type == line.type and start < begin + line.size:
                    begin = max(begin, start + other.size)
            live.append((begin, line))
            room[line.type] = max(room[line.type], begin + line.size)
            lines.append(f"{line.type} *{line.name} = state->{workspace(line.type)} + {begin};")
        return lines, room


def c_type(dtype: Any) -> str:
    return TYPES.get(str(dtype)) or refuse(f"numbers of {dtype}", "C")


def workspace(kind: str) -> str:
    """Return the name of the workspace of a type."""
    return f"{kind.removesuffix('_t')}s"


def stored_array(name: str, shape: Sequence[int], dtype: Any) -> Array:
    return Array("{0}", (View(name, row_major(shape)),), tuple(shape), np.dtype(dtype))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def shift(text: str, by: int, count: int) -> str:
    """Renumber the `count` views of an expression, so that `by` others come before them."""
    return text.format(*(f"{{{by + i}}}" for i in range(count)))


def literal(value: Any) -> str:
    if isinstance(value, np.bool_):
        return str(value).lower()
    if isinstance(value, np.integer):
        is_lowest = value < 0 and value == np.iinfo(value.dtype).min
        suffix = {"uint32": "u", "int64": "LL", "uint64": "ULL"}.get(str(value.dtype), "")
        return f"{value.dtype.name.upper()}_MIN" if is_lowest else f"{value}{suffix}"
    if not np.isfinite(value):
        return "NAN" if np.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!s}f" if value.dtype == np.float32 else str(value)

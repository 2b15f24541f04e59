"""Export to NumPy: one module and a file of arrays, for machines where nothing else can be installed."""

import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.exporting.function import Function, Part
from jaxrl.exporting.operations import ELEMENTWISE, Operation, refuse, require_plain_convolution, trace
from jaxrl.spaces import Space, match_image_layout, space_from_plain

SOURCE = '''"""A policy trained with jaxrl. It needs NumPy, and policy.npz beside it, and nothing else.

{use}
"""

import pathlib

import numpy as np

W = np.load(pathlib.Path(__file__).parent / "policy.npz")
W = {{name: W[name] for name in W.files}}


def _read(name, x, dtype, shape, channels_first=None):
    x = np.asarray(x, dtype)
    x = np.moveaxis(x, 0, -1) if x.shape == channels_first else x
    if x.shape != shape:
        raise ValueError(f"{{name}} has shape {{x.shape}}; expected {{shape}}")
    return x[None]


def act({given}):
    {docstring!r}
{body}
'''
_refuse = partial(refuse, language="NumPy")


def _cast(eqn: Any, x: str) -> str:
    return f"np.asarray({x}).astype({str(np.dtype(eqn.params['new_dtype']))!r})"


def _broadcast(eqn: Any, x: str) -> str:
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for axis, size in zip(axes, eqn.invars[0].aval.shape, strict=True):
        spread[axis] = size
    return f"np.broadcast_to(np.reshape({x}, {tuple(spread)}), {tuple(shape)})"


def _reshape(eqn: Any, x: str) -> str:
    return f"np.reshape({x}, {tuple(eqn.outvars[0].aval.shape)})"


def _product(eqn: Any, a: str, b: str) -> str:
    (left, right), (left_rows, right_rows) = eqn.params["dimension_numbers"]
    if not left_rows:
        return f"np.tensordot({a}, {b}, ({tuple(left)}, {tuple(right)}))"
    # Axes that are summed over or shared have one letter in both operands.
    letters = iter("abcdefghijklmnop")
    of_a = [next(letters) for _ in eqn.invars[0].aval.shape]
    of_b = [next(letters) for _ in eqn.invars[1].aval.shape]
    for i, j in (*zip(left, right, strict=True), *zip(left_rows, right_rows, strict=True)):
        of_b[j] = of_a[i]
    rows = [of_a[i] for i in left_rows]
    free = [x for x in of_a if x not in of_b] + [x for x in of_b if x not in of_a]
    return f"np.einsum('{''.join(of_a)},{''.join(of_b)}->{''.join([*rows, *free])}', {a}, {b})"


def _over_axes(call: str) -> Callable[..., str]:
    return lambda eqn, x: f"{call}({x}, {tuple(eqn.params['axes'])})"


def _best(call: str) -> Callable[..., str]:
    return lambda eqn, x: f"{call}({x}, {eqn.params['axes'][0]}).astype({str(np.dtype(eqn.params['index_dtype']))!r})"


def _part(eqn: Any, x: str) -> str:
    begin, end, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    steps = strides or [1] * len(begin)
    return f"{x}[{', '.join(f'{i}:{j}:{k}' for i, j, k in zip(begin, end, steps, strict=True))}]"


def _convolve(eqn: Any, x: str, kernel: str) -> str:
    """Write a convolution of `[N, H, W, C]` with `[h, w, C, O]`, as Flax makes them: windows times kernel."""
    made = eqn.params
    require_plain_convolution(made, "NumPy")
    (down, right), window = made["window_strides"], eqn.invars[1].aval.shape[:2]
    padded = f"np.pad({x}, {((0, 0), *map(tuple, made['padding']), (0, 0))})"
    windows = f"np.lib.stride_tricks.sliding_window_view({padded}, {tuple(window)}, (1, 2))"
    return f"np.tensordot({windows}[:, ::{down}, ::{right}], {kernel}, ((3, 4, 5), (2, 0, 1)))"


def _divide(eqn: Any, a: str, b: str) -> str:
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return f"{a} / {b}"
    return f"np.trunc({a} / {b}).astype({str(eqn.outvars[0].aval.dtype)!r})"


RULES: dict[str, Callable[..., str]] = {
    "convert_element_type": _cast, "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _reshape,
    "expand_dims": _reshape, "dot_general": _product, "conv_general_dilated": _convolve, "div": _divide,
    "slice": _part,
    "transpose": lambda eqn, x: f"np.transpose({x}, {tuple(eqn.params['permutation'])})",
    "select_n": lambda eqn, which, *x: f"np.where({which}, {x[1]}, {x[0]})" if len(x) == 2 else _refuse("select_n"),
    "integer_pow": lambda eqn, x: f"{x} ** {eqn.params['y']}",
    "concatenate": lambda eqn, *x: f"np.concatenate([{', '.join(x)}], {eqn.params['dimension']})",
    "stack": lambda eqn, *x: f"np.stack([{', '.join(x)}], {eqn.params['axis']})",
    "reduce_sum": _over_axes("np.sum"), "reduce_max": _over_axes("np.max"), "reduce_min": _over_axes("np.min"),
    "reduce_and": _over_axes("np.all"), "reduce_or": _over_axes("np.any"),
    "argmax": _best("np.argmax"), "argmin": _best("np.argmin"),
}  # fmt: skip


def files(function: Function) -> dict[str, bytes]:
    """Return the files of an export by name; the module takes one observation at a time.

    Raises:
      SettingsError: the policy has an operation that is not supported here, such as pooling.
    """
    writer, program = _Writer(), trace(function)
    for operation in program.operations:
        writer.write(operation)
    held = io.BytesIO()
    np.savez(held, **writer.arrays)  # type: ignore[arg-type]
    source = _source(function, writer.lines, program.results)
    return {"policy.py": source.encode(), "policy.npz": held.getvalue()}


def signature(function: Function) -> tuple[list[Part], list[Part]]:
    """Return the inputs and outputs of `act`: parts of an observation, actions, and the arrays of the memory."""
    part = lambda name, x, *batch: Part(name, (*batch, *x.shape), str(x.dtype))
    memory = [part(f"memory[{i}]", x, 1) for i, x in enumerate(function.memory)]
    seen = zip(function.entries, function.obs, strict=True)
    made = zip(function.action_entries, function.actions, strict=True)
    return [*(part(*x) for x in seen), *memory], [*(part(*x) for x in made), *memory]


def _read(entry: str, like: jax.ShapeDtypeStruct) -> str:
    """Return an expression for a part of an observation, of which an image may have its channels first."""
    shape = tuple(like.shape)
    channels_first = (*shape[-1:], *shape[:-1])
    images = len(shape) == 3 and match_image_layout(np.empty(channels_first, bool), shape).shape == shape
    layout = f", {channels_first}" if images and channels_first != shape else ""
    return f"_read({entry!r}, {entry}, {str(like.dtype)!r}, {shape}{layout})"


def _nest(space: Space, parts: Iterator[str]) -> str:
    """Return an expression for an element of `space`, made of those for its leaves, in the order of JAX's trees."""
    if isinstance(space, Mapping):
        return f"{{{', '.join(f'{name!r}: {_nest(space[name], parts)}' for name in sorted(space))}}}"
    if isinstance(space, tuple):
        return f"({''.join(f'{_nest(part, parts)}, ' for part in space)})"
    return next(parts)


class _Writer:
    """Writer of operations as lines of NumPy, with the arrays that they use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.arrays: dict[str, np.ndarray] = {}

    def write(self, operation: Operation) -> None:
        """Append the lines of an operation."""
        for x in operation.eqn.outvars:
            if np.dtype(x.aval.dtype).isbuiltin != 1:
                _refuse(f"numbers of {x.aval.dtype}")
        given = [x if isinstance(x, str) else self._constant(x) for x in operation.ins]
        made = self._write(operation.name, operation.eqn, given)
        self.lines += [f"{name} = {said}" for name, said in zip(operation.outs, made, strict=True)]

    def _write(self, name: str, eqn: Any, given: list[str]) -> list[str]:
        if name == "split":
            ends = [0, *np.cumsum(eqn.params["sizes"]).tolist()]
            before = ":, " * eqn.params["axis"]
            return [f"{given[0]}[{before}{i}:{j}]" for i, j in itertools.pairwise(ends)]
        if name in ELEMENTWISE:
            return [ELEMENTWISE[name].numpy.format(*given)]
        return [RULES[name](eqn, *given) if name in RULES else _refuse(name)]

    def _constant(self, value: Any) -> str:
        array = np.asarray(value)
        if array.ndim == 0:
            kind = array.dtype.name if array.dtype != bool else "bool_"
            return f"np.{kind}({array.item()!r})".replace("inf", "np.inf").replace("nan", "np.nan")
        # Equal arrays are stored once.
        for name, other in self.arrays.items():
            if other.dtype == array.dtype and np.array_equal(other, array):
                return f'W["{name}"]'
        self.arrays[f"w{len(self.arrays)}"] = array
        return f'W["w{len(self.arrays) - 1}"]'


def _source(function: Function, lines: Sequence[str], results: Sequence[Any]) -> str:
    seen = [name for name in function.names if not name.startswith("memory") and name != "first"]
    given = "obs, memory=None" if function.memory else "obs"
    parts = list(zip(seen, function.entries, function.obs, strict=True))
    shapes = "; ".join(f"{entry}: {list(x.shape)} {x.dtype}" for _, entry, x in parts)
    count = len(function.actions)
    said = [x if isinstance(x, str) else repr(np.asarray(x).tolist()) for x in results]
    needed = {word for line in lines for word in re.findall(r"\b[a-z]\w*\b", line.partition(" = ")[2])} | set(said)
    body = [f"{name} = {_read(entry, x)}" for name, entry, x in parts if name in needed]
    out = _nest(space_from_plain(function.spaces["action"]), (f"np.asarray({x})[0]" for x in said[:count]))
    docstring, use = f"Return the action for one observation ({shapes}).", "    action = act(obs)"
    if function.memory:
        fresh = ", ".join(f"np.zeros({(1, *x.shape)}, {str(x.dtype)!r})" for x in function.memory)
        names = [name for name in function.names if name.startswith("memory")]
        body += [
            "first = np.asarray([memory is None])",
            f"{', '.join(names)}, = [{fresh}] if memory is None else memory",
        ]
        out = f"{out}, [{', '.join(said[count:])}]"
        docstring = f"Return the action for one observation ({shapes}), and the memory to give with the next one."
        use = "    action, memory = act(obs)  # as an episode begins\n    action, memory = act(obs, memory)"
    body += [*lines, f"return {out}"]
    return SOURCE.format(use=use, given=given, docstring=docstring, body="\n".join(f"    {x}" for x in body))

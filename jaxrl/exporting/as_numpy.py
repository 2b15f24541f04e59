"""A policy as arrays and a page of NumPy: for where nothing else can be installed."""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.exporting.function import Function
from jaxrl.xla import forms
from jaxrl.xla.equations import Code, Equation, bind, called, read

SOURCE = '''"""A policy trained with jaxrl. It needs NumPy, and policy.npz beside it, and nothing else.

{use}
"""

import pathlib

import numpy as np

W = np.load(pathlib.Path(__file__).parent / "policy.npz")
W = {{name: W[name] for name in W.files}}


def act({given}):
    """{docstring}"""
{body}
'''
NAMES = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "max": "np.maximum({}, {})", "min": "np.minimum({}, {})",
    "neg": "-{}", "exp": "np.exp({})", "log": "np.log({})", "log1p": "np.log1p({})", "expm1": "np.expm1({})",
    "tanh": "np.tanh({})", "abs": "np.abs({})", "sqrt": "np.sqrt({})", "sign": "np.sign({})", "floor": "np.floor({})",
    "sin": "np.sin({})", "cos": "np.cos({})", "square": "np.square({})", "is_finite": "np.isfinite({})",
    "rsqrt": "1 / np.sqrt({})", "logistic": "0.5 * (1 + np.tanh(0.5 * {}))", "pow": "{} ** {}", "eq": "{} == {}",
    "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}", "and": "{} & {}",
    "or": "{} | {}", "not": "~{}", "clamp": "np.clip({1}, {0}, {2})", "stop_gradient": "{}", "copy": "{}",
    "rem": "np.fmod({}, {})",
}  # fmt: skip
"""Primitives that are one call or operator of NumPy."""


def _cast(eqn: Any, x: str) -> str:
    return f"np.asarray({x}).astype({str(np.dtype(eqn.params['new_dtype']))!r})"


def _broadcast(eqn: Any, x: str) -> str:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    spread = [1] * len(shape)
    for place, size in zip(places, eqn.invars[0].aval.shape, strict=True):
        spread[place] = size
    return f"np.broadcast_to(np.reshape({x}, {tuple(spread)}), {tuple(shape)})"


def _shaped(eqn: Any, x: str) -> str:
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


def _convolved(eqn: Any, x: str, kernel: str) -> str:
    """Write a convolution of `[N, H, W, C]` with `[h, w, C, O]`, as Flax makes them: windows times kernel."""
    made = eqn.params
    plain = made["lhs_dilation"] == made["rhs_dilation"] == (1, 1) and made["feature_group_count"] == 1
    if not plain or tuple(made["dimension_numbers"]) != ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)):
        _refuse("a convolution of another kind than [N, H, W, C]")
    (down, right), window = made["window_strides"], eqn.invars[1].aval.shape[:2]
    padded = f"np.pad({x}, {((0, 0), *map(tuple, made['padding']), (0, 0))})"
    windows = f"np.lib.stride_tricks.sliding_window_view({padded}, {tuple(window)}, (1, 2))"
    return f"np.tensordot({windows}[:, ::{down}, ::{right}], {kernel}, ((3, 4, 5), (2, 0, 1)))"


def _divided(eqn: Any, a: str, b: str) -> str:
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return f"{a} / {b}"
    return f"np.trunc({a} / {b}).astype({str(eqn.outvars[0].aval.dtype)!r})"


RULES: dict[str, Callable[..., str]] = {
    "convert_element_type": _cast, "broadcast_in_dim": _broadcast, "reshape": _shaped, "squeeze": _shaped,
    "expand_dims": _shaped, "dot_general": _product, "conv_general_dilated": _convolved, "div": _divided,
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
    """Return the files of an export by name; what they do is worked out for one observation at a time.

    Raises:
      SettingsError: the policy computes something for which there is no line of NumPy here, such as pooling.
    """
    # Plain forms have no branches by platform, for which there is no line of NumPy.
    with forms("plain"):
        traced = jax.make_jaxpr(partial(function.call, function.params))(*function.inputs(1))
    writer = _Writer()
    results = writer.run(read(traced), function.names)
    lines, held = writer.needed(results), io.BytesIO()
    used = {name: array for name, array in writer.arrays.items() if any(f'W["{name}"]' in line for line in lines)}
    np.savez(held, **used)  # type: ignore[arg-type]
    source = _source(function, lines, results)
    return {"policy.py": source.encode(), "policy.npz": held.getvalue()}


class _Writer:
    """Write each equation that depends on an input as a line of NumPy, and work out the others now."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.arrays: dict[str, np.ndarray] = {}

    def run(self, code: Code, args: Sequence[Any]) -> list[Any]:
        """Return the results: text is a line's name, anything else a value known by now."""
        known = {**code.given, **dict(zip(code.ins, args, strict=True))}
        for equation in code.equations:
            made = self._results(equation, [known[i] for i in equation.ins])
            known.update(zip(equation.outs, made, strict=True))
        return [known[i] for i in code.outs]

    def _results(self, equation: Equation, given: list[Any]) -> Sequence[Any]:
        # No input in it: worked out now, and a constant of the file.
        if not any(isinstance(x, str) for x in given):
            return bind(equation, *given)
        if (inner := called(equation)) is not None:
            return self.run(inner, given)
        eqn = equation.eqn
        for x in eqn.outvars:
            if np.dtype(x.aval.dtype).isbuiltin != 1:
                _refuse(f"numbers of {x.aval.dtype}")
        name, words = equation.name, [x if isinstance(x, str) else self._constant(x) for x in given]
        if name == "split":
            ends = [0, *np.cumsum(eqn.params["sizes"]).tolist()]
            before = ":, " * eqn.params["axis"]
            return [self._line(f"{words[0]}[{before}{i}:{j}]") for i, j in itertools.pairwise(ends)]
        if name not in NAMES and name not in RULES:
            _refuse(name)
        return [self._line(NAMES[name].format(*words) if name in NAMES else RULES[name](eqn, *words))]

    def _line(self, said: str) -> str:
        self.lines.append((f"x{len(self.lines)}", said))
        return self.lines[-1][0]

    def needed(self, results: Sequence[Any]) -> list[str]:
        """Return the lines on which the results depend."""
        wanted, kept = {x for x in results if isinstance(x, str)}, []
        for name, said in reversed(self.lines):
            if name in wanted:
                wanted |= set(re.findall(r"\bx\d+\b", said))
                kept.append(f"{name} = {said}")
        return kept[::-1]

    def _constant(self, value: Any) -> str:
        array = np.asarray(value)
        if array.ndim == 0:
            kind = array.dtype.name if array.dtype != bool else "bool_"
            return f"np.{kind}({array.item()!r})".replace("inf", "np.inf").replace("nan", "np.nan")
        # Equal arrays are kept once.
        for name, other in self.arrays.items():
            if other.dtype == array.dtype and np.array_equal(other, array):
                return f'W["{name}"]'
        self.arrays[f"w{len(self.arrays)}"] = array
        return f'W["w{len(self.arrays) - 1}"]'


def _refuse(name: str) -> Any:
    raise SettingsError(
        f"this policy computes {name}, which is not written in NumPy here; export it as stablehlo or onnx instead"
    )


def _source(function: Function, lines: Sequence[str], results: Sequence[Any]) -> str:
    seen = [name for name in function.names if not name.startswith("memory") and name != "first"]
    given = "obs, memory=None" if function.memory else "obs"
    parts = list(zip(seen, function.entries, function.obs, strict=True))
    shapes = "; ".join(f"{entry}: {list(x.shape)} {x.dtype}" for _, entry, x in parts)
    count = len(function.actions)
    said = [x if isinstance(x, str) else repr(np.asarray(x).tolist()) for x in results]
    needed = {word for line in lines for word in re.findall(r"\b[a-z]\w*\b", line.partition(" = ")[2])} | set(said)
    body = [f"{name} = np.asarray({entry}, {str(x.dtype)!r})[None]" for name, entry, x in parts if name in needed]
    actions = [f"np.asarray({x})[0]" for x in said[:count]]
    out = actions[0] if count == 1 else f"({', '.join(actions)})"
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

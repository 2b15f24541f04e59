"""A policy as a list of array operations, for formats that write each operation as source code."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.exporting.function import Function
from jaxrl.xla import forms
from jaxrl.xla.equations import Code, Equation, bind, body_of_call, read


class Form(NamedTuple):
    """An elementwise operation as source code; `{}` is an operand, `{t}` in C the type of the result."""

    numpy: str
    c: str


ELEMENTWISE: Mapping[str, Form] = {
    name: Form(*forms)
    for name, *forms in [
        # primitive, NumPy, C
        ("add", "{} + {}", "{} + {}"),
        ("sub", "{} - {}", "{} - {}"),
        ("mul", "{} * {}", "{} * {}"),
        ("neg", "-{}", "-{}"),
        ("max", "np.maximum({}, {})", "maximum_{t}({}, {})"),
        ("min", "np.minimum({}, {})", "minimum_{t}({}, {})"),
        ("clamp", "np.clip({1}, {0}, {2})", "minimum_{t}(maximum_{t}({1}, {0}), {2})"),
        ("abs", "np.abs({})", "fabs({})"),
        ("sign", "np.sign({})", "sign_{t}({})"),
        ("square", "np.square({})", "square_{t}({})"),
        ("sqrt", "np.sqrt({})", "sqrt({})"),
        ("rsqrt", "1 / np.sqrt({})", "1 / sqrt({})"),
        ("pow", "{} ** {}", "pow({}, {})"),
        ("rem", "np.fmod({}, {})", "fmod({}, {})"),
        ("floor", "np.floor({})", "floor({})"),
        ("exp", "np.exp({})", "exp({})"),
        ("expm1", "np.expm1({})", "expm1({})"),
        ("log", "np.log({})", "log({})"),
        ("log1p", "np.log1p({})", "log1p({})"),
        ("tanh", "np.tanh({})", "tanh({})"),
        ("logistic", "0.5 * (1 + np.tanh(0.5 * {}))", "0.5f * (1 + tanh(0.5f * {}))"),
        ("sin", "np.sin({})", "sin({})"),
        ("cos", "np.cos({})", "cos({})"),
        ("is_finite", "np.isfinite({})", "isfinite({}) != 0"),
        ("eq", "{} == {}", "{} == {}"),
        ("ne", "{} != {}", "{} != {}"),
        ("lt", "{} < {}", "{} < {}"),
        ("le", "{} <= {}", "{} <= {}"),
        ("gt", "{} > {}", "{} > {}"),
        ("ge", "{} >= {}", "{} >= {}"),
        ("and", "{} & {}", "{} & {}"),
        ("or", "{} | {}", "{} | {}"),
        ("not", "~{}", "!{}"),
    ]
}


class Operation(NamedTuple):
    """One primitive; an operand is the name of a value that depends on the inputs, or a constant."""

    eqn: Any
    """JAX's own equation, with parameters and shapes."""
    ins: tuple[Any, ...]
    outs: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)


class Program(NamedTuple):
    """The operations needed for the results, in order; results are names or constants, as operands are."""

    operations: list[Operation]
    results: list[Any]


def trace(function: Function, **known: np.ndarray) -> Program:
    """Return the program of a policy for one environment; inputs have the names in `function.names`.

    Args:
      function: the policy.
      known: constant inputs, by name.
    """
    # Plain forms have no branches by platform.
    with forms("plain"):
        traced = jax.make_jaxpr(partial(function.call, function.params))(*function.inputs(1))
    operations: list[Operation] = []
    results = _walk(read(traced), [known.get(name, name) for name in function.names], operations)
    wanted, kept = {x for x in results if isinstance(x, str)}, []
    for operation in reversed(operations):
        if not wanted.isdisjoint(operation.outs):
            wanted.update(x for x in operation.ins if isinstance(x, str))
            kept.append(operation)
    return Program(kept[::-1], results)


def _walk(code: Code, args: Sequence[Any], operations: list[Operation]) -> list[Any]:
    """Append the operations of `code`, including those of functions that it calls; return its results."""
    values = {**code.given, **dict(zip(code.ins, args, strict=True))}
    for equation in code.equations:
        made = _results(equation, [values[i] for i in equation.ins], operations)
        values.update(zip(equation.outs, made, strict=True))
    return [values[i] for i in code.outs]


def _results(equation: Equation, given: list[Any], operations: list[Operation]) -> Sequence[Any]:
    if not any(isinstance(x, str) for x in given):
        return bind(equation, *given)
    if (inner := body_of_call(equation)) is not None:
        return _walk(inner, given, operations)
    if (same := _unchanged_operand(equation, given)) is not None:
        return [same]
    name, count = f"x{len(operations)}", len(equation.outs)
    outs = (name,) if count == 1 else tuple(f"{name}_{i}" for i in range(count))
    operations.append(Operation(equation.eqn, tuple(given), outs))
    return outs


def _unchanged_operand(equation: Equation, given: Sequence[Any]) -> Any:
    """Return the operand that equals the result; `None` if there is something to compute."""
    if equation.name in ("stop_gradient", "copy"):
        return given[0]
    if equation.name == "div" and not isinstance(given[1], str) and np.all(np.asarray(given[1]) == 1):
        from_shape, to_shape = (x.aval.shape for x in (equation.eqn.invars[0], equation.eqn.outvars[0]))
        return given[0] if from_shape == to_shape else None
    if equation.name == "select_n" and not isinstance(given[0], str):
        cases = np.unique(np.asarray(given[0]))
        return given[1 + int(cases[0])] if len(cases) == 1 else None
    return None


def refuse(name: str, language: str) -> Any:
    """Raise `SettingsError`: the operation `name` of a policy is not supported in `language`."""
    raise SettingsError(
        f"this policy computes {name}, which is not written in {language} here; export it as stablehlo or onnx instead"
    )


def require_plain_convolution(params: Mapping[str, Any], language: str) -> None:
    """Raise `SettingsError` for convolutions other than of `[N, H, W, C]` with `[h, w, C, O]`, as Flax makes them."""
    plain = params["lhs_dilation"] == params["rhs_dilation"] == (1, 1) and params["feature_group_count"] == 1
    layout = tuple(params["dimension_numbers"]) == ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    if not (plain and layout and np.min(params["padding"]) >= 0):
        refuse("a convolution of another kind than [N, H, W, C]", language)

"""A traced function as a plain list of equations between numbered values, which can be split and run in parts.

JAX's own form, the jaxpr, differs from version to version. This module alone reads it, by the attributes of its parts
and without their types, which have no lasting place in JAX. Whoever calls it does so by `attempt`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

DRAWS = frozenset(
    ("random_bits", "random_split", "random_fold_in", "random_gamma", "threefry2x32", "rng_bit_generator")
)
"""Primitives that compute random numbers."""
RANDOM = DRAWS | {"random_wrap", "random_unwrap", "random_seed", "random_clone"}
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
"""Primitives that do no more than the equations inside them; their derivative rules matter only under
differentiation."""


class Equation(NamedTuple):
    """One primitive, with the numbers of its inputs and outputs."""

    eqn: Any
    """JAX's own equation."""
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    draws: bool
    """Whether it computes random numbers, itself or inside."""
    body: "Code | None"
    """For a call or a `scan` that draws: the function that it calls or repeats."""

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)


class Code(NamedTuple):
    """A function. Its values are numbered, its inputs first."""

    ins: list[int]
    outs: list[int]
    equations: list[Equation]
    given: dict[int, Any]
    """Known values: literals, and arrays that the function closes over."""
    avals: dict[int, Any]
    """The abstract value, with `shape` and `dtype`, of every value."""
    numbers: Iterator[int]

    def add(self, aval: Any) -> int:
        """Return the number of a new value."""
        number = next(self.numbers)
        self.avals[number] = aval
        return number


class Counts(NamedTuple):
    """What the inputs of a `scan` are, in this order; the rest are rows."""

    consts: int
    carry: int


def read(jaxpr: Any, seen: dict[Any, bool] | None = None) -> Code:
    """Read a closed jaxpr; `seen` is what `_draws` knows already."""
    code, seen = Code([], [], [], {}, {}, itertools.count()), {} if seen is None else seen
    inner = _open(jaxpr)
    numbers = {var: code.add(var.aval) for var in inner.invars}
    code.ins.extend(numbers.values())
    for var, value in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True):
        numbers[var] = _known(code, value, var.aval)
    number = lambda atom: _known(code, atom.val, atom.aval) if hasattr(atom, "val") else numbers[atom]
    for eqn in inner.eqns:
        args, name = tuple(map(number, eqn.invars)), eqn.primitive.name
        draws = name in DRAWS or any(_draws(sub, seen) for sub in _inside(eqn))
        made = tuple(code.add(var.aval) for var in eqn.outvars)
        body = read(next(_inside(eqn)), seen) if draws and (name == "scan" or name in CALLS) else None
        code.equations.append(Equation(eqn, args, made, draws, body))
        numbers.update(zip(eqn.outvars, made, strict=True))
    code.outs.extend(number(atom) for atom in inner.outvars)
    return code


def called(equation: Equation) -> Code | None:
    """Return the function that a call does no more than call; of other equations `None`."""
    return read(next(_inside(equation.eqn))) if equation.name in CALLS else None


def find_dependencies(code: Code, numbers: Iterable[int]) -> set[int]:
    """Return the values on which those of `numbers` may depend, these included."""
    needed = set(numbers)
    for equation in reversed(code.equations):
        if not needed.isdisjoint(equation.outs):
            needed |= set(equation.ins)
    return needed


def _known(code: Code, value: Any, aval: Any) -> int:
    number = code.add(aval)
    code.given[number] = value
    return number


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _inside(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        several = value if isinstance(value, tuple | list) else (value,)
        yield from (x for x in several if hasattr(_open(x), "eqns"))


def _draws(jaxpr: Any, seen: dict[Any, bool]) -> bool:
    if jaxpr not in seen:
        seen[jaxpr] = any(e.primitive.name in DRAWS or any(_draws(x, seen) for x in _inside(e)) for e in jaxpr.eqns)
    return seen[jaxpr]


def walk(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr, and all that are inside them."""
    for eqn in _open(jaxpr).eqns:
        yield from walk_equation(eqn)


def walk_equation(eqn: Any) -> Iterator[Any]:
    """Yield an equation of a jaxpr, and all that are inside it."""
    yield eqn
    for jaxpr in _inside(eqn):
        yield from walk(jaxpr)


BITS = 50
"""Numbers that one word of Threefry works out on its way."""


def count_work(function: Callable[..., Any], *args: Any) -> int:
    """Return how many numbers a function works out, by its equations; a `while` counts as one turn.

    A coarse measure, but the same on every machine. `args` are arrays or their shapes.
    """
    return _work(jax.make_jaxpr(function)(*args))


def _work(jaxpr: Any) -> int:
    return sum(_equation_work(eqn) for eqn in _open(jaxpr).eqns)


def _equation_work(eqn: Any) -> int:
    inner = sum(map(_work, _inside(eqn)))
    if inner:
        return inner * eqn.params["length"] if eqn.primitive.name == "scan" else inner
    made = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    return made * BITS if eqn.primitive.name in DRAWS else made


def scan_counts(equation: Equation) -> Counts:
    """Return what the inputs of a `scan` are; a call is one without carry and rows."""
    return eqn_scan_counts(equation.eqn) if equation.name == "scan" else Counts(len(equation.ins), 0)


def eqn_scan_counts(eqn: Any) -> Counts:
    """Return what the inputs of a `scan` of a jaxpr are; its outputs are the carry and then rows."""
    params = eqn.params
    if "num_consts" in params:
        return Counts(params["num_consts"], params["num_carry"])
    consts, carry, _ = map(len, params["ft_in"].unpack())  # JAX 0.11
    return Counts(consts, carry)


# --- running ----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Something to be run: what it takes and makes, by number."""

    call: Callable[..., Sequence[Any]]
    ins: tuple[int, ...]
    outs: tuple[int, ...]


def run(steps: Sequence[Step], values: dict[int, Any]) -> None:
    """Run `steps` one after the other, adding what they make to `values`."""
    for step in steps:
        values.update(zip(step.outs, step.call(*(values[i] for i in step.ins)), strict=True))


def call(code: Code, *args: Any) -> list[Any]:
    """Run a function."""
    values = {**code.given, **dict(zip(code.ins, args, strict=True))}
    run([Step(partial(bind, equation), equation.ins, equation.outs) for equation in code.equations], values)
    return arrays(code, values, code.outs)


def arrays(code: Code, values: dict[int, Any], numbers: Sequence[int]) -> list[Any]:
    """Return values, those that are plain numbers as the arrays that they stand for."""
    as_array = lambda i: jnp.asarray(values[i], code.avals[i].dtype) if i in code.given else values[i]
    return [as_array(i) for i in numbers]


def bind(equation: Equation, *args: Any) -> Sequence[Any]:
    """Do what an equation does."""
    primitive, params = equation.eqn.primitive, equation.eqn.params
    if equation.body is not None and equation.name in CALLS:
        # What is one function of the program stays one: XLA rounds otherwise where it sees more at once.
        called = partial(call, equation.body)
        made: Sequence[Any] = jax.jit(called)(*args) if equation.name in ("jit", "pjit") else called(*args)
        return made
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.eqn.ctx.manager:
        made = primitive.bind(*functions, *args, **params)
    return made if primitive.multiple_results else [made]

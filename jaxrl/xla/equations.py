"""Traced functions as lists of equations between numbered values, which can be split and run in parts.

The jaxpr, JAX's own form, changes between versions. Only this module reads it, by attributes rather than types, which
JAX does not export reliably. Call it under `with_fallback`.
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
"""Primitives equivalent to the equations inside them; their derivative rules matter only under differentiation."""


class Equation(NamedTuple):
    """One primitive, with the numbers of its inputs and outputs."""

    eqn: Any
    """JAX's own equation."""
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    draws: bool
    """Whether it computes random numbers, directly or inside."""
    body: "Code | None"
    """Body of a call or `scan` that draws."""

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)


class Code(NamedTuple):
    """A function; its values are numbered, starting with the inputs."""

    ins: list[int]
    outs: list[int]
    equations: list[Equation]
    given: dict[int, Any]
    """Constants: literals, and arrays that the function closes over."""
    avals: dict[int, Any]
    """Abstract value, with `shape` and `dtype`, of every number."""
    numbers: Iterator[int]

    def add(self, aval: Any) -> int:
        """Return the number of a new value."""
        number = next(self.numbers)
        self.avals[number] = aval
        return number


class Counts(NamedTuple):
    """Numbers of inputs of a `scan`, in this order; the rest are rows."""

    consts: int
    carry: int


def read(jaxpr: Any, seen: dict[Any, bool] | None = None) -> Code:
    """Read a closed jaxpr; `seen` caches `_draws`."""
    code, seen = Code([], [], [], {}, {}, itertools.count()), {} if seen is None else seen
    inner = _open(jaxpr)
    # The inputs get the first numbers, then the constants.
    numbers = {var: code.add(var.aval) for var in inner.invars}
    code.ins.extend(numbers.values())
    for var, value in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True):
        numbers[var] = _add_known(code, value, var.aval)
    # Every occurrence of a literal is a separate constant.
    number = lambda atom: _add_known(code, atom.val, atom.aval) if hasattr(atom, "val") else numbers[atom]
    for eqn in inner.eqns:
        args, name = tuple(map(number, eqn.invars)), eqn.primitive.name
        draws = name in DRAWS or any(_draws(sub, seen) for sub in _inside(eqn))
        made = tuple(code.add(var.aval) for var in eqn.outvars)
        # Only bodies that `hoist` can split are read; other equations stay intact.
        body = read(next(_inside(eqn)), seen) if draws and (name == "scan" or name in CALLS) else None
        code.equations.append(Equation(eqn, args, made, draws, body))
        numbers.update(zip(eqn.outvars, made, strict=True))
    code.outs.extend(number(atom) for atom in inner.outvars)
    return code


def body_of_call(equation: Equation) -> Code | None:
    """Return the body of a call; `None` for other equations."""
    return read(next(_inside(equation.eqn))) if equation.name in CALLS else None


def find_dependencies(code: Code, numbers: Iterable[int]) -> set[int]:
    """Return the values on which `numbers` may depend, including themselves."""
    needed = set(numbers)
    # An equation reads only values of earlier ones, so one pass from the end finds all.
    for equation in reversed(code.equations):
        if not needed.isdisjoint(equation.outs):
            needed |= set(equation.ins)
    return needed


def _add_known(code: Code, value: Any, aval: Any) -> int:
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
    """Yield the equations of a jaxpr, and recursively those inside them."""
    for eqn in _open(jaxpr).eqns:
        yield from walk_equation(eqn)


def walk_equation(eqn: Any) -> Iterator[Any]:
    """Yield an equation of a jaxpr, and recursively those inside it."""
    yield eqn
    for jaxpr in _inside(eqn):
        yield from walk(jaxpr)


BITS = 50
"""Intermediate numbers per random word of Threefry."""


def count_work(function: Callable[..., Any], *args: Any) -> int:
    """Return the number of numbers that a function computes; a `while` counts as one iteration.

    A coarse measure of work, but the same on every machine. `args` are arrays or their shapes.
    """
    return _work(jax.make_jaxpr(function)(*args))


def _work(jaxpr: Any) -> int:
    return sum(_equation_work(eqn) for eqn in _open(jaxpr).eqns)


def _equation_work(eqn: Any) -> int:
    inner = sum(map(_work, _inside(eqn)))
    if inner:
        # The length of a scan is known; a `while` and every branch of a `cond` count once.
        return inner * eqn.params["length"] if eqn.primitive.name == "scan" else inner
    made = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    return made * BITS if eqn.primitive.name in DRAWS else made


def scan_counts(equation: Equation) -> Counts:
    """Return the counts of inputs of a `scan`; a call has constants alone."""
    return eqn_scan_counts(equation.eqn) if equation.name == "scan" else Counts(len(equation.ins), 0)


def eqn_scan_counts(eqn: Any) -> Counts:
    """Return the counts of inputs of a jaxpr's `scan`; its outputs are the carry and then rows."""
    params = eqn.params
    if "num_consts" in params:
        return Counts(params["num_consts"], params["num_carry"])
    consts, carry, _ = map(len, params["ft_in"].unpack())  # JAX 0.11
    return Counts(consts, carry)


# --- running ----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """An operation, with the numbers of its inputs and outputs."""

    call: Callable[..., Sequence[Any]]
    ins: tuple[int, ...]
    outs: tuple[int, ...]


def run(steps: Sequence[Step], values: dict[int, Any]) -> None:
    """Run `steps` in order, adding their outputs to `values`."""
    for step in steps:
        values.update(zip(step.outs, step.call(*(values[i] for i in step.ins)), strict=True))


def call(code: Code, *args: Any) -> list[Any]:
    """Run a function."""
    return arrays(code, evaluate(code, *args), code.outs)


def evaluate(code: Code, *args: Any) -> dict[int, Any]:
    """Run a function; return all its values by number."""
    values = {**code.given, **dict(zip(code.ins, args, strict=True))}
    run([Step(partial(bind, equation), equation.ins, equation.outs) for equation in code.equations], values)
    return values


def arrays(code: Code, values: dict[int, Any], numbers: Sequence[int]) -> list[Any]:
    """Return values by number; constants are converted to arrays of their dtype."""
    as_array = lambda i: jnp.asarray(values[i], code.avals[i].dtype) if i in code.given else values[i]
    return [as_array(i) for i in numbers]


def bind(equation: Equation, *args: Any) -> Sequence[Any]:
    """Evaluate an equation."""
    primitive, params = equation.eqn.primitive, equation.eqn.params
    if equation.body is not None and equation.name in CALLS:
        # A jitted function stays one: inlined, XLA would fuse it with its surroundings and round differently.
        called = partial(call, equation.body)
        return jax.jit(called)(*args) if equation.name in ("jit", "pjit") else called(*args)
    # Depending on the version of JAX, functions and parameters, or parameters alone.
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    # Under the settings of JAX that held when the equation was traced.
    with equation.eqn.ctx.manager:
        made = primitive.bind(*functions, *args, **params)
    return made if primitive.multiple_results else [made]

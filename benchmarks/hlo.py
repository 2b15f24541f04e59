"""What one iteration of a compiled program runs, read from the program's text."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """An instruction that runs something: a launch on a GPU, a thunk on a CPU."""

    kind: str
    bytes: float
    """What it has to read and write; where it uses a slice of an array, that slice alone."""
    flops: float
    """Those of its products of matrices, two for each multiplication; other arithmetic is not counted."""
    times: int
    """How often an iteration runs it, as far as XLA knows."""
    cycles: float = 0.0
    """What XLA estimates that one run takes; only compilers for TPUs say so."""
    serial: int = 0
    """Terms of the longest sum that one thread adds up alone: of one that XLA for GPUs has fused into a kernel with a
    thread for each entry of its result. Such a kernel takes as long as many others."""


def kernels(compiled: Any, depth: int = 2) -> list[Kernel]:
    """Return the kernels of an iteration of `iterate`.

    A loop inside gives its kernels as often as it turns, where XLA knows it, a branch its larger side. `depth` is that
    of the loop over iterations: 2 where only the one over blocks is around it.
    """
    program = _parse(compiled.as_text())
    name = next(iter(reversed(program)))  # the entry comes last
    for _ in range(depth):
        inside = [loop.attribute("body") for _, loop in _reached(program, name) if loop.kind == "while"]
        name = max(inside, key=lambda body: len(list(_kernels(program, body))), default=name)
    return list(_kernels(program, name))


class Waits(NamedTuple):
    """What in a whole program decides, while it runs, what runs next: on a GPU the host is asked, and waited for."""

    conditionals: int
    unknown_loops: int
    """Loops of which XLA does not know how often they turn."""


def waits(compiled: Any) -> Waits:
    """Count what a program has to wait for, wherever it stands."""
    program = _parse(compiled.as_text())
    found = [one for computation in program.values() for one in computation.values()]
    loops = [one for one in found if one.kind == "while" and not _turns(program, one)]
    return Waits(sum(one.kind == "conditional" for one in found), len(loops))


def turns(compiled: Any) -> dict[str, int]:
    """Return how often each loop turns of which XLA knows it, by the loop's name."""
    program = _parse(compiled.as_text())
    found = (one for computation in program.values() for one in computation.values())
    return {one.name: times for one in found if one.kind == "while" and (times := _turns(program, one))}


def _turns(program: "Program", loop: "Instruction") -> int:
    """Return how often a loop turns; 0 if XLA does not know.

    Compilers for TPUs do not write it down, but JAX's loops count from 0 up to a constant in their condition.
    """
    known = re.search(r"known_trip_count[^0-9]*(\d+)", loop.attributes)
    if known:
        return int(known[1])
    condition = program.get(loop.attribute("condition"), {})
    end = list(condition.values())[-1] if condition else None
    if end is None or end.kind != "compare" or "direction=LT" not in end.attributes:
        return 0
    bound = condition.get(end.operands[-1])
    return int(bound.operands[0]) if bound is not None and bound.kind == "constant" else 0


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, name: str) -> str:
        """Return the computation that is called `name`; empty if there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]
Program = dict[str, Computation]

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
"""Instructions that run nothing; nor do those that wait for what others began, `copy-done` and its like."""
_SLICES = {"slice", "dynamic-slice", "gather"}
"""Read of their first operand only what they return."""
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Write only one operand, this one, into the first."""
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(,.*)?$")


def _parse(text: str) -> Program:
    """Return the instructions of each computation of an HLO module; the last of each is its result."""
    found: Program = {}
    computation: Computation = {}
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            computation = found[opened[1]] = {}
        elif read := _LINE.match(line):
            name, shape, kind, given, attributes = read.groups(default="")
            named = re.sub(r"/\*.*?\*/", "", given).split(", ")
            operands = tuple(words[-1].lstrip("%") for one in named if (words := one.split()))
            computation[name] = Instruction(name, shape, kind, operands, attributes)
    return found


def _reached(program: Program, name: str) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the instructions of a computation, each with its own, and those of what it calls in place of the calls."""
    computation = program.get(name, {})
    for instruction in computation.values():
        if instruction.kind == "call":
            yield from _reached(program, instruction.attribute("to_apply"))
        else:
            yield computation, instruction


def _kernels(program: Program, name: str, times: int = 1) -> Iterator[Kernel]:
    """Yield what a computation runs."""
    for computation, instruction in _reached(program, name):
        kind = instruction.kind
        if kind == "while":
            yield from _kernels(program, instruction.attribute("body"), times * max(1, _turns(program, instruction)))
        elif kind == "conditional":
            named = re.findall(r"branch_computations=\{([^}]*)\}|\b\w+_computation=([\w.%\-]+)", instruction.attributes)
            sides = [side.strip(" %") for several, one in named for side in (several or one).split(",")]
            branches = [list(_kernels(program, side, times)) for side in sides]
            yield from max(branches, key=lambda branch: sum(kernel.times for kernel in branch), default=[])
        elif kind not in _FREE and not kind.endswith("-done"):
            moved, flops = _moved(program, computation, instruction), _flops(program, computation, instruction)
            yield Kernel(kind, moved, flops, times, _cycles(instruction), _serial(program, instruction))


class Collective(NamedTuple):
    """An instruction by which devices learn from each other."""

    kind: str
    given: tuple[float, ...]
    """Bytes of each array that a device gives."""
    times: int
    """How often a program's inner loops run it in an iteration, as far as XLA knows."""


COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast", "reduce-scatter"}


def collectives(compiled: Any) -> list[Collective]:
    """Return what a program exchanges, wherever it stands, loops of unknown length taken as one turn."""
    program = _parse(compiled.as_text())
    return list(_collectives(program, next(iter(reversed(program)))))


def _collectives(program: Program, name: str, times: int = 1) -> Iterator[Collective]:
    """Yield what a computation and those that it calls exchange."""
    computation = program.get(name, {})
    for instruction in computation.values():
        kind = instruction.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            given = tuple(_bytes(_shape(computation, operand)) for operand in instruction.operands)
            yield Collective(kind, given, times)
        turned = times * max(1, _turns(program, instruction)) if kind == "while" else times
        for inner in _called(instruction):
            yield from _collectives(program, inner, turned)


def _called(instruction: Instruction) -> list[str]:
    """Return the computations that an instruction runs, but for what decides, or makes one number of two."""
    found = re.findall(r"\b(?:body|calls|(?:true|false)_computation)=%?([\w.\-]+)", instruction.attributes)
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    found += [side.strip(" %") for side in branches[1].split(",")] if branches else []
    return found + ([instruction.attribute("to_apply")] if instruction.kind == "call" else [])


def _cycles(instruction: Instruction) -> float:
    estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return float(estimate[1]) if estimate else 0.0


def _serial(program: Program, kernel: Instruction) -> int:
    """Return `Kernel.serial`."""
    if "kind=kLoop" not in kernel.attributes:
        return 0
    inside = program.get(kernel.attribute("calls"), {})
    return max((_terms(inside, one) for one in inside.values() if one.kind == "reduce"), default=0)


def _terms(computation: Computation, reduce: Instruction) -> int:
    """Return how many entries a reduction makes one of."""
    sizes = _dims(_shape(computation, reduce.operands[0]))
    axes = re.search(r"dimensions=\{([\d,]*)\}", reduce.attributes)
    return math.prod(sizes[int(axis)] for axis in axes[1].split(",")) if axes and axes[1] else 1


# --- bytes ---------------------------------------------------------------------------------------------------


def _moved(program: Program, computation: Computation, kernel: Instruction) -> float:
    """Return the bytes that a kernel reads and writes."""
    # One that runs beside others is a `fusion-start`.
    inside = program.get(kernel.attribute("calls")) if kernel.kind in ("fusion", "fusion-start") else None
    if inside is None:
        read = sum(_read({kernel.name: kernel}, name, _shape(computation, name)) for name in set(kernel.operands))
        return read + _written(computation, kernel)
    parameters = [instruction for instruction in inside.values() if instruction.kind == "parameter"]
    result = list(inside.values())[-1]
    return sum(_read(inside, one.name, one.shape) for one in parameters) + _written(inside, result)


def _read(computation: Computation, name: str, shape: str) -> float:
    """Return how many bytes of the array `name` a computation reads, at most all of it."""
    size, total = _bytes(shape), 0.0
    for user in computation.values():
        for place, operand in enumerate(user.operands):
            if operand != name or user.kind in ("tuple", "parameter", "constant"):
                continue
            if user.kind == "bitcast":
                total += _read(computation, user.name, shape)
            elif place == 0 and user.kind in _SLICES:
                total += _bytes(user.shape)
            elif not (place == 0 and user.kind in _UPDATES):
                total += size
    return min(total, size)


def _written(computation: Computation, result: Instruction) -> float:
    """Return how much of a result is written: of one that is updated in place, the update."""
    if result.kind in ("tuple", "bitcast"):
        return sum(_written(computation, computation[name]) for name in result.operands if name in computation)
    # After the result of a library's call comes room that it works in, and after that of a copy what it is a copy of.
    if result.kind == "custom-call" or result.kind.endswith("-start"):
        return _bytes(result.shape.partition("]")[0] + "]")
    place = _UPDATES.get(result.kind)
    return _bytes(result.shape if place is None else _shape(computation, result.operands[place]))


def _shape(computation: Computation, name: str) -> str:
    """Return the shape of an instruction; empty if the computation has none of this name."""
    return computation[name].shape if name in computation else ""


def _bytes(shape: str) -> float:
    """Return the size of a shape as it is written in a program, of a tuple that of all its arrays."""
    sizes = {"pred": 8.0, "bf16": 16.0, "c64": 64.0, "c128": 128.0}
    return sum(
        math.prod(map(int, dims.split(","))) * bits / 8 if dims else bits / 8
        for kind, dims in re.findall(r"\b(pred|bf16|c64|c128|[suf]\d+)\w*\[([\d,]*)\]", shape)
        for bits in [sizes.get(kind) or float(kind[1:])]
    )


# --- products ------------------------------------------------------------------------------------------------


def _flops(program: Program, computation: Computation, kernel: Instruction) -> float:
    """Return those of the products of matrices in a kernel."""
    if kernel.kind == "fusion":
        inside = program.get(kernel.attribute("calls"), {})
        return sum(_flops(program, inside, instruction) for instruction in inside.values())
    if kernel.kind == "convolution":
        return _flops_of_convolution(computation, kernel)
    # XLA for GPUs gives products to a library, by a call of its name.
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]+)', kernel.attributes)
    if contracted is None:
        return 0.0
    sizes = dict(enumerate(_dims(_shape(computation, kernel.operands[0]))))
    summed = math.prod(sizes.get(int(place.strip('"')), 1) for place in contracted[1].split(","))
    return 2.0 * math.prod(_dims(kernel.shape)) * summed


def _flops_of_convolution(computation: Computation, kernel: Instruction) -> float:
    """Return those of a convolution, which is what every product is on a TPU: all entries of a kernel for each output.

    A kernel with holes (`rhs_dilate`) is as large as its entries, and one entry of the result needs only those of the
    kernel that meet an entry of what is convolved, not a hole (`lhs_dilate`).
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", kernel.attributes)
    sizes = _dims(_shape(computation, kernel.operands[1]))
    if labels is None or len(sizes) != len(labels[1]):
        return 0.0
    outputs = sizes[labels[1].index("o")]
    holes = re.search(r"lhs_dilate=([\dx]+)", kernel.attributes)
    met = math.prod(map(int, holes[1].split("x"))) if holes else 1
    return 2.0 * math.prod(_dims(kernel.shape)) * math.prod(sizes) / max(1, outputs) / met


def _dims(shape: str) -> list[int]:
    """Return the dimensions of the first array in a shape."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in found[1].split(",")] if found and found[1] else []

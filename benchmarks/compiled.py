"""What a compiled program is made of, and what a profiler sees of it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks.loops import Loop, Training


def profile(loop: Loop | Training, iterations: int, folder: Path) -> list[tuple[str, float, float]]:
    """Trace one call of `loop` into `folder`; return its kernels: name, microseconds and runs an iteration.

    The dearest come first. On a GPU these are the events of the device; on a CPU those of XLA's threads, which run side
    by side, so that their times may add up to more than the iteration's.
    """
    loop.us(iterations)
    with jax.profiler.trace(folder):
        loop.us(iterations)
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(jax.profiler.ProfileData.from_file(str(newest)).planes)
    planes = [plane for plane in planes if plane.name.startswith("/device:")] or planes
    spent: dict[str, list[float]] = {}
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        if not re.search(r"^\$|::|^end: |\(|^while", event.name):  # Python's frames, XLA's own functions, whole loops
            spent.setdefault(event.name, []).append(event.duration_ns / 1e3)
    kernels = [(name, sum(us) / iterations, len(us) / iterations) for name, us in spent.items()]
    return sorted(kernels, key=lambda kernel: -kernel[1])


def memory(compiled: Any) -> dict[str, int]:
    """Return the bytes of a program's arguments, what it needs beside them, and both with its results: its peak."""
    analysis = compiled.memory_analysis()
    state, temp = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"state_bytes": state, "temp_bytes": temp, "peak_bytes": state + temp + results}


_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
"""Instructions that run nothing."""


def kernels_per_iteration(compiled: Any, depth: int = 2) -> int:
    """Count the instructions that one iteration of `iterate` runs: its kernels, a figure without noise.

    On a GPU each is a launch, on a CPU a thunk. A loop inside counts as often as it turns, where XLA knows it, a branch
    with its larger side. `depth` is that of the loop over iterations: 2 where only the one over blocks is around it.
    """
    return _size(*_iteration(compiled, depth))


def instructions_per_iteration(compiled: Any, depth: int = 2) -> int:
    """Count them with each loop inside only once: the size of the program."""
    return _size(*_iteration(compiled, depth), turning=False)


def copies_per_iteration(compiled: Any, depth: int = 2) -> int:
    """Count the copies among the kernels."""
    return _size(*_iteration(compiled, depth), only=("copy", "copy-start"))


def _iteration(compiled: Any, depth: int) -> tuple[dict[str, list[str]], str]:
    """Return the computations of a program, and which of them is the body of an iteration.

    It is the largest loop in the loop over blocks, itself the largest of the program.
    """
    computations = _computations(compiled.as_text())
    name = next(iter(reversed(computations)))  # the entry comes last
    for _ in range(depth):
        inside = [body for line in computations[name] for body in re.findall(r" while\(.*body=%?([\w.\-]+)", line)]
        name = max(inside, key=lambda body: _size(computations, body, turning=False), default=name)
    return computations, name


def _computations(text: str) -> dict[str, list[str]]:
    """Return the instructions of each computation of an HLO module."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = opened[1]
            found[name] = []
        elif " = " in line and name:
            found[name].append(line)
    return found


def _size(computations: dict[str, list[str]], name: str, *, turning: bool = True, only: tuple[str, ...] = ()) -> int:
    """Count what a computation runs, or of that only instructions of some kinds."""
    size = partial(_size, computations, turning=turning, only=only)
    total = 0
    for line in computations.get(name, []):
        operation = re.search(r" = .*? ([a-z][\w\-]*)\(", line)
        kind = operation[1] if operation else ""
        if kind == "while":
            (body,) = re.findall(r"body=%?([\w.\-]+)", line)
            turns = re.search(r"known_trip_count[^0-9]*(\d+)", line)
            total += size(body) * (int(turns[1]) if turns and turning else 1)
        elif kind == "conditional":
            sides = re.findall(r"(?:branch_computations=\{|_computation=)([^},]*(?:, [^}]*)?)", line)
            names = [part.strip(" %") for side in sides for part in side.split(",")]
            total += max((size(side) for side in names), default=0)
        elif kind == "call":
            (target,) = re.findall(r"to_apply=%?([\w.\-]+)", line)
            total += size(target)
        elif kind in only or (not only and kind not in _FREE):
            total += 1
    return total

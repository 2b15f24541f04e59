"""Compile a program for a target, and count."""

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import hlo
from benchmarks.compiled import thunks
from benchmarks.compiled.cases import Program
from benchmarks.compiled.targets import TARGETS, Target
from jaxrl import xla
from jaxrl.trees import PyTree
from jaxrl.xla import forms
from jaxrl.xla.ahead import block_lengths

Row = dict[str, Any]


def measure(
    case: str, program: Callable[[], Program], target: str, text: Path | None = None, plain: Sequence[str] = ()
) -> Row:
    """Return the row of a case; write its program into `text`. The files `plain` of `jaxrl/xla` shape nothing."""
    with forms(TARGETS[target].forms), without(plain), tempfile.TemporaryDirectory() as dump:
        made = program()
        compiled, seconds, block = _compiled(made, target, Path(dump))
        # Elsewhere a fusion of this kind is no kernel of a thread an entry.
        of_gpu = _launches(compiled, Path(dump)) if TARGETS[target].forms == "cuda" else {"serial_terms": None}
        if text is not None:
            text.mkdir(parents=True, exist_ok=True)
            (text / f"{case}-{target}.txt").write_text(compiled.as_text())
            for thunk in Path(dump).glob(thunks.DUMP):
                (text / f"{case}-{target}-thunks.txt").write_text(thunk.read_text())
    told = {"plain": list(plain)} if plain else {}
    return {"case": case, "target": target, **told, **figures(compiled, made, block), **of_gpu, "compile_s": seconds}


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Trace programs with the plain forms of some files of `jaxrl/xla`, as elsewhere.

    Raises:
      ImportError: there is no such file.
    """
    with ExitStack() as stack:
        for module in (importlib.import_module(f"jaxrl.xla.{name}") for name in names):
            for name, stand_in in _PLAIN.items():
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


_PLAIN: dict[str, Any] = {
    xla.shaped_for.__name__: lambda *platforms: False,
    xla.by_platform.__name__: lambda ours, plain, *args: plain(*args),
    xla.is_reverse_only.__name__: lambda: False,
}
"""Functions that the forms ask before they take effect, and what they return without them."""


def device_of(target: Target) -> Any:
    """Return the device to compile for.

    Raises:
      RuntimeError: the compiler for it is not installed.
    """
    if not target.topology:
        return jax.devices("cpu")[0]
    return topologies.get_topology_desc(**target.topology).devices[0]


def placed(tree: PyTree, device: Any) -> PyTree:
    """Return the shapes of `tree`, whose arrays are to lie on `device`."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _compiled(program: Program, target: str, dump: Path) -> tuple[Any, float, int]:
    """Return the compiled program, the seconds that it took, and how many iterations its blocks have, 0 without any."""
    shapes = placed(program.shapes, device_of(TARGETS[target]))
    with block_lengths() as lengths:
        traced = jax.jit(program.function, donate_argnums=program.donated).trace(*shapes)
    options = dict(program.options(traced.jaxpr) or {})
    if TARGETS[target].forms == "cuda":
        options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    lowered, begun = traced.lower(), time.perf_counter()
    return lowered.compile(compiler_options=options), time.perf_counter() - begun, max(lengths, default=0)


def _launches(compiled: Any, dump: Path) -> Row:
    launches = thunks.read(dump, hlo.turns(compiled))
    return {
        "host_launches_per_call": launches.launches,
        "host_waits_per_call": launches.waits,
        "command_buffers": launches.buffers,
    }


def figures(compiled: Any, program: Program, block: int) -> Row:
    """Return what is counted in the text of a program, per optimisation step unless it says otherwise."""
    inner = hlo.kernels(compiled, program.depth)
    around = hlo.kernels(compiled, program.depth - 1) if block else inner
    share = lambda of: _sum(inner, of) + (_sum(around, of) - _sum(inner, of)) / max(1, block)
    waits, memory = hlo.waits(compiled), compiled.memory_analysis()
    runs, cycles = share(lambda kernel: 1), share(lambda kernel: kernel.cycles)
    return {
        "kernels_per_opt_step": runs / program.opt_steps,
        "kernels_per_env_step": runs / program.env_steps if program.env_steps else None,
        "kernels_per_iteration": _sum(inner, lambda kernel: 1),
        "conditionals": waits.conditionals,
        "unknown_trip_loops": waits.unknown_loops,
        "copies": share(lambda kernel: kernel.kind in ("copy", "copy-start")) / program.opt_steps,
        "bytes": share(lambda kernel: kernel.bytes) / program.opt_steps,
        "flops": share(lambda kernel: kernel.flops) / program.opt_steps,
        "serial_terms": share(lambda kernel: kernel.serial) / program.opt_steps,
        "temp_bytes": memory.temp_size_in_bytes,
        "state_bytes": memory.argument_size_in_bytes,
        "estimated_cycles_per_opt_step": cycles / program.opt_steps or None,
        "opt_steps_per_iteration": program.opt_steps,
        "env_steps_per_iteration": program.env_steps,
    }


def _sum(kernels: Sequence[hlo.Kernel], of: Any) -> float:
    return sum(kernel.times * of(kernel) for kernel in kernels)


COLUMNS = {
    "kernels_per_opt_step": "kernels/opt",
    "kernels_per_iteration": "/iteration",
    "host_launches_per_call": "launches",
    "host_waits_per_call": "waits",
    "conditionals": "cond",
    "unknown_trip_loops": "unknown",
    "copies": "copies",
    "bytes": "kB/opt",
    "serial_terms": "serial/opt",
    "temp_bytes": "temp MB",
    "estimated_cycles_per_opt_step": "kcycles/opt",
    "compile_s": "compile s",
}
_UNITS = {"bytes": 1e3, "temp_bytes": 1e6, "estimated_cycles_per_opt_step": 1e3}
HEADER = f"{'case':<16}" + "".join(f"{title:>12}" for title in COLUMNS.values())


def line(row: Row) -> str:
    """Return a row of the table."""
    told = (None if row.get(name) is None else row[name] / _UNITS.get(name, 1) for name in COLUMNS)
    return f"{row['case']:<16}" + "".join(f"{'-' if x is None else f'{x:,.1f}':>12}" for x in told)


WORSE = 1.02
"""From which ratio on a figure counts as worse: it has no noise, but a compiler's version may move it a little."""
COMPARED = (
    *("kernels_per_opt_step", "serial_terms", "host_launches_per_call", "host_waits_per_call", "conditionals"),
    "temp_bytes",
)
"""Figures of a row that are to grow no further, and on a TPU the estimated cycles."""


def worse(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """Say in a line each which figures of the `new` rows are worse than those of the same cases among the `old`."""
    before = {(row["case"], row["target"]): row for row in old}
    lines = []
    for row in new:
        was = before.get((row["case"], row["target"]), {})
        for name in (*COMPARED, "estimated_cycles_per_opt_step"):
            if was.get(name) is not None and row[name] > WORSE * was[name]:
                lines.append(f"{row['case']} on {row['target']}: {name} {row[name]:g}, was {was[name]:g}")
    return lines

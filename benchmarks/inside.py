"""What a compiled program is made of, and what a profiler sees of it."""

import re
from pathlib import Path
from typing import Any

import jax

from benchmarks.device import limits
from benchmarks.hlo import Kernel, kernels
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
    told = [(name, sum(us) / iterations, len(us) / iterations) for name, us in spent.items()]
    return sorted(told, key=lambda kernel: -kernel[1])


def figures(program: Any, depth: int = 2, updates: float = 1) -> dict[str, Any]:
    """Return what a compiled program says of itself: all but its time.

    Args:
      program: the program.
      depth: of the loop over iterations in it, see `hlo.kernels`.
      updates: optimisation steps of an iteration.

    Returns:
      Kernels of an iteration, which have no noise: as often as they run, written out once, and those that only copy;
      `kernels_per_opt_step`; `device_us`, the least that the device allows them for an optimisation step, and of that
      what is `launching`, and what is for `products` alone; bytes of the program's arguments, of what it needs beside
      them, and of both with its results: its peak.
    """
    iteration, device = kernels(program, depth), limits()
    runs = sum(kernel.times for kernel in iteration)
    flops = sum(kernel.flops * kernel.times for kernel in iteration)
    analysis = program.memory_analysis()
    state, temp = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    return {
        "kernels_per_iteration": runs,
        "instructions_per_iteration": len(iteration),
        "copies_per_iteration": sum(kernel.times for kernel in iteration if kernel.kind in ("copy", "copy-start")),
        "kernels_per_opt_step": runs / updates,
        "device_us": device.bound(iteration) / updates,
        "device_us_of": {
            "launching": runs * device.kernel(Kernel("", 0, 0, 1)) / updates,
            "products": flops / device.flops_per_us / updates,
        },
        "state_bytes": state,
        "temp_bytes": temp,
        "peak_bytes": state + temp + analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    }

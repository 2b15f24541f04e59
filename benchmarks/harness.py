"""What all cases share: interleaved repeats, rows, the header of a result, and the table."""

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxrl
from jaxrl.xla.options import compiler_options

Row = dict[str, Any]
Sample = Callable[[], float]
"""Runs once and returns microseconds per optimisation step (per vector step, for an environment alone)."""


class Effort(NamedTuple):
    """How much to measure."""

    repeats: int = 7
    opt_steps: int = 3_000
    """Optimisation steps of one call."""
    profile: Path | None = None
    """Folder for a trace of one call of the subject, of which the dearest kernels are told."""


QUICK = Effort(1, 32)
"""The smallest: it shows that a case runs, and its figures mean nothing."""
SMALLEST = "the smallest form, to see that it runs; its figures mean nothing"
"""What `--quick` is, in every script that has it."""


def interleave(subjects: Mapping[str, Sample], repeats: int) -> dict[str, list[float]]:
    """Call each subject in turn, `repeats` times after one that is not counted; return the numbers of each.

    A machine that slows down thus slows all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(repeats + 1):
        for name, subject in subjects.items():
            value = subject()
            if repeat:
                samples[name].append(value)
    return samples


def spread(samples: Sequence[float]) -> list[float]:
    """Return smallest, median and largest."""
    return [min(samples), statistics.median(samples), max(samples)]


def ratio_spread(subject: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return smallest, median and largest of the ratios of samples that were taken side by side."""
    return spread([a / b for a, b in zip(subject, reference, strict=True)])


def median_ratio(subject: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of them."""
    return ratio_spread(subject, reference)[1]


def row(case: str, subject: Sequence[float], ceiling: Sequence[float], env_steps: float, **more: Any) -> Row:
    """Return the row of a case.

    Args:
      case: its name.
      subject: microseconds per optimisation step, one number a repeat.
      ceiling: the same for the limit that it is held against.
      env_steps: environment steps per optimisation step.
      **more: whatever else belongs to the case; with `inside.figures` also how near the device's limit it comes.
    """
    us = statistics.median(subject)
    if more.get("device_us"):
        more = {**more, "ratio_to_device": us / more["device_us"], "us_per_kernel": us / more["kernels_per_opt_step"]}
    return {
        "case": case,
        "us_per_opt_step": us,
        "spread": spread(subject),
        "opt_steps_per_sec": 1e6 / us,
        "env_steps_per_sec": 1e6 / us * env_steps,
        "ceiling_us": statistics.median(ceiling),
        "ratio_to_ceiling": median_ratio(subject, ceiling),
        "ratio_spread": ratio_spread(subject, ceiling),
        "repeats": len(subject),
        "kernels_per_iteration": None,
        "compile_s": None,
        **more,
    }


def header() -> Row:
    """Say on what the numbers were measured."""
    memory = jax.devices()[0].memory_stats() or {}  # a CPU has none
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "devices": len(jax.devices()),
        "cpu": _cpu(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxrl": jaxrl.__version__,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "variables": {name: _nameless(value) for name, value in sorted(os.environ.items()) if name in VARIABLES},
        "compiler_options": compiler_options(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "device_peak_memory_mb": memory["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in memory else None,
        "command": " ".join(["python -m", _module(), *map(_nameless, sys.argv[1:])]),
    }


PACKAGES = (
    "jaxlib",
    "flax",
    "optax",
    "chex",
    "gymnax",
    "orbax-checkpoint",
    "numpy",
    "gymnasium",
    "flashbax",
    "ale-py",
    "envpool",
)
"""Whose versions are told, where they are installed."""
VARIABLES = (
    "PJRT_NPROC",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH",
)
"""Of the environment, that change what is measured."""


def _cpu() -> str:
    """Return the name of the processor."""
    try:
        named = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        named = []
    return named[0].partition(":")[2].strip() if named else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit that is checked out, with `+` where files were changed since; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "..", ":!results"]).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def versions(found: Iterable[str]) -> str:
    """Return the only version of several, or the first and the last of them."""
    order = sorted(set(found), key=lambda version: tuple(map(int, version.split("."))))
    return " to ".join(dict.fromkeys([order[0], order[-1]]))


def _module() -> str:
    """Return the name by which the script was run."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else "benchmarks"


def _nameless(argument: str) -> str:
    """Return an argument without the folder of an absolute path, which is the machine's own affair."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table of the documentation."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def spaced(number: float) -> str:
    """Return a whole number as the documentation has it, thousands apart."""
    return f"{number:,.0f}".replace(",", " ")


COLUMNS = ("us/opt", "min", "max", "ceiling", "ratio", "to scan", "to device", "env steps/s", "kernels", "compile s")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    lines = [f"{'case':<22}" + "".join(f"{name:>12}" for name in COLUMNS)]
    for r in rows:
        low, median, high = r["spread"]
        numbers = [
            *(f"{x:,.1f}" for x in (median, low, high, r["ceiling_us"])),
            f"{r['ratio_to_ceiling']:.3f}",
            *(f"{r[name]:.3f}" if name in r else "-" for name in ("ratio_to_scan", "ratio_to_device")),
            f"{r['env_steps_per_sec']:,.0f}",
            "-" if r["kernels_per_iteration"] is None else str(r["kernels_per_iteration"]),
            "-" if r["compile_s"] is None else f"{r['compile_s']:.1f}",
        ]
        lines.append(f"{r.get('name', r['case']):<22}" + "".join(f"{text:>12}" for text in numbers))
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row], **measured: Any) -> None:
    """Write a result, with what else was `measured` of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": {**header(), **measured}, "rows": list(rows)}, indent=2) + "\n")

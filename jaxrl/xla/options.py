"""XLA's compiler options. Plain: none. An option that this version of XLA does not know is left out and logged.

In `compiler_options`, an unknown name raises an error; in `XLA_FLAGS` it would abort the process.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.xla import shaped_for
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.contexts import NUMBERS, options_of

FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Options for fast compilation, of slower programs, on CPUs."""
if jax.__version_info__ < (0, 11):  # later versions always use the fusion emitters
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
PASSES = "xla_disable_hlo_passes"
WIDTH = "xla_cpu_prefer_vector_width"
GRAPHS = "xla_gpu_enable_command_buffer"
KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,CONVOLUTION"
"""Contents of CUDA graphs: those that XLA allows by default, and loops, conditionals and convolutions."""
HOST_SLICES = "dynamic-slice-annotator"
"""XLA's pass that has the host select the slice copied by an iteration of a loop, which a graph cannot contain; without
the pass, a kernel reads the index on the device."""
SPLIT = "xla_gpu_experimental_force_split_k"
UNCUT = 256
"""Longest sum that is not split."""


def compiler_options() -> dict[str, Any] | None:
    """Return XLA's options for training programs, or `None`.

    On CPUs with 512-bit vectors, they select that width (`ppo-64` takes 0.73 of the time, together with the products of
    `products.py`). By default XLA uses only 256 bits, although the libraries that it calls for matrix products use all
    512. On CUDA they are `graph_options`. Options in `XLA_FLAGS` take precedence.
    """
    return _known_options({WIDTH: 512}) if shaped_for("cpu") and not _is_in_flags(WIDTH) else graph_options()


def graph_options() -> dict[str, Any] | None:
    """Return XLA's options for a program that runs as one CUDA graph, or `None` elsewhere.

    Without them, the host launches the body of a loop in each iteration, and if the trip count is not static, waits for
    the device to evaluate the condition. With them, a training call of any length is one launch (`dqn-10`: 1 instead of
    6 and 2 waits per iteration; `ppo-1024`: 1 instead of 937; with convolutions `dqn-conv` 1 instead of 14, with slices
    on the device `ppo-gru` 1 instead of 4 408). With drivers older than 12.3, XLA leaves loops out of graphs.
    """
    if not shaped_for("cuda") or _is_in_flags(GRAPHS):
        return None
    return without_pass(_known_options({GRAPHS: KINDS, "xla_gpu_graph_min_graph_size": 1}), HOST_SLICES)


def product_options(longest_sum: Callable[[], int]) -> dict[str, Any]:
    """Return XLA's options for a program whose matrix products sum over at most `longest_sum()` entries each.

    For a product with few outputs, XLA for CUDA splits the sum, to occupy more of the device's units, and pads operands
    that do not divide. For short sums these padding kernels cost more than they gain (`dqn-10`: 39 kernels with, 34
    without).
    """
    if not shaped_for("cuda") or jax.__version_info__ < (0, 11) or _is_in_flags(SPLIT):
        return {}
    short = with_fallback("the length of sums", lambda: longest_sum() <= UNCUT, lambda: False)
    return _known_options({SPLIT: 1}) if short else {}


def once_options() -> dict[str, Any] | None:
    """Return XLA's options for a program that runs once, at the start of a run.

    On CPUs it is compiled with fewer optimisations, in a fifth of the processor time (`dqn-10`, 0.7 instead of 3.2 s);
    100 000 steps of warm-up then take 0.4 s instead of 0.3 s. On CUDA they are `graph_options`.
    """
    if not shaped_for("cpu"):
        return graph_options()
    return _known_options({name: value for name, value in FAST_COMPILE.items() if not _is_in_flags(name)})


def spread_options(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `options` for a sharded program, such that it has the same bits on any number of devices.

    For several devices, but not for one, XLA first eliminates common subexpressions; its form of a division then
    depends on other divisions by the same number. So this pass is disabled everywhere.
    """
    return without_pass(options, "cse")


def without_pass(options: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Return `options` that also disable the pass `name`, unless `XLA_FLAGS` disable passes themselves."""
    if _is_in_flags(PASSES):
        return options
    # All passes are in one option, separated by commas.
    others = (options or {}).get(PASSES)
    return {**(options or {}), **_known_options({PASSES: f"{others},{name}" if others else name})}


def parallel_calls() -> int:
    """Return the number of threads that should call programs in parallel: one per core on CPUs, else 1.

    Two calls on two cores take 0.53 of the time of two in sequence (`dqn-10`, `ppo-4`); on an accelerator they would
    wait for each other.
    """
    return _cores() if shaped_for("cpu", "plain") else 1


def _cores() -> int:
    """Return the number of cores that this process may use, or if unknown, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_options() -> dict[str, Any]:
    """Return the flags and JAX options with which worker processes compile programs as this process does."""
    return {"flags": os.environ.get("XLA_FLAGS", ""), "jax": options_of(NUMBERS)}


def apply_options(options: dict[str, Any]) -> None:
    """Apply the result of `worker_options` in a worker, on the CPU, before its first program.

    Programs run in the calling thread, which has nothing else to do. With asynchronous dispatch, JAX would hand them to
    another thread: a vector step of five CartPoles then takes 195 us instead of 155.
    """
    os.environ["XLA_FLAGS"] = options["flags"]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for name, value in options["jax"].items():
        jax.config.update(f"jax_{name}", value)


def prefers_one_program() -> bool:
    """Return whether the members of a population should train in one program rather than in a call each.

    True on accelerators, where the number of launches bounds a small program of any width: on an H200 an iteration
    of 256 members has 52 kernels, that of one member 34 (`seeds-256`, `dqn-10`). On a CPU, members in sequence do not
    share caches, and threads use all cores.
    """
    return shaped_for("cuda", "tpu")


def _is_in_flags(option: str) -> bool:
    return option in os.environ.get("XLA_FLAGS", "")


def _known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the `options` that this version of XLA knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    # XLA checks the names of options only when it compiles, so a trivial program is compiled with each, once per
    # process.
    def compile_with() -> bool:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
        return True

    return with_fallback(f"the compiler's option {name}", compile_with, lambda: False)

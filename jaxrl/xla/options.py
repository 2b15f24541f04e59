"""XLA's compiler options. Plain: none. An option that this XLA does not know is left out, and noted.

As an entry of `compiler_options` an unknown name is an error that can be caught; in `XLA_FLAGS` it ends the process.
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
"""Options with which XLA compiles for CPUs quickly rather than well."""
if jax.__version_info__ < (0, 11):  # later ones have no other way than that
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
PASSES = "xla_disable_hlo_passes"
WIDTH = "xla_cpu_prefer_vector_width"
GRAPHS = "xla_gpu_enable_command_buffer"
KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,CONVOLUTION"
"""What a CUDA graph may hold: all that XLA puts there by default, and loops, conditionals and convolutions."""
HOST_SLICES = "dynamic-slice-annotator"
"""The pass by which XLA lets the host say which slice of an array a turn of a loop copies. A graph cannot hold such a
loop; without the pass a kernel reads the turn's number on the device."""


SPLIT = "xla_gpu_experimental_force_split_k"
UNCUT = 256
"""Longest sum that is left in one piece."""


def compiler_options() -> dict[str, Any] | None:
    """Return XLA's options for programs that optimise, or `None`.

    On CPUs with 512-bit vectors, they select that width (`ppo-64` takes 0.73 of the time, together with the products of
    `products.py`). By default XLA uses only 256 bits, although the libraries that it calls for matrix products use all
    512. On CUDA they are `graph_options`. What is named in `XLA_FLAGS` takes precedence.
    """
    return _known({WIDTH: 512}) if shaped_for("cpu") and not _is_in_flags(WIDTH) else graph_options()


def graph_options() -> dict[str, Any] | None:
    """Return XLA's options for a program that runs as one CUDA graph, or `None` elsewhere.

    Without them the host launches the body of a loop in each turn, and where XLA does not know how often it turns, it
    waits for the device to learn whether to go on. With them a training call of any length is one launch (`dqn-10`: 1
    where 6 and 2 waits were for every iteration; `ppo-1024`: 1 and 937; with convolutions `dqn-conv` 1 and 14, with
    slices by the device `ppo-gru` 1 and 4 408). XLA leaves loops out where the driver is older than 12.3, and runs them
    as before.
    """
    if not shaped_for("cuda") or _is_in_flags(GRAPHS):
        return None
    return without_pass(_known({GRAPHS: KINDS, "xla_gpu_graph_min_graph_size": 1}), HOST_SLICES)


def product_options(longest_sum: Callable[[], int]) -> dict[str, Any]:
    """Return XLA's options for a program whose products of matrices each sum over at most `longest_sum()` entries.

    Where a product has few outputs, XLA for CUDA cuts its sum in parts, so that more of the device's units have one,
    and pads what does not divide. A short sum is not worth the kernels that pad (`dqn-10`: 39
    kernels with, 34 without).
    """
    if not shaped_for("cuda") or jax.__version_info__ < (0, 11) or _is_in_flags(SPLIT):
        return {}
    short = with_fallback("the length of sums", lambda: longest_sum() <= UNCUT, lambda: False)
    return _known({SPLIT: 1}) if short else {}


def once_options() -> dict[str, Any] | None:
    """Return XLA's options for a program that runs once, at the beginning of a run.

    On CPUs XLA compiles it quickly rather than well: in a fifth of the processor's time (`dqn-10`, 0.7 of 3.2 s), for
    100 000 steps of warm-up that take 0.4 s rather than 0.3 s. On CUDA they are `graph_options`.
    """
    if not shaped_for("cpu"):
        return graph_options()
    return _known({name: value for name, value in FAST_COMPILE.items() if not _is_in_flags(name)})


def spread_options(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return XLA's options for a program of shards, in place of `options`: the same bits on any number of devices.

    For several devices XLA begins with a search for what is computed twice, for one it does not. What it then makes of
    divisions depends on who else divides by the same number. So nowhere does it search.
    """
    return without_pass(options, "cse")


def without_pass(options: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Return `options` by which XLA also leaves out the pass `name`, unless `XLA_FLAGS` say which to leave out."""
    if _is_in_flags(PASSES):
        return options
    others = (options or {}).get(PASSES)
    return {**(options or {}), **_known({PASSES: f"{others},{name}" if others else name})}


def parallel_calls() -> int:
    """Return how many calls of one program run side by side from as many threads: on a CPU one on each core.

    Two on two cores take 0.53 of the time of one after the other (`dqn-10`, `ppo-4`); on an accelerator they would wait
    for one another.
    """
    return len(os.sched_getaffinity(0)) if shaped_for("cpu", "plain") else 1


def worker_options() -> dict[str, Any]:
    """Return what processes that step environments need for programs like those of this process, on a CPU."""
    return {"flags": os.environ.get("XLA_FLAGS", ""), "jax": options_of(NUMBERS)}


def apply_options(options: dict[str, Any]) -> None:
    """Make programs as the process that `worker_options` was called in, and on the CPU, before this one makes any.

    They run in the thread that calls them, which has nothing else to do. JAX would hand them to another one: a vector
    step of five CartPoles then takes 195 us rather than 155.
    """
    os.environ["XLA_FLAGS"] = options["flags"]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for name, value in options["jax"].items():
        jax.config.update(f"jax_{name}", value)


def prefers_one_program() -> bool:
    """Return whether members of a population train in one program, rather than each in a call of its own.

    On accelerators, where launches bound a small program, however wide: on an H200 an iteration of 256 members together
    has 52 kernels, that of one 34 (`seeds-256`, `dqn-10`). On a CPU members one after the other have the caches alone,
    and threads have the cores.
    """
    return shaped_for("cuda", "tpu")


def _is_in_flags(option: str) -> bool:
    return option in os.environ.get("XLA_FLAGS", "")


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of `options` that this XLA knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    def compile_with() -> bool:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
        return True

    return with_fallback(f"the compiler's option {name}", compile_with, lambda: False)

"""JAX's options of the current thread, for use in other threads and processes.

A `with` block sets an option in its own thread only. The same holds for forms, so both are passed on here.
"""

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import jax

NUMBERS = (
    "allow_f16_reductions",
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "softmax_custom_jvp",
    "threefry_partitionable",
)
"""Options that affect what a program computes; each is also a context manager of `jax`."""
OPTIONS = (*NUMBERS, "debug_infs", "debug_nans", "default_device")
"""Options that affect the compiled program of a function."""
FULL = ("float32", "highest", "F32_F32_F32")
"""Values of `jax_default_matmul_precision` with which products of matrices are in float32 everywhere."""


def product_precision(device: Any) -> str:
    """Return the precision in which XLA multiplies float32 matrices on a device.

    Unless JAX is configured otherwise, NVIDIA GPUs from compute capability 8.0 on round operands to TF32 (10 bits after
    the point), TPUs to bfloat16 (7 bits).
    """
    wanted: str | None = options_of(("default_matmul_precision",))["default_matmul_precision"]
    if device.platform == "cpu" or wanted in FULL:
        return "float32"
    if wanted is not None and wanted not in ("default", "fastest"):
        return wanted
    if device.platform == "tpu":
        return "bfloat16"
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]  # such as gfx90a of AMD
    return "TF32" if major.isdecimal() and int(major) >= 8 else "float32"


def host_device() -> Any:
    """Return the CPU, as JAX's device; its default device where `JAX_PLATFORMS` leaves the CPU out."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def options_of(names: tuple[str, ...] = OPTIONS) -> dict[str, Any]:
    """Return the values in this thread of those options of `names` that this JAX has."""
    return {name: getattr(jax.config, f"jax_{name}") for name in names if getattr(jax, name, None) is not None}


def bind_context(job: Callable[..., Any]) -> Callable[..., Any]:
    """Return `job` for another thread, bound to the forms and options of this one."""
    # Forms are context variables, which the copy carries. JAX keeps its options per thread, so they are entered one by
    # one.
    context, options = copy_context(), options_of()

    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            for name, value in options.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            return context.run(job, *args)

    return run

"""JAX's options as they hold where a program is made, which a `with` block may set and no other thread takes along.

Nothing of this makes a program faster: it is here because the forms, chosen by a `with` block too, go along with it.
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
"""Options that decide what a program computes; each is a context manager of `jax` too."""
OPTIONS = (*NUMBERS, "debug_infs", "debug_nans", "default_device")
"""Options that make another program of the same function."""


def options_of(names: tuple[str, ...] = OPTIONS) -> dict[str, Any]:
    """Return the options of `names` that this JAX has, as they hold in this thread."""
    return {name: getattr(jax.config, f"jax_{name}") for name in names if getattr(jax, name, None) is not None}


def bind_context(job: Callable[..., Any]) -> Callable[..., Any]:
    """Return `job` to be called in another thread, under the forms and the options of this one."""
    context, options = copy_context(), options_of()

    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            for name, value in options.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            return context.run(job, *args)

    return run

"""XLA's compiler options for programs that optimise. Plain: none."""

import os
from typing import Any

from jaxrl.xla import shaped_for

WIDTH = "xla_cpu_prefer_vector_width"


def compiler_options() -> dict[str, Any] | None:
    """Return XLA's options for programs that optimise, or `None`.

    On CPUs with 512-bit vectors, they select that width (`ppo-64` takes 0.73 of the time, together with the products of
    `products.py`). By default XLA uses only 256 bits, although the libraries that it calls for matrix products use all
    512. A width named in `XLA_FLAGS` takes precedence.
    """
    named = WIDTH in os.environ.get("XLA_FLAGS", "")
    return {WIDTH: 512} if shaped_for("cpu") and not named else None

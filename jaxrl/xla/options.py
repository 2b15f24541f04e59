"""What XLA is asked for in the programs that optimise. Plain: nothing."""

import os
from typing import Any

from jaxrl.xla import shaped_for

WIDTH = "xla_cpu_prefer_vector_width"


def compiler_options() -> dict[str, Any] | None:
    """Return the options of XLA for programs that optimise, or `None`.

    On CPUs those are vectors of 512 bits, where there are any (`ppo-64` takes 0.73 of the time, together with the
    products of `products.py`): left alone, XLA uses halves of them, although the libraries that it calls for products
    of matrices use whole ones. Where `XLA_FLAGS` name a width, they decide.
    """
    named = WIDTH in os.environ.get("XLA_FLAGS", "")
    return {WIDTH: 512} if shaped_for("cpu") and not named else None

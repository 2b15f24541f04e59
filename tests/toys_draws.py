"""What `jax.random` draws, chosen by a test."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp


@contextmanager
def drawn(**values: Iterable[Any]) -> Iterator[None]:
    """Have the functions of `jax.random` of these names return the values given, one a call, whatever the key.

    For programs that are traced within the block.
    """
    with ExitStack() as stack:
        for name, arrays in values.items():
            given = iter(arrays)
            stack.enter_context(mock.patch.object(jax.random, name, _next(given)))
        yield


def _next(given: Iterator[Any]) -> Any:
    return lambda *args, **how: jnp.asarray(next(given))

"""Fallbacks for optimisations that rely on undocumented parts of JAX.

The form of a traced program, the names of XLA's options and JAX's distributed store change with releases. Code that
reads or rewrites them therefore runs under `with_fallback`: if it fails, the plain program is used and the run logs it
once.
"""

from collections.abc import Callable
from typing import TypeVar

import jax

from jaxrl.errors import JaxrlError, describe_error

T = TypeVar("T")
_failures: dict[str, str] = {}


def with_fallback(name: str, make: Callable[[], T], fallback: Callable[[], T]) -> T:
    """Return `make()`; if this version of JAX does not support it, record that and return `fallback()`.

    `name` describes the optimisation in the log. Errors of jaxrl itself are raised.
    """
    try:
        return make()
    except JaxrlError:
        raise
    except Exception as error:  # a future release may raise anything
        # An error of the user's own function is raised again here, and does not count as a failure.
        plain = fallback()
        _failures.setdefault(name, describe_error(error))
        return plain


def failures() -> dict[str, str]:
    """Return the optimisations that failed in this process, with reasons."""
    return dict(_failures)


def notes() -> list[str]:
    """Return a line for the log if any optimisation failed."""
    if not _failures:
        return []
    listed = "; ".join(f"{name} ({reason})" for name, reason in _failures.items())
    return [f"JAX {jax.__version__} does not allow some optimisations, so the run goes without them: {listed}"]

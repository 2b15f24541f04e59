"""Rewritings that need more of JAX than its documented interface: tried, and done without where they fail.

The form of a traced program, the names of XLA's options and JAX's distributed store change with releases. So whatever
reads or rewrites them goes through `with_fallback`: where it fails, the plain program stands, and the run says so once.
"""

from collections.abc import Callable
from typing import TypeVar

import jax

from jaxrl.errors import JaxrlError, describe_error

T = TypeVar("T")
_failures: dict[str, str] = {}


def with_fallback(rewriting: str, make: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Return `make()`; where this JAX does not allow it, note that `rewriting` failed and return `otherwise()`.

    Errors of jaxrl itself are raised.
    """
    try:
        return make()
    except JaxrlError:
        raise
    except Exception as error:  # whatever a release that we do not know raises
        plain = otherwise()  # an error of the user's function is raised here again, and is no failure of the rewriting
        _failures.setdefault(rewriting, describe_error(error))
        return plain


def failures() -> dict[str, str]:
    """Return the rewritings that have failed in this process, each with the reason."""
    return dict(_failures)


def notes() -> list[str]:
    """Return one line for the log if any rewriting has failed."""
    if not _failures:
        return []
    listed = "; ".join(f"{name} ({reason})" for name, reason in _failures.items())
    return [f"JAX {jax.__version__} does not allow some optimisations, so the run goes without them: {listed}"]

"""Forms of a program that compilers run faster, each with a plain alternative, selected per platform.

Nothing here is about reinforcement learning, and no result depends on it beyond rounding: with plain forms, the program
is merely slower on some platform. Each module's docstring and `docs/performance.md` report the gain of a form.

Select forms with `forms` or the environment variable `JAXRL_FORMS`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from jaxrl.errors import SettingsError, suggest

PLATFORMS = ("cpu", "cuda", "tpu")
CHOICES = ("auto", "plain", *PLATFORMS)
_requested: ContextVar[str | None] = ContextVar("forms", default=None)
_reverse: ContextVar[bool] = ContextVar("reverse", default=False)


@contextmanager
def forms(which: str) -> Iterator[None]:
    """Trace programs with the forms of `which` inside a `with` block.

    Args:
      which: `auto` for the default device, `plain` for none, or `cpu`, `cuda` or `tpu` for that platform, such as to
        compile for it without having one.

    Raises:
      SettingsError: the name is unknown.
    """
    token = _requested.set(_check(which))
    try:
        yield
    finally:
        _requested.reset(token)


def current_forms() -> str:
    """Return the forms in use: `plain` or the name of a platform.

    Raises:
      SettingsError: `JAXRL_FORMS` is none of `CHOICES`.
    """
    which = _check(requested_forms())
    return _backend() if which == "auto" else which


def requested_forms() -> str:
    """Return the requested forms, one of `CHOICES`; actors in other processes request the same."""
    return _requested.get() or os.environ.get("JAXRL_FORMS") or "auto"


def shaped_for(*platforms: str) -> bool:
    """Return whether to trace the form for `platforms` rather than the plain one."""
    return current_forms() in platforms


def by_platform(ours: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """Call `ours` if XLA lowers the program for a CPU, otherwise `plain`; with plain forms, always `plain`."""
    if current_forms() == "plain":
        return plain(*args)
    # Chosen when the program is lowered, not when it is traced: it may be lowered for another platform than the
    # default.
    return jax.lax.platform_dependent(*args, cpu=ours, default=plain)


@contextmanager
def reverse_mode() -> Iterator[None]:
    """Allow forms that support only reverse-mode differentiation, as of a loss, inside a `with` block."""
    token = _reverse.set(True)
    try:
        yield
    finally:
        _reverse.reset(token)


def is_reverse_only() -> bool:
    """Return whether the program being traced is differentiated in reverse mode only."""
    return _reverse.get() and shaped_for(*PLATFORMS)


def _backend() -> str:
    """Return the platform of the default backend; `plain` for one without forms, such as ROCm."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend if backend in PLATFORMS else "plain"
    # JAX calls both CUDA and ROCm `gpu`; only CUDA devices are also found under their own name.
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "plain"
    return "cuda"


def _check(which: str) -> str:
    if which not in CHOICES:
        raise SettingsError(f"unknown forms {which!r}; {suggest(which, CHOICES)}")
    return which

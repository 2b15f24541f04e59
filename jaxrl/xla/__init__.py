"""How programs are shaped for compilers: each form beside its plain one, chosen per platform.

Nothing here is reinforcement learning, and nothing outside depends on it: with the plain forms, the same program is
merely slower somewhere. What each form gains, and where, stands at its head and in `docs/performance.md`.

The switch is `forms`, or `JAXRL_FORMS` in the environment.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from jaxrl.errors import SettingsError, nearest

PLATFORMS = ("cpu", "cuda", "tpu")
CHOICES = ("auto", "plain", *PLATFORMS)
_chosen: ContextVar[str | None] = ContextVar("forms", default=None)
_reverse: ContextVar[bool] = ContextVar("reverse", default=False)


@contextmanager
def forms(which: str) -> Iterator[None]:
    """Trace what is traced inside with the forms of `which`.

    Args:
      which: `auto` for those of the device that programs run on, `plain` for none, or `cpu`, `cuda`, `tpu` for those of
        another platform, to compile for it without having it.

    Raises:
      SettingsError: an unknown name.
    """
    token = _chosen.set(_check(which))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen() -> str:
    """Return which forms are traced now: `plain`, or the name of a platform.

    Raises:
      SettingsError: `JAXRL_FORMS` is none of `CHOICES`.
    """
    which = _chosen.get() or _check(os.environ.get("JAXRL_FORMS") or "auto")
    return _backend() if which == "auto" else which


def shaped_for(*platforms: str) -> bool:
    """Say whether the form for `platforms` is to be traced, rather than its plain one."""
    return chosen() in platforms


def by_platform(ours: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """Call `ours` where XLA lowers the program for a CPU, else `plain`; with plain forms always `plain`."""
    if chosen() == "plain":
        return plain(*args)
    return jax.lax.platform_dependent(*args, cpu=ours, default=plain)


@contextmanager
def reverse_mode() -> Iterator[None]:
    """Trace what is only differentiated in reverse, as a loss is, with forms that allow nothing else."""
    token = _reverse.set(True)
    try:
        yield
    finally:
        _reverse.reset(token)


def only_reversed() -> bool:
    """Say whether the program that is traced now is only differentiated in reverse."""
    return _reverse.get() and shaped_for("cpu")


def _backend() -> str:
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _check(which: str) -> str:
    if which not in CHOICES:
        raise SettingsError(f"unknown forms {which!r}; {nearest(which, CHOICES)}")
    return which

"""Scalars in the `info` of environments on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BOOKKEEPING = ("env_id", "players", "final_obs", "final_info")
"""Bookkeeping entries of EnvPool and Gymnasium, which are not recorded."""


def vector_scalars(info: Mapping[str, Any], num_envs: int) -> dict[str, np.ndarray]:
    """Return the scalars in the `info` of a vector of environments, float32 `[N]`, NaN where one is missing.

    Nested entries are named with a slash, such as `episode/l`. Gymnasium's mask `_NAME` says which environments have
    NAME. Anything but one number per environment is left out.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in info.items():
        if name in BOOKKEEPING or (name.startswith("_") and name[1:] in info):
            continue
        if isinstance(value, Mapping):
            inner = vector_scalars(value, num_envs)
            found |= {f"{name}/{word}": _mask_missing(info.get(f"_{name}"), x) for word, x in inner.items()}
        elif getattr(value, "shape", None) == (num_envs,) and np.asarray(value).dtype.kind in "biuf":
            found[name] = _mask_missing(info.get(f"_{name}"), np.asarray(value, np.float32))
    return found


def scalar_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in the `info` of one environment as floats, nested as they are.

    Gymnasium's vectors can stack only these: anything else, and integers of more than 64 bits, is left out.
    """
    found: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, Mapping):
            found[name] = scalar_info(value)
        elif is_number(value) and not (isinstance(value, int) and not -(2**63) <= value < 2**63):
            found[name] = float(value)
    return found


def is_number(value: Any) -> bool:
    """Return whether `value` is a single real number."""
    if isinstance(value, bool | int | float):
        return True
    return isinstance(value, np.generic | np.ndarray) and value.shape == () and value.dtype.kind in "biuf"


def _mask_missing(mask: Any, values: np.ndarray) -> np.ndarray:
    return values if mask is None else np.where(mask, values, np.float32(np.nan))


def stack_scalars(steps: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack scalars `[N]` of several steps to `[T, N]`, NaN where a step lacks one."""
    names = {name: len(x) for step in steps for name, x in step.items()}
    blank = {name: np.full(size, np.nan, np.float32) for name, size in names.items()}
    return {name: np.stack([step.get(name, blank[name]) for step in steps]) for name in names}

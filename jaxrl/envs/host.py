"""Environments not written in JAX: those of Gymnasium (https://gymnasium.farama.org), imported only when asked for."""

from typing import Any

import numpy as np

from jaxrl.errors import SettingsError, nearest
from jaxrl.types import Box, Discrete, EnvSpec, MultiDiscrete, PyTree, Space

PREFIX = "gymnasium:"
"""What the name of such an environment begins with, as in `gymnasium:CartPole-v1`."""


def gymnasium_spec(env: Any) -> EnvSpec:
    """Describe a Gymnasium environment, or one of a vector of them; raise `SettingsError` for a space that is unknown.

    A time limit is the environment's own affair: it says itself where it cuts an episode.
    """
    single = "single_" if hasattr(env, "single_action_space") else ""
    observations, actions = getattr(env, f"{single}observation_space"), getattr(env, f"{single}action_space")
    spec = getattr(env, "spec", None)
    name = PREFIX + (spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__)
    return EnvSpec(name, space_of(name, observations), space_of(name, actions))


def space_of(name: str, space: Any) -> Space:
    """Return the space of environment `name` that a Gymnasium space is."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: space_of(name, part) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(space_of(name, part) for part in space.spaces)
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "MultiDiscrete" and space.nvec.ndim == 1:
        return MultiDiscrete(tuple(int(n) for n in space.nvec))
    if kind == "MultiBinary" and len(space.shape) == 1:
        return MultiDiscrete((2,) * space.shape[0])
    if kind == "Box":
        dtype = np.float32 if space.dtype == np.float64 else space.dtype
        return Box(_bound(space.low), _bound(space.high), tuple(space.shape), str(np.dtype(dtype)))
    raise SettingsError(f"environment {name} has a space {space}; expected Box, Discrete, MultiDiscrete, Dict or Tuple")


def _bound(values: np.ndarray) -> float | tuple[float, ...]:
    flat = [float(x) for x in np.ravel(values)]
    return flat[0] if len(set(flat)) <= 1 and flat else tuple(flat)


def to_host(space: Any, action: PyTree) -> PyTree:
    """Return actions `[N, ...]` as a Gymnasium space of single actions expects them: from its own lowest number on."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: to_host(part, action[key]) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(to_host(part, x) for part, x in zip(space.spaces, action, strict=True))
    array = np.asarray(action)
    return array + space.start if kind in ("Discrete", "MultiDiscrete") else array.astype(space.dtype)


def require_gymnasium() -> Any:
    """Return the module; raise `SettingsError` with the line that installs it."""
    try:
        import gymnasium
    except ImportError:
        raise SettingsError(
            "environments of Gymnasium need the extra `gymnasium`: pip install 'jaxrl[gymnasium]'"
        ) from None
    return gymnasium


def check_name(name: str) -> str:
    """Return the Gymnasium id in `name`, which begins with `PREFIX`; raise `SettingsError` with the nearest names."""
    registry = require_gymnasium().registry
    id_ = name.removeprefix(PREFIX)
    if id_ not in registry:
        raise SettingsError(f"unknown environment {name!r}; {nearest(name, [PREFIX + known for known in registry])}")
    return id_

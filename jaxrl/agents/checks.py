"""Checks of settings that every agent makes."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax.numpy as jnp

from jaxrl.errors import SettingsError, check_between, check_count, nearest
from jaxrl.nn import ACTIVATIONS, DTYPES, TORSOS
from jaxrl.registry import ALGORITHMS, Actions, Kind, listed, names_of
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, box_bounds
from jaxrl.written import whole

Config = TypeVar("Config")

RANGES = {
    "lr": (0.0, 1e3),
    "max_grad_norm": (0.0, 1e30),
    "epsilon_start": (0.0, 1.0),
    "epsilon_end": (0.0, 1.0),
    "tau": (0.0, 1.0),
    "clip": (0.0, 1e30),
    "clip_value": (0.0, 1e30),
    "rho_clip": (0.0, 1e30),
    "c_clip": (0.0, 1e30),
    "entropy": (-1e30, 1e30),
    "value": (0.0, 1e30),
    "gae_lambda": (0.0, 1.0),
    "q_lambda": (0.0, 1.0),
    "target_kl": (0.0, 1e30),
    "policy_lr": (0.0, 1e3),
    "temperature_lr": (0.0, 1e3),
    "temperature": (1e-30, 1e30),
    "target_entropy": (-1e30, 1e30),
    "noise": (0.0, 1e30),
    "noise_memory": (0.0, 0.9999),
    "target_noise": (0.0, 1e30),
    "target_noise_clip": (0.0, 1e30),
    "v_min": (-1e30, 1e30),
    "v_max": (-1e30, 1e30),
    "noisy": (0.0, 1e30),
    "munchausen": (0.0, 1e30),
    "munchausen_temperature": (1e-6, 1e30),
    "bc_alpha": (0.0, 1e30),
    "cql": (0.0, 1e30),
    "beta": (0.0, 1e30),
    "max_weight": (1e-30, 1e30),
    "expectile": (1e-6, 1 - 1e-6),
}
"""Smallest and largest value of each setting that is a number."""
UNSET = ("v_min", "v_max")
"""Settings that may be left out, as `None`."""
LEAST = {
    "accumulate": 1,
    "epsilon_decay": 0,
    "lr_decay": 0,
    "target_interval": 1,
    "core_features": 1,
    "critics": 1,
    "policy_interval": 1,
    "atoms": 2,
    "cql_actions": 1,
}
"""Least value of each setting that is a count."""
CHOICES: dict[str, Iterable[str]] = {
    "loss": ("huber", "squared"),
    "values": ("expected", "c51", "qr", "iqn"),
    "activation": ACTIVATIONS,
    "torso": TORSOS,
    "dtype": DTYPES,
    "core": ("none", "gru", "lstm"),
    "surrogate": ("clipped", "plain", "weighted"),
    "normalise": ("minibatch", "batch", "none"),
}


def changed(name: str, config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings `config` of the agent `name`, some of them replaced, all of them checked.

    Raises:
      SettingsError: a setting that the agent does not have, or a value out of its range.
    """
    known: Mapping[str, Any] = config.__dataclass_fields__  # type: ignore[attr-defined]
    for word in settings:
        if word not in known:
            raise SettingsError(f"{name} has no setting {word!r}; {nearest(word, known, settings=True)}")
    settings = {word: whole(value) if word in LEAST else value for word, value in settings.items()}
    config = replace(config, **settings)  # type: ignore[type-var]
    for word in known:
        value = getattr(config, word)
        if word in UNSET and value is None:
            continue
        if word in RANGES:
            check_between(f"agent.{word}", value, *RANGES[word])
        elif word in LEAST:
            check_count(f"agent.{word}", value, LEAST[word], 2**31 - 1)
        elif word in CHOICES and value not in CHOICES[word]:
            raise SettingsError(f"unknown agent.{word} {value!r}; {nearest(str(value), CHOICES[word])}")
    widths = {word: _widths(word, getattr(config, word)) for word in ("features", "channels") if word in known}
    return replace(config, **widths)  # type: ignore[type-var]


def check_actions(name: str, spec: EnvSpec) -> None:
    """Raise `SettingsError` unless the agent `name` takes the actions of an environment."""
    space, row = spec.action_space, ALGORITHMS[name]
    kind = _actions_of(space)
    if kind in row.actions:
        return
    alike: tuple[Kind, ...] = ("offline",) if row.kind == "offline" else ("off_policy", "on_policy")
    others = names_of(*alike, actions=kind) or names_of("off_policy", "on_policy", actions=kind)
    if kind == "unbounded" and "bounded" in row.actions:
        raise SettingsError(
            f"{name} needs actions with a bound on both sides, but {spec.name} has {space}; use {listed(others, 'or')}"
        )
    takes = listed([word for word in ("continuous", "discrete") if _WORDS[word] & {*row.actions}], "or")
    raise SettingsError(
        f"{name} takes {takes} actions, but {spec.name} has {type(space).__name__} actions"
        f"{f' of {space.dtype}' if isinstance(space, Box) else ''}; agents for other actions: {listed(others)}"
    )


_WORDS = {"continuous": {"bounded", "unbounded"}, "discrete": {"discrete", "multidiscrete"}}


def _actions_of(space: Space) -> Actions | None:
    if isinstance(space, Discrete | MultiDiscrete):
        return "discrete" if isinstance(space, Discrete) else "multidiscrete"
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        return None
    return "bounded" if box_bounds(space)[2].all() else "unbounded"


def hyper_of(settings: Mapping[str, Any], names: Iterable[str], optional: Collection[str]) -> list[Any]:
    """Return the settings `names` as float32 scalars; an `optional` one is `()` if it is 0 or there is none.

    An option that is off leaves no trace in the state: what was saved before there was one stays good.
    """
    return [() if name in optional and not settings.get(name) else jnp.float32(settings[name]) for name in names]


def _widths(word: str, widths: Any) -> tuple[int, ...]:
    if not isinstance(widths, tuple | list):
        raise SettingsError(f"agent.{word} is {widths!r}; expected a width for each layer, as in (120, 84)")
    return tuple(check_count(f"agent.{word}", whole(width)) for width in widths)


def pieces(parts: int, rows: int) -> int:
    """Return `parts`, the setting `accumulate`; raise `SettingsError` unless it divides a batch of `rows`."""
    if rows % parts:
        raise SettingsError(f"agent.accumulate is {parts} and does not divide the batch size {rows}")
    return parts

"""Checks of settings that all agents share."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.agents.fields import rules_of
from jaxrl.agents.schedules import ALIASES, schedules_in, with_schedules
from jaxrl.errors import SettingsError, suggest
from jaxrl.masks import check_observation_entries
from jaxrl.registry import ALGORITHMS, Actions, Kind, algorithm_names, config_class, join_names
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, box_bounds, is_leaf
from jaxrl.tuning import tunable

Config = TypeVar("Config")


def replace_settings(name: str, config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings `config` of the agent `name` with some replaced and all checked.

    Raises:
      SettingsError: these are no settings of the agent, it has no such setting, or a value is out of range.
    """
    expected = config_class(name)
    check_config(name, config, expected)
    known: Mapping[str, Any] = config.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(config, expected):
        raise SettingsError(
            f"the settings of {name} are {type(config).__name__}; expected {expected.__name__}, or a subclass of it"
        )
    # Schedules are taken out first, since the rules of their fields allow numbers alone.
    settings = with_schedules(settings, cast(Any, config).schedules)
    for word in settings:
        if word not in known:
            raise SettingsError(f"{name} has no setting {word!r}; {suggest(word, known, settings=True)}")
    config = replace(config, **settings)
    # All fields are checked, and not only those replaced here: `config` may have been made by hand.
    checked, kind = {}, cast(Any, type(config))
    for word, (rule, optional) in rules_of(kind).items():
        value = getattr(config, word)
        checked[word] = None if optional and value is None else rule.check(f"agent.{word}", value)
    # What schedules decide comes last, and replaces the numbers given for the same fields.
    return replace(config, **{**checked, **_settings_of_schedules(name, config)})


def check_config(name: str, config: object, expected: Any) -> None:
    """Raise `SettingsError` unless `config` is a dataclass, such as the settings `expected` of the agent `name`."""
    if isinstance(config, type) or not is_dataclass(config):
        example = next(iter(expected.__dataclass_fields__), "name")
        raise SettingsError(
            f"the settings of {name} are {config!r:.60}; expected {expected.__name__}(...), or settings by name, as in "
            f"{name}({example}=...)"
        )


def _settings_of_schedules(name: str, config: Any) -> dict[str, Any]:
    """Return the settings of an agent that its schedules decide: the schedules as `str` writes them, and their peaks.

    A schedule of a learning rate takes the place of `lr_decay`, which is one for all learning rates.
    """
    schedules, rules = schedules_in(config.schedules), rules_of(cast(Any, type(config)))
    decided: dict[str, Any] = {"schedules": tuple(f"{word}={schedule}" for word, schedule in schedules.items())}
    for word, schedule in schedules.items():
        for field in ALIASES.get(word, (word,)):
            if field not in rules:
                raise SettingsError(f"{name} has no setting {word!r} for a schedule; {suggest(word, rules)}")
            # A schedule moves between these values alone, so they stand for all of it.
            for value in (schedule.start, schedule.end, *([0.0] if schedule.warmup else [])):
                rules[field][0].check(f"agent.{field}, in its schedule,", value)
            # The value furthest from 0: an option whose schedule begins or ends at 0 counts as on.
            decided[field] = schedule.peak
        if word == "lr" or word.endswith("_lr"):
            decided["lr_decay"] = 0
    return decided


def refuse_beside(config: Any, setting: str, off: Any = 0, **usual: Any) -> None:
    """Raise `SettingsError` if a `setting` is not `off`, beside another whose value differs from that in `usual`."""
    if (value := getattr(config, setting)) == off:
        return
    for name, fits in usual.items():
        if (other := getattr(config, name)) != fits:
            raise SettingsError(
                f"agent.{setting} is {value} and agent.{name} {other}, which do not go together; set {name} to {fits}, "
                f"or {setting} to {off}"
            )


def check_actions(name: str, spec: EnvSpec) -> None:
    """Raise `SettingsError` unless the agent `name` supports the action space of `spec`, and its mask if it has one."""
    check_observation_entries(spec)
    space, row = spec.action_space, ALGORITHMS[name]
    kind = _actions_of(space)
    if kind in row.actions:
        return
    # Agents of the same kind are suggested first; offline, no agent may support these actions.
    alike: tuple[Kind, ...] = ("offline",) if row.kind == "offline" else ("off_policy", "on_policy")
    others = algorithm_names(*alike, actions=kind) or algorithm_names("off_policy", "on_policy", actions=kind)
    if kind == "unbounded" and "bounded" in row.actions:
        raise SettingsError(
            f"{name} needs actions with a bound on both sides, but {spec.name} has {space}; "
            f"use {join_names(others, 'or')}"
        )
    takes = join_names([word for word in ("continuous", "discrete") if _WORDS[word] & {*row.actions}], "or")
    raise SettingsError(
        f"{name} takes {takes} actions, but {spec.name} has {_describe(space)}; agents for "
        f"{'such' if kind == 'composite' else 'other'} actions: {join_names(others)}"
    )


def _describe(space: Space) -> str:
    if isinstance(space, Box):
        return f"Box actions of {space.dtype}"
    kinds = {type(leaf).__name__: None for leaf in jax.tree.leaves(space, is_leaf=is_leaf)}
    if is_leaf(space) or not kinds:
        return f"{type(space).__name__} actions"
    return f"{'dict' if isinstance(space, Mapping) else 'tuple'} actions of {join_names(kinds)}"


_WORDS = {"continuous": {"bounded", "unbounded"}, "discrete": {"discrete", "multidiscrete"}}


def _actions_of(space: Space) -> Actions | None:
    if isinstance(space, Mapping | tuple):
        parts = jax.tree.leaves(space, is_leaf=is_leaf)
        return "composite" if parts and all(map(_actions_of, parts)) else None
    if isinstance(space, Discrete | MultiDiscrete):
        return "discrete" if isinstance(space, Discrete) else "multidiscrete"
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        return None
    return "bounded" if box_bounds(space)[2].all() else "unbounded"


def make_hyper(settings: Mapping[str, Any], names: Iterable[str], optional: Collection[str] = ()) -> list[Any]:
    """Return the settings `names` as float32 scalars; an `optional` one is `()` if it is 0 or missing.

    An option that is off leaves no trace in the state, so checkpoints from before the option existed stay valid.
    """
    off = {name for name in optional if not settings.get(name)}
    return [() if name in off else tunable(f"agent.{name}", settings[name]) for name in names]


def check_pieces(parts: int, rows: int) -> int:
    """Return `parts`, the setting `accumulate`; raise `SettingsError` unless it divides the batch size `rows`."""
    if rows % parts:
        among = f" among {count} shards" if (count := shards.num_shards()) > 1 else ""
        raise SettingsError(f"agent.accumulate is {parts} and does not divide the batch size {rows * count}{among}")
    return parts

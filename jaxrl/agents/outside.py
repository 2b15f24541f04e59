"""Algorithms from outside of the package, with all that the built-in ones have."""

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from inspect import signature
from typing import Any, get_args

from jaxrl.agents.base import Agent, AgentMaker, Maker
from jaxrl.agents.checks import check_actions, check_config
from jaxrl.agents.custom import PARTS
from jaxrl.errors import SettingsError, describe_error, suggest
from jaxrl.registry import ALGORITHMS, SINGLE, Actions, Algorithm, Kind, join_names
from jaxrl.spaces import EnvSpec


def register_algorithm(
    name: str,
    make: Callable[..., AgentMaker],
    *,
    like: str | None = None,
    kind: Kind | None = None,
    config: type | None = None,
    actions: tuple[Actions, ...] | None = None,
    env: str | None = "",
    settings: Mapping[str, Any] | None = None,
) -> Callable[..., AgentMaker]:
    """Make an algorithm known in this process, by `name`; return its maker, to be used as `jaxrl.dqn` is.

    It then has flags (`--agent.NAME` for each field of its settings), `--help`, a settings file, resume, `load_policy`
    and the other commands. A run directory holds its name and settings, never its code, so a process that goes on with
    a run registers it too.

    Args:
      name: what `jaxrl.train` and `config.yaml` call it.
      make: function from the settings to what makes an agent of an `EnvSpec`; the agent's own `name` and `settings` are
        replaced by those given here.
      like: name of the algorithm that it is built on, as `"ppo"`. `kind`, `actions` and `env` are then those of that
        algorithm if left out, and `settings` are added to its own. Presets for environments are not taken over.
      kind: what it learns from: `off_policy`, `on_policy` (its agent has `prepare`) or `offline`. By default that of
        the built-in agent that `make` returns with the default settings, if it does, otherwise `off_policy`.
      config: the dataclass of its settings, all with defaults; left out, the type with which the first parameter of
        `make` is annotated.
      actions: the action spaces that it supports: any of `discrete`, `multidiscrete`, `bounded`, `unbounded` and
        `composite`, which is a dict or tuple of the others and not among the default.
      env: the environment of a run that names none (default: CartPole-v1, or none where `kind` is found to be offline).
      settings: settings of a run that suit it, nested by name, as in `{"num_envs": 1, "buffer": {"batch_size": 256}}`.

    Raises:
      SettingsError: the name is taken, an algorithm or a kind of learning or action is unknown, or the settings have
        no defaults.
    """
    if name in ALGORITHMS:
        raise SettingsError(f"an algorithm is already registered as {name!r}; choose another name")
    config = settings_class(name, make) if config is None else config
    base = _find_defaults(name, like)
    if kind is None and like is None and (kind := infer_kind(make, config)) == "offline" and env == "":
        env = None
    kind = kind or base.kind
    actions = base.actions if actions is None else actions
    env = base.env if env == "" else env
    for what, given, known in (("kind", (kind,), get_args(Kind)), ("actions", actions, get_args(Actions))):
        if odd := [x for x in given if x not in known]:
            raise SettingsError(f"{what} of {name} is {odd[0]!r}; expected {join_names(known, 'or')}")
    try:
        config()
    except TypeError as error:
        raise SettingsError(f"{name}: the settings {config.__name__} need defaults: {describe_error(error)}") from error
    if like is not None and kind != base.kind:
        raise SettingsError(f"kind of {name} is {kind}, but {like} is {base.kind}; leave out kind, or like")
    settings, bound = _merge(base.settings, settings or {}), partial(_make, name, make, config)
    ALGORITHMS[name] = Algorithm(name, make.__module__, config.__name__, kind, actions, env, settings, bound, config)
    return bound


def _find_defaults(name: str, like: str | None) -> Algorithm:
    """Return the defaults of a new algorithm: those of the algorithm `like`, or else general ones."""
    if like is None:
        return Algorithm(name, "", "", "off_policy", SINGLE)
    if like not in ALGORITHMS:
        raise SettingsError(f"{name}: like is {like!r}, which is no algorithm; {suggest(like, ALGORITHMS)}")
    return ALGORITHMS[like]


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested `settings` with some replaced."""
    nested = {
        name: _merge(settings[name], value)
        for name, value in changes.items()
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping)
    }
    return {**settings, **changes, **nested}


def infer_kind(make: Callable[..., AgentMaker], config: type) -> Kind | None:
    """Return the kind of the registered algorithm whose maker `make` returns for the default settings, if it does."""
    try:
        made = make(config())
    except Exception:  # raised again, with its cause, where the agent is built
        return None
    row = ALGORITHMS.get(str(made.args[0])) if isinstance(made, Maker) else None
    return None if row is None else row.kind


def made_by_hand(algo: object, custom: Iterable[str]) -> list[str]:
    """Return the parts among `custom` of a run of `algo` that naming its algorithm does not bring back.

    What an algorithm of the user's own passes to a built-in agent, such as a target, its maker passes again.
    """
    row = ALGORITHMS.get(str(algo))
    built_in = row is not None and row.make is None
    return [part for part in custom if built_in or part not in PARTS]


def needs_python(settings: Mapping[str, Any]) -> list[str]:
    """Return the parts made in Python of a run with these `settings` that naming its algorithm does not bring back."""
    algo, custom = settings.get("algo"), list(settings.get("custom") or [])
    return made_by_hand(algo, custom) if algo in ALGORITHMS else custom


def settings_class(name: str, make: Callable[..., Any]) -> type:
    """Return the dataclass with which the first parameter of `make` is annotated.

    Raises:
      SettingsError: there is no such parameter, or its type is no dataclass.
    """
    first = next(iter(signature(make).parameters), None)
    hint = typing.get_type_hints(make).get(first or "")
    for kind in (hint, *get_args(hint)):  # both of `Config` and `Config | None`
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    raise SettingsError(
        f"{name}: the first parameter of the function is annotated with {hint}; expected the dataclass of its "
        "settings, as in def make(config: MyConfig)"
    )


def _make(name: str, make: Callable[..., AgentMaker], kind: type, config: Any = None, **settings: Any) -> AgentMaker:
    """Return the maker of agents with the settings `config`, of which some are replaced."""
    if config is not None:
        check_config(name, config, kind)
    try:
        config = kind(**{**(asdict(config) if config is not None else {}), **settings})
    except TypeError as error:
        raise SettingsError(f"{name}: {describe_error(error)}") from error
    return Maker(_build, name, make, config)


def _build(name: str, make: Callable[..., AgentMaker], config: Any, spec: EnvSpec) -> Agent:
    check_actions(name, spec)
    try:
        agent = make(config)(spec)
    # These already tell the user what to change.
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{name} failed on {spec.name}: {describe_error(error)}") from error
    if not isinstance(agent, Agent):
        raise SettingsError(f"{name} made {type(agent).__name__} for {spec.name}; expected a jaxrl.Agent")
    info = agent.info._replace(settings=asdict(config), offline=ALGORITHMS[name].kind == "offline")
    return agent._replace(name=name, info=info)

"""Populations from the command line: any setting of the training may be swept, each program of its own built once."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxrl.cli.algos import EnvRun, build
from jaxrl.cli.config import flag_types, from_plain
from jaxrl.errors import SettingsError, suggest
from jaxrl.parsing import parse_value
from jaxrl.strategies import Strategy
from jaxrl.strategies.population import (
    Population,
    Range,
    combinations,
    keeps_program,
    make_population,
    parse_values,
    replace_settings,
    resolve_layout,
    sweepable,
    with_values,
)
from jaxrl.strategies.search import make_search
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.settings import TrainerConfig

OF_ENV = "env_args."
"""How the names of swept parameters of the environment begin."""


@dataclass(frozen=True)
class PopulationConfig:
    """The members of a population: each setting of a sweep, with each of several seeds."""

    seeds: int = 1
    """Runs of each setting, with the seed of the run and those that follow it."""
    sweep: Any = None
    """Values of swept settings by name: a list, or a range as text, log_uniform(1e-5,1e-2) or between(0.9,0.999)."""
    members: int | None = None
    """Members in all, where a range is drawn from."""
    draw_seed: int = 0
    """Seed of these draws."""
    halving: Any = None
    """Successive halving among the members: its factor, or its settings by name."""
    pbt: Any = None
    """Population-based training: its interval in optimisation steps, or its settings by name."""
    layout: str = "auto"
    """How members train: spread over cores and devices, together in one program, or auto, as suits the platform."""
    width: int | None = None
    """Members in one program, where they train together; unset: all that share it."""


def read_sweep(words: Sequence[str]) -> dict[str, Any]:
    """Read `name=values` as they stand on a command line; what they mean is known with the settings alone.

    Raises:
      SettingsError: a word of another form, or a name twice.
    """
    sweep: dict[str, Any] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not equals or not name or not values or ",," in f",{values},":
            raise SettingsError(f"--sweep {word!r}; expected a setting and its values, as in agent.lr=1e-4,3e-4")
        if name in sweep:
            raise SettingsError(f"--sweep names {name} twice; give all its values at once")
        found = parse_values(values)
        sweep[name] = str(found) if isinstance(found, Range) else list(found)
    return sweep


def build_population(
    algo: str, config: Any, asked: PopulationConfig, teacher: GreedyPolicy | None = None
) -> Population:
    """Build the population that is `asked` for, of runs like `config`, which may have a `teacher`.

    Members whose settings differ only in what lives in their states as arrays share a strategy, and its programs.

    Raises:
      SettingsError: a setting that cannot be swept, a value that it cannot have, numbers that do not fit.
    """
    sweep = {name: _values(config, name, values) for name, values in (asked.sweep or {}).items()}
    combined = combinations(sweep, asked.seeds, asked.members, asked.draw_seed)
    configs = [from_plain(config, replace_settings(_env_args_if_swept(config, swept), swept)) for swept in combined]
    for one in configs:
        one.check()
    built: dict[str, tuple[Strategy, dict[str, float]]] = {}
    base = build(algo, configs[0], teacher)
    known = sweepable(base) if sweep else {}
    variants = []
    for swept, one in zip(combined, configs, strict=True):
        alive = {name: value for name, value in swept.items() if keeps_program(name, value, known)}
        rest = repr({name: value for name, value in swept.items() if name not in alive})
        if rest not in built:
            strategy = build(algo, one, teacher)
            built[rest] = strategy, sweepable(strategy)
        strategy, own = built[rest]
        if any(name not in own for name in alive):  # here they hang on what is turned off
            variants.append(build(algo, one, teacher))
            continue
        # What a strategy was built with needs no other value.
        other = {name: value for name, value in alive.items() if own[name] != value}
        variants.append(with_values(strategy, other, own))
    search = make_search({"halving": asked.halving, "pbt": asked.pbt})
    layout = resolve_layout(asked.layout, asked.width, max(strategy.placement.shards for strategy in variants))
    return make_population(variants, combined, asked.seeds, sweep, asked.members, asked.draw_seed, search, layout)


def _env_args_if_swept(config: Any, swept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the environment, of which one that is swept must leave the others as they are."""
    return {"env_args": dict(config.env_args)} if any(name.startswith(OF_ENV) for name in swept) else {}


def _of_env(config: Any, name: str, given: Any) -> Sequence[Any] | Range:
    """Return the values of a swept parameter of the environment.

    Raises:
      SettingsError: it is none, no number, or members would be scored in environments of their own.
    """
    own = name.removeprefix(OF_ENV)
    numbers = [OF_ENV + known for known, value in config.env_args.items() if type(value) in (int, float)]
    if not isinstance(config, EnvRun) or name not in numbers:
        hint = suggest(name, numbers) if numbers else f"give it a number first, as in --env-args {own} 1"
        raise SettingsError(f"{name!r} cannot be swept; {hint}")
    if config.eval_env is None and own not in config.eval_env_args:
        raise SettingsError(
            f"a sweep of {name} trains in several environments, whose scores cannot be compared; say in which one all "
            f"are evaluated, as in --eval-env-args {own} {config.env_args[own]}"
        )
    found, base = parse_values(given) if isinstance(given, str) else given, config.env_args[own]
    if isinstance(found, Range):
        if isinstance(base, int):
            raise SettingsError(
                f"{name} is a whole number, {base}, so nothing can be drawn from {found}; list its values, or give it "
                f"a fraction first, as in --env-args {own} {float(base)}"
            )
        return found
    typed = [parse_value(str(value)) for value in found] if isinstance(found, list | tuple) else []
    if not typed or any(type(value) not in (int, float) for value in typed):
        raise SettingsError(f"sweep of {name} is {given!r}; expected a list of numbers, or a range")
    return typed if isinstance(base, int) else [float(value) for value in typed]


def _values(config: Any, name: str, given: Any) -> Sequence[Any] | Range:
    """Return the values of a swept setting in its type; raise `SettingsError` for what cannot be swept."""
    if name.startswith(OF_ENV):
        return _of_env(config, name, given)
    kinds = {flag.removeprefix("--").replace("-", "_"): kind for flag, kind in flag_types(config).items()}
    of_trainer = {field.name for field in fields(TrainerConfig)}
    able = {known: kind for known, kind in kinds.items() if known not in of_trainer and kind in (int, float, bool, str)}
    for fixed in ("env", "eval_env", "teacher"):  # all members are scored in one environment, and have one teacher
        able.pop(fixed, None)
    if name not in able:
        hint = "give --seeds" if name == "seed" else suggest(name, able, settings=True)
        raise SettingsError(f"{name!r} cannot be swept; {hint}")
    found = parse_values(given) if isinstance(given, str) else given
    if isinstance(found, Range):
        if able[name] is not float:
            raise SettingsError(f"{name} takes no fractions, so nothing can be drawn from {found}; list its values")
        return found
    if not isinstance(found, list | tuple) or not found:
        raise SettingsError(f"sweep of {name} is {given!r}; expected a list of values, or a range")
    configs = [from_plain(config, replace_settings({}, {name: value})) for value in found]
    return [operator.attrgetter(name)(one) for one in configs]

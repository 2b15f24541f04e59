"""What a population cannot be, said before it begins."""

from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import SettingsError
from jaxrl.strategies.population import Population
from jaxrl.strategies.search import Halving, upgrade_settings
from jaxrl.training.mesh import MeshShape, check_there, near_shape, require_all_used, require_even, shape_of
from jaxrl.training.population.teams import widths
from jaxrl.training.processes import require_alone
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.members import population_of
from jaxrl.training.storage.run_dir import CONFIG, LOCK, plain, read_yaml


def check_members(population: Population, config: TrainerConfig) -> None:
    """Raise `SettingsError` if the members cannot be trained side by side under `config`."""
    config.check()
    require_alone("a population")
    members = population.members
    if config.seed + max(m.seed for m in members) > 2**32 - 1:
        raise SettingsError(f"seed is {config.seed}; seeds of members end at {2**32 - 1}")
    if any(member.strategy.actor_fns is not None for member in members):
        raise SettingsError(
            "members of a population train in environments written in JAX; train with one seed at a time"
        )
    if config.mesh is None:
        check_devices(population, config.devices)
    else:
        check_mesh(population, shape_of(config.mesh, config.devices, of_members=True), config.devices)


def check_mesh(population: Population, shape: MeshShape, devices: int) -> None:
    """Raise `SettingsError`, naming the nearest mesh, unless members and their shards can be divided over `shape`.

    `devices` are those that were asked for; 1: all that there are.
    """
    count, shards = len(population.members), {member.strategy.placement.shards for member in population.members}
    there = check_there(devices) if devices > 1 else len(jax.devices())
    if population.layout.name == "together" and shape.envs > 1:
        raise SettingsError(
            f"mesh {shape} has {shape.envs} devices for each member, but members that train together have one for all "
            "of a program; set layout to spread, or leave envs out"
        )
    for one in sorted(shards):
        require_even(one, shape.envs, "mesh envs")
    fits = lambda fit: fit.members <= count and all(one % fit.envs == 0 for one in shards)
    if devices == 1:
        require_all_used(shape, there, fits)
    if population.layout.name == "together":
        check_devices(population, shape.members)
    elif shape.members > count:
        near = near_shape(shape, shape.devices, fits)
        raise SettingsError(
            f"mesh {shape} has {shape.members} groups, but there are {count} members; set mesh to {near}"
        )


def check_devices(population: Population, devices: int) -> None:
    """Raise `SettingsError` unless there are so many devices, and a part of the population for each."""
    check_there(devices)
    count = len(population.members)
    if population.layout.name == "spread":
        if devices > count:
            raise SettingsError(f"devices is {devices}, but there are {count} members; set devices to {count} at most")
    elif devices > (teams := len(widths(population))):
        at_most = max(count // devices, 1)
        raise SettingsError(
            f"devices is {devices}, but members train together in {teams} program{'s' * (teams > 1)}, each on one "
            f"device; set width to {at_most}, so that there is one for each, or devices to {teams}"
        )


def require_same(population: Population, max_opts: int, path: Path) -> None:
    """Raise `SettingsError` unless the population in `path` is this one, and can be trained to `max_opts`."""
    found, own = population_of(path), plain(population.settings)
    if (there := found and upgrade_settings(found)) != own:
        raise SettingsError(
            f"{path} holds {f'the population {there}' if there else 'a run of its own'}, not {own}; "
            "go on with what is there, or choose another run directory"
        )
    require_rungs(population, read_yaml(path / CONFIG).get("max_opts"), max_opts, path)


def require_rungs(population: Population, before: Any, max_opts: int, what: object) -> None:
    """Raise `SettingsError` where the rungs of halving follow from other optimisation steps, those of `before`."""
    if isinstance(population.search, Halving) and before != max_opts:
        raise SettingsError(
            f"max_opts is {max_opts}, but the rungs of {what} follow from {before}; keep it, or go on "
            "with the best members as runs of their own (jaxrl.extract)"
        )


def require_begun(path: Path) -> None:
    """Raise `SettingsError` if at the place of a member that has no settings there is anything but its beginning."""
    if path.is_dir():
        kept = [entry.name for entry in path.iterdir() if entry.name not in (LOCK, f".{CONFIG}.tmp")]
        if kept:
            raise SettingsError(f"{path} has no {CONFIG}, but {min(kept)}")
    elif path.exists():
        raise SettingsError(f"{path} is a file, and no directory of a member")

"""What a population cannot be, said before it begins."""

from jaxrl.errors import SettingsError
from jaxrl.strategies.population import Population
from jaxrl.training.devices import check_there
from jaxrl.training.population.teams import widths
from jaxrl.training.processes import require_alone
from jaxrl.training.settings import TrainerConfig


def check_members(population: Population, config: TrainerConfig) -> None:
    """Raise `SettingsError` if the members cannot be trained side by side under `config`."""
    config.check()
    require_alone("a population")
    members = population.members
    if config.seed + max(m.seed for m in members) > 2**32 - 1:
        raise SettingsError(f"seed is {config.seed}; seeds of members end at {2**32 - 1}")
    if any(member.strategy.remote is not None for member in members):
        raise SettingsError(
            "members of a population train in environments written in JAX; train with one seed at a time"
        )
    if any(member.strategy.shards > 1 for member in members):
        raise SettingsError("shards are for a single run; members of a population are spread over devices as they are")
    check_devices(population, config.devices)


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

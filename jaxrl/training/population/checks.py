"""What a population cannot be, said before it begins."""

from collections.abc import Sequence

from jaxrl.errors import SettingsError
from jaxrl.strategies.population import Member
from jaxrl.training.processes import require_alone
from jaxrl.training.settings import TrainerConfig


def check_members(members: Sequence[Member], config: TrainerConfig) -> None:
    """Raise `SettingsError` if `members` cannot be trained side by side under `config`."""
    config.check()
    require_alone("a population")
    if config.seed + max(m.seed for m in members) > 2**32 - 1:
        raise SettingsError(f"seed is {config.seed}; seeds of members end at {2**32 - 1}")
    if any(member.strategy.remote is not None for member in members):
        raise SettingsError(
            "members of a population train in environments written in JAX; train with one seed at a time"
        )
    if config.devices > 1:
        raise SettingsError("devices are for the shards of a single run; leave them at 1 for a population")

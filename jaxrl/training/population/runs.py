"""A member on its way: how it began, and whose place it took."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import DivergedError, NoCheckpointError, SettingsError
from jaxrl.strategies.population import Member, set_values, with_values
from jaxrl.strategies.search import Copy
from jaxrl.training.devices import copied
from jaxrl.training.logbook import flat
from jaxrl.training.population.scores import HALVED, named
from jaxrl.training.report import Report
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.members import Membership
from jaxrl.training.storage.run_dir import CONFIG, read_yaml
from jaxrl.training.taking_up import prolonged
from jaxrl.training.trainer import Trainer

COPY_STREAM = 2**32 - 3
"""Folded into the key of the seed of a member that takes over from another, before the place and its number."""
ENDS = ("stop_reward", "patience", "stop", HALVED)
"""Why a member may have ended before the others."""


def same_ends(path: Path, config: TrainerConfig) -> bool:
    """Return whether what a member stopped at is still what it would stop at."""
    old = read_yaml(path / CONFIG)
    return all(old.get(name) == getattr(config, name) for name in ("stop_reward", "patience"))


def taken_over(path: Path, member: Member) -> dict[str, Any]:
    """Return the values of swept settings under which a member was saved in `path`, where it may have taken over."""
    try:
        saved = flat(Store(path / "checkpoints", 1).newest_facts()[1]["settings"])
    except (NoCheckpointError, KeyError, AttributeError):
        return {}  # it begins again, or its trainer says what is wrong
    return {name: saved[name] for name, value in member.swept.items() if saved.get(name, value) != value}


@contextmanager
def explain_damage(path: Path | None, member: Member) -> Iterator[None]:
    """Let a member begin or go on inside; where what is on disk does not let it, say which one it is, and the remedy.

    It can be trained anew to the same bits, unless it has taken over from another, which has moved on.
    """
    try:
        yield
    except NoCheckpointError as error:
        reason = str(error).partition(";")[0]
        raise NoCheckpointError(f"member {member.number}: {reason}; {_remedy(path, member)}") from error
    except SettingsError as error:
        if path is None or (path / CONFIG).exists():
            raise
        raise SettingsError(f"member {member.number}: {error}; {_remedy(path, member)}") from error


def _remedy(path: Path | None, member: Member) -> str:
    """Say what helps a member whose directory is damaged."""
    try:
        settings = flat(read_yaml(path / CONFIG)) if path is not None else {}
    except SettingsError:
        settings = taken_over(path, member) if path is not None else {}
    if any(settings.get(name, value) != value for name, value in member.swept.items()):
        return (
            "it had taken over from another member, so it cannot be trained anew; extract the members that you want, "
            "and go on with these"
        )
    return f"remove {path}, and resume again: this member alone is trained anew, to the same bits"


class Run:
    """A member on its way."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.membership = Membership(member.number)
        self.status = "running"
        self.trainer: Trainer | None = None
        self.scores: tuple[float | None, float | None] = (None, None)
        """The best and the last, of one that diverged before."""
        self.reports: Generator[Report, None, None] | None = None
        self.trained_to = -1
        """Optimisation steps of its last evaluation here, in a search."""

    def kept(self) -> "Run":
        """Return the member for another call, which goes on from where its trainer stands."""
        again = Run(self.member)
        again.trainer, again.scores, again.membership = self.trainer, self.scores, self.membership
        again.status = self.status if self.status in (*ENDS, "diverged") else "running"
        return again

    def go_on(self, max_opts: int) -> None:
        """Go on in memory, to `max_opts` optimisation steps; one that had an end of its own goes no further.

        Raises:
          DivergedError: it had diverged.
          SettingsError: it has made more optimisation steps.
        """
        trainer = self.trainer
        assert trainer is not None
        if self.status == "diverged":
            raise DivergedError(f"member {self.member.number} diverged")
        if self.status in ENDS:
            self.reports = _none()
            return
        done = trainer.schedule.opt_steps(trainer.ledger.t)
        trainer.config, trainer.schedule, _ = prolonged(trainer.strategy, trainer.config, max_opts, done)


def _none() -> Generator[Report, None, None]:
    yield from ()


def take_over(own: Run, other: Run, copy: Copy, place: int, device: Any) -> None:
    """Let a member go on as its parent stands after `place` optimisation steps, under other settings.

    It may be done again after a crash, and must then come to the same. So its stream of randomness hangs on its seed,
    on the place and on its number alone: members may share a seed, and copies of one parent must not stay the same.
    """
    trainer, parent = own.trainer, other.trainer
    if own.membership.adopted_at == place:
        return  # before a crash, and that is what was loaded
    if trainer is None or parent is None or trainer.state is None or parent.state is None:
        return  # one of them has come to its end
    key = jax.random.key(trainer.config.seed, impl=str(jax.random.key_impl(trainer.state.key)))
    for part in (COPY_STREAM, place, copy.member):
        key = jax.random.fold_in(key, part)
    state = copied(trainer.strategy, parent.state, device)._replace(key=key)
    line = f"goes on as member {copy.parent} stood after {place} optimisation steps, with {named(copy.values)}"
    own.membership.adopted_at = place
    trainer.adopt(set_values(own.member, state, copy.values), with_values(own.member.strategy, copy.values), line)

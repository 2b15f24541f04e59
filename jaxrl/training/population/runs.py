"""A member on its way: how it began, and whose place it took."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import DivergedError, NoCheckpointError
from jaxrl.strategies.base import Strategy
from jaxrl.strategies.population import Member, moved, with_values
from jaxrl.strategies.search import Copy
from jaxrl.training.devices import copied
from jaxrl.training.logbook import flat
from jaxrl.training.population.scores import HALVED, named
from jaxrl.training.report import Report
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.run_dir import CONFIG, read_yaml
from jaxrl.training.taking_up import prolonged
from jaxrl.training.trainer import Trainer
from jaxrl.trees import PyTree

COPY_STREAM = 2**32 - 3
"""Folded, before its number, into the key of a member that takes over from another."""
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


class Run:
    """A member on its way."""

    def __init__(self, member: Member) -> None:
        self.member = member
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
        again.trainer, again.scores = self.trainer, self.scores
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


def take_over(own: Run, other: Run, copy: Copy, gate: int, device: Any) -> None:
    """Let a member go on as its parent stands, under other settings and with a stream of randomness of its own.

    The stream hangs on its number: members may share a seed, and copies of one parent must not stay the same.
    """
    trainer, parent = own.trainer, other.trainer
    if trainer is None or parent is None or trainer.state is None or parent.state is None:
        return  # one of them has come to its end
    key = jax.random.fold_in(jax.random.fold_in(trainer.state.key, COPY_STREAM), copy.member)
    state = copied(trainer.strategy, parent.state, device)._replace(key=key)
    told = f"goes on as member {copy.parent} stood after {gate} optimisation steps, with {named(copy.values)}"
    _adopt(trainer, moved(own.member, state, copy.values), with_values(own.member.strategy, copy.values), told)


def _adopt(trainer: Trainer, state: PyTree, strategy: Strategy, told: str) -> None:
    """Let a trainer go on from another state and with other settings of the same program; `told` becomes an event.

    Raises:
      StorageError: it could not be written.
    """
    own, storage = trainer.strategy, trainer._storage
    trainer.state, trainer.strategy = state, strategy._replace(devices=own.devices, first_device=own.first_device)
    storage.renew(trainer.settings())
    step = trainer.ledger.changed_at = trainer.schedule.opt_steps(trainer.ledger.t)
    trainer._log.event("adopted", told)
    storage.save(step, trainer._saved(), trainer._facts(), trainer._best, again=True)
    storage.settle()
    if storage.error is not None:
        raise storage.error

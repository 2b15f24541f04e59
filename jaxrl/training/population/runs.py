"""A member on its way: how it began, and whose place it took."""

import heapq
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import NoCheckpointError
from jaxrl.strategies.population import Member, moved, with_values
from jaxrl.strategies.search import Copy
from jaxrl.training.devices import copied
from jaxrl.training.logbook import flat
from jaxrl.training.population.scores import named
from jaxrl.training.report import Report
from jaxrl.training.settings import TrainerConfig
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.run_dir import CONFIG, read_yaml
from jaxrl.training.trainer import Trainer

COPY_STREAM = 2**32 - 3
"""Folded, before its number, into the key of a member that takes over from another."""
HALVED = "halved"
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


def least_far(waiting: list[tuple[int, int]], free: Callable[[int], bool]) -> int | None:
    """Take out of a heap the entry of the member that is least far, of those that are `free`; return its place."""
    later = []
    while waiting and not free(waiting[0][1]):
        later.append(heapq.heappop(waiting))
    found = heapq.heappop(waiting)[1] if waiting else None
    for entry in later:
        heapq.heappush(waiting, entry)
    return found


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
    trainer.adopt(moved(own.member, state, copy.values), with_values(own.member.strategy, copy.values), told)

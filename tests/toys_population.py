"""Populations of two small members, and how those that have begun go on."""

from functools import cache
from pathlib import Path
from typing import Any

from toys_trainer import small_dqn

import jaxrl
from jaxrl.strategies.population import Population
from jaxrl.training.loop import Trainer
from jaxrl.training.population.scores import PopulationResult
from jaxrl.training.storage.leaves import state_digest

LENGTH = {"max_opts": 60, "eval_interval": 20, "eval_episodes": 3, "record_interval": 20, "save_interval": 20}
BEGUN = {**LENGTH, "max_opts": 20, "quiet": True}


@cache
def two(layout: str = "spread") -> Population:
    return jaxrl.population(small_dqn(), seeds=2, layout=layout)


def go_on(run: Path, **settings: Any) -> PopulationResult:
    """Train the two members of a directory to 40 steps."""
    return Trainer(two(), **{**BEGUN, "max_opts": 40, **settings}, run_dir=run, resume=True).train()


def digests(result: PopulationResult) -> list[str]:
    """Return the digest of the state of each member that has one."""
    return [state_digest(member.result.state) for member in result.members if member.result is not None]

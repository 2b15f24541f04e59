"""What tests share of agents that learn from somebody beside their rollouts: a teacher, or demonstrations."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.training.storage.group import open_store

SMALL: dict[str, Any] = {"features": (8,)}
QUIET: dict[str, Any] = {
    "eval_interval": 0,
    "eval_episodes": 0,
    "record_interval": 0,
    "save_interval": 0,
    "quiet": True,
}


def leaves_of(run: Path, step: int) -> Any:
    """Return all arrays of a checkpoint by path."""
    return open_store(run, "checkpoints").read(step)[0]


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

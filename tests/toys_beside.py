"""What tests share of agents that learn from somebody beside their rollouts: a teacher, or demonstrations."""

from pathlib import Path
from typing import Any

import numpy as np
from toys_agents import DISCRETE
from toys_masks import minefield

import jaxrl
from jaxrl.training.storage.group import open_store

SMALL: dict[str, Any] = {"features": (8,)}
QUIET: dict[str, Any] = {
    "eval_interval": 0,
    "eval_episodes": 0,
    "record_interval": 0,
    "save_interval": 0,
    "quiet": True,
}
COMMAND = (
    *("ppo", "--env", "Catch-bsuite", "--num-envs", "4", "--rollout", "8", "--epochs", "1", "--minibatches", "2"),
    *("--agent.features", "8", "--processor.normalise-obs", "--eval-interval", "0", "--eval-episodes", "0"),
    *("--record-interval", "2", "--save-interval", "4", "--quiet"),
)
MASKED = minefield(jaxrl.Discrete(4)).spec
MANY = jaxrl.EnvSpec("Toy", DISCRETE.observation_space, jaxrl.MultiDiscrete((2, 3)))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def leaves_of(run: Path, step: int) -> Any:
    """Return all arrays of a checkpoint by path."""
    return open_store(run, "checkpoints").read(step)[0]


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

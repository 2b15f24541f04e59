"""The settings that all peers train with, and how a script tells what it measured. Imports nothing beyond Python.

The loss of DQN is squared, except in Stable-Baselines3 and SBX, which have a Huber and a squared one and no choice.
Its gradients are not clipped, but Stable-Baselines3 and jaxrl work out their norm all the same.
"""

import json
import sys
import time
from typing import NamedTuple


class DQN(NamedTuple):
    """DQN with a single network for the choice and the value of the next action."""

    env: str = "CartPole-v1"
    num_envs: int = 10
    opt_interval: int = 10
    """Environment steps."""
    hidden: tuple[int, ...] = (120, 84)
    batch_size: int = 128
    capacity: int = 10_000
    warmup: int = 1_000
    lr: float = 2.5e-4
    discount: float = 0.99
    target_interval: int = 100
    """Optimisation steps, as is the decay."""
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_decay: int = 2_500
    slowness: int = 1
    """Divides the optimisation steps of a turn, where one takes long."""
    seeds: int = 1
    """Runs at the same time, each of as many steps."""

    @property
    def env_steps(self) -> float:
        """Environment steps of an optimisation step."""
        return self.opt_interval


class PPO(NamedTuple):
    """PPO; it learns by Adam from `epochs` times `minibatches` parts of each rollout."""

    num_envs: int
    slowness: int = 1
    env: str = "CartPole-v1"
    rollout: int = 128
    epochs: int = 4
    minibatches: int = 4
    hidden: tuple[int, ...] = (64, 64)
    lr: float = 2.5e-4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value: float = 0.5
    entropy: float = 0.01
    max_grad_norm: float = 0.5
    seeds: int = 1

    @property
    def env_steps(self) -> float:
        """Environment steps of an optimisation step."""
        return self.num_envs * self.rollout / (self.epochs * self.minibatches)


class SAC(NamedTuple):
    """SAC with two critics and a temperature that is learnt; an optimisation step after every environment step."""

    env: str = "Pendulum-v1"
    num_envs: int = 1
    hidden: tuple[int, ...] = (256, 256)
    batch_size: int = 256
    capacity: int = 100_000
    warmup: int = 1_000
    lr: float = 3e-4
    discount: float = 0.99
    tau: float = 0.005
    slowness: int = 15
    seeds: int = 1

    @property
    def env_steps(self) -> float:
        """Environment steps of an optimisation step."""
        return self.num_envs


WIDTHS = {64: 1, 256: 4, 1024: 30, 2048: 100}
"""Units of each of two hidden layers, and the `slowness` of such a task."""

TASKS: dict[str, DQN | PPO | SAC] = {
    "dqn": DQN(),
    "ppo-4": PPO(4),
    "ppo-1024": PPO(1024, slowness=60),
    "sac": SAC(),
    "dqn-8": DQN(seeds=8),
    "dqn-32": DQN(seeds=32, slowness=2),
    "ppo-4-32": PPO(4, seeds=32, slowness=2),
    **{f"dqn-width-{n}": DQN(hidden=(n, n), slowness=slowness) for n, slowness in WIDTHS.items()},
    **{f"ppo-width-{n}": PPO(4, hidden=(n, n), slowness=slowness) for n, slowness in WIDTHS.items()},
}


def opt_steps() -> int:
    """Return how many optimisation steps the driver asks for, after as many that are not counted."""
    return int(sys.argv[1])


def task() -> DQN | PPO | SAC:
    """Return which of `TASKS` the driver asks for."""
    return TASKS[sys.argv[2]]


class Watch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()

    def us(self, steps: int) -> float:
        """Return microseconds for each of `steps`."""
        return (time.perf_counter() - self.begun) / steps * 1e6


def tell(us: float, mean_return: float, trained: int, **versions: str) -> None:
    """Print the result for the driver, as the last line."""
    learnt = {"opt_steps": trained, "mean_return": mean_return}
    print(json.dumps({"us_per_opt_step": us, "learnt": learnt, "versions": versions}))

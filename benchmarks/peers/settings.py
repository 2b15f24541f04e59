"""The settings that all peers train with, and how a script tells what it measured. Imports nothing beyond Python.

The loss is squared, except in Stable-Baselines3 and SBX, which have a Huber and a squared one and no choice.
"""

import json
import sys
import time

ENV, NUM_ENVS, OPT_INTERVAL = "CartPole-v1", 10, 10
HIDDEN, BATCH_SIZE, CAPACITY, WARMUP = (120, 84), 128, 10_000, 1_000
LR, DISCOUNT, TARGET_INTERVAL = 2.5e-4, 0.99, 100
EPSILON_START, EPSILON_END, EPSILON_DECAY = 1.0, 0.05, 2_500
"""The decay and the target's interval are in optimisation steps."""


def opt_steps() -> int:
    """Return how many optimisation steps the driver asks for, after as many that are not counted."""
    return int(sys.argv[1])


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

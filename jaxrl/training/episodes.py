"""Training episodes: from the arrays of the compiled loop to rows of a log."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.strategies.base import EpisodeEnds, Strategy
from jaxrl.training.report import Hooks
from jaxrl.training.schedule import Schedule
from jaxrl.training.settings import TrainerConfig

LINE = '{"opt_steps": %d, "env_steps": %d, "env": %d, "return": %s, "length": %d, "terminated": %s}\n'


class Episodes(NamedTuple):
    """Finished episodes, in the order of their last steps; arrays `[E]`."""

    opt_steps: np.ndarray
    """Optimisation steps at the end of the iteration in which it ended."""
    env_steps: np.ndarray
    """Environment steps, including the warm-up and its last vector step."""
    env: np.ndarray
    """Index of the environment."""
    total: np.ndarray
    """Float32, the return."""
    length: np.ndarray
    terminated: np.ndarray
    """Bool; otherwise it was truncated."""


def reports_episodes(strategy: Strategy, config: TrainerConfig, hooks: Hooks) -> bool:
    """Return whether the log or a hook takes a run's episodes; raise `SettingsError` if `strategy` reports none."""
    if not config.train_episodes and hooks.episode is None:
        return False
    if strategy.collect is None:
        name = "train_episodes" if config.train_episodes else "Hooks.episode"
        algo = (strategy.info.settings or {}).get("algo", "this strategy")
        raise SettingsError(f"{algo} does not report training episodes; leave {name} out")
    return True


def episodes_in(endings: Sequence[EpisodeEnds], t: int, stop: int, schedule: Schedule) -> Episodes:
    """Return the episodes that ended in iterations `t .. stop-1`, from the `endings` of one or more calls."""
    # Calls write into arrays of a fixed length: drop the rows past the last iteration. The full arrays are copied to
    # the host: slicing on the device would compile a program for each length.
    length = np.concatenate([np.asarray(ended.length) for ended in endings])[: stop - t]
    total = np.concatenate([np.asarray(ended.total) for ended in endings])[: stop - t]
    num_envs = length.shape[-1]
    length, total = length.reshape(-1), total.reshape(-1)
    # A length of 0 is a step without an end; a negative one is that of a truncated episode.
    ended = np.flatnonzero(length)
    iteration, step = np.divmod(ended, schedule.env_steps_per_step)
    vector_step, env = np.divmod(step, num_envs)
    return Episodes(
        opt_steps=(t + iteration + 1) * schedule.opt_steps_per_step,
        env_steps=schedule.env_steps(t) + iteration * schedule.env_steps_per_step + (vector_step + 1) * num_envs,
        env=env,
        total=total[ended],
        length=np.abs(length[ended]),
        terminated=length[ended] > 0,
    )


def format_lines(found: Episodes) -> bytes:
    """Format rows of `train_episodes.jsonl` in one operation: there may be tens of thousands per second."""
    # Nine digits represent a float32 exactly. JSON has no infinity, for a return that overflowed.
    totals = [f"{x:.9g}" if math.isfinite(x) else "null" for x in found.total.tolist()]
    terminated = ["true" if ended else "false" for ended in found.terminated.tolist()]
    columns = (found.opt_steps.tolist(), found.env_steps.tolist(), found.env.tolist(), totals)
    rows = zip(*columns, found.length.tolist(), terminated, strict=True)
    return ((LINE * len(totals)) % tuple(chain.from_iterable(rows))).encode()


def episode_dicts(found: Episodes) -> Iterator[dict[str, Any]]:
    """Yield the same rows as dicts, for hooks."""
    names = ("opt_steps", "env_steps", "env", "return", "length", "terminated")
    for row in zip(*(x.tolist() for x in found), strict=True):
        yield dict(zip(names, row, strict=True))

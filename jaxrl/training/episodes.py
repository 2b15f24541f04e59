"""Episodes of the training: from what the compiled loop tells of its steps to rows of a log."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.strategies.base import EpisodeEnds, Strategy
from jaxrl.training.program import most_told
from jaxrl.training.report import Hook, Hooks, call
from jaxrl.training.schedule import Schedule
from jaxrl.training.settings import TrainerConfig

LINE = '{"opt_steps": %d, "env_steps": %d, "env": %d, "return": %s, "length": %d, "terminated": %s}\n'


class Episodes(NamedTuple):
    """Episodes that ended, in the order of their last steps; arrays `[E]`."""

    opt_steps: np.ndarray
    """Optimisation steps made at the end of the iteration in which it ended."""
    env_steps: np.ndarray
    """Environment steps taken, warm-up and those of its last vector step included."""
    env: np.ndarray
    """Which of the environments, from 0."""
    total: np.ndarray
    """Float32, its return."""
    length: np.ndarray
    terminated: np.ndarray
    """Bool; all others were truncated."""


class Teller(NamedTuple):
    """What becomes of the episodes that a run is told of."""

    tells: bool
    """Whether the program tells of them at all."""
    most: int
    """Iterations of a call, at most."""
    writes: bool
    hook: Hook

    def tell(
        self,
        endings: Sequence[EpisodeEnds],
        t: int,
        stop: int,
        schedule: Schedule,
        write: Callable[[Episodes], object],
        trainer: object,
    ) -> None:
        """Give those that ended in iterations `t .. stop-1` to `write`, and each to the hook, as far as is wanted."""
        if not endings or stop == t:
            return
        found = episodes_in(endings, t, stop, schedule)
        if self.writes:
            write(found)
        for row in rows_of(found) if self.hook is not None else ():
            call(self.hook, trainer, row)


def teller_of(strategy: Strategy, config: TrainerConfig, hooks: Hooks) -> Teller:
    """Return what tells of single episodes, if that is wanted; raise `SettingsError` if the strategy cannot."""
    writes, tells = config.train_episodes, config.train_episodes or hooks.episode is not None
    if tells and strategy.collect is None:
        name = "train_episodes" if writes else "Hooks.episode"
        algo = (strategy.info.settings or {}).get("algo", "this strategy")
        raise SettingsError(f"{name}: the training of {algo} tells of no episodes; leave it out")
    return Teller(tells, most_told(strategy) if tells else 2**32, writes, hooks.episode)


def episodes_in(endings: Sequence[EpisodeEnds], t: int, stop: int, schedule: Schedule) -> Episodes:
    """Return the episodes that ended in iterations `t .. stop-1`; `endings` are those of one call or of several."""
    host = [_on_host(ended) for ended in endings]
    # Calls write into arrays of a fixed length; the rows of iterations that were not made are cut off.
    length, total = (np.concatenate([x[i] for x in host])[: stop - t] for i in (0, 1))
    num_envs = length.shape[-1]
    length, total = length.reshape(-1), total.reshape(-1)
    # A length of 0 is a step that ended nothing; a negative one is that of a truncated episode.
    place = np.flatnonzero(length)
    iteration, step = np.divmod(place, schedule.env_steps_per_step)
    vector_step, env = np.divmod(step, num_envs)
    return Episodes(
        opt_steps=(t + iteration + 1) * schedule.opt_steps_per_step,
        env_steps=schedule.env_steps(t) + iteration * schedule.env_steps_per_step + (vector_step + 1) * num_envs,
        env=env,
        total=total[place],
        length=np.abs(length[place]),
        terminated=length[place] > 0,
    )


def _on_host(ended: EpisodeEnds) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays on the host, whole: cut on the device, each length would be a program of its own."""
    return np.asarray(ended.length), np.asarray(ended.total)


def lines_of(found: Episodes) -> bytes:
    """Return the rows of `train_episodes.jsonl`, all in one go: there may be ten thousands a second."""
    # A float32 has nine digits. A return that overflowed is none that JSON knows.
    totals = [f"{x:.9g}" if math.isfinite(x) else "null" for x in found.total.tolist()]
    columns = (
        found.opt_steps.tolist(),
        found.env_steps.tolist(),
        found.env.tolist(),
        totals,
        found.length.tolist(),
        ["true" if ended else "false" for ended in found.terminated.tolist()],
    )
    count = len(found.length)
    return ((LINE * count) % tuple(chain.from_iterable(zip(*columns, strict=True)))).encode()


def rows_of(found: Episodes) -> Iterator[dict[str, Any]]:
    """Return the same rows for hooks."""
    for opt_steps, env_steps, env, total, length, terminated in zip(*(x.tolist() for x in found), strict=True):
        yield {
            "opt_steps": opt_steps,
            "env_steps": env_steps,
            "env": env,
            "return": total,
            "length": length,
            "terminated": terminated,
        }

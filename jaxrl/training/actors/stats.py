"""Counts and payloads of actors, and detection of environments that hang."""

import math
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from jaxrl.strategies.interaction import EPISODE_PREFIX, scalar_column
from jaxrl.trees import PyTree
from jaxrl.types import Step

MAX_CHECK_GAP_S = 1.0
"""Maximum seconds counted between two checks: a process that was suspended for an hour did not wait for its actors."""


class ActorStats:
    """Counts of one actor, its waiting time, and the call of the environment in progress."""

    def __init__(self) -> None:
        self.env_steps = self.episodes = 0
        self.returns = 0.0
        self._waits: tuple[float, float | None] = (0.0, None)
        """Seconds of all waits that have ended, and when the one in progress began: replaced at once, as another thread
        reads them."""
        self.calls = 0
        """Calls of the environment, including the one in progress."""
        self.limit_s = math.inf
        """Timeout of the call in progress in seconds; infinite outside of calls, and in one that compiles."""
        self.inside = False
        """Whether a call is in progress."""

    def calling(self, limit_s: float) -> "ActorStats":
        """Count the following `with` block as a call of the environment, with timeout `limit_s`."""
        # Set before `inside`, since a `HangDetector` in another thread may read them at any time.
        self.calls, self.limit_s = self.calls + 1, limit_s
        return self

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *error: object) -> None:
        self.limit_s, self.inside = math.inf, False

    @property
    def waited_s(self) -> float:
        """Seconds that the actor has waited for the learner, in all waits that have ended."""
        return self._waits[0]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the following `with` block as waiting."""
        waited, begun = self.waited_s, time.perf_counter()
        self._waits = waited, begun
        try:
            yield
            waited += time.perf_counter() - begun  # not if the end of the run breaks it off: no checkpoint has that
        finally:
            self._waits = waited, None

    def waited_so_far(self) -> float:
        """Return `waited_s` together with the wait in progress, if any."""
        ended, begun = self._waits
        return ended if begun is None else ended + time.perf_counter() - begun

    def facts(self) -> list[float]:
        """Return the counts."""
        return [self.env_steps, self.episodes, self.returns, self.waited_s]

    def restore(self, facts: Sequence[float]) -> None:
        """Restore the counts from `facts()`."""
        self.env_steps, self.episodes = int(facts[0]), int(facts[1])
        self.returns, self._waits = float(facts[2]), (float(facts[3]), None)


class HangDetector:
    """Detects calls of environments that exceed their timeout, by polling."""

    def __init__(self, stats: list[ActorStats]) -> None:
        self._stats = stats
        self._calls, self._seconds = [0] * len(stats), [0.0] * len(stats)

    def late(self, seconds: float) -> dict[int, float]:
        """Check, `seconds` after the last time; return the timeouts of overdue calls, by actor."""
        found = {}
        for i, stats in enumerate(self._stats):
            calls, limit_s = stats.calls, stats.limit_s
            # The number of the call distinguishes a long one from many short ones.
            same = stats.inside and calls == self._calls[i]
            self._calls[i], self._seconds[i] = calls, self._seconds[i] + min(seconds, MAX_CHECK_GAP_S) if same else 0.0
            if self._seconds[i] > limit_s:
                found[i] = limit_s
        return found


def stack_of(ident: int | None) -> str:
    """Return the stack of a thread as text."""
    return "".join(traceback.format_stack(sys._current_frames().get(ident or 0)))


# --- parameters and blocks --------------------------------------------------------------------------------------


class Published(NamedTuple):
    """Parameters published to actors."""

    round: int
    """The first round for which they have no lag."""
    opt_step: int
    agent: PyTree
    processor_stats: PyTree = ()
    """Processor statistics of all earlier rounds."""


class Block(NamedTuple):
    """Steps of one actor's environments, `[T, N, ...]`."""

    words: dict[str, np.ndarray]
    """Transitions and their metrics, packed."""
    info: dict[str, np.ndarray]
    """Scalars of the environments, float32, NaN if missing."""
    fresh: Any = ()
    """Processor statistics of these steps."""


def split_scalars(step: Step, done: Any) -> tuple[Step, dict[str, np.ndarray]]:
    """Split the scalars specific to an environment from a step, whose other parts have the same form everywhere.

    Scalars are NaN at invalid steps, and those of complete episodes also where none is `done`.
    """
    if len(step.info) == 2:
        return step, {}
    scalars: dict[str, Any] = dict(step.info)
    known = {name: scalars.pop(name) for name in ("episode_return", "episode_length")}
    all_valid = np.all(step.valid)
    for name in scalars:
        of_episodes = name.startswith(EPISODE_PREFIX)
        if of_episodes or not all_valid:
            counts = done & step.valid if of_episodes else step.valid
            scalars[name] = np.where(counts, scalars[name], np.float32(np.nan))
    return step._replace(info=known), scalars


def stack_scalars(steps: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack scalars `[N]` of several steps to `[T, N]`, NaN where a step lacks one."""
    names = {name: len(x) for step in steps for name, x in step.items()}
    # A scalar missing from a step still needs its row in the block.
    blank = {name: np.full(size, np.nan, np.float32) for name, size in names.items()}
    return {name: np.stack([step.get(name, blank[name]) for step in steps]) for name in names}


class Scalars:
    """Statistics of the environments' scalars since the previous row: count, sum, minimum and maximum of each."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, float, float, float]] = {}

    def add(self, blocks: Iterable[Block]) -> None:
        """Add the scalars of blocks that have been learnt from."""
        for block in blocks:
            for name, values in block.info.items():
                scalars = values[~np.isnan(values)].astype(np.float64)
                count, total, low, high = self._kept.get(name, _NONE)
                self._kept[name] = (
                    count + scalars.size,
                    total + float(scalars.sum()),
                    float(scalars.min(initial=low)),
                    float(scalars.max(initial=high)),
                )

    def columns(self) -> dict[str, float | None]:
        """Return the columns of a row, named like those of scalars from the device; reset the statistics."""
        row: dict[str, float | None] = {}
        for word, (count, total, low, high) in self._kept.items():
            name = scalar_column(word)
            numbers = {name: total / count if count else None, f"{name}_min": low, f"{name}_max": high}
            row |= {column: x if count else None for column, x in numbers.items()}
        self._kept = dict.fromkeys(self._kept, _NONE)
        return row


_NONE = (0, 0.0, math.inf, -math.inf)

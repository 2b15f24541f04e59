"""What each actor has done and sends, and whether its environment keeps it too long."""

import math
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.strategies.interaction import EPISODE_PREFIX, scalar_column
from jaxrl.trees import PyTree
from jaxrl.types import Step

GLANCE_S = 1.0
"""Most seconds that one look at the actors counts for: a process that was stopped for an hour did not wait for them."""


COUNTED = 4
"""Numbers that are kept of an actor."""


class ActorStats:
    """What one actor has done, how long it waited for the learner, and whether its environment has it now."""

    def __init__(self) -> None:
        self.env_steps = self.episodes = 0
        self.returns, self.waited_s = 0.0, 0.0
        self.calls = 0
        """Calls of the environment, the one under way included."""
        self.limit_s = math.inf
        """Seconds that the call under way may take; infinite outside of calls, and in one that compiles."""
        self.inside = False
        """Whether a call is under way."""

    def calling(self, limit_s: float) -> "ActorStats":
        """Count what is done in the block of `with` that follows as a call of the environment."""
        self.calls, self.limit_s = self.calls + 1, limit_s
        return self

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *error: object) -> None:
        self.limit_s, self.inside = math.inf, False

    def facts(self) -> list[float]:
        """Return what was counted."""
        return [self.env_steps, self.episodes, self.returns, self.waited_s]

    def take_up(self, facts: Sequence[float]) -> None:
        """Go on counting from what `facts()` returned."""
        self.env_steps, self.episodes = int(facts[0]), int(facts[1])
        self.returns, self.waited_s = float(facts[2]), float(facts[3])


def is_numbers(value: Any, count: int) -> bool:
    """Say whether `value` is a list of so many finite numbers."""
    plain = isinstance(value, list) and len(value) == count
    return plain and all(type(x) in (int, float) and math.isfinite(x) for x in value)


class Watch:
    """How long each actor has been seen in one and the same call of its environment."""

    def __init__(self, stats: list[ActorStats]) -> None:
        self._stats = stats
        self._calls, self._seconds = [0] * len(stats), [0.0] * len(stats)

    def late(self, seconds: float) -> dict[int, float]:
        """Look again, `seconds` after the last time; return the actors whose call takes too long, and its limit."""
        found = {}
        for i, stats in enumerate(self._stats):
            calls, limit_s = stats.calls, stats.limit_s
            # The number of the call tells one that takes long from many short ones.
            same = stats.inside and calls == self._calls[i]
            self._calls[i], self._seconds[i] = calls, self._seconds[i] + min(seconds, GLANCE_S) if same else 0.0
            if self._seconds[i] > limit_s:
                found[i] = limit_s
        return found


def stack_of(ident: int | None) -> str:
    """Say where a thread is."""
    return "".join(traceback.format_stack(sys._current_frames().get(ident or 0)))


# --- what an actor is given, and sends --------------------------------------------------------------------------


class Published(NamedTuple):
    """Parameters for actors."""

    round: int
    """The first round that may be played with them without lag."""
    opt_step: int
    agent: PyTree
    learnt: PyTree = ()
    """What the processor has learnt of the rounds before."""


class Block(NamedTuple):
    """Steps of one actor's environments, `[T, N, ...]`."""

    words: dict[str, np.ndarray]
    """Transitions and what is recorded of them, packed."""
    info: dict[str, np.ndarray]
    """Scalars of the environments themselves, float32, NaN where one does not tell it."""
    fresh: Any = ()
    """What the actor's processor has learnt of them."""


def apart(step: Step, done: Any) -> tuple[Step, dict[str, np.ndarray]]:
    """Take the environments' own scalars out of a step, whose other parts are the same for all environments.

    Those of whole episodes are left only where one is `done`.
    """
    if len(step.info) == 2:
        return step, {}
    scalars: dict[str, Any] = dict(step.info)
    known = {name: scalars.pop(name) for name in ("episode_return", "episode_length")}
    for name in scalars:
        if name.startswith(EPISODE_PREFIX):
            scalars[name] = np.where(done, scalars[name], np.float32(np.nan))
    return step._replace(info=known), scalars


def block_of(words: Sequence[Mapping[str, Any]], infos: list[dict[str, np.ndarray]], fresh: Any = ()) -> Block:
    """Return several steps, packed and with their scalars, as one block, and what was learnt of them."""
    return Block({word: np.stack([step[word] for step in words]) for word in words[0]}, _stack_scalars(infos), fresh)


def _stack_scalars(steps: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack scalars `[N]` of several steps to `[T, N]`, NaN where a step lacks one."""
    names = {name: len(x) for step in steps for name, x in step.items()}
    # A scalar that a step lacks must still fill its row of the block.
    blank = {name: np.full(size, np.nan, np.float32) for name, size in names.items()}
    return {name: np.stack([step.get(name, blank[name]) for step in steps]) for name in names}


class Scalars:
    """What environments told since the last row: count, sum, least and largest number of each scalar."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, float, float, float]] = {}

    def take_up(self, blocks: Iterable[Block]) -> None:
        """Take in blocks that have been learnt from."""
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
        """Return the columns of a row, as those of scalars from the device; what they hold is taken out."""
        row: dict[str, float | None] = {}
        for word, (count, total, low, high) in self._kept.items():
            name = scalar_column(word)
            numbers = {name: total / count if count else None, f"{name}_min": low, f"{name}_max": high}
            row |= {column: x if count else None for column, x in numbers.items()}
        self._kept = dict.fromkeys(self._kept, _NONE)
        return row


_NONE = (0, 0.0, math.inf, -math.inf)

"""What each actor has done, and whether its environment keeps it too long."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

GLANCE_S = 1.0
"""Most seconds that one look at the actors counts for: a process that was stopped for an hour did not wait for them."""


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

    @contextmanager
    def calling(self, limit_s: float) -> Iterator[None]:
        """Count what is done within as a call of the environment."""
        self.calls, self.limit_s, self.inside = self.calls + 1, limit_s, True
        try:
            yield
        finally:
            self.limit_s, self.inside = math.inf, False


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
            same = stats.inside and calls == self._calls[i]
            self._calls[i], self._seconds[i] = calls, self._seconds[i] + min(seconds, GLANCE_S) if same else 0.0
            if self._seconds[i] > limit_s:
                found[i] = limit_s
        return found

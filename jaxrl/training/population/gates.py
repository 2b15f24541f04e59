"""Where the members of a population wait for each other, and what a search then makes of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.strategies.population import Member
from jaxrl.strategies.search import Search, Verdict
from jaxrl.training.settings import TrainerConfig


class Gates:
    """Collects the members' scores at each gate; says who waits, and when all that will come are there."""

    def __init__(self, search: Search, members: Sequence[Member], config: TrainerConfig) -> None:
        """Place the gates.

        Raises:
          SettingsError: there are no evaluations to go by, or the run ends before the first gate.
        """
        if not config.eval_interval or not config.eval_episodes:
            raise SettingsError(f"{search.name} goes by evaluations; set eval_interval and eval_episodes")
        if len(members) < 2:
            raise SettingsError(f"{search.name} chooses among members, and there is one; sweep a setting, or set seeds")
        self._search, self._stride = search, members[0].strategy.opt_steps_per_step
        self.steps = search.gates(len(members), config.max_opts, config.eval_interval)
        if not self.steps:
            raise SettingsError(
                f"{search.name} has no evaluation to decide at before the end at {config.max_opts}; "
                f"lower eval_interval, which is {config.eval_interval}"
            )
        self.passed = 0
        """Gates that are behind all members."""
        self.there = {member.number for member in members}
        """Members that have not been ended by a verdict."""
        self.values: dict[int, Mapping[str, Any]] = {member.number: dict(member.swept) for member in members}
        """Present values of the swept settings."""
        self.parents: dict[int, int] = {}
        """Whose place a member last took."""
        self._scores: list[dict[int, float]] = [{} for _ in self.steps]
        self._farthest = 0
        self._gone: set[int] = set()

    def take(self, number: int, opt_steps: int, score: float | None) -> None:
        """Take in the score of an evaluation: at each gate the first one at or past it counts."""
        for step, scores in zip(self.steps, self._scores, strict=True):
            if step <= opt_steps and number not in scores:
                scores[number] = math.nan if score is None else float(score)
        self.reached(opt_steps)

    def reached(self, opt_steps: int) -> None:
        """Take note of how far a member is."""
        self._farthest = max(self._farthest, opt_steps)

    def place(self, gate: int) -> int:
        """Return where the members stand at a gate: the first evaluation at or past it, which they all make there."""
        return -(-self.steps[gate] // self._stride) * self._stride

    def is_behind(self, gate: int) -> bool:
        """Return whether a member is beyond a gate, so that all that was decided there had been done before."""
        return self._farthest > self.place(gate)

    def holds(self, opt_steps: int) -> bool:
        """Return whether a member that is so far waits for the others."""
        return self.passed < len(self.steps) and opt_steps >= self.steps[self.passed]

    def gone(self, number: int) -> None:
        """Expect no more of a member, which ended by itself."""
        self._gone.add(number)

    def verdict(self, held: Mapping[int, int]) -> Verdict | None:
        """Return what is decided at the next gate, once all that will come have come; then it is behind them."""
        if self.passed == len(self.steps) or not (held or self.is_behind(self.passed)):
            return None
        if any(held.get(number, -1) < self.steps[self.passed] for number in self.there - self._gone):
            return None
        scores = self._scores[self.passed]
        known = {n: scores.get(n, math.nan) for n in sorted(self.there) if n in held or n in scores}
        verdict = self._search.decide(self.passed, known, self.values)
        self.passed += 1
        self.there -= set(verdict.ended)
        for copy in verdict.copies:
            self.values[copy.member], self.parents[copy.member] = copy.values, copy.parent
        return verdict

"""Whose turn it is among the members of a population."""

import heapq
from collections.abc import Callable, Sequence

from jaxrl.training.population.runs import Run


class Queue:
    """Members that wait for their turn: next is the one that is least far, of those whose devices are free."""

    def __init__(self, runs: Sequence[Run]) -> None:
        # Those of one program begin together: of many programs not all are kept.
        programs = [*dict.fromkeys(id(run.member.strategy.step) for run in runs)]
        self._runs = sorted(runs, key=lambda run: (programs.index(id(run.member.strategy.step)), run.member.number))
        self._places = {run.member.number: place for place, run in enumerate(self._runs)}
        self._waiting = [(0, place) for place in range(len(runs))]

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, number: int, opt_steps: int) -> None:
        """Let a member wait that has made so many optimisation steps."""
        heapq.heappush(self._waiting, (opt_steps, self._places[number]))

    def take(self, is_free: Callable[[int], bool]) -> Run | None:
        """Take out the next member whose number `is_free`; `None` if there is none."""
        passed_over: list[tuple[int, int]] = []
        found = None
        while self._waiting and found is None:
            entry = heapq.heappop(self._waiting)
            run = self._runs[entry[1]]
            if is_free(run.member.number):
                found = run
            else:
                passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._waiting, entry)
        return found

"""Log and console output of a population: its members' evaluations, and statistics over all members."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrl.strategies.population import Population
from jaxrl.strategies.search import PBT, Verdict
from jaxrl.terminal import Stage, columns, is_terminal, print_folded
from jaxrl.training.population.scores import format_swept, spread
from jaxrl.training.recorders import Row
from jaxrl.training.recorders.console import fit_parts
from jaxrl.training.recorders.jsonl import line_of
from jaxrl.training.sanity import hint
from jaxrl.training.schedule import Schedule
from jaxrl.training.storage.group_files import GroupFiles, GroupLog
from jaxrl.training.storage.run_dir import METRICS

MAX_LINES = 12
"""Maximum lines printed at once, of settings or of decisions; more settings are shown as one line for all members."""


class PopulationRows:
    """Collects the members' evaluations, and reports each round once all members have completed it."""

    def __init__(self, population: Population, quiet: bool) -> None:
        """Expect evaluations of all members; with `quiet`, print nothing."""
        self._members, self._search, self._quiet = population.members, population.search, quiet
        self._scores: dict[int, dict[int, float]] = {}
        self._held: dict[int, dict[int, Row]] = {}
        self._reported: set[int] = set()
        self._gone: set[int] = set()
        self._farthest: dict[int, int] = {}
        self._log: GroupLog | None = None
        self._begun = time.perf_counter()
        self._opt_steps, self._first = 0, 0
        """Total optimisation steps of a run, and those made before this process."""
        self._hinted = False
        self._stage = Stage()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show on the terminal that programs are being compiled inside."""
        if not self._quiet:
            self._stage.show("compiling")
        try:
            yield
        finally:
            self._stage.clear()

    def begin(self, schedule: Schedule) -> None:
        """Start the estimate of the time left until the end of `schedule`."""
        self._opt_steps, self._first = schedule.opt_steps(schedule.last), max(self._reported, default=0)
        self._begun = time.perf_counter()

    def scores_of(self, number: int) -> list[tuple[int, float]]:
        """Return optimisation steps and scores of a member's evaluations so far, the earliest first."""
        return [(step, scores[number]) for step, scores in sorted(self._scores.items()) if number in scores]

    def open(self, files: GroupFiles) -> None:
        """Append to the log that members share, with the rounds that they completed in an earlier process.

        The population's rows follow from its members', so they are written anew at every resume.
        """
        self._log = files.log(METRICS)
        for number, row in self._log.resumed_rows():
            # Evaluations before the first step are in no report.
            if row["kind"] == "eval" and row["opt_steps"] > 0:
                self.take(number, row)

    def take(self, number: int, row: Row, greedy_falls_short: bool = False) -> None:
        """Add an evaluation of a member; print a hint, once, if greedy actions return far less than training does."""
        if greedy_falls_short and not self._hinted and row.get("train_return") is not None:
            self._hinted = True
            said = hint(row["eval_reward"], row["train_return"])
            self.print_line(f"{row['opt_steps']:>9,} opts  member {number}: {said}")
        at = self._scores.setdefault(row["opt_steps"], {})
        if number in at:
            return
        score = row.get("score")
        # The first evaluation of a member at a step counts; a repeated one, as after a rollback, does not.
        at[number] = float("nan") if score is None else float(score)
        self._held.setdefault(row["opt_steps"], {})[number] = row
        self._farthest[number] = max(row["opt_steps"], self._farthest.get(number, 0))
        for opt_steps in sorted(step for step in self._scores if step <= row["opt_steps"]):
            self._report(opt_steps)

    def go_on(self) -> None:
        """Expect evaluations of every member again."""
        self._gone.clear()

    def remove(self, number: int) -> None:
        """Stop waiting for a member."""
        self._gone.add(number)
        for opt_steps in sorted(self._scores):
            self._report(opt_steps)

    def _report(self, opt_steps: int) -> None:
        """Report the round at `opt_steps` once all running members have reached it.

        If some of them were not evaluated there, statistics over all members are omitted.
        """
        scores = self._scores[opt_steps]
        others = [m.number for m in self._members if m.number not in scores and m.number not in self._gone]
        # Report once, when every expected member was evaluated here or is past this step.
        if opt_steps in self._reported or any(self._farthest.get(number, 0) <= opt_steps for number in others):
            return
        self._reported.add(opt_steps)
        env_steps, returns = None, list[float]()
        for _, row in sorted(self._held.pop(opt_steps).items()):  # in order of members, not of threads
            env_steps = row.get("env_steps", env_steps)
            returns += [row["train_return"]] if row.get("train_return") is not None else []
        if others:
            return
        strata = self._strata(scores)
        over_all = spread(strata.values())
        finite = {number: score for number, score in sorted(scores.items()) if np.isfinite(score)}
        best = max(finite, key=lambda number: finite[number], default=None)
        self._write(
            {
                "kind": "population",
                "opt_steps": opt_steps,
                "env_steps": env_steps,
                "wall_s": round(time.perf_counter() - self._begun, 3),
                **over_all._asdict(),
                "best": None if best is None else finite[best],
                "best_member": best,
            }
        )
        self._show(opt_steps, env_steps, strata, sum(returns) / len(returns) if returns else None)

    def decided(self, opt_steps: int, verdict: Verdict, is_new: bool) -> None:
        """Log the copies that a search decided, with parents and settings; if new, print the decisions."""
        said = []
        for copy in verdict.copies:
            row = {"kind": "lineage", "opt_steps": opt_steps, "member": copy.member, "parent": copy.parent}
            self._write({**row, "values": dict(copy.values)})
            values = format_swept(copy.values)
            said.append(f"member {copy.member} goes on as member {copy.parent} stands, with {values}")
        if verdict.ended:
            said.append(f"{len(verdict.ended)} members stop here: {_listed(verdict.ended)}")
        if len(said) > MAX_LINES:
            said[MAX_LINES:] = [f"{len(said) - MAX_LINES} more go on as others stand"]
        for line in said if is_new else ():
            self.print_line(f"{opt_steps:>9,} opts  {self._search.name}: {line}")

    def _strata(self, scores: Mapping[int, float]) -> dict[str, list[float]]:
        strata: dict[str, list[float]] = {}
        for member in self._members:
            if member.number in scores:
                strata.setdefault(format_swept(member.swept), []).append(scores[member.number])
        return strata

    def print_line(self, line: str) -> None:
        """Print a line unless quiet."""
        if not self._quiet:
            print_folded(line)

    def _show(
        self, opt_steps: int, env_steps: int | None, strata: Mapping[str, Sequence[float]], training: float | None
    ) -> None:
        shown, varied = strata, isinstance(self._search, PBT)
        if varied or len(strata) > MAX_LINES:
            shown = {"all members" if varied else "all settings": [x for scores in strata.values() for x in scores]}
        seconds = time.perf_counter() - self._begun
        done, left = opt_steps - self._first, self._opt_steps - opt_steps
        first = [
            (0, f"{opt_steps:>9,} opts"),
            (2, f"  {env_steps:>11,} env steps" if env_steps is not None else ""),
            (4, "" if training is None else f"  train {training:.4g}"),
            (3, f"  {seconds:.0f} s"),
            (1, f"  {seconds * left / done:.0f} s left" if left > 0 and done > 0 else ""),
        ]
        room = columns() if is_terminal(sys.stdout) else math.inf
        self.print_line(fit_parts(first, room))
        for name, scores in shown.items():
            row = spread([scores])
            value, called = f"{'':14}  IQM {row.iqm:>9.5g}", "" if name == format_swept({}) else f"  {name}"
            parts = [(0, value), (1, f" {row.interval:<22}"), (2, f" of {row.members:<4}"), (0, called)]
            self.print_line(fit_parts(parts, room))

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.append_own(f"{line_of(row)}\n".encode())


def _listed(members: Sequence[int]) -> str:
    """Return the numbers of members, at most the first `MAX_LINES`."""
    return ", ".join(map(str, members[:MAX_LINES])) + (" ..." if len(members) > MAX_LINES else "")

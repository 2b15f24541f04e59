"""Log, console output and TensorBoard of a population: its members' evaluations, and statistics over all members."""

import heapq
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.strategies.population import Population
from jaxrl.strategies.search import PBT, Verdict
from jaxrl.terminal import Stage, columns, is_terminal, print_folded
from jaxrl.training.population.scores import format_swept, iqm, name_settings, spread
from jaxrl.training.recorders import Recorders, Row, RunInfo, TensorBoardRecorder
from jaxrl.training.recorders.base import NUMBER
from jaxrl.training.recorders.console import fit_parts
from jaxrl.training.recorders.jsonl import line_of
from jaxrl.training.sanity import hint
from jaxrl.training.schedule import Schedule
from jaxrl.training.storage.logs import to_float
from jaxrl.training.storage.population_files import PopulationFiles, PopulationLog
from jaxrl.training.storage.run_dir import BOARD, METRICS

MAX_LINES = 12
"""Maximum lines printed at once, of settings or of decisions; more settings are shown as one line for all members."""
MAX_NAME, SHORT_NAME = 255, 200
"""Maximum bytes of a directory's name, and the number of them that a longer one keeps."""


AT, BETWEEN, END = range(3)
"""Parts of a `Position`: at a multiple of the interval, between two, and at the end of the run."""


class Position(NamedTuple):
    """Position in a run by which rows of different members are matched; ordered.

    Members whose iterations have other numbers of optimisation steps reach a multiple of an interval after different
    ones, and end at different ones.
    """

    multiples: int
    """Multiples of the interval so far."""
    part: int = AT
    opt_steps: int = 0
    """0 at a multiple; in between the optimisation steps done, at the end `max_opts` before rounding."""


BEFORE = Position(-1)


def position_of(schedule: Schedule, asked: int, row: Row) -> Position:
    """Return the position of the row of a member with this `schedule`, whose `max_opts` was rounded up from `asked`."""
    interval = schedule.eval_interval if row["kind"] == "eval" else schedule.record_interval
    opt_steps = row["opt_steps"]
    is_end = opt_steps == schedule.opt_steps(schedule.last) and schedule.limit(schedule.last) == "max_opts"
    opt_steps = asked if is_end else opt_steps
    multiples = opt_steps // interval if interval else 0
    if opt_steps == multiples * interval or (not is_end and schedule.is_due(interval, opt_steps)):
        return Position(multiples)
    return Position(multiples, END if is_end else BETWEEN, opt_steps)


class Round(NamedTuple):
    """Rows of one kind at the same position."""

    opt_steps: int
    """The most of any member."""
    rows: Mapping[int, Row]
    """By member, in order."""
    is_whole: bool
    """Whether all running members have a row here."""


class Rounds:
    """Gathers the members' rows of one kind into rounds; a round is complete once all running members came so far."""

    def __init__(self, members: Iterable[int]) -> None:
        """Expect rows of `members`."""
        self.newest = 0
        """Optimisation steps of the newest complete round; 0 before the first."""
        self._rows: dict[Position, dict[int, Row]] = {}
        self._farthest: dict[int, Position] = {}
        self._complete: set[Position] = set()
        self.expect(members)

    def add(self, number: int, position: Position, row: Row) -> None:
        """Add a row of a member; in an incomplete round it replaces one that a rollback has undone."""
        if position not in self._complete:
            self._rows.setdefault(position, {})[number] = row
        if position > self._farthest.get(number, BEFORE):
            self._farthest[number] = position
            heapq.heappush(self._behind, (position, number))

    def remove(self, number: int) -> None:
        """Stop waiting for a member."""
        self._expected.discard(number)

    def pop_completed(self) -> list[Round]:
        """Remove and return the rounds that are complete, in order."""
        # The member that is farthest behind comes first; entries from before it moved on, or left, are dropped.
        while self._behind and not self._is_current(*self._behind[0]):
            heapq.heappop(self._behind)
        found = []
        for position in sorted(at for at in self._rows if not self._behind or at <= self._behind[0][0]):
            rows = self._rows.pop(position)
            self._complete.add(position)
            opt_steps = max(row["opt_steps"] for row in rows.values())
            found.append(Round(opt_steps, dict(sorted(rows.items())), self._expected <= rows.keys()))
            self.newest = max(self.newest, opt_steps)
        return found

    def _is_current(self, position: Position, number: int) -> bool:
        return number in self._expected and position == self._farthest.get(number, BEFORE)

    def expect(self, members: Iterable[int]) -> None:
        """Expect rows of `members`, after those that have come."""
        self._expected = set(members)
        self._behind = [(self._farthest.get(number, BEFORE), number) for number in self._expected]
        heapq.heapify(self._behind)


class PopulationRows:
    """Collects the members' rows, and reports each round of evaluations once all members have completed it."""

    def __init__(
        self,
        population: Population,
        quiet: bool,
        position_of: Callable[[int, Row], Position] = lambda number, row: Position(row["opt_steps"]),
    ) -> None:
        """Expect evaluations of all members; with `quiet`, print nothing. `position_of(member, row)` orders rows."""
        self._members, self._search, self._quiet = population.members, population.search, quiet
        self._position_of = position_of
        self._names = dict(zip(self._numbers(), name_settings([one.swept for one in self._members]), strict=True))
        """Names of the members' settings, by number."""
        self._scores: dict[int, dict[int, float]] = {}
        self._evaluated = Rounds(self._numbers())
        self._trained = Rounds(self._numbers())
        self._log: PopulationLog | None = None
        self._boards: Boards | None = None
        self._begun = time.perf_counter()
        self._opt_steps, self._first = 0, 0
        """Total optimisation steps of a run, and those made before this process."""
        self._hinted = False
        self._stage = Stage()

    def _numbers(self) -> list[int]:
        return [member.number for member in self._members]

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
        self._opt_steps, self._first = schedule.opt_steps(schedule.last), self._evaluated.newest
        self._begun = time.perf_counter()

    def scores_of(self, number: int) -> list[tuple[int, float]]:
        """Return optimisation steps and scores of a member's evaluations so far, the earliest first."""
        return [(step, scores[number]) for step, scores in sorted(self._scores.items()) if number in scores]

    def open(self, files: PopulationFiles, about: RunInfo | None) -> None:
        """Append to the log that members share, and to TensorBoard if there is `about`, which describes the population.

        Rounds that the members completed in an earlier process are taken up from their rows. The population's own rows
        follow from these, so they are written anew at every resume; TensorBoard has them.
        """
        self._log = files.log(METRICS)
        for number, row in self._log.resumed_rows():
            # Evaluations before the first step are in no report.
            if row["opt_steps"] > 0:
                self._add(number, row)
        self._report()  # once: rows come member by member, so that no round is complete before the last member's
        if about is not None:
            about = about._replace(opt_steps=self._newest())
            self._boards = Boards(files.directory / BOARD, self._groups(), about, files.resumed)

    def _newest(self) -> int:
        return max(self._evaluated.newest, self._trained.newest)

    def close(self) -> None:
        """Close TensorBoard's files."""
        if self._boards is not None:
            self._boards.close()

    def take(self, number: int, row: Row, greedy_falls_short: bool = False) -> None:
        """Add a row of a member; print a hint, once, if greedy actions return far less than training does."""
        if greedy_falls_short and not self._hinted and row.get("train_return") is not None:
            self._hinted = True
            self.print_about(number, row["opt_steps"], hint(row["eval_reward"], row["train_return"]))
        self._add(number, row)
        self._report()

    def _add(self, number: int, row: Row) -> None:
        if row.get("kind") == "eval":
            self._scores.setdefault(row["opt_steps"], {}).setdefault(number, to_float(row.get("score")))
            self._evaluated.add(number, self._position_of(number, row), row)
        elif row.get("kind") == "train":
            self._trained.add(number, self._position_of(number, row), row)

    def expect_all(self) -> None:
        """Expect rows of every member again."""
        self._evaluated.expect(self._numbers())
        self._trained.expect(self._numbers())

    def remove(self, number: int) -> None:
        """Stop waiting for a member."""
        self._evaluated.remove(number)
        self._trained.remove(number)
        self._report()

    def _report(self) -> None:
        """Report the rounds that are complete; if some members were not evaluated there, there are no statistics."""
        trained, evaluated = self._trained.pop_completed(), self._evaluated.pop_completed()
        for one in (*trained, *evaluated):
            if self._boards is not None:
                self._boards.write(one.rows)
        for opt_steps, rows, is_whole in evaluated:
            if is_whole:
                self._report_all(opt_steps, rows)

    def _report_all(self, opt_steps: int, rows: Mapping[int, Row]) -> None:
        scores = {number: to_float(row.get("score")) for number, row in rows.items()}
        counts = {x for row in rows.values() if type(x := row.get("env_steps")) is int}
        env_steps = counts.pop() if len(counts) == 1 else None  # by their settings, members may take others
        returns = [x for row in rows.values() if not math.isnan(x := to_float(row.get("train_return")))]
        # From the members' rows, which outlast a process: these rows are written anew at every resume.
        walls = [x for row in rows.values() if math.isfinite(x := to_float(row.get("wall_s")))]
        strata = self._strata(scores)
        over_all = spread(strata.values())
        finite = {number: score for number, score in scores.items() if np.isfinite(score)}
        best = max(finite, key=lambda number: finite[number], default=None)
        self._write(
            {
                "kind": "population",
                "opt_steps": opt_steps,
                "env_steps": env_steps,
                "wall_s": max(walls, default=None),
                **over_all._asdict(),
                "best": None if best is None else finite[best],
                "best_member": best,
            }
        )
        self._show(opt_steps, env_steps, strata, sum(returns) / len(returns) if returns else None)

    def log_decision(self, opt_steps: int, verdict: Verdict, is_new: bool) -> None:
        """Log the copies that a search decided, with parents and settings; if new, print the decisions."""
        said = []
        for copy in verdict.copies:
            row = {"kind": "lineage", "opt_steps": opt_steps, "member": copy.member, "parent": copy.parent}
            self._write({**row, "values": dict(copy.values)})
            values = format_swept(copy.values)
            said.append(f"member {copy.member} goes on as member {copy.parent} stands, with {values}")
        if verdict.ended:
            said.append(f"{len(verdict.ended)} members stop here: {_list_members(verdict.ended)}")
        if len(said) > MAX_LINES:
            said[MAX_LINES:] = [f"{len(said) - MAX_LINES} more go on as others stand"]
        for line in said if is_new else ():
            self.print_line(f"{opt_steps:>9,} opts  {self._search.name}: {line}")

    def _strata(self, scores: Mapping[int, float]) -> dict[str, list[float]]:
        strata: dict[str, list[float]] = {}
        for member in self._members:
            if member.number in scores:
                strata.setdefault(self._names[member.number], []).append(scores[member.number])
        return strata

    def _name_of_all(self, settings: int) -> str | None:
        """Return what to show in one line for all members, or `None` to show so many settings one by one."""
        if isinstance(self._search, PBT):
            return "all members"
        return "all settings" if settings > MAX_LINES else None

    def _groups(self) -> dict[str, list[int]]:
        """Return the members of each line that is shown."""
        groups: dict[str, list[int]] = {}
        for member in self._members:
            groups.setdefault(self._names[member.number], []).append(member.number)
        name = self._name_of_all(len(groups))
        return groups if name is None else {name: self._numbers()}

    def print_line(self, line: str) -> None:
        """Print a line unless quiet."""
        if not self._quiet:
            print_folded(line)

    def print_about(self, number: int, opt_steps: int, line: str) -> None:
        """Print a line about a member unless quiet."""
        self.print_line(f"{opt_steps:>9,} opts  member {number}: {line}")

    def _show(
        self, opt_steps: int, env_steps: int | None, strata: Mapping[str, Sequence[float]], training: float | None
    ) -> None:
        shown = strata
        if (name := self._name_of_all(len(strata))) is not None:
            shown = {name: [x for scores in strata.values() for x in scores]}
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


def _list_members(members: Sequence[int]) -> str:
    """Return the numbers of members, at most the first `MAX_LINES`."""
    return ", ".join(map(str, members[:MAX_LINES])) + (" ..." if len(members) > MAX_LINES else "")


# --- TensorBoard --------------------------------------------------------------------------------------------------


class Boards:
    """The event files of a population, in a directory for each of several groups of members.

    They have the means over the members of each setting, under the tags that a single run has.
    """

    def __init__(self, directory: Path, groups: Mapping[str, Sequence[int]], about: RunInfo, resumed: bool) -> None:
        """Write for each of `groups`, members by name, into a directory of that name; of one group into `directory`.

        `about` describes the population; if it is `resumed`, rows follow after its `opt_steps`. A resume that is
        refused hides nothing: the files are rewound with the first row.
        """
        names = {
            name: directory if len(groups) == 1 else directory / _file_name(name, members[0])
            for name, members in groups.items()
        }
        self._groups = {name: (groups[name], Recorders([TensorBoardRecorder(path)])) for name, path in names.items()}
        for _, recorder in self._groups.values():
            recorder.begin(about)
        self._rewind_to = about.opt_steps if resumed else None

    def write(self, rows: Mapping[int, Row]) -> None:
        """Write the means of the members' rows of one kind at the same optimisation steps.

        The score of a group is the interquartile mean of its members' scores, as everywhere.
        """
        if self._rewind_to is not None:
            for _, recorder in self._groups.values():
                recorder.rewind(self._rewind_to)
            self._rewind_to = None
        for members, recorder in self._groups.values():
            own = [rows[number] for number in members if number in rows]
            if own:
                recorder.write(_mean(own))

    def close(self) -> None:
        """Close the files."""
        for _, recorder in self._groups.values():
            recorder.close()


def _file_name(setting: str, member: int) -> str:
    """Return a name of a directory for a setting, of which `member` is the first; file systems take 255 bytes."""
    name = setting.replace("/", "_")
    if len(name.encode()) <= MAX_NAME:
        return name
    return f"{name.encode()[:SHORT_NAME].decode(errors='ignore')}... (member {member})"


def _mean(rows: Sequence[Row]) -> Row:
    found: dict[str, Any] = {"kind": rows[0]["kind"], "opt_steps": max(row["opt_steps"] for row in rows)}
    for name in dict.fromkeys(name for row in rows for name in row if name not in found):
        values = np.asarray([row[name] for row in rows if type(row.get(name)) in NUMBER], np.float64)
        finite = values[np.isfinite(values)]
        if len(finite):
            found[name] = float(iqm(finite) if name == "score" else finite.mean())
    return found

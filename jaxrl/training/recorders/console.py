"""Console progress: a live line on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from jaxrl.terminal import Stage, wrap_line
from jaxrl.training.recorders.base import Progress, Recorder, Row, RunInfo, Video

REFRESH_S = 0.1
PLAIN_S = 30.0
"""Without a terminal: seconds since the last line after which progress is printed."""
COUNTER, BAR = 24, 24
"""Minimum columns of the counter, and columns of the bar."""
WIDE = 136
"""Minimum columns of a terminal for a bar."""


class ConsoleRecorder(Recorder):
    """Shows counters, speed, time left, and the last and best return; for a run without evaluations, each train row."""

    actions: str | None = None
    """How evaluations choose actions, shown with the first one."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self._stage = Stage(self.console.file, self.console.is_terminal and not self.console.is_dumb_terminal)
        self._live: Any = None
        self._last: float | None = None
        self._best: float | None = None
        self._train: float | None = None
        self._explained: float | None = None
        self._progress: Progress | None = None
        self._evaluates, self._evaluated_at = True, -1
        self._shown = 0.0 if self.console.is_terminal else time.monotonic()

    def stage(self, what: str) -> None:
        """Show a stage before the first step; a terminal erases it at the next output."""
        self._stage.show(what)

    def unstage(self) -> None:
        """Erase the stage from the terminal."""
        self._stage.clear()

    def begin(self, run: RunInfo) -> None:
        """Read from the settings whether the run evaluates."""
        self._evaluates = bool(run.settings.get("eval_interval") and run.settings.get("eval_episodes"))

    def write(self, row: Row) -> None:
        self._stage.clear()
        if row["kind"] == "train":
            self._train, self._explained = row.get("episode_return"), row.get("explained_variance")
            # With evaluations, only these are shown.
            if self._evaluates or self._evaluated_at == row["opt_steps"]:
                return
        if not self.console.is_terminal:
            self._shown = time.monotonic()
        if row["kind"] == "event":
            self._best = None if row.get("event") == "best" else self._best  # evaluations mean something else now
            self._print_message(row["opt_steps"], row["message"])
        elif row["kind"] == "train":
            self.console.print(fit_parts(_train_parts(row, self._left), self._room))
        else:
            self.recall(row)
            actions = self.actions if self._evaluated_at < 0 else None
            self.console.print(fit_parts(_eval_parts(row, self._left, actions), self._room))
            self._evaluated_at = row["opt_steps"]

    def recall(self, row: Row) -> None:
        """Take the last and best return from the row of an evaluation, perhaps of an earlier session."""
        self._last = row.get("eval_reward")
        if row.get("is_best"):
            self._best = self._last if row.get("confirm_score") is None else row["confirm_score"]

    def video(self, video: Video) -> None:
        self._stage.clear()
        self._print_message(video.opt_steps, f"filmed {video.path}, return {_number(video.episode_return)}")

    def tick(self, progress: Progress) -> None:
        live, self._progress = self.console.is_terminal, progress
        # Called after every chunk: most calls return here.
        if time.monotonic() - self._shown < (REFRESH_S if live else PLAIN_S):
            return
        self._shown = time.monotonic()
        if not live:
            self.console.print(_counter(progress) + fit_parts(self._parts(progress), math.inf))
            return
        self._stage.clear()
        if self._live is None:
            self._live = self._start()
            self._task = self._live.add_task("", total=progress.max_opts, detail="")
        self._live.update(self._task, completed=progress.opt_steps, detail=self._detail(progress))

    def close(self) -> None:
        self._stage.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # On a narrow terminal the counter stays complete and the rest is cropped: a wrapped line cannot be erased.
        whole = Column(no_wrap=True, min_width=COUNTER)
        counter = TextColumn("{task.completed:>9,}/{task.total:,} opts", table_column=whole)
        bar = [BarColumn(bar_width=BAR)] if self.console.width >= WIDE else []
        detail = TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=True, overflow="crop", ratio=1))
        live = Progress(counter, *bar, detail, console=self.console, transient=True, expand=True)
        live.start()
        return live

    @property
    def _room(self) -> float:
        """Columns of the terminal; infinite elsewhere."""
        return self.console.width if self.console.is_terminal else math.inf

    @property
    def _left(self) -> str:
        """The time left as part of a line; empty at the end or if unknown."""
        progress = self._progress
        return f"  {progress.seconds_left:.0f} s left" if progress and progress.opt_steps < progress.max_opts else ""

    def _print_message(self, opt_steps: int, text: str) -> None:
        self.console.print("\n".join(wrap_line(f"{opt_steps:>9,} opts  {text}", self._room)))

    def _parts(self, progress: Progress) -> list[tuple[int, str]]:
        return [
            (4, f"  {progress.env_steps:,} env steps"),
            (3, f"  {progress.opt_steps_per_sec:,.0f} opts/s"),
            (1, f"  {progress.seconds_left:.0f} s left"),
            (6, f"  train {_number(self._train)}"),
            (2, f"  last {_number(self._last)}"),
            (5, f"  best {_number(self._best)}"),
            (7, _explained_variance(self._explained)),
        ]

    def _detail(self, progress: Progress) -> str:
        taken = max(COUNTER, len(_counter(progress))) + (BAR + 1 if self.console.width >= WIDE else 0)
        # rich separates columns by one space
        return fit_parts(self._parts(progress), self.console.width - taken + 1)[2:]


def fit_parts(parts: Sequence[tuple[int, str]], room: float) -> str:
    """Join the `parts`, each `(rank, text)`, that fit into `room` columns; lower ranks have priority.

    Parts of rank 0 are always included. The first rank that does not fit excludes all higher ones.
    """
    ranked = sorted(parts, key=itemgetter(0))
    ends = accumulate(len(text) for _, text in ranked)
    beyond = [rank for (rank, _), end in zip(ranked, ends, strict=True) if rank and end > room]
    return "".join(text for rank, text in parts if not beyond or rank < beyond[0])


def _counter(progress: Progress) -> str:
    return f"{progress.opt_steps:>9,}/{progress.max_opts:,} opts"


def _train_parts(row: Row, left: str) -> list[tuple[int, str]]:
    return [
        (0, f"{row['opt_steps']:>9,} opts"),
        (2, f"  {row['env_steps']:>11,} env steps"),
        (0, f"  train {_number(row.get('episode_return'))}"),
        (3, _explained_variance(row.get("explained_variance"))),
        (1, left),
    ]


def _explained_variance(value: float | None) -> str:
    return "" if value is None else f"  explained variance {value:.2f}"


def _eval_parts(row: Row, left: str, actions: str | None) -> list[tuple[int, str]]:
    verdict, again = _verdict(row)
    counts = [(0, f"{row['opt_steps']:>9,} opts"), (6, f"  {row['env_steps']:>11,} env steps")]
    training = "" if row.get("train_return") is None else f"  train {_number(row['train_return'])}"
    end = [(2, training), (1, verdict), (7, again), (4, left)]
    if "episodes" not in row:  # a session's score, given by its user
        return [*counts, (0, f"  score {_number(row['eval_reward']):>9}"), *end]
    return [
        *counts,
        (0, f"  return {_number(row['eval_reward']):>9}"),
        (5, f" +- {_number(row['eval_reward_std'])}"),
        (8, f" over {row['episodes']} episodes"),
        (3, f", {actions} actions" if actions else ""),
        (3, f"  {row['unfinished']} unfinished" if row["unfinished"] else ""),
        *end,
    ]


def _verdict(row: Row) -> tuple[str, str]:
    """Return the remark on a best evaluation, and the result of its re-evaluation."""
    again = row.get("confirm_score")
    if again is None:
        return ("  best", "") if row["is_best"] else ("", "")
    if row["is_best"]:
        return "  best", f", confirmed at {_number(again)}"
    return "  not kept as best", f": {_number(again)} on re-evaluation"


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"

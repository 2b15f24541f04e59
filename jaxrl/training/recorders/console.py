"""Progress for a person to watch: a live line on a terminal, plain lines elsewhere."""

import math
import time
from itertools import accumulate
from typing import Any

from jaxrl.terminal import Stage
from jaxrl.training.recorders.base import Progress, Row, Video

REFRESH_S = 0.1
PLAIN_S = 30.0
"""Seconds without a line after which one says how far a run is, where no terminal shows it."""
COUNTER, BAR = 24, 24
"""Columns of the counter, at least, and of the bar."""
WIDE = 136
"""Columns of a terminal that has room for a bar."""


class ConsoleRecorder:
    """Show counters, speed, time left, and the last and best return."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self._stage = Stage(self.console.file, self.console.is_terminal and not self.console.is_dumb_terminal)
        self._live: Any = None
        self._last: float | None = None
        self._best: float | None = None
        self._train: float | None = None
        self._shown = 0.0 if self.console.is_terminal else time.monotonic()

    def stage(self, what: str) -> None:
        """Show what is done before the first step: on a terminal until something else is shown."""
        self._stage.show(what)

    def unstage(self) -> None:
        """Take back what a terminal shows of it."""
        self._stage.clear()

    def write(self, row: Row) -> None:
        self._stage.clear()
        if row["kind"] == "train":
            self._train = row.get("episode_return")
            return
        if not self.console.is_terminal:
            self._shown = time.monotonic()
        if row["kind"] == "eval":
            self._last = row["eval_reward"]
            if row["is_best"]:
                self._best = self._last if row.get("confirm_score") is None else row["confirm_score"]
            self.console.print(_eval_line(row))
        else:
            self.console.print(f"{row['opt_steps']:>9,} opts  {row['message']}")

    def video(self, video: Video) -> None:
        self._stage.clear()
        self.console.print(f"{video.opt_steps:>9,} opts  filmed {video.path}, return {_number(video.episode_return)}")

    def tick(self, progress: Progress) -> None:
        live = self.console.is_terminal
        if time.monotonic() - self._shown < (REFRESH_S if live else PLAIN_S):
            return
        self._shown = time.monotonic()
        if not live:
            counter = f"{progress.opt_steps:>9,}/{progress.max_opts:,} opts"
            self.console.print(f"{counter}  {'  '.join(self._parts(progress))}")
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

        # On a narrow terminal the counter stays whole, and the rest is cut: a line that wraps could not be taken back.
        whole = Column(no_wrap=True, min_width=COUNTER)
        counter = TextColumn("{task.completed:>9,}/{task.total:,} opts", table_column=whole)
        bar = [BarColumn(bar_width=BAR)] if self.console.width >= WIDE else []
        detail = TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=True, overflow="crop", ratio=1))
        live = Progress(counter, *bar, detail, console=self.console, transient=True, expand=True)
        live.start()
        return live

    def _parts(self, progress: Progress) -> list[str]:
        return [
            f"{progress.env_steps:,} env steps",
            f"{progress.opt_steps_per_sec:,.0f} opts/s",
            f"{progress.seconds_left:.0f} s left",
            f"train {_number(self._train)}",
            f"last {_number(self._last)}",
            f"best {_number(self._best)}",
        ]

    def _detail(self, progress: Progress) -> str:
        parts = self._parts(progress)
        room = self.console.width - COUNTER - (BAR if self.console.width >= WIDE else 0) - 2
        ends = accumulate(len(part) + 2 for part in parts)
        return "  ".join(part for part, end in zip(parts, ends, strict=True) if end - 2 <= room)


def _eval_line(row: Row) -> str:
    if "episodes" not in row:  # a session's: the score that its user has given
        counts = f"{row['opt_steps']:>9,} opts  {row['env_steps']:>11,} env steps"
        return f"{counts}  score {_number(row['eval_reward']):>9}{_verdict(row)}"
    unfinished = f"  {row['unfinished']} unfinished" if row["unfinished"] else ""
    return (
        f"{row['opt_steps']:>9,} opts  {row['env_steps']:>11,} env steps  return {_number(row['eval_reward']):>9}"
        f" +- {_number(row['eval_reward_std'])} over {row['episodes']} episodes{unfinished}"
        f"{_verdict(row)}"
    )


def _verdict(row: Row) -> str:
    """Say whether an evaluation is the best, and what a second look at it came to."""
    again = row.get("confirm_score")
    if again is None:
        return "  best" if row["is_best"] else ""
    return f"  best, confirmed at {_number(again)}" if row["is_best"] else f"  not the best: again {_number(again)}"


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"

"""Progress for a person to watch: a live line on a terminal, plain lines elsewhere."""

import math
import time
from typing import Any

from jaxrl.training.recorders.base import Progress, Row

REFRESH_S = 0.1


class ConsoleRecorder:
    """Show counters, speed, time left, and the last and best return."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self._live: Any = None
        self._last: float | None = None
        self._best: float | None = None
        self._train: float | None = None
        self._shown = 0.0

    def write(self, row: Row) -> None:
        if row["kind"] == "train":
            self._train = row.get("episode_return")
        elif row["kind"] == "eval":
            self._last = row["eval_reward"]
            if row["is_best"]:
                self._best = self._last if row.get("confirm_score") is None else row["confirm_score"]
            self.console.print(_eval_line(row))
        else:
            self.console.print(f"{row['opt_steps']:>9,} opts  {row['message']}")

    def tick(self, progress: Progress) -> None:
        if not self.console.is_terminal or time.monotonic() - self._shown < REFRESH_S:
            return
        self._shown = time.monotonic()
        if self._live is None:
            self._live = self._start()
            self._task = self._live.add_task("", total=progress.max_opts, detail="")
        self._live.update(self._task, completed=progress.opt_steps, detail=self._detail(progress))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn

        live = Progress(
            TextColumn("{task.completed:>9,}/{task.total:,} opts"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            transient=True,
        )
        live.start()
        return live

    def _detail(self, progress: Progress) -> str:
        parts = [
            f"{progress.env_steps:,} env steps",
            f"{progress.opt_steps_per_sec:,.0f} opts/s",
            f"{progress.seconds_left:.0f} s left",
            f"train {_number(self._train)}",
            f"last {_number(self._last)}",
            f"best {_number(self._best)}",
        ]
        return "  ".join(parts)


def _eval_line(row: Row) -> str:
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

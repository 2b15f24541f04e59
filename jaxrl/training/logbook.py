"""Logging for trainer and session: rows and events, the best policy, the facts of a checkpoint.

A logbook decides nothing and computes nothing of the training; it only formats and writes, continues the logs of an
earlier process, and raises `DivergedError` once it has logged that nothing more can be tried.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import DivergedError, NoCheckpointError, SettingsError, check_number
from jaxrl.parsing import flatten_settings
from jaxrl.strategies.base import Policy
from jaxrl.strategies.guard import Health
from jaxrl.training.divergence import Validity, in_good_health, look
from jaxrl.training.episodes import Episodes, format_lines
from jaxrl.training.evaluator import EvalOutcome, Evaluation, episode_rows, eval_columns
from jaxrl.training.ledger import Ledger
from jaxrl.training.policy import spec_facts
from jaxrl.training.recorders import (
    Progress,
    Recorder,
    Recorders,
    Row,
    RunInfo,
    Video,
    check_unwritten,
    console_of,
    histograms,
    own_recorder,
    recorders_of,
)
from jaxrl.training.report import Point
from jaxrl.training.sanity import EvalKind, TrainingReturns, columns_to_write, hint, is_far_below
from jaxrl.training.schedule import Schedule
from jaxrl.training.storage.files import plain
from jaxrl.training.storage.logs import rows_in
from jaxrl.training.storage.population_files import MemberDir
from jaxrl.training.storage.run import Best, Storage
from jaxrl.training.storage.run_dir import EPISODES, METRICS, TRAIN_EPISODES, population_dir
from jaxrl.trees import PyTree

STATM = Path("/proc/self/statm")
"""Memory of the process in pages, on Linux; the second number is the resident set."""

OF_POPULATION = ("console", "jsonl", "tensorboard")
"""Recorders by name that a population has once for all members."""
CLOSED = "nothing is being trained; call note() in a hook, or between the reports of a trainer"


class Logbook:
    """The log of a run. Before `open`, rows are discarded."""

    def __init__(
        self,
        schedule: Schedule,
        where: Callable[[], tuple[dict[str, int], float]],
        given: Sequence[Recorder | str] = (),
        quiet: bool = True,
    ) -> None:
        """Prepare the recorders, but open no file.

        Args:
          schedule: the schedule of the run.
          where: returns the counters that every row begins with, and the seconds of the run so far.
          given: recorders besides the logs of the run directory: names and objects. Without a directory, names that
            need one are skipped.
          quiet: skip a console given by name.
        """
        self.validity = Validity()
        """Counts of environment steps covered by the rows, and of invalid ones among them."""
        self.curve: list[Point] = []
        """The learning curve so far."""
        self._schedule, self._where = schedule, where
        self._given, self._console = given, console_of(given, quiet)
        self._rows, self._episodes = Recorders([]), Recorders([])
        self._train_episodes = Recorders([])
        self._waiting: dict[str, list[str]] = {}
        self._noted: dict[str, tuple[float, int]] = {}
        """Sum and count of the numbers noted for the next row, by name."""
        self._shared: set[str] = set()
        """Columns that the log of a population adds to the rows of its members."""
        self._columns: set[str] | None = None
        """Column names of the previous row, empty before the first; `None` while the logbook is closed."""

    # --- open, rewind, close ---

    def continue_from(self, before: "Logbook") -> None:
        """Take over the curve, and the numbers noted for the next row, from the log of an earlier call of the run."""
        self.curve, self._noted = before.curve, before._noted

    def open(self, storage: Storage, resume: bool, repeats: bool, notes: Iterable[str], restart_note: str = "") -> None:
        """Open the logs in the directory of `storage`, and log the start of the run.

        With `resume`, first truncate the logs to the checkpoint and append the rows that an earlier process could not
        write. `repeats` says whether later rows of that process come again as they were. `notes` become events;
        `restart_note` goes into that of a resumption.
        """
        opt_steps = self._counters["opt_steps"]
        self._rows = Recorders(recorders_of(self._recorders_in(storage), storage.log(METRICS), self._console))
        self._episodes = Recorders(own_recorder(storage.log(EPISODES)))
        self._train_episodes = Recorders(own_recorder(storage.log(TRAIN_EPISODES)))
        self._rows.begin(run_info(storage, opt_steps, changed=resume and not repeats))
        self._shared = {"member"} if isinstance(storage.dir, MemberDir) else set()
        # From here on `note` is allowed.
        self._columns = {*self._shared}
        if resume:
            # Rewind first: the unwritten rows of an earlier process precede the checkpoint, and follow its rows.
            self.rewind(opt_steps if storage.resumes else -1)
            for log in self._logs:
                log.take_up(self._waiting)
            self.curve = []
            for row in () if storage.dir is None else rows_in(partial(storage.dir.open_log, METRICS), ("eval",)):
                if type(row.get("env_steps")) is int:  # a row may come from anyone
                    self._continue_curve(row)
                    if self._console is not None:
                        self._console.recall(
                            {**row, **{name: _finite(row.get(name)) for name in ("eval_reward", "confirm_score")}}
                        )
        for note in notes:
            self.event("note", note)
        if resume:
            self.event("resume", storage.describe_resume(opt_steps, restart_note))
        if changed := storage.eval_changes:
            self.event("best", f"evaluation settings changed ({changed}): the best score is reset")

    def _recorders_in(self, storage: Storage) -> Sequence[Recorder | str]:
        """Return the recorders given, of a member without those that the population has for all members."""
        if not isinstance(storage.dir, MemberDir):
            return self._given
        own = [recorder for recorder in self._given if recorder not in OF_POPULATION]
        if own:  # they may write files
            storage.dir.make()
        return own

    def rewind(self, opt_steps: int) -> None:
        """Truncate the logs and the curve after `opt_steps`."""
        for log in self._logs:
            log.rewind(opt_steps)
        self.curve = [point for point in self.curve if point.opt_steps <= opt_steps]

    def close(self) -> None:
        """Flush and close the logs."""
        self._columns = None
        self.unstage()
        for log in self._logs:
            log.close()

    # --- divergence ---

    def require_rollback_left(self, ledger: Ledger, max_rollbacks: int, what: str) -> None:
        """Log the divergence and raise `DivergedError` if no rollback is left; `what` is from `divergence.explain`."""
        if ledger.tries < max_rollbacks:
            return
        self.event("diverged", what)
        tried = f"{ledger.tries} new tries from the last good checkpoint ended no better; " if ledger.tries else ""
        raise DivergedError(f"training diverged: {what}; {tried}try a lower agent.lr, or a smaller agent.max_grad_norm")

    def go_back(self, opt_steps: int, facts: Mapping[str, Any] | None) -> None:
        """Truncate the logs after `opt_steps`; `facts` are those of the checkpoint, `None` at the start of the run."""
        self.rewind(opt_steps)
        self._noted = noted_in(facts or {})

    def log_rollback(self, what: str, restart_note: str = "") -> None:
        """Log the reason for a rollback; `restart_note` says what starts anew."""
        self.event("rollback", f"{what}; went back to here{restart_note}, to go on with other random numbers")

    def require_valid(self, validity: Validity | None = None) -> None:
        """Log and raise `DivergedError` if none of the environment steps was valid; by default those of the rows."""
        if verdict := (validity or self.validity).verdict:
            self.event("diverged", verdict)
            raise DivergedError(verdict)

    # --- rows ---

    def row(self, kind: str, **columns: Any) -> dict[str, Any]:
        """Return a row with the current counters and time."""
        counters, wall = self._where()
        return {"kind": kind, **counters, "wall_s": round(wall, 3), **columns}

    def event(self, event: str, message: str, **more: str) -> None:
        """Log an event."""
        self._rows.write(self.row("event", event=event, message=message, **more))

    def note(self, values: Mapping[str, float]) -> None:
        """Add numbers to the means in the next row of metrics.

        Raises:
          SettingsError: the run is not open, a value is not a number, or the row has a column of that name.
        """
        if self._columns is None:
            raise SettingsError(CLOSED)
        for name, value in values.items():
            if name in self._columns:
                raise SettingsError(f"note: rows have a column {name!r} of their own; take another name")
            number = check_number(f"note: {name}", value)
            total, count = self._noted.get(name, (0.0, 0))
            self._noted[name] = total + number, count + 1

    def log_train(self, columns: Mapping[str, Any], ledger: Ledger, agent: Mapping[str, Any], steps: int) -> Row:
        """Log and return a row of metrics, with an event for each warning about it.

        Warnings are given once, which `ledger` remembers; `agent` has the settings of the agent. `steps` is the number
        of environment steps in the interval, if their validity matters.
        """
        row = self.row("train", **columns_to_write(columns), **memory())
        # Before the first row the columns are unknown: a noted name may be one of them, and the row's value wins.
        self._columns = {*row, *self._shared}
        left_out = sorted({*self._noted} & self._columns)
        row |= {name: total / count for name, (total, count) in self._noted.items() if name not in self._columns}
        self._noted = {}
        self._rows.write(row)
        if left_out:
            self.event("note", f"note: rows have a column {left_out[0]!r} of their own, so that it was left out")
        for event, message in ledger.watch(columns, agent).items():
            self.event(event, message)
        self.validity, warning = look(self.validity, row, steps)
        if warning:
            self.event("invalid", warning)
        return row

    def log_video(self, video: Video | str) -> None:
        """Log a video, or an event with the reason why there is none."""
        if isinstance(video, str):
            self.event("video", video)
        else:
            self._rows.video(video)

    def log_score(self, columns: Mapping[str, Any], evaluation: Evaluation | None) -> Row:
        """Log and return the row of a score, with the histograms of its evaluation, if any."""
        row = self.row("eval", **columns)
        self._continue_curve(row)
        spread = {} if evaluation is None else {"returns": evaluation.returns, "lengths": evaluation.lengths}
        self._rows.scored(row, histograms(row["opt_steps"], row["env_steps"], **spread))
        return row

    def log_eval(self, found: EvalOutcome, training: TrainingReturns | None, kind: EvalKind, ledger: Ledger) -> Row:
        """Log and return the row of an evaluation, and log a row for each of its episodes; see `eval_columns`.

        `training` has the returns of the training episodes. If greedy actions return far less, log a warning, once in
        a run.
        """
        if self._console is not None:
            self._console.actions = kind.actions
        columns = eval_columns(found.evaluation, found.score, found.again, found.is_best)
        row = self.log_score({**columns, "train_return": training and training.mean}, found.evaluation)
        self._episodes.write_all(list(episode_rows(self._counters, found.evaluation)))
        # Once in a run, resumed ones included: the ledger is part of the checkpoint.
        if kind.hints and not ledger.warned_greedy and is_far_below(found.evaluation.returns, training):
            assert training is not None
            ledger.warned_greedy = True
            self.event("greedy", hint(row["eval_reward"], training.mean))
        return row

    def _continue_curve(self, row: Row) -> None:
        """Add an evaluation to the curve; drop points at the same step or later, as left by a rewind."""
        point = Point(row["opt_steps"], row["env_steps"], _finite(row.get("score")), _finite(row.get("train_return")))
        while self.curve and self.curve[-1].opt_steps >= point.opt_steps:
            self.curve.pop()
        self.curve.append(point)

    def log_note(self, text: str | None) -> None:
        """Log `text` as an event, if there is one.

        Raises:
          SettingsError: the run is not open, or `text` is not a non-empty string.
        """
        if text is None:
            return
        if self._columns is None:
            raise SettingsError(CLOSED)
        if not isinstance(text, str) or not text:
            raise SettingsError(f"note: {text!r} is no text; numbers have names, as in note(norm=3.5)")
        self.event("note", text)

    def log_episodes(self, episodes: Episodes) -> None:
        """Log a row for each training episode."""
        if len(episodes.length):
            self._train_episodes.extend(format_lines(episodes))

    # --- console ---

    def stage(self, what: str) -> None:
        """Show the current stage of the run."""
        if self._console is not None:
            self._console.stage(what)

    @contextmanager
    def staged(self, what: str) -> Iterator[None]:
        """Show a stage during the block; clear it on failure, so that the error stands alone."""
        self.stage(what)
        try:
            yield
        except BaseException:
            self.unstage()
            raise

    def unstage(self) -> None:
        """Clear the stage."""
        if self._console is not None:
            self._console.unstage()

    def tick(self, t: int, rate: float) -> Progress:
        """Show and return the progress after `t` iterations, at `rate` iterations per second."""
        schedule = self._schedule
        progress = Progress(
            **self._counters,
            max_opts=schedule.opt_steps(schedule.last),
            opt_steps_per_sec=rate * schedule.opt_steps_per_step,
            seconds_left=(schedule.last - t) / max(rate, 1e-9),
        )
        self._rows.tick(progress)
        return progress

    # --- checkpoints ---

    def best(self, score: float, params: PyTree, policy: Policy | None, settings: Mapping[str, Any]) -> Best:
        """Return the current policy as the best, with the facts needed to load and run it."""
        counters = self._counters
        facts = {"score": score, **counters, "settings": plain(settings), "spec": spec_facts(policy)}
        return Best(counters["opt_steps"], score, params, facts)

    def facts(self, ledger: Ledger, health: Health | None, **own: Any) -> dict[str, Any]:
        """Return the facts of a checkpoint; `own` are those of this kind of run.

        A regular, healthy save is progress since the last rollback: it resets `ledger.tries`.
        """
        counters = self._counters
        healthy, regular = in_good_health(health), self._schedule.is_regular_save(counters["opt_steps"])
        # Before the facts, which include the ledger.
        ledger.tries = 0 if healthy and regular else ledger.tries
        return {
            "ledger": ledger.facts(),
            "env_steps": counters["env_steps"],
            "healthy": healthy,
            "regular": regular,
            "unwritten": {name: rows for log in self._logs for name, rows in log.unwritten().items()},
            **({"noted": dict(self._noted)} if self._noted else {}),  # a copy: a thread writes it
            **own,
        }

    def restore_ledger(self, facts: Mapping[str, Any], ledger: Ledger, reset_best: bool = False) -> Ledger:
        """Return the ledger of a run that resumes from `facts`; keep its unwritten rows for `open`.

        With `reset_best`, evaluation settings have changed, so that old scores are not comparable: reset the best.

        Raises:
          KeyError, TypeError, ValueError: `facts` are not from `facts()`.
        """
        taken, waiting = ledger.restore(facts["ledger"]), facts["unwritten"]
        # Validate before use: the checkpoint may come from an untrusted source.
        check_unwritten(waiting)
        self._noted = noted_in(facts)
        self._waiting = waiting
        if reset_best:
            taken.forget_scores()
        return taken

    @property
    def _logs(self) -> tuple[Recorders, ...]:
        return self._rows, self._episodes, self._train_episodes

    @property
    def _counters(self) -> dict[str, int]:
        return self._where()[0]


def noted_in(facts: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Return sum and count of the numbers noted for the next row, from the facts of a checkpoint."""
    return {str(name): (float(total), int(count)) for name, (total, count) in facts.get("noted", {}).items()}


def _finite(number: Any) -> float | None:
    return float(number) if isinstance(number, int | float) and abs(number) <= sys.float_info.max else None


def memory() -> dict[str, float]:
    """Return the current memory use of the process and its first device in MB (1e6 bytes), where available."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open(STATM, "rb", buffering=0) as file:
        found["rss_mb"] = int(file.read(256).split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_in_use" in stats:
        found["device_mb"] = stats["bytes_in_use"] / 1e6
    return found


def run_info(storage: Storage, opt_steps: int, changed: bool) -> RunInfo:
    """Return the description of a run for recorders; it starts or resumes after `opt_steps`."""
    settings, population = storage.settings, None if storage.path is None else population_dir(storage.path)
    called = (
        "-".join((*algo_and_env(settings), f"s{settings.get('seed')}")) if storage.path is None else storage.path.name
    )
    name = called if population is not None else settings.get("name") or called  # members need distinct names
    return RunInfo(
        name=name if population is None else f"{population.name}-{name}",
        directory=storage.path,
        settings=flatten_settings(settings),
        tags=(*algo_and_env(settings), *settings.get("tags", ())),
        opt_steps=opt_steps if storage.resumes else 0,
        changed=changed,
        group=population,
        notes=str(settings.get("notes") or ""),
    )


def algo_and_env(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the algorithm and the environment of a run, where they have names."""
    return tuple(str(part) for part in (settings.get("algo"), settings.get("env")) if part)


@contextmanager
def reading_facts(checkpoint: str, writer: str) -> Iterator[None]:
    """Convert errors from reading the facts of a checkpoint, which `writer`, as "a session", should have written.

    Raises:
      NoCheckpointError: the facts are not those of this kind of run.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NoCheckpointError(f"checkpoint {checkpoint} was not written by {writer}: {error}") from error

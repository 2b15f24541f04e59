"""Recorders for services, each in a thread of its own: one that hangs or is away costs the training nothing."""

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError, describe_error, print_stderr
from jaxrl.training.recorders.base import KINDS, Histogram, Recorder, Row, RunInfo, Video
from jaxrl.training.recorders.jsonl import rows_of
from jaxrl.training.reel import films_in
from jaxrl.training.storage.run_dir import CONFIG, METADATA, METRICS, VIDEOS, read_json, read_metadata

CAPACITY = 4_096
"""Rows that wait for a service, at most; those that come then are taken from the log at the end."""
GATHER_S = 1.0
"""Seconds over which rows are gathered. A thread that woke for each would contend with the training for Python's lock
just while rows are made; and a service that takes many in one call is called less often."""
LOG_AT_ONCE = 256
"""Rows of a log that are read before they are told."""
LIMIT_S = 30.0
"""Seconds that the end of a run waits for a service."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Seconds until what has failed is tried again: at first, and doubled each time up to at most."""


class Service:
    """What tells a service of one run: override what it needs.

    All of it is called in one thread, except `abandon`, may block, and is tried again if it fails.
    """

    def connect(self, run: RunInfo, kept: dict[str, Any], /) -> dict[str, Any]:
        """Open the run at the service, or go on with the one that `kept` describes; return what to keep, for JSON.

        `kept` is what an earlier process returned here, or empty.
        """
        return kept

    def send(self, row: Row, /) -> None:
        """Tell a row of `train` or `eval`."""

    def send_some(self, rows: Sequence[Row], /) -> int:
        """Tell some of the rows that wait in one call, from the first on; return how many, at least one."""
        self.send(rows[0])
        return 1

    def video(self, video: Video, /) -> None:
        """Tell a video."""

    def histogram(self, histogram: Histogram, /) -> None:
        """Tell a histogram."""

    def finish(self, run: RunInfo, /) -> None:
        """Tell what the run has left in its directory, and that it has ended."""

    def abandon(self) -> None:
        """See to it that the process can end although not all could be told; called in the thread that trains."""


class ServiceRecorder(Recorder):
    """Tell a service the rows of metrics, in a thread of its own.

    The log of the run has every row. So none is lost that the service does not take: what an earlier process could not
    tell is taken from the log when the run goes on. A file beside the log keeps up to where rows were told, and none is
    told again, unless it differs.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Service],
        *,
        capacity: int = CAPACITY,
        limit_s: float = LIMIT_S,
        retry_s: float = RETRY_S,
        gather_s: float = GATHER_S,
    ) -> None:
        """Prepare, but begin no thread.

        Args:
          name: of the service, in messages and in the name of the file that is kept.
          make: makes what tells it; called once for each run.
          capacity: rows that wait at most.
          limit_s: seconds that the end of a run waits for the service.
          retry_s: seconds until what has failed is tried again, the first time.
          gather_s: seconds over which rows are gathered before they are told.
        """
        self._name, self._make = name, make
        self._capacity, self._limit_s, self._retry_s, self._gather_s = capacity, limit_s, retry_s, gather_s
        self._worker: _Worker | None = None

    def begin(self, run: RunInfo) -> None:
        """Connect, and tell what an earlier process could not; return at once.

        Raises:
          SettingsError: what was made is no `Service`.
        """
        service = self._make()
        if not isinstance(service, Service):
            raise SettingsError(
                f"recorder {self._name}: {service!r} is no service; derive its class from jaxrl.Service, and override "
                "what it needs"
            )
        self._worker = _Worker(self._name, service, run, self._capacity, self._retry_s, self._gather_s)
        self._worker.start()

    def write(self, row: Row) -> None:
        """Have a row told."""
        if self._worker is not None and row["kind"] in KINDS:
            self._worker.put(row)

    def video(self, video: Video) -> None:
        """Have a video told."""
        if self._worker is not None:
            self._worker.put_more(_VIDEO, video)

    def histogram(self, histogram: Histogram) -> None:
        """Have a histogram told."""
        if self._worker is not None:
            self._worker.put_more(f"{_HISTOGRAM}/{histogram.name}", histogram)

    def rewind(self, opt_steps: int) -> None:
        """Tell rows after `opt_steps` again if this run has made them before: they come of other random numbers."""
        if self._worker is not None and self._worker.taken:
            self._worker.rewind(opt_steps)

    def close(self) -> None:
        """Wait until all is told, but not longer than the time limit."""
        if self._worker is not None and not self._worker.end(self._limit_s):
            print_stderr(
                f"warning: {self._name} has not taken all rows within {self._limit_s:g} s; {METRICS} has them, and "
                "going on with the run tells them"
            )
        self._worker = None


_REWIND = "rewind"
_VIDEO, _HISTOGRAM = "video", "histogram"
_METRICS = "metrics"


class _GivenUpError(Exception):
    """The run has ended, and the service still fails."""


class _Worker:
    """The thread of one run: connect, catch up, tell rows as they come, finish."""

    def __init__(
        self, name: str, service: Service, run: RunInfo, capacity: int, retry_s: float, gather_s: float
    ) -> None:
        self.taken = 0
        """Rows taken in."""
        self._name, self._service, self._run = name, service, run
        self._capacity, self._retry_s, self._gather_s = capacity, retry_s, gather_s
        self._rows: deque[Row] = deque()
        self._due, self._closing, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._behind = self._said = self._done = False
        self._back: int | None = None
        """The least step to which the run went back after rows were left to the log."""
        self._keeping = threading.Lock()
        self._path = None if run.directory is None else run.directory / f"{name}.json"
        self._kept = _read(self._path)
        self._told: dict[str, int] = dict(self._kept.pop("told", {}))
        self._floor = self._least(run.opt_steps) if run.changed else dict(self._told)
        self._tellers = {_METRICS: self._tell_metrics, _REWIND: self._go_back}
        self._tellers |= dict.fromkeys((_VIDEO, _HISTOGRAM), self._tell_more)
        self._thread = threading.Thread(target=self._work, name=f"jaxrl-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, row: Row) -> None:
        """Take in a row; where there is no room, this one and those after it are left to the log."""
        self.taken += 1
        if not self._behind and len(self._rows) < self._capacity:
            self._rows.append(row)
            # Wakes the thread before its time.
            if 2 * len(self._rows) >= self._capacity:
                self._due.set()
            return
        if not self._behind:
            self._say(f"{len(self._rows):,} rows wait")
        self._behind = True

    def rewind(self, opt_steps: int) -> None:
        """Take in that the run went back; there is always room for that."""
        if not self._behind:
            self._rows.append({"kind": _REWIND, "opt_steps": opt_steps})
            return
        self._back = opt_steps if self._back is None else min(self._back, opt_steps)
        self._keep()  # a run that is killed before its end tells these rows when it goes on

    def put_more(self, kind: str, given: Video | Histogram) -> None:
        """Take in what is no row, unless the service does nothing with it."""
        sort = _sort_of(kind)
        if getattr(type(self._service), sort) is not getattr(Service, sort):
            self.put({"kind": kind, "opt_steps": given.opt_steps, "given": given})

    def end(self, limit_s: float) -> bool:
        """Say whether all was told within the limit, or it was already said that not."""
        self._closing.set()
        self._due.set()
        # A thread that hangs in the service is left behind: it is a daemon, and writes nothing from here on.
        self._thread.join(limit_s)
        self._abandoned.set()
        if not self._done:
            self._service.abandon()
        return self._done or self._said

    def _work(self) -> None:
        with contextlib.suppress(_GivenUpError):
            self._kept = self._attempt(lambda: self._service.connect(self._run, dict(self._kept)))
            self._keep()
            self._catch_up(self._run.opt_steps)
            while self._gather():
                self._tell(self._waiting())
            self._tell(self._waiting())
            # Rows that found no room are taken from the log, from where the service has them.
            if self._behind:
                self._told = self._floor = self._held()
                self._back = None
                self._catch_up()
            self._attempt(lambda: self._service.finish(self._run))
            self._done = True

    def _gather(self) -> bool:
        """Let rows come for a while, or until half of the room is taken; say whether more may come."""
        self._due.wait(self._gather_s)
        self._due.clear()
        return not self._closing.is_set()

    def _waiting(self) -> list[Row]:
        """Take the rows that wait."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def _catch_up(self, upto: int | None = None) -> None:
        """Tell what the log holds after the floor, up to a step."""
        if self._run.directory is None or upto == 0:
            return
        held = rows_of(self._run.directory / METRICS)
        rows = (row for row in held if upto is None or row["opt_steps"] <= upto)
        while some := list(islice(rows, LOG_AT_ONCE)):
            self._tell(some)

    def _tell(self, rows: Iterable[Row]) -> None:
        """Tell rows in their order."""
        for sort, some in groupby(rows, lambda row: _sort_of(row["kind"])):
            self._tellers[sort](some)

    def _tell_metrics(self, rows: Iterable[Row]) -> None:
        left = [row for row in rows if self._is_new(row)]
        while left:
            count = self._attempt(partial(self._send, left))
            self._note(left[:count])
            left = left[count:]

    def _send(self, rows: Sequence[Row]) -> int:
        """Have the first of `rows`, or more, told; return how many."""
        return min(max(int(self._service.send_some(rows)), 1), len(rows))

    def _tell_more(self, rows: Iterable[Row]) -> None:
        for row in filter(self._is_new, rows):
            self._attempt(partial(self._tell_once, row))
            self._note([row])

    def _tell_once(self, row: Row) -> None:
        try:
            tell = self._service.video if row["kind"] == _VIDEO else self._service.histogram
            tell(row["given"])
        except Exception as error:  # once: the run's files have it, and rows behind it shall not wait
            self._say(describe_error(error))

    def _go_back(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._told = self._floor = self._least(row["opt_steps"])

    def _is_new(self, row: Row) -> bool:
        return bool(row["opt_steps"] > self._floor.get(row["kind"], -1))

    def _held(self) -> dict[str, int]:
        """Return up to where the service has the rows of the log."""
        return dict(self._told) if self._back is None else self._least(self._back)

    def _least(self, opt_steps: int) -> dict[str, int]:
        return {kind: min(told, opt_steps) for kind, told in self._told.items()}

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Do something until it succeeds; raise `_GivenUpError` if it fails and the run has ended."""
        wait = self._retry_s
        while not self._abandoned.is_set():
            # Asked before the attempt: the one that begins after the end of the run is the last.
            last = self._closing.is_set()
            try:
                return action()
            except (Exception, SystemExit) as error:
                self._say(describe_error(error))
            if last:
                break
            # The end of the run cuts the pause short.
            self._closing.wait(wait)
            wait = min(2 * wait, LONGEST_RETRY_S)
        raise _GivenUpError

    def _note(self, told: Sequence[Row]) -> None:
        self._told = {**self._told, **{row["kind"]: row["opt_steps"] for row in told}}
        self._keep()

    def _keep(self) -> None:
        """Write down up to where rows were told. On a full disk it stays as it was: some may then be told twice."""
        if self._path is None or self._abandoned.is_set():
            return
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with self._keeping, contextlib.suppress(OSError):
            temporary.write_text(json.dumps({**self._kept, "told": self._held()}))
            os.replace(temporary, self._path)

    def _say(self, what: str) -> None:
        if not self._said and not self._abandoned.is_set():
            print_stderr(
                f"warning: {self._name} does not take rows ({what}); training goes on, and {METRICS} has all of them"
            )
        self._said = True


def _sort_of(kind: str) -> str:
    """Return how things of this kind are told."""
    return _METRICS if kind in KINDS else kind.partition("/")[0]


def _read(path: Path | None) -> dict[str, Any]:
    """Return what an earlier process kept, or nothing if it is missing or damaged."""
    with contextlib.suppress(ValueError, OSError):
        kept = {} if path is None else read_json(path)
        told = kept.get("told", {})
        if isinstance(told, dict) and all(type(step) is int for step in told.values()):
            return kept
    return {}


# --- what a run has left for a service ----------------------------------------------------------------------------


BEST = "best"
SCORES = ("best_score", "best_opt_steps", "last_score")


def best_files(run: RunInfo) -> dict[str, Path]:
    """Return the files of the best policy by their names in a directory that `load_policy` takes; none without one."""
    if run.directory is None:
        return {}
    best = sorted(path for path in (run.directory / BEST).glob("[0-9]*/**/*") if path.is_file())
    about = [run.directory / name for name in (CONFIG, METADATA)]
    files = [path for path in (*about, *best) if path.is_file()] if best else []
    return {path.relative_to(run.directory).as_posix(): path for path in files}


def films(run: RunInfo) -> list[Path]:
    """Return the pictures that move in the directory of the run."""
    return [] if run.directory is None else films_in(run.directory)


def videos(run: RunInfo) -> dict[str, Path]:
    """Return the episodes filmed on the way, by their names in the directory of the run."""
    found = [] if run.directory is None else films_in(run.directory / VIDEOS)
    return {f"{VIDEOS}/{path.name}": path for path in found}


def events_of(run: RunInfo) -> list[Row]:
    """Return the events of the run, in their order."""
    log = () if run.directory is None else rows_of(run.directory / METRICS, ("event",))
    # A path in a message may have bytes that are no text, which services cannot write.
    said = lambda row: str(row.get("message", "")).encode(errors="replace").decode()
    return [{**row, "event": str(row.get("event", "")), "message": said(row)} for row in log]


def summary_of(run: RunInfo) -> tuple[dict[str, Any], bool]:
    """Return the scores of a run that has ended, and whether it failed."""
    facts = {} if run.directory is None else read_metadata(run.directory)
    status = str(facts.get("status", ""))
    scores = {name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)}
    return {**scores, "status": status}, status.startswith(("failed", "diverged"))

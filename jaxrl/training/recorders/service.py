"""Recorders for tracking services, each in its own thread: a service that hangs or is down never blocks training."""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from jaxrl.errors import SettingsError, describe_error, print_stderr
from jaxrl.training.recorders.base import Histogram, Recorder, Row, RunInfo, Video
from jaxrl.training.stops import BROKEN
from jaxrl.training.storage.files import read_json, write_atomically
from jaxrl.training.storage.logs import KINDS, rows_of
from jaxrl.training.storage.run_dir import CONFIG, METADATA, METRICS, VIDEOS, films_in, read_metadata

CAPACITY = 4_096
"""Maximum queued rows; any beyond it are read from the log at the end of the run."""
GATHER_S = 1.0
"""Seconds over which rows are batched. A thread woken by each row would contend for the GIL just while rows are made,
and services that accept many rows per call are called less often."""
LOG_AT_ONCE = 256
"""Rows of a log that are read and sent at a time."""
LOST = "without a run_dir, those that it never takes are lost"
"""What becomes of rows for which there is no log."""
LIMIT_S = 30.0
"""Seconds that the end of a run waits for a service."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Initial and maximum retry delay in seconds; it doubles with each failure."""


class Service:
    """Client of a tracking service for one run; override the methods that it needs.

    All methods but `abandon` are called in one thread, may block, and are retried on failure, except that videos and
    histograms are sent once.
    """

    def connect(self, run: RunInfo, kept: dict[str, Any], /) -> dict[str, Any]:
        """Create the run at the service, or resume the one in `kept`; return the JSON object to keep for next time.

        `kept` is the object returned in an earlier process, or empty.
        """
        return kept

    def send(self, row: Row, /) -> None:
        """Send a row of kind `train` or `eval`."""

    def send_some(self, rows: Sequence[Row], /) -> int:
        """Send the first of the pending `rows` in one call; return how many, at least one."""
        self.send(rows[0])
        return 1

    def video(self, video: Video, /) -> None:
        """Send a video."""

    def histogram(self, histogram: Histogram, /) -> None:
        """Send a histogram."""

    def finish(self, run: RunInfo, /) -> None:
        """Upload the results in the run's directory, and mark the run as ended."""

    def abandon(self) -> None:
        """Let the process exit although not everything was sent; called in the training thread."""


class ServiceRecorder(Recorder):
    """Sends metrics to a service in its own thread.

    The run's log has every row, so none is lost if the service fails: rows that an earlier process could not send are
    read from the log when the run is resumed. A file in the run directory records up to which step rows were sent; none
    is sent twice unless it may have changed. Without a directory, rows that the service does not take are lost.
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
        """Prepare without starting a thread.

        Args:
          name: name of the service, in messages and as the name of its state file.
          make: returns the client; called once per run.
          capacity: maximum queued rows.
          limit_s: seconds that the end of a run waits for the service.
          retry_s: seconds until the first retry.
          gather_s: seconds over which rows are batched.
        """
        self._name, self._make = name, make
        self._capacity, self._limit_s, self._retry_s, self._gather_s = capacity, limit_s, retry_s, gather_s
        self._worker: _Worker | None = None

    def begin(self, run: RunInfo) -> None:
        """Start the thread, which connects and sends what an earlier process could not; return immediately.

        Raises:
          SettingsError: `make` did not return a `Service`.
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
        """Queue a row of kind `train` or `eval`; others are ignored."""
        if self._worker is not None and row["kind"] in KINDS:
            self._worker.put(row)

    def video(self, video: Video) -> None:
        """Queue a video."""
        if self._worker is not None:
            self._worker.put_more(_VIDEO, video)

    def histogram(self, histogram: Histogram) -> None:
        """Queue a histogram."""
        if self._worker is not None:
            self._worker.put_more(f"{_HISTOGRAM}/{histogram.name}", histogram)

    def rewind(self, opt_steps: int) -> None:
        """Send rows after `opt_steps` again if this process has already made some: new random numbers change them."""
        if self._worker is not None and self._worker.taken:
            self._worker.rewind(opt_steps)

    def close(self) -> None:
        """Wait until everything is sent, at most for the time limit."""
        if self._worker is not None and not self._worker.end(self._limit_s):
            rest = LOST if self._worker.keeps_nothing else f"{METRICS} has them, and resuming the run sends them"
            print_stderr(f"warning: {self._name} has not taken all rows within {self._limit_s:g} s; {rest}")
        self._worker = None


_REWIND = "rewind"
_VIDEO, _HISTOGRAM = "video", "histogram"
_METRICS = "metrics"


class _GivenUpError(Exception):
    """The run has ended, and the service still fails."""


class _Worker:
    """The thread of one run: connects, catches up from the log, sends queued rows, finishes."""

    def __init__(
        self, name: str, service: Service, run: RunInfo, capacity: int, retry_s: float, gather_s: float
    ) -> None:
        self.taken = 0
        """Number of rows received."""
        self.keeps_nothing = run.directory is None
        """Whether there is no log with the rows that the service does not take."""
        self._name, self._service, self._run = name, service, run
        self._capacity, self._retry_s, self._gather_s = capacity, retry_s, gather_s
        self._rows: deque[Row] = deque()
        self._due, self._closing, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._overflowed = self._warned = self._done = False
        self._rewound_to: int | None = None
        """The earliest step to which the run was rewound since the queue overflowed."""
        self._keeping = threading.Lock()
        self._path = None if run.directory is None else run.directory / f"{name}.json"
        self._kept = _read(self._path)
        self._sent: dict[str, int] = dict(self._kept.pop("sent", {}))
        """The last step sent, by kind."""
        self._floor = self._least(run.opt_steps) if run.changed else dict(self._sent)
        """The step up to which rows are skipped as sent before, by kind."""
        self._handlers = {_METRICS: self._deliver_metrics, _REWIND: self._rewind}
        self._handlers |= dict.fromkeys((_VIDEO, _HISTOGRAM), self._deliver_other)
        self._thread = threading.Thread(target=self._work, name=f"jaxrl-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, row: Row) -> None:
        """Queue a row; once the queue is full, this and all later rows are left to the log."""
        self.taken += 1
        if not self._overflowed and len(self._rows) < self._capacity:
            self._rows.append(row)
            # Wake the thread early.
            if 2 * len(self._rows) >= self._capacity:
                self._due.set()
            return
        if not self._overflowed:
            self._warn(f"{len(self._rows):,} rows wait")
        self._overflowed = True

    def rewind(self, opt_steps: int) -> None:
        """Queue a rewind of the run, whatever the capacity."""
        if not self._overflowed:
            self._rows.append({"kind": _REWIND, "opt_steps": opt_steps})
            return
        self._rewound_to = opt_steps if self._rewound_to is None else min(self._rewound_to, opt_steps)
        self._keep()  # if the process is killed, the rows are sent when the run is resumed

    def put_more(self, kind: str, given: Video | Histogram) -> None:
        """Queue a video or histogram, unless the service ignores them."""
        sort = _sort_of(kind)
        if getattr(type(self._service), sort) is not getattr(Service, sort):
            self.put({"kind": kind, "opt_steps": given.opt_steps, "given": given})

    def end(self, limit_s: float) -> bool:
        """End the thread; return whether all was sent within the limit, or a failure was already reported."""
        self._closing.set()
        self._due.set()
        # A thread that hangs in the service is abandoned: it is a daemon, and writes no more files.
        self._thread.join(limit_s)
        self._abandoned.set()
        if not self._done:
            self._service.abandon()
        return self._done or self._warned

    def _work(self) -> None:
        with contextlib.suppress(_GivenUpError):
            self._kept = self._attempt(lambda: self._service.connect(self._run, dict(self._kept)))
            self._keep()
            self._catch_up(self._run.opt_steps)
            if self._run.changed:  # all rows of this process are new, also one at the step resumed from
                self._floor = {}
            while self._wait_for_rows():
                self._deliver(self._waiting())
            self._deliver(self._waiting())
            # After an overflow, send the remaining rows from the log.
            if self._overflowed:
                self._sent = self._floor = self._last_sent()
                self._rewound_to = None
                self._catch_up()
            self._attempt(lambda: self._service.finish(self._run))
            self._done = True

    def _wait_for_rows(self) -> bool:
        """Wait for `gather_s`, or until the queue is half full; return whether more rows may come."""
        self._due.wait(self._gather_s)
        self._due.clear()
        return not self._closing.is_set()

    def _waiting(self) -> list[Row]:
        """Dequeue all rows."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def _catch_up(self, upto: int | None = None) -> None:
        """Send the rows in the log after the floor, up to step `upto`."""
        if self._run.directory is None or upto == 0:
            return
        held = rows_of(self._run.directory)
        rows = (row for row in held if upto is None or row["opt_steps"] <= upto)
        while some := list(islice(rows, LOG_AT_ONCE)):
            self._deliver(some)

    def _deliver(self, rows: Iterable[Row]) -> None:
        """Send rows in order."""
        for sort, some in groupby(rows, lambda row: _sort_of(row["kind"])):
            self._handlers[sort](some)

    def _deliver_metrics(self, rows: Iterable[Row]) -> None:
        left = [row for row in rows if self._is_new(row)]
        while left:
            count = self._attempt(partial(self._send, left))
            self._note(left[:count])
            left = left[count:]

    def _send(self, rows: Sequence[Row]) -> int:
        """Send the first of `rows`; return how many, between 1 and all."""
        return min(max(int(self._service.send_some(rows)), 1), len(rows))

    def _deliver_other(self, rows: Iterable[Row]) -> None:
        for row in filter(self._is_new, rows):
            self._attempt(partial(self._deliver_once, row))
            self._note([row])

    def _deliver_once(self, row: Row) -> None:
        try:
            send = self._service.video if row["kind"] == _VIDEO else self._service.histogram
            send(row["given"])
        except Exception as error:  # not retried: the run's files have it, and it would delay the rows after it
            self._warn(describe_error(error))

    def _rewind(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._sent, self._floor = self._least(row["opt_steps"]), {}

    def _is_new(self, row: Row) -> bool:
        return bool(row["opt_steps"] > self._floor.get(row["kind"], -1))

    def _last_sent(self) -> dict[str, int]:
        """Return the last valid step sent of each kind."""
        return dict(self._sent) if self._rewound_to is None else self._least(self._rewound_to)

    def _least(self, opt_steps: int) -> dict[str, int]:
        return {kind: min(sent, opt_steps) for kind, sent in self._sent.items()}

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Retry `action` until it succeeds; raise `_GivenUpError` if it still fails after the end of the run."""
        wait = self._retry_s
        while not self._abandoned.is_set():
            # Read before the attempt: the first attempt that starts after the end of the run is the last.
            last = self._closing.is_set()
            try:
                return action()
            except (Exception, SystemExit) as error:
                self._warn(describe_error(error))
            if last:
                break
            # The end of the run interrupts the delay.
            self._closing.wait(wait)
            wait = min(2 * wait, LONGEST_RETRY_S)
        raise _GivenUpError

    def _note(self, sent: Sequence[Row]) -> None:
        self._sent = {**self._sent, **{row["kind"]: row["opt_steps"] for row in sent}}
        self._keep()

    def _keep(self) -> None:
        """Save the state file. On a full disk the old one stays, and some rows may later be sent twice."""
        if self._path is None or self._abandoned.is_set():
            return
        with self._keeping, contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps({**self._kept, "sent": self._last_sent()}))

    def _warn(self, what: str) -> None:
        if not self._warned and not self._abandoned.is_set():
            rest = LOST if self.keeps_nothing else f"{METRICS} has all of them"
            print_stderr(f"warning: {self._name} does not take rows ({what}); training goes on, and {rest}")
        self._warned = True


def _sort_of(kind: str) -> str:
    """Return the sort of a queued item, by which it is sent."""
    return _METRICS if kind in KINDS else kind.partition("/")[0]


def _read(path: Path | None) -> dict[str, Any]:
    """Return the state file of an earlier process, or `{}` if it is missing or damaged."""
    with contextlib.suppress(ValueError, OSError):
        kept = {} if path is None else read_json(path)
        sent = kept.get("sent", {})
        if isinstance(sent, dict) and all(type(step) is int for step in sent.values()):
            return kept
    return {}


# --- results of a run, for services -------------------------------------------------------------------------------


BEST = "best"
SCORES = ("best_score", "best_opt_steps", "last_score")


def best_files(run: RunInfo) -> dict[str, Path]:
    """Return the files of the best policy, if any, by their names in a directory that `load_policy` accepts."""
    if run.directory is None:
        return {}
    best = sorted(path for path in (run.directory / BEST).glob("[0-9]*/**/*") if path.is_file())
    about = [run.directory / name for name in (CONFIG, METADATA)]
    files = [path for path in (*about, *best) if path.is_file()] if best else []
    return {path.relative_to(run.directory).as_posix(): path for path in files}


def films(run: RunInfo) -> list[Path]:
    """Return the GIF and MP4 files in the directory of the run."""
    return [] if run.directory is None else films_in(run.directory)


def videos(run: RunInfo) -> dict[str, Path]:
    """Return the episodes filmed during training, by their names in the directory of the run."""
    found = [] if run.directory is None else films_in(run.directory / VIDEOS)
    return {f"{VIDEOS}/{path.name}": path for path in found}


def events_of(run: RunInfo) -> list[Row]:
    """Return the events of the run in order."""
    log = () if run.directory is None else rows_of(run.directory, ("event",))
    # A path in a message may have surrogate escapes, which services cannot encode.
    said = lambda row: str(row.get("message", "")).encode(errors="replace").decode()
    return [{**row, "event": str(row.get("event", "")), "message": said(row)} for row in log]


def summary_of(run: RunInfo) -> tuple[dict[str, Any], bool]:
    """Return scores and status of an ended run, and whether it failed."""
    facts = {} if run.directory is None else read_metadata(run.directory)
    status = str(facts.get("status", ""))
    scores = {name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)}
    return {**scores, "status": status}, status.startswith(BROKEN)

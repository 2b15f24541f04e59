"""Weights & Biases."""

import contextlib
import netrc
import os
import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxrl.errors import MissingError, require_extra
from jaxrl.training.recorders.base import Histogram, Row, RunInfo, Video, numbers_of
from jaxrl.training.recorders.service import Service, ServiceRecorder, best_files, events_of, films, summary_of

PROJECT = "jaxrl"
"""The default project."""
EVENT = ("opt_steps", "env_steps", "wall_s", "event", "message")
"""Columns of the table of events."""
LONGEST_TAG, LONGEST_ARTIFACT = 64, 128
"""Maximum characters of a tag, and of the name of an artifact."""
FLUSH_S = 1.0
"""Seconds until a row is flushed to wandb's files: if the process is killed first, wandb loses the row."""
LEAVE_S = 2.0
"""Seconds for wandb's service process to exit after this one, if the run has not waited for it."""
HOST = "https://api.wandb.ai"
_others: list[set[int]] = []
"""Service processes of wandb that existed before the first run here connected, and so belong to the user."""
_looking = threading.Lock()


def wandb_recorder(**init: Any) -> ServiceRecorder:
    """Return a recorder for Weights & Biases; `init` are arguments of `wandb.init`, such as `project="pendulum"`.

    Raises:
      MissingError: the package is missing, or there is no API key for the server.
    """
    require_extra("wandb", "runs recorded by wandb")
    _require_key(init.get("mode") or os.environ.get("WANDB_MODE", "online"))
    return ServiceRecorder("wandb", partial(_Wandb, init))


class _Wandb(Service):
    """One run at the service; members of a population share a group, named after it."""

    def __init__(self, init: Mapping[str, Any]) -> None:
        self._init = init
        self._run: Any = None

    def connect(self, run: RunInfo, kept: dict[str, Any]) -> dict[str, Any]:
        import wandb

        if self._run is None:
            # The id is ours and kept in the run directory, so that a resumed run continues on the same page.
            run_id = kept.get("id") or os.urandom(4).hex()
            arguments = {**_arguments(run), **self._init}
            # A process may have many runs open, as for a population; wandb must not capture its output.
            settings = wandb.Settings(
                silent=True, console="off", symlink=False, x_transaction_log_flush_interval=FLUSH_S
            )
            with _looking:
                if not _others:
                    _others.append(_services())
            self._run = wandb.init(id=run_id, resume="allow", reinit="create_new", settings=settings, **arguments)
            for axis in ("opt_steps", "env_steps"):
                self._run.define_metric(axis)
            # Wandb's default step counts calls, so runs could not be compared over it.
            self._run.define_metric("*", step_metric="opt_steps")
            self._run.config.update(dict(run.settings), allow_val_change=True)
        return {"id": self._run.id}

    def send(self, row: Row) -> None:
        counters = {name: row[name] for name in ("opt_steps", "env_steps")}
        numbers = {name: x for name, x in numbers_of(row).items() if name.partition("/")[2] not in counters}
        self._run.log({**counters, **numbers})

    def video(self, video: Video) -> None:
        import wandb

        counters = {"opt_steps": video.opt_steps, "env_steps": video.env_steps}
        self._run.log({**counters, "video/episode": wandb.Video(str(video.path), format=video.path.suffix[1:])})

    def histogram(self, histogram: Histogram) -> None:
        import wandb

        counters = {"opt_steps": histogram.opt_steps, "env_steps": histogram.env_steps}
        self._run.log({**counters, histogram.name: wandb.Histogram(np_histogram=histogram.bins())})

    def finish(self, run: RunInfo) -> None:
        import wandb

        if events := events_of(run):  # one table; after a resume it replaces the earlier one
            rows = [[event.get(name) for name in EVENT] for event in events]
            self._run.log({"opt_steps": events[-1]["opt_steps"], "events": wandb.Table(columns=[*EVENT], data=rows)})
        summary, failed = summary_of(run)
        self._run.summary.update(summary)
        for film in films(run):
            self._run.log({f"video/{film.stem}": wandb.Video(str(film), format=film.suffix[1:])})
        if files := best_files(run):
            end = "-best"
            name = run.name.replace("/", "_")[: LONGEST_ARTIFACT - len(end)] + end
            artifact = wandb.Artifact(name, type="model", metadata=summary)
            for name, path in files.items():
                artifact.add_file(str(path), name=name)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(failed))

    def abandon(self) -> None:
        """Keep wandb from waiting for its server again, without limit, when the process exits."""
        threading.Thread(target=_end_uploads, daemon=True).start()


def _arguments(run: RunInfo) -> dict[str, Any]:
    """Return arguments of `wandb.init`; environment variables take precedence."""
    environment = os.environ
    tags = [tag for tag in environment.get("WANDB_TAGS", "").split(",") if tag]
    alone = run.group is None
    return {
        "project": environment.get("WANDB_PROJECT", PROJECT),
        "dir": None if run.directory is None else str(run.directory),
        "name": environment.get("WANDB_NAME", run.name) if alone else run.name,
        "group": environment.get("WANDB_RUN_GROUP") if run.group is None else run.group.name,
        "job_type": environment.get("WANDB_JOB_TYPE", "train" if alone else "member"),
        "tags": list(dict.fromkeys(tag[:LONGEST_TAG] for tag in (*run.tags, *tags))),
        "notes": environment.get("WANDB_NOTES", run.notes) or None,
    }


def _end_uploads() -> None:
    """Kill wandb's service process at the exit of this one, if a run has started it and `/proc` shows which it is.

    Data not uploaded yet remain in its files. While it is exiting, it ignores milder signals.
    """
    threading.main_thread().join()
    time.sleep(LEAVE_S)
    for pid in _services().difference(*_others) if _others else ():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _services() -> set[int]:
    """Return the ids of wandb's service processes among the children of this one."""
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or child has just ended
            for pid in task.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                    found.add(int(pid))
    return found


def _require_key(mode: str) -> None:
    """Raise `MissingError` if the server needs an API key and there is none: wandb would prompt for it."""
    if mode != "online" or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", HOST)).hostname or ""
    files = [os.environ.get("NETRC"), *(Path.home() / name for name in (".netrc", "_netrc"))]
    if any(_knows(Path(file), host) for file in files if file):
        return
    raise MissingError(
        f"wandb has no key for {host}; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to write files "
        "that `wandb sync` uploads later"
    )


def _knows(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

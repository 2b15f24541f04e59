"""Rows for Weights & Biases."""

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

from jaxrl.errors import SettingsError, require_extra
from jaxrl.training.recorders.base import Histogram, Row, RunInfo, Video, numbers_of
from jaxrl.training.recorders.service import Service, ServiceRecorder, best_files, events_of, films, summary_of

PROJECT = "jaxrl"
"""The project of runs for which nobody has named another."""
EVENT = ("opt_steps", "env_steps", "wall_s", "event", "message")
"""Columns of the table of events."""
FLUSH_S = 1.0
"""Seconds until wandb's files have a row: what they do not have when a process is killed, is lost for wandb."""
LEAVE_S = 2.0
"""Seconds that wandb's own process has to end at the end of this one, where the run has not waited for it."""
HOST = "https://api.wandb.ai"
_others: list[set[int]] = []
"""Wandb's own processes that were there before the first run of this process connected: they are the user's."""
_looking = threading.Lock()


def wandb_recorder(**init: Any) -> ServiceRecorder:
    """Return a recorder for Weights & Biases; `init` are arguments of `wandb.init`, as in `project="pendulum"`.

    Raises:
      SettingsError: the package is missing, or there is no key for the server.
    """
    require_extra("wandb", "runs recorded by wandb")
    _require_key(init.get("mode") or os.environ.get("WANDB_MODE", "online"))
    return ServiceRecorder("wandb", partial(_Wandb, init))


class _Wandb(Service):
    """One run at the service; members of a population share the group of its name."""

    def __init__(self, init: Mapping[str, Any]) -> None:
        self._init = init
        self._run: Any = None

    def connect(self, run: RunInfo, kept: dict[str, Any]) -> dict[str, Any]:
        import wandb

        if self._run is None:
            # An id of its own choice, kept beside the log: a run that goes on finds its page again.
            run_id = kept.get("id") or os.urandom(4).hex()
            arguments = {**_arguments(run), **self._init}
            # A process may have many runs open, as for a population; and it prints what it prints.
            settings = wandb.Settings(
                silent=True, console="off", symlink=False, x_transaction_log_flush_interval=FLUSH_S
            )
            with _looking:
                if not _others:
                    _others.append(_services())
            self._run = wandb.init(id=run_id, resume="allow", reinit="create_new", settings=settings, **arguments)
            for axis in ("opt_steps", "env_steps"):
                self._run.define_metric(axis)
            # Wandb's own steps count calls, over which no two runs can be compared.
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

        if events := events_of(run):  # as one table: of a run that went on, it takes the place of the one before
            rows = [[event.get(name) for name in EVENT] for event in events]
            self._run.log({"opt_steps": events[-1]["opt_steps"], "events": wandb.Table(columns=[*EVENT], data=rows)})
        summary, failed = summary_of(run)
        self._run.summary.update(summary)
        for film in films(run):
            self._run.log({f"video/{film.stem}": wandb.Video(str(film), format=film.suffix[1:])})
        if files := best_files(run):
            artifact = wandb.Artifact(f"{run.name}-best", type="model", metadata=summary)
            for name, path in files.items():
                artifact.add_file(str(path), name=name)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(failed))

    def abandon(self) -> None:
        """Do not let wandb wait for its server once more, and without end, when the process ends."""
        threading.Thread(target=_end_uploads, daemon=True).start()


def _arguments(run: RunInfo) -> dict[str, Any]:
    """Return arguments of `wandb.init`; where the user's environment has a say, it wins."""
    environment = os.environ
    tags = [tag for tag in environment.get("WANDB_TAGS", "").split(",") if tag]
    alone = run.group is None
    return {
        "project": environment.get("WANDB_PROJECT", PROJECT),
        "dir": str(run.directory),
        "name": environment.get("WANDB_NAME", run.name) if alone else run.name,
        "group": environment.get("WANDB_RUN_GROUP") if run.group is None else run.group.name,
        "job_type": environment.get("WANDB_JOB_TYPE", "train" if alone else "member"),
        "tags": [*run.tags, *tags],
        "notes": environment.get("WANDB_NOTES", run.notes) or None,
    }


def _end_uploads() -> None:
    """Once this process ends, end wandb's own that a run has begun, where the system says which that is.

    Its files have what it has not uploaded. It would not heed a milder signal, once it has been told to end.
    """
    threading.main_thread().join()
    time.sleep(LEAVE_S)
    for pid in _services().difference(*_others) if _others else ():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _services() -> set[int]:
    """Return wandb's own processes among the children of this one."""
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a child has ended meanwhile
            for pid in task.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                    found.add(int(pid))
    return found


def _require_key(mode: str) -> None:
    """Raise `SettingsError` if rows are to go to a server for which there is no key: wandb would ask for one."""
    if mode != "online" or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", HOST)).hostname or ""
    files = [os.environ.get("NETRC"), *(Path.home() / name for name in (".netrc", "_netrc"))]
    if any(_knows(Path(file), host) for file in files if file):
        return
    raise SettingsError(
        f"wandb has no key for {host}; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to write files "
        "that `wandb sync` uploads later"
    )


def _knows(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

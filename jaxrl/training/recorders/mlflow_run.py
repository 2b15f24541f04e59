"""MLflow."""

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from jaxrl.errors import require_extra
from jaxrl.training.recorders.base import Row, RunInfo, numbers_of
from jaxrl.training.recorders.service import Service, ServiceRecorder, best_files, events_of, films, summary_of, videos
from jaxrl.training.storage.files import read_json, write_atomically

EXPERIMENT = "jaxrl"
"""The default experiment."""
AT_ONCE, METRICS_AT_ONCE = 100, 1_000
"""Maximum parameters and metrics per call."""
LONGEST = 500
"""Maximum characters of a parameter that servers of all versions accept."""
LONGEST_NAME = 250
"""Maximum characters of the name of a parameter, metric or tag."""
EVENTS = "events.txt"
"""Artifact with a line for each event."""
PARENT = "mlflow.json"
"""File in a population's directory with the id of the parent run of its members."""
_parents = threading.Lock()


def mlflow_recorder(experiment: str | None = None, tracking_uri: str | None = None) -> ServiceRecorder:
    """Return a recorder for MLflow.

    Args:
      experiment: name of the experiment (default: `MLFLOW_EXPERIMENT_NAME`, or else `jaxrl`).
      tracking_uri: the server (default: `MLFLOW_TRACKING_URI`, or else files in `mlruns` in the directory of the run,
        or of the population for its members).

    Raises:
      SettingsError: the package is missing.
    """
    require_extra("mlflow", "runs recorded by mlflow")
    return ServiceRecorder("mlflow", partial(_MLflow, experiment, tracking_uri))


class _MLflow(Service):
    """One run at the service; members of a population are nested in a parent run."""

    def __init__(self, experiment: str | None, tracking_uri: str | None) -> None:
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = None
        self._id: str | None = None
        self._parent: str | None = None

    def connect(self, run: RunInfo, kept: dict[str, Any]) -> dict[str, Any]:
        from mlflow import MlflowClient

        _silence_retries()

        if self._uri is None:
            # MLflow prefers a database, which needs its full package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._uri = ((run.group or run.directory or Path()) / "mlruns").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=self._uri)
        # Members connect concurrently: only one may create the experiment and the parent.
        with _parents:
            experiment = self._client.get_experiment_by_name(self._experiment)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            self._parent = None if run.group is None else self._parent_of(run.group, experiment_id)
        self._id = self._id or kept.get("id")
        if self._id is None:
            nested = {} if self._parent is None else {"mlflow.parentRunId": self._parent}
            self._id = self._client.create_run(experiment_id, run_name=run.name, tags=nested).info.run_id
        else:
            self._client.update_run(self._id, status="RUNNING")
        self._describe(run)
        return {"id": self._id}

    def send_some(self, rows: Sequence[Row]) -> int:
        """Send as many rows as fit into one call."""
        metrics = [self._metrics_of(row) for row in rows]
        # Rows are not split, and at least one is sent.
        count = max(1, sum(size <= METRICS_AT_ONCE for size in accumulate(map(len, metrics))))
        self._client.log_batch(self._id, metrics=list(chain.from_iterable(metrics[:count])))
        return count

    def _metrics_of(self, row: Row) -> list[Any]:
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        return [Metric(_accepted(name), value, now, row["opt_steps"]) for name, value in numbers_of(row).items()]

    def finish(self, run: RunInfo) -> None:
        for name, path in {**best_files(run), **{film.name: film for film in films(run)}, **videos(run)}.items():
            self._client.log_artifact(self._id, str(path), str(Path(name).parent) if "/" in name else None)
        if lines := [f"{row['opt_steps']:>9,} opts  {row['event']}: {row['message']}\n" for row in events_of(run)]:
            self._client.log_text(self._id, "".join(lines), EVENTS)
        summary, failed = summary_of(run)
        for name, value in summary.items():
            self._client.set_tag(self._id, name, str(value))
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
        if self._parent is not None:
            self._client.set_terminated(self._parent)

    def _describe(self, run: RunInfo) -> None:
        """Log settings as parameters, and later changes, which MLflow's parameters do not allow, as tags."""
        from mlflow.entities import Param, RunTag

        logged = self._client.get_run(self._id).data.params
        params = {_accepted(name): str(value)[:LONGEST] for name, value in run.settings.items()}
        new = [Param(name, value) for name, value in params.items() if name not in logged]
        for start in range(0, len(new), AT_ONCE):
            self._client.log_batch(self._id, params=new[start : start + AT_ONCE])
        other = {_accepted(f"now.{name}"): value for name, value in params.items() if logged.get(name, value) != value}
        named = {name: str(run.settings[name]) for name in ("algo", "env") if run.settings.get(name)}
        tags = {**dict.fromkeys(map(_accepted, run.tags[len(named) :]), "yes"), **named, **other}
        tags |= {"mlflow.note.content": run.notes} if run.notes else {}
        self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _parent_of(self, group: Path, experiment_id: str) -> str:
        """Return the id of the parent run of a population's members; the first member creates it."""
        path = group / PARENT
        found = read_json(path).get("id") if path.exists() else None
        if isinstance(found, str):
            return found
        made: str = self._client.create_run(experiment_id, run_name=group.name).info.run_id
        write_atomically(path, f'{{"id": "{made}"}}\n')
        return made


def _accepted(name: str) -> str:
    """Return `name` as MLflow accepts it: few characters, and a normalised relative path, as it may become a file."""
    parts = re.sub(r"[^\w.\-/ :]", "_", name)[:LONGEST_NAME].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _silence_retries() -> None:
    """Silence urllib3's line for each retry of MLflow's connection: `ServiceRecorder` reports failures once."""
    logger = logging.getLogger("urllib3.connectionpool")
    if logger.level == logging.NOTSET:  # keep a level set by the user
        logger.setLevel(logging.ERROR)

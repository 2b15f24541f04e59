"""Workers in a Ray cluster (https://docs.ray.io), as Ray actors; Ray is imported on demand."""

import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from jaxrl.errors import SettingsError, describe_error, one_line, require_extra, safe_str
from jaxrl.strategies.host_actors import NEEDS_RAY
from jaxrl.training.actors.remote import WorkerDied
from jaxrl.training.actors.worker import Worker

ANSWER_S = 10.0
"""Timeout in seconds for a connection to a cluster."""


def connect(actors: int) -> None:
    """Connect to the Ray cluster at `RAY_ADDRESS`, else to one running on this machine, else start a local one.

    Ray stays connected until the process ends.

    Raises:
      SettingsError: Ray is not installed, the cluster cannot be reached, or it has too few CPUs.
    """
    ray, given = require_extra("ray", NEEDS_RAY), os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with _own_signals(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # the fork calls exec at once
        if not ray.is_initialized():
            try:
                # Check the address first: Ray itself would retry for minutes.
                _require_answer(given)
                ray.init(address="auto", **quiet)
            except Exception as error:
                if given or not isinstance(error, ConnectionError):
                    where = f"at RAY_ADDRESS={given}" if given else "on this machine that can be joined"
                    raise SettingsError(f"there is no Ray cluster {where}: {describe_error(error)}") from error
                # No cluster is named or running: start a local one. It offers a CPU to each actor, even if there are
                # fewer.
                cpus = max(actors, os.cpu_count() or 1)
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < actors:
        raise SettingsError(
            f"actors is {actors}, but the Ray cluster has {cpus} CPUs, of which each actor takes one; lower actors, or "
            "add machines by ray start"
        )


def _require_answer(address: str | None) -> None:
    """Raise an `OSError` if nothing answers at `HOST:PORT`, without the retries of Ray."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), ANSWER_S).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class RayWorker:
    """A worker as a Ray actor, which runs calls concurrently, each in a thread."""

    name = "Ray worker"
    hint = "has the cluster room for it?"

    @staticmethod
    def put(pickled: bytes) -> Any:
        """Return a reference to `pickled` in Ray's object store, which has one copy per machine."""
        return require_extra("ray", NEEDS_RAY).put(pickled)

    def __init__(self) -> None:
        """Start the Ray actor, where Ray places it."""
        self._ray = require_extra("ray", NEEDS_RAY)
        # Three concurrent calls: `run_round`, `overdue_call` and `close`. No restarts by Ray, which would lose the
        # environments.
        options = {"num_cpus": 1, "max_concurrency": 3, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._actor = self._ray.remote(**options)(Worker).remote()

    def call_method(self, method: str, *args: Any) -> Any:
        """Start an asynchronous call of a method of `Worker`; return the reference of its answer."""
        with self._raising_worker_died():
            return getattr(self._actor, method).remote(*args)

    def is_ready(self, call: Any, seconds: float) -> bool:
        """Wait up to `seconds` for the answer; return whether it has arrived."""
        with self._raising_worker_died():
            return bool(self._ray.wait([call], timeout=seconds)[0])

    def result(self, call: Any) -> Any:
        """Return an answer that has arrived."""
        with self._raising_worker_died():
            return self._ray.get(call)

    def kill(self) -> None:
        """Kill the Ray actor."""
        with suppress(Exception):  # the actor or Ray itself may be gone
            self._ray.kill(self._actor)

    @contextmanager
    def _raising_worker_died(self) -> Iterator[None]:
        lost = self._ray.exceptions
        try:
            yield
        except (lost.RayActorError, lost.ObjectLostError) as error:
            why = one_line((safe_str(error).strip().splitlines() or [""])[-1])
            raise WorkerDied(f"its Ray worker is gone, with its process or machine: {why}") from error

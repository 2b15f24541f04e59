"""The learner's side of actors in other processes: one thread drives each remote worker, a local process or in Ray."""

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import cloudpickle
import jax

from jaxrl.errors import SettingsError, describe_error
from jaxrl.strategies.host_actors import ActorFns
from jaxrl.training.actors.actor import OPENING_S, ActorSpec, RemoteError, Stopped, hang_message
from jaxrl.training.actors.stats import MAX_CHECK_GAP_S, ActorStats, Block, Published
from jaxrl.training.actors.worker import VERSIONS_TO_MATCH, Answer, WorkerConfig, never_called
from jaxrl.training.storage.run import versions
from jaxrl.xla import requested_forms
from jaxrl.xla.options import worker_options

POLL_S = 0.1
"""Seconds between polls of a worker."""
PATIENCE_S = 2.0
"""Grace period in seconds for a worker to close its environments, before it is killed."""
START_S = 300.0
"""Timeout in seconds for a worker to start, which includes scheduling and imports."""
MAX_PUBLISHED = 8
"""Number of published parameters retained for actors that lag behind."""


class WorkerDied(Exception):
    """Raised if a worker has died; the message continues a sentence on its actor, as `its process is gone: ...`."""


class WorkerHandle(Protocol):
    """A worker, started when its handle is made. All methods but `kill` raise `WorkerDied` if it has died."""

    name: str
    """What a worker is, in messages."""
    hint: str
    """Hint in messages on a worker that does not answer."""

    @staticmethod
    def put(pickled: bytes) -> Any:
        """Return `pickled`, or a reference to it, to pass in calls of all workers."""
        ...

    def call_method(self, method: str, *args: Any) -> Any:
        """Start an asynchronous call of a method of `Worker`; return a handle for `is_ready` and `result`."""
        ...

    def is_ready(self, call: Any, seconds: float) -> bool:
        """Wait up to `seconds` for the answer; return whether it has arrived."""
        ...

    def result(self, call: Any) -> Any:
        """Return an answer that has arrived."""
        ...

    def kill(self) -> None:
        """Kill the worker and its child processes."""
        ...


class RemoteContext:
    """State shared by the remote actors of a run."""

    def __init__(
        self,
        start: type[WorkerHandle],
        actor_fns: ActorFns,
        halted: Callable[[], bool],
        opening_turn: Callable[[], AbstractContextManager[None]],
        log: Callable[[str], object],
    ) -> None:
        """Pickle the actors' functions; `opening_turn()` holds the lock for opening environments, and `log(line)` logs.

        Raises:
          SettingsError: the environment or the agent cannot be pickled.
        """
        self.start, self.actor_fns, self.halted = start, actor_fns, halted
        self.opening_turn, self.log = opening_turn, log
        self._sent: dict[int, Any] = {}
        self._sending = threading.Lock()
        try:
            # Send only the functions that an actor calls.
            self.pickled_fns = cloudpickle.dumps(actor_fns._replace(push=None, publish=never_called, arrival=None))
        except Exception as error:
            raise SettingsError(
                f"actor_engine {actor_fns.config.actor_engine} sends the environment and the agent to other processes, "
                f"but {actor_fns.env.spec.name} cannot be sent ({describe_error(error)}); make it by a "
                "function of a module"
            ) from error

    def pickle_params(self, published: Published) -> Any:
        """Return the parameters for calls of workers; they are pickled once for all actors."""
        # Actors request the same parameters at the same time: the first pickles them, the others wait.
        with self._sending:
            if published.round not in self._sent:
                self._sent[published.round] = self.start.put(cloudpickle.dumps(jax.device_get(published)))
            found = self._sent[published.round]
            while len(self._sent) > MAX_PUBLISHED:
                del self._sent[min(self._sent)]
            return found


class RemoteActor:
    """An actor in another process, driven by its thread here."""

    def __init__(self, context: RemoteContext, spec: ActorSpec, stats: ActorStats) -> None:
        """Prepare the actor; `open` starts the worker."""
        self._context, self._spec, self._stats = context, spec, stats
        self._left = context.actor_fns.config.actor_restarts
        self._worker: WorkerHandle | None = None
        self._answered = False
        """Whether the worker has answered since its start."""

    def open(self) -> None:
        """Start a worker and open its environments; restart it if it dies, up to `actor_restarts` times."""
        while self._worker is None:
            with self._restarting():
                self._open()

    def run_round(self, number: int, published: Published) -> Block:
        """Run a round; if the worker dies, run it again in a new one from the seed, up to `actor_restarts` times."""
        while True:
            with self._restarting():
                if self._worker is None:
                    with self._context.opening_turn():
                        self._open()
                return self._call("run_round", number, self._context.pickle_params(published))

    def close(self, kill: bool = False) -> None:
        """Close the environments and end the worker; with `kill`, without waiting for a hanging step."""
        worker = self._worker
        if worker is not None and not kill:
            # A dead worker needs no closing.
            with suppress(WorkerDied), self._stats.calling(PATIENCE_S):
                worker.is_ready(worker.call_method("close"), PATIENCE_S)
        self._drop()

    def _open(self) -> None:
        self._worker, self._answered = self._context.start(), False
        config = WorkerConfig(
            versions(VERSIONS_TO_MATCH),
            worker_options(),
            requested_forms(),
            self._context.pickled_fns,
            pickle.dumps(self._spec),
        )
        self._call("open", config, self._stats.facts())

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """Drop a worker that dies during the block, if a restart is left.

        Raises:
          Stopped: the run has ended.
          RemoteError: no restart is left.
        """
        try:
            yield
        except WorkerDied as gone:
            self._drop()
            if self._context.halted():
                raise Stopped from gone
            if not self._left:
                raise RemoteError(f" failed: {gone}") from gone
            self._left -= 1
            self._context.log(
                f"actor {self._spec.actor} starts again from its seed, {self._left} more times at most: {gone}"
            )

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker and wait for the answer, with health checks meanwhile.

        Raises:
          WorkerDied: the worker has died.
          Stopped: the run has ended.
          RemoteError: the call failed, a call of the environment hangs, or the worker does not respond.
        """
        worker = self._worker
        assert worker is not None, "started before it is called"
        with self._stats.calling(self._silence_limit()):  # a worker that has stopped reading would block this thread
            call = worker.call_method(method, *args)
        # A worker that answers health checks is alive, however long its round takes; only silence counts.
        check, silent, checked = None, 0.0, time.perf_counter()
        while not self._is_ready(worker, call, POLL_S):
            # Capped: while this process was suspended, it did not wait for the worker.
            now = time.perf_counter()
            silent, checked = silent + min(now - checked, MAX_CHECK_GAP_S), now
            if self._context.halted():
                raise Stopped
            if check is None:
                check = worker.call_method("overdue_call")
            elif self._is_ready(worker, check, 0.0):
                self._raise_if_hung(worker.result(check))
                check, silent = worker.call_method("overdue_call"), 0.0
            elif silent > self._silence_limit():
                self._drop()  # kill it: it would not respond to `close`
                raise RemoteError(f": its {worker.name} has not answered for {silent:.0f} s; {worker.hint}")
        report: Answer = worker.result(call)
        self._answered = True
        # The worker counts its steps and episodes; waiting for the learner is counted here.
        self._stats.restore([*report.counted[:-1], self._stats.waited_s])
        if report.failure is not None:
            raise RemoteError(*report.failure)
        return report.value

    def _is_ready(self, worker: WorkerHandle, call: Any, seconds: float) -> bool:
        """Return whether an answer has arrived; timed as a call, since a stalled worker would block this thread."""
        with self._stats.calling(self._silence_limit()):
            return worker.is_ready(call, seconds)

    def _raise_if_hung(self, late: tuple[float, str] | None) -> None:
        self._answered = True
        if late is not None:
            raise RemoteError(hang_message(self._context.actor_fns.env.spec.name, late[0]), late[1])

    def _silence_limit(self) -> float:
        """Return the timeout for a silent worker in seconds."""
        return max(OPENING_S, self._context.actor_fns.config.actor_timeout) if self._answered else START_S

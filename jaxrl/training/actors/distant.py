"""Actors in other processes, each as its thread in the process of the learner sees it.

How a worker is begun and reached is a matter of an `Engine`: processes of this machine, or workers of Ray.
"""

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import cloudpickle
import jax
import numpy as np

from jaxrl.errors import SettingsError, describe_error
from jaxrl.strategies.host_actors import ActorFns
from jaxrl.training.actors.players import OPENING_S, Elsewhere, Part, Stopped, hanging
from jaxrl.training.actors.stats import GLANCE_S, ActorStats, Block, Published
from jaxrl.training.actors.worker import SAME, Answer, Order, nothing
from jaxrl.training.storage.run import versions
from jaxrl.xla import requested_forms
from jaxrl.xla.options import worker_options

POLL_S = 0.1
"""Seconds between looks at a worker."""
PATIENCE_S = 2.0
"""Seconds given to a worker to close its environments, before it is killed."""
START_S = 300.0
"""Seconds that a worker may take to begin: it is placed, and imports jaxrl."""
KEPT = 8
"""Parameters that are kept for actors that are behind."""


class Gone(Exception):
    """Tell that a worker is gone, as the end of a sentence on its actor: `its process is gone: ...`."""


class Reach(Protocol):
    """A worker as it is reached. All but `kill` raise `Gone` where it has died."""

    def ask(self, method: str, *args: Any) -> Any:
        """Begin a call of a method of `Worker`; return what `came` and `take` know it by."""
        ...

    def came(self, call: Any, seconds: float) -> bool:
        """Wait for the answer for at most so long; return whether it has come."""
        ...

    def take(self, call: Any) -> Any:
        """Return an answer that has come."""
        ...

    def kill(self) -> None:
        """End it at once, and what belongs to it."""
        ...


class Engine(Protocol):
    """How workers are begun."""

    name: str
    """What one is called."""
    doubt: str
    """What to ask oneself where one does not answer."""

    def begin(self) -> Reach:
        """Begin a worker."""
        ...

    def put(self, parcel: bytes) -> Any:
        """Return what stands for `parcel` in calls of all workers."""
        ...


class Company:
    """What the distant players of a run share."""

    def __init__(
        self,
        engine: Engine,
        actor_fns: ActorFns,
        halted: Callable[[], bool],
        turn: Callable[[], AbstractContextManager[None]],
        tell: Callable[[str], object],
    ) -> None:
        """Prepare; `turn()` waits for the moment to open environments, and `tell(line)` takes what is to be logged.

        Raises:
          SettingsError: the environment or the agent cannot be sent to another process.
        """
        self.engine, self.actor_fns, self.halted, self.turn, self.tell = engine, actor_fns, halted, turn, tell
        self._sent: dict[int, Any] = {}
        self._sending = threading.Lock()
        try:
            # Only what a player calls: the rest of a strategy stays here.
            self.script = cloudpickle.dumps(actor_fns._replace(push=None, publish=nothing, arrival=None))
        except Exception as error:
            raise SettingsError(
                f"actor_engine {actor_fns.config.actor_engine} sends the environment and the agent to other processes, "
                f"but {actor_fns.env.spec.name} cannot be sent ({describe_error(error)}); make it by a "
                "function of a module"
            ) from error

    def parcel(self, published: Published) -> Any:
        """Return what stands for parameters in calls; they are pickled once for all actors."""
        # Actors ask for the same parameters at the same time: the first pickles them, the others wait for that.
        with self._sending:
            if published.round not in self._sent:
                self._sent[published.round] = self.engine.put(cloudpickle.dumps(jax.tree.map(np.asarray, published)))
            found = self._sent[published.round]
            while len(self._sent) > KEPT:
                del self._sent[min(self._sent)]
            return found


class DistantPlayer:
    """A player in another process, as its thread sees it."""

    def __init__(self, company: Company, part: Part, stats: ActorStats) -> None:
        """Prepare; the worker begins when the environments are opened."""
        self._company, self._part, self._stats = company, part, stats
        self._left = company.actor_fns.config.actor_restarts
        self._worker: Reach | None = None
        self._answered = False
        """Whether the worker has ever answered."""

    def open(self) -> None:
        """Begin a worker, and open the environments there; another one, as often as may be, where it dies."""
        while self._worker is None:
            with self._lasting():
                self._open()

    def play(self, number: int, published: Published) -> Block:
        """Have the round played; again from its seed by another worker, as often as may be, where one dies."""
        while True:
            with self._lasting():
                if self._worker is None:
                    with self._company.turn():
                        self._open()
                block: Block = self._ask("play", number, self._company.parcel(published))
                return block

    def close(self, kill: bool = False) -> None:
        """Close the environments and end the worker; with `kill`, without waiting for a step that hangs."""
        worker = self._worker
        if worker is not None and not kill:
            # One that has died is closed already.
            with suppress(Gone), self._stats.calling(PATIENCE_S):
                worker.came(worker.ask("close"), PATIENCE_S)
        self._drop()

    def _open(self) -> None:
        self._worker, self._answered = self._company.engine.begin(), False
        order = Order(
            versions(SAME), worker_options(), requested_forms(), self._company.script, pickle.dumps(self._part)
        )
        self._ask("open", order, self._stats.facts())

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        """Get over a worker that dies within, if that may be; it is `None` then.

        Raises:
          Stopped: the run has ended.
          Elsewhere: it may not be.
        """
        try:
            yield
        except Gone as gone:
            self._drop()
            if self._company.halted():
                raise Stopped from gone
            if not self._left:
                raise Elsewhere(f" failed: {gone}") from gone
            self._left -= 1
            self._company.tell(
                f"actor {self._part.actor} starts again from its seed, {self._left} more times at most: {gone}"
            )

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _ask(self, method: str, *args: Any) -> Any:
        """Have the worker do something, and look at it meanwhile.

        Raises:
          Gone: it has died.
          Stopped: the run has ended.
          Elsewhere: what it did has failed, a call of the environment hangs, or the worker is silent.
        """
        worker = self._worker
        assert worker is not None, "begun before it is asked"
        with self._stats.calling(self._longest()):  # one that has stopped to read would hold this thread here
            call = worker.ask(method, *args)
        # A worker that answers glances is alive, however long its round takes. Only silence counts against it.
        glance, silent, looked = None, 0.0, time.perf_counter()
        while not self._came(worker, call, POLL_S):
            # A process that was stopped for an hour did not wait for its worker.
            now = time.perf_counter()
            silent, looked = silent + min(now - looked, GLANCE_S), now
            if self._company.halted():
                raise Stopped
            if glance is None:
                glance = worker.ask("glance")
            elif self._came(worker, glance, 0.0):
                self._fail_if_late(worker.take(glance))
                glance, silent = worker.ask("glance"), 0.0
            elif silent > self._longest():
                engine = self._company.engine
                self._drop()  # it would not hear that it is to close
                raise Elsewhere(f": its {engine.name} has not answered for {silent:.0f} s; {engine.doubt}")
        report: Answer = worker.take(call)
        self._answered = True
        # The worker counts what its environments do; waiting for the learner is counted here.
        self._stats.take_up([*report.counted[:-1], self._stats.waited_s])
        if report.failure is not None:
            raise Elsewhere(*report.failure)
        return report.value

    def _came(self, worker: Reach, call: Any, seconds: float) -> bool:
        """Say whether an answer has come, as one that stops in the middle of it would hold this thread, too."""
        with self._stats.calling(self._longest()):
            return worker.came(call, seconds)

    def _fail_if_late(self, late: tuple[float, str] | None) -> None:
        self._answered = True
        if late is not None:
            raise Elsewhere(hanging(self._company.actor_fns.env.spec.name, late[0]), late[1])

    def _longest(self) -> float:
        """Return the seconds that the worker may be silent."""
        return max(OPENING_S, self._company.actor_fns.config.actor_timeout) if self._answered else START_S

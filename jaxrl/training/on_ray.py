"""Actors on other machines: each plays in a worker of Ray (https://docs.ray.io), asked by its thread in this process.

A worker is given the parameters of a round by their number, and returns its block. It runs `Player`, as a thread does,
from the same seed: so the bits are the same. Ray is imported on demand.
"""

import os
import pickle
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

from jaxrl.errors import SettingsError, one_line, require_extra
from jaxrl.strategies.remote import NEEDS_RAY, Remote
from jaxrl.training.actor_stats import ActorStats, Block, Published, Watch, stack_of
from jaxrl.training.players import (
    OPENING_S,
    Elsewhere,
    Part,
    Player,
    Stopped,
    hanging,
    programs,
    raised,
)
from jaxrl.training.storage.run import versions
from jaxrl.xla import asked, forms
from jaxrl.xla.options import of_workers, take_options

POLL_S = 0.1
"""Seconds between looks at a worker."""
PATIENCE_S = 2.0
"""Seconds given to a worker to close its environments, before it is killed."""
START_S = 300.0
"""Seconds that a worker may take to begin: it is placed, and imports jaxrl."""
SAME = ("jaxrl", "jax", "numpy")
"""Packages whose version must be the same on all machines."""
ANSWER_S = 10.0
"""Seconds that a cluster may take to answer."""
KEPT = 8
"""Parameters that are kept in Ray's store, for actors that are behind."""


# --- in the process of the learner ------------------------------------------------------------------------------


def connect(actors: int) -> None:
    """Join the Ray cluster of `RAY_ADDRESS`, or the one that runs on this machine, or start one of this machine alone.

    Ray stays connected until the process ends.

    Raises:
      SettingsError: Ray is not installed, there is no cluster where one should be, or it has too few CPUs.
    """
    ray, given = require_extra("ray", NEEDS_RAY), os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with _own_signals(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # another program takes its place at once
        if not ray.is_initialized():
            try:
                _require_answer(given)
                ray.init(address="auto", **quiet)
            except Exception as error:
                if given or not isinstance(error, ConnectionError):
                    where = f"at RAY_ADDRESS={given}" if given else "on this machine that can be joined"
                    raise SettingsError(
                        f"there is no Ray cluster {where}: {type(error).__name__}: {one_line(error)}"
                    ) from error
                cpus = max(actors, os.cpu_count() or 1)
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < actors:
        raise SettingsError(
            f"actors is {actors}, but the Ray cluster has {cpus} CPUs, of which each actor takes one; lower actors, or "
            "add machines by ray start"
        )


def _require_answer(address: str | None) -> None:
    """Raise an `OSError` where nothing answers at `HOST:PORT`: Ray itself would ask again for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), ANSWER_S).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces by its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class Company:
    """What the players of a run share in the process of the learner."""

    def __init__(
        self,
        remote: Remote,
        halted: Callable[[], bool],
        turn: Callable[[], AbstractContextManager[None]],
        tell: Callable[[str], object],
    ) -> None:
        """Prepare; `turn()` waits for the moment to open environments, and `tell(line)` takes what is to be logged."""
        self.ray, self.remote = require_extra("ray", NEEDS_RAY), remote
        self.halted, self.turn, self.tell = halted, turn, tell
        self._sent: dict[int, Any] = {}
        self._sending = threading.Lock()
        try:
            # Only what a player calls: the rest of a strategy stays here.
            self.script = self.ray.cloudpickle.dumps(remote._replace(push=None, publish=_none, arrival=None))
        except Exception as error:
            raise SettingsError(
                f"actor_engine ray sends the environment and the agent to other processes, but {remote.env.spec.name} "
                f"cannot be sent ({type(error).__name__}: {one_line(error)}); make it by a function of a module"
            ) from error

    def worker(self) -> Any:
        """Begin a worker somewhere in the cluster; return its handle."""
        place = {"num_cpus": 1, "max_concurrency": 3, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        return self.ray.remote(**place)(Worker).remote()

    def parcel(self, published: Published) -> Any:
        """Return a reference to parameters in Ray's store, where they lie once for all actors."""
        with self._sending:
            if published.round not in self._sent:
                self._sent[published.round] = self.ray.put(published)
            while len(self._sent) > KEPT:
                del self._sent[min(self._sent)]
            return self._sent.get(published.round) or self.ray.put(published)


class RayPlayer:
    """A player in a worker of Ray, as its thread sees it."""

    def __init__(self, company: Company, part: Part, stats: ActorStats) -> None:
        """Prepare; the worker begins when the environments are opened."""
        self._company, self._part, self._stats, self._ray = company, part, stats, company.ray
        self._left = company.remote.config.actor_restarts
        self._worker: Any = None
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
        if self._worker is None:
            return
        if not kill:
            with suppress(self._ray.exceptions.RayError):
                self._ray.wait([self._worker.close.remote()], timeout=PATIENCE_S)
        self._drop()

    def _open(self) -> None:
        self._worker, self._answered = self._company.worker(), False
        order = Order(versions(SAME), of_workers(), asked(), self._company.script, pickle.dumps(self._part))
        self._ask("open", order, self._stats.facts())

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        """Get over a worker that dies within, if that may be; it is `None` then.

        Raises:
          Elsewhere: it may not.
        """
        lost = self._ray.exceptions
        try:
            yield
        except (lost.RayActorError, lost.ObjectLostError) as error:
            self._drop()
            why = one_line(str(error).strip().splitlines()[-1])
            if not self._left:
                raise Elsewhere(f" failed: its Ray worker is gone, with its process or machine: {why}") from error
            self._left -= 1
            self._company.tell(
                f"actor {self._part.actor} starts again from its seed, {self._left} more times at most: its Ray worker "
                f"was gone, with its process or machine: {why}"
            )

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        with suppress(Exception):  # it may be gone, and so may Ray
            self._ray.kill(worker)

    def _ask(self, method: str, *args: Any) -> Any:
        """Have the worker do something, and look at it meanwhile.

        Raises:
          Stopped: the run has ended.
          Elsewhere: what it did has failed, a call of the environment hangs, or the worker is silent.
        """
        ray, answer = self._ray, getattr(self._worker, method).remote(*args)
        glance, since = self._worker.glance.remote(), time.perf_counter()
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if self._company.halted():
                raise Stopped
            if ray.wait([glance], timeout=0)[0]:
                self._judge(ray.get(glance))
                glance, since = self._worker.glance.remote(), time.perf_counter()
            elif (silent := time.perf_counter() - since) > self._longest():
                raise Elsewhere(f": its Ray worker has not answered for {silent:.0f} s; has the cluster room for it?")
        report: Answer = ray.get(answer)
        self._answered = True
        self._stats.take_up([*report.counted[:-1], self._stats.waited_s])
        if report.failure is not None:
            raise Elsewhere(*report.failure)
        return report.value

    def _judge(self, late: tuple[float, str] | None) -> None:
        self._answered = True
        if late is not None:
            raise Elsewhere(hanging(self._company.remote.env.spec.name, late[0]), late[1])

    def _longest(self) -> float:
        """Return the seconds that the worker may be silent."""
        return max(OPENING_S, self._company.remote.config.actor_timeout) if self._answered else START_S


# --- in a process of Ray ----------------------------------------------------------------------------------------


class Order(NamedTuple):
    """What a worker is begun with; parts that hold arrays as bytes, because it first sets up JAX."""

    versions: dict[str, str]
    options: dict[str, Any]
    """See `of_workers`."""
    forms: str
    remote: bytes
    part: bytes


class Answer(NamedTuple):
    """What a worker returns."""

    value: Any
    failure: tuple[str, str] | None
    """How the line goes on after the actor's number, and a traceback."""
    counted: list[float]
    """What the actor has done, see `ActorStats.facts`."""


class Worker:
    """A player in a process of its own. Ray calls its methods side by side, each in a thread."""

    def __init__(self) -> None:
        """Prepare."""
        self._stats = ActorStats()
        self._watch, self._looked = Watch([self._stats]), time.perf_counter()
        self._player: Player | None = None
        self._thread: int | None = None
        self._ended, self._playing, self._forms = False, threading.Lock(), "auto"

    def open(self, order: Order, facts: list[float]) -> Answer:
        """Open the environments of an actor that has done what `facts` count."""
        return self._answer(lambda: self._open(order, facts))

    def play(self, number: int, published: Published) -> Answer:
        """Play a round; its block is the value of the answer."""
        assert self._player is not None, "opened before it plays"
        player = self._player
        return self._answer(lambda: player.play(number, published))

    def glance(self) -> tuple[float, str] | None:
        """Return the limit of a call of the environment that takes too long, and where it is; `None` without one."""
        now = time.perf_counter()
        late, self._looked = self._watch.late(now - self._looked), now
        return (late[0], stack_of(self._thread)) if late else None

    def close(self) -> None:
        """End the round under way, and close the environments."""
        self._ended = True
        with self._playing:
            if self._player is not None:
                self._player.close()

    def _open(self, order: Order, facts: list[float]) -> None:
        if (here := versions(SAME)) != order.versions:
            mine, theirs = (", ".join(map(" ".join, named.items())) for named in (here, order.versions))
            raise Elsewhere(f": its machine has {mine}, and the learner's has {theirs}; install the same")
        take_options(order.options)
        self._stats.take_up(facts)
        self._forms = order.forms
        remote, part = pickle.loads(order.remote), pickle.loads(order.part)
        self._player = Player(remote, programs(remote, _none), part, self._stats, lambda: self._ended)
        with forms(self._forms):
            self._player.open()

    def _answer(self, do: Callable[[], Any]) -> Answer:
        value, failure = None, None
        with self._playing, forms(self._forms):
            self._thread = threading.get_ident()
            try:
                value = do()
            except BaseException as error:
                report = raised(error)
                failure = report.line, report.trace
        return Answer(value, failure, self._stats.facts())


def _none(*args: Any) -> Any:
    """Stand where a player needs no program."""

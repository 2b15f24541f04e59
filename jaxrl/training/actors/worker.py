"""The worker's side of an actor in another process: its configuration, its methods and its answers.

It plays a round with given parameters and returns the block. It runs the same `Player` as a thread, from the same seed,
so that results are identical bit by bit.
"""

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl.training.actors.players import Player, RemoteError, programs, to_remote_error
from jaxrl.training.actors.stats import ActorStats, HangDetector, Published, stack_of
from jaxrl.training.storage.run import versions
from jaxrl.xla import forms
from jaxrl.xla.options import apply_options

SAME = ("jaxrl", "jax", "numpy")
"""Packages whose versions must match the learner's."""


class Order(NamedTuple):
    """The configuration of a worker; parts with arrays are pickled, because the worker sets up JAX first."""

    versions: dict[str, str]
    options: dict[str, Any]
    """See `worker_options`."""
    forms: str
    actor_fns: bytes
    part: bytes


class Answer(NamedTuple):
    """The answer of a worker to a call."""

    value: Any
    failure: tuple[str, str] | None
    """The line that follows the actor's number, and a traceback."""
    counted: list[float]
    """Counts of the actor, see `ActorStats.facts`."""


class Worker:
    """Runs a player. While one thread opens or plays, others may glance or close."""

    def __init__(self) -> None:
        """Prepare the worker; `open` creates its player."""
        self._stats = ActorStats()
        self._watch, self._looked = HangDetector([self._stats]), time.perf_counter()
        self._player: Player | None = None
        self._thread: int | None = None
        self._ended, self._playing, self._forms = False, threading.Lock(), "auto"
        self._put = jax.jit(lambda agent, learnt: (agent, learnt))

    def open(self, order: Order, facts: list[float]) -> Answer:
        """Open the environments of an actor whose counts so far are `facts`."""
        return self._answer(lambda: self._open(order, facts))

    def play(self, number: int, published: bytes) -> Answer:
        """Play a round with the pickled parameters `published`; the value of the answer is the block."""
        assert self._player is not None, "opened before it plays"
        player = self._player
        return self._answer(lambda: player.play(number, self._on_device(pickle.loads(published))))

    def glance(self) -> tuple[float, str] | None:
        """Return the timeout and the stack of an overdue call of the environment, or `None`."""
        now = time.perf_counter()
        late, self._looked = self._watch.late(now - self._looked), now
        return (late[0], stack_of(self._thread)) if late else None

    def end(self) -> None:
        """End the round in progress."""
        self._ended = True

    def close(self) -> Answer:
        """End the round in progress, and close the environments."""
        self.end()
        return self._answer(lambda: self._player.close() if self._player is not None else None)

    def _open(self, order: Order, facts: list[float]) -> None:
        # Check versions before unpickling, which other versions might get wrong.
        if (here := versions(SAME)) != order.versions:
            mine, theirs = (", ".join(map(" ".join, named.items())) for named in (here, order.versions))
            raise RemoteError(f": its machine has {mine}, and the learner's has {theirs}; install the same")
        apply_options(order.options)
        self._stats.take_up(facts)
        self._forms = order.forms
        actor_fns, part = pickle.loads(order.actor_fns), pickle.loads(order.part)
        self._player = Player(actor_fns, programs(actor_fns, never_called), part, self._stats, lambda: self._ended)
        with forms(self._forms):
            self._player.open()

    def _on_device(self, published: Published) -> Published:
        """Return parameters as outputs of a program, which are the fastest inputs of other programs."""
        agent, learnt = self._put(published.agent, published.learnt)
        return published._replace(agent=agent, learnt=learnt)

    def _answer(self, do: Callable[[], Any]) -> Answer:
        value, failure = None, None
        # `close` waits here until the round in progress has ended.
        with self._playing, forms(self._forms):
            self._thread = threading.get_ident()
            try:
                value = do()
            # Return any exception in the answer: the calling thread of the learner raises it.
            except BaseException as error:
                report = to_remote_error(error)
                failure = report.line, report.trace
        return Answer(value, failure, self._stats.facts())


def never_called(*args: Any) -> Any:
    """A placeholder for programs that a player does not call."""

"""A player in a process of its own: what begins it, what it is asked, and what it answers.

It is given the parameters of a round by their number, and returns its block. It runs `Player`, as a thread does, from
the same seed: so the bits are the same.
"""

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl.training.actors.players import Elsewhere, Player, programs, raised
from jaxrl.training.actors.stats import ActorStats, Published, Watch, stack_of
from jaxrl.training.storage.run import versions
from jaxrl.xla import forms
from jaxrl.xla.options import apply_options

SAME = ("jaxrl", "jax", "numpy")
"""Packages whose version must be the same on all machines."""


class Order(NamedTuple):
    """What a worker is begun with; parts that hold arrays as bytes, because it first sets up JAX."""

    versions: dict[str, str]
    options: dict[str, Any]
    """See `worker_options`."""
    forms: str
    actor_fns: bytes
    part: bytes


class Answer(NamedTuple):
    """What a worker returns."""

    value: Any
    failure: tuple[str, str] | None
    """How the line goes on after the actor's number, and a traceback."""
    counted: list[float]
    """What the actor has done, see `ActorStats.facts`."""


class Worker:
    """A player in a process of its own. While one thread opens or plays, others may glance or close."""

    def __init__(self) -> None:
        """Prepare."""
        self._stats = ActorStats()
        self._watch, self._looked = Watch([self._stats]), time.perf_counter()
        self._player: Player | None = None
        self._thread: int | None = None
        self._ended, self._playing, self._forms = False, threading.Lock(), "auto"
        self._put = jax.jit(lambda agent, learnt: (agent, learnt))

    def open(self, order: Order, facts: list[float]) -> Answer:
        """Open the environments of an actor that has done what `facts` count."""
        return self._answer(lambda: self._open(order, facts))

    def play(self, number: int, published: bytes) -> Answer:
        """Play a round with parameters `published`, pickled; its block is the value of the answer."""
        assert self._player is not None, "opened before it plays"
        player = self._player
        return self._answer(lambda: player.play(number, self._on_device(pickle.loads(published))))

    def glance(self) -> tuple[float, str] | None:
        """Return the limit of a call of the environment that takes too long, and where it is; `None` without one."""
        now = time.perf_counter()
        late, self._looked = self._watch.late(now - self._looked), now
        return (late[0], stack_of(self._thread)) if late else None

    def end(self) -> None:
        """End the round under way."""
        self._ended = True

    def close(self) -> Answer:
        """End the round under way, and close the environments."""
        self.end()
        return self._answer(lambda: self._player.close() if self._player is not None else None)

    def _open(self, order: Order, facts: list[float]) -> None:
        # Before anything is unpickled, which other versions might read wrongly.
        if (here := versions(SAME)) != order.versions:
            mine, theirs = (", ".join(map(" ".join, named.items())) for named in (here, order.versions))
            raise Elsewhere(f": its machine has {mine}, and the learner's has {theirs}; install the same")
        apply_options(order.options)
        self._stats.take_up(facts)
        self._forms = order.forms
        actor_fns, part = pickle.loads(order.actor_fns), pickle.loads(order.part)
        self._player = Player(actor_fns, programs(actor_fns, nothing), part, self._stats, lambda: self._ended)
        with forms(self._forms):
            self._player.open()

    def _on_device(self, published: Published) -> Published:
        """Return parameters as a program returns them, which other programs then take in the quickest way."""
        agent, learnt = self._put(published.agent, published.learnt)
        return published._replace(agent=agent, learnt=learnt)

    def _answer(self, do: Callable[[], Any]) -> Answer:
        value, failure = None, None
        # Closing waits here until the round under way has ended.
        with self._playing, forms(self._forms):
            self._thread = threading.get_ident()
            try:
                value = do()
            # An answer like any other: it is raised where the learner sees it, in the thread that has asked.
            except BaseException as error:
                report = raised(error)
                failure = report.line, report.trace
        return Answer(value, failure, self._stats.facts())


def nothing(*args: Any) -> Any:
    """Stand where a player needs no program."""

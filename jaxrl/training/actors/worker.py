"""The worker's side of an actor in another process: its configuration, its methods and its answers.

It runs a round with given parameters and returns the block. It has the same `Actor` as a thread, from the same seed, so
that results are identical bit by bit.
"""

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl.training.actors.actor import Actor, RemoteError, programs, to_remote_error
from jaxrl.training.actors.stats import ActorStats, HangDetector, Published, stack_of
from jaxrl.training.storage.run import versions
from jaxrl.xla import forms
from jaxrl.xla.options import apply_options

VERSIONS_TO_MATCH = ("jaxrl", "jax", "numpy")
"""Packages whose versions must match the learner's."""


class WorkerConfig(NamedTuple):
    """The configuration of a worker; parts with arrays are pickled, because the worker sets up JAX first."""

    versions: dict[str, str]
    options: dict[str, Any]
    """See `worker_options`."""
    forms: str
    actor_fns: bytes
    spec: bytes


class Answer(NamedTuple):
    """The answer of a worker to a call."""

    value: Any
    failure: tuple[str, str] | None
    """The line that follows the actor's number, and a traceback."""
    counted: list[float]
    """Counts of the actor, see `ActorStats.facts`."""


class Worker:
    """Runs an actor. While one thread opens it or runs a round, others may call `overdue_call`, `end` or `close`."""

    def __init__(self) -> None:
        """Prepare the worker; `open` creates its actor."""
        self._stats = ActorStats()
        self._hangs, self._checked = HangDetector([self._stats]), time.perf_counter()
        self._actor: Actor | None = None
        self._thread: int | None = None
        self._ended, self._running, self._forms = False, threading.Lock(), "auto"
        self._put = jax.jit(lambda agent, processor_stats: (agent, processor_stats))

    def open(self, config: WorkerConfig, facts: list[float]) -> Answer:
        """Open the environments of an actor whose counts so far are `facts`."""
        return self._answer(lambda: self._open(config, facts))

    def run_round(self, number: int, published: bytes) -> Answer:
        """Run a round with the pickled parameters `published`; the value of the answer is the block."""
        assert self._actor is not None, "opened before its first round"
        actor = self._actor
        return self._answer(lambda: actor.run_round(number, self._on_device(pickle.loads(published))))

    def overdue_call(self) -> tuple[float, str] | None:
        """Return the timeout and the stack of an overdue call of the environment, or `None`."""
        now = time.perf_counter()
        late, self._checked = self._hangs.late(now - self._checked), now
        return (late[0], stack_of(self._thread)) if late else None

    def end(self) -> None:
        """End the round in progress."""
        self._ended = True

    def close(self) -> Answer:
        """End the round in progress, and close the environments."""
        self.end()
        return self._answer(lambda: self._actor.close() if self._actor is not None else None)

    def _open(self, config: WorkerConfig, facts: list[float]) -> None:
        # Check versions before unpickling, which other versions might get wrong.
        if (here := versions(VERSIONS_TO_MATCH)) != config.versions:
            mine, theirs = (", ".join(map(" ".join, named.items())) for named in (here, config.versions))
            raise RemoteError(f": its machine has {mine}, and the learner's has {theirs}; install the same")
        apply_options(config.options)
        self._stats.restore(facts)
        self._forms = config.forms
        actor_fns, spec = pickle.loads(config.actor_fns), pickle.loads(config.spec)
        self._actor = Actor(actor_fns, programs(actor_fns, never_called), spec, self._stats, lambda: self._ended)
        with forms(self._forms):
            self._actor.open()

    def _on_device(self, published: Published) -> Published:
        """Return parameters as outputs of a program, which are the fastest inputs of other programs."""
        agent, processor_stats = self._put(published.agent, published.processor_stats)
        return published._replace(agent=agent, processor_stats=processor_stats)

    def _answer(self, do: Callable[[], Any]) -> Answer:
        value, failure = None, None
        # `close` waits here until the round in progress has ended.
        with self._running, forms(self._forms):
            self._thread = threading.get_ident()
            try:
                value = do()
            # Return any exception in the answer: the calling thread of the learner raises it.
            except BaseException as error:
                report = to_remote_error(error)
                failure = report.line, report.trace
        return Answer(value, failure, self._stats.facts())


def never_called(*args: Any) -> Any:
    """A placeholder for programs that an actor does not call."""

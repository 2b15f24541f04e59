"""Actors: a thread each, which steps environments or drives a remote worker, while the main thread optimises."""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np

from jaxrl import streams
from jaxrl.errors import ActorError
from jaxrl.strategies.base import EpisodeEnds, Strategy, fold
from jaxrl.strategies.host_actors import ActorBatch, ActorFns
from jaxrl.training.actors.actor import Actor, ActorSpec, Stopped, hang_message, programs, to_remote_error
from jaxrl.training.actors.in_processes import ProcessWorker
from jaxrl.training.actors.on_ray import RayWorker, connect
from jaxrl.training.actors.remote import RemoteActor, RemoteContext
from jaxrl.training.actors.stats import ActorStats, Block, HangDetector, Published, Scalars, stack_of
from jaxrl.training.interrupt import Interrupt
from jaxrl.trees import PyTree
from jaxrl.xla.contexts import bind_context

POLL_S = 0.1
"""Seconds between polls for stop requests and failures."""
PATIENCE_S = 2.0
"""Grace period in seconds for calls of environments in progress when a run ends."""

LogFn = Callable[[str, str], object]


class ParameterServer:
    """Exchanges parameters and blocks between learner and actors; closing it ends every wait."""

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self.closed = False
        self.failure: tuple[str, str] | None = None
        """The first failure of an actor: a line with its number and the reason, and a traceback."""
        self._changed = threading.Condition()
        self._published: list[Published] = []
        self._blocks: dict[tuple[int, int], Block] = {}
        self._taken = self._rounds = 0

    # --- for the learner ---

    def open(self, agent: PyTree, opt_step: int, processor_stats: PyTree, rounds: int) -> None:
        """Publish the first parameters; actors run `rounds` rounds, and none beyond."""
        with self._changed:
            self._rounds = rounds
            self._published = [Published(0, opt_step, agent, processor_stats)]
            self._changed.notify_all()

    def take(self, actors: int, seconds: float) -> list[Block] | None:
        """Return the blocks of the next round, ordered by actor, or `None` if any is missing after `seconds`."""
        with self._changed:
            wanted = [(self._taken, i) for i in range(actors)]
            ready = lambda: all(key in self._blocks for key in wanted)
            if not self._changed.wait_for(lambda: ready() or self.failure, seconds) or not ready():
                return None
            return [self._blocks.pop(key) for key in wanted]

    def finish_round(self, agent: PyTree, opt_step: int, processor_stats: PyTree) -> None:
        """Mark the round last taken as learnt from, and publish new parameters, if any.

        Both at once, so that no round can begin in between with the wrong parameters.
        """
        with self._changed:
            self._taken += 1
            if agent is not None:
                self._published.append(Published(self._taken, opt_step, agent, processor_stats))
                # Evict older parameters: no actor begins a round before the next one to be taken.
                oldest = self._of_round(self._taken)
                self._published = [p for p in self._published if p.round >= oldest.round]
            self._changed.notify_all()

    def opt_step_of_round(self) -> int:
        """Return the optimisation step of the parameters for the next round."""
        with self._changed:
            return self._of_round(self._taken).opt_step

    def close(self) -> None:
        """Wake up all waiting threads."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    # --- for actors ---

    def begin(self, number: int) -> Published:
        """Wait until round `number` may begin; return its parameters."""
        # At most `max_lag` earlier rounds may still be unlearnt, which bounds the staleness of the parameters.
        may = lambda: self._published and number < min(self._rounds, self._taken + self.max_lag + 1)
        with self._changed:
            self._changed.wait_for(lambda: self.closed or may())
            if self.closed:
                raise Stopped
            return self._of_round(number)

    def deliver(self, number: int, actor: int, block: Block) -> None:
        """Hand the block of a round to the learner."""
        with self._changed:
            self._blocks[number, actor] = block
            self._changed.notify_all()

    def fail(self, actor: int, error: BaseException) -> None:
        """Report the failure of an actor; the first one counts."""
        with self._changed:
            if not self.closed and self.failure is None:
                why = to_remote_error(error)
                self.failure = f"actor {actor}{why.line}", why.trace
            self._changed.notify_all()

    def _of_round(self, number: int) -> Published:
        """Return the newest parameters at least `max_lag` rounds old; deterministic in the number of the round."""
        # Not the newest at the time of the call, which would depend on a race between actors and learner.
        old = [p for p in self._published if p.round <= number - self.max_lag]
        return old[-1] if old else self._published[0]


class ActorPool:
    """The actors of a run in this process."""

    def __init__(
        self, actor_fns: ActorFns, programs: Any, interrupt: Interrupt, opt_steps_per_step: int, log: LogFn, last: int
    ) -> None:
        """Prepare the pool; threads and environments start with the first call of `run`.

        `log(event, line)` logs an event; `last` is the last iteration of the run.
        """
        self.actor_fns, self.programs, self.interrupt, self.log = actor_fns, programs, interrupt, log
        self.failure: tuple[ActorError, str] | None = None
        """The error that ended the actors, and its traceback for the log."""
        self.waited_s = 0.0
        """Seconds that the learner has waited for actors."""
        self._opts, self._last = opt_steps_per_step, last
        assert actor_fns.config.max_lag is not None, "nothing is unset in the settings of a strategy's actors"
        self._server = ParameterServer(actor_fns.config.max_lag)
        self._stats = [ActorStats() for _ in range(actor_fns.actors)]
        self._hangs = HangDetector(self._stats)
        self._actors: list[Actor | RemoteActor] = []
        self._threads: list[threading.Thread] = []
        self._opening = threading.Lock()
        self._restart_messages: list[str] = []
        """Messages on restarted actors, pending for the log."""
        self.refill = range(0)
        """Numbers of the blocks that refill a buffer saved without its contents."""
        self._fill = range(0)
        """Numbers of the blocks to push before the next iteration."""
        self._processor: PyTree = None
        """State of the processor before the warm-up."""
        self._arrived: list[Block] = []
        """The blocks of the latest round."""
        self._lags: list[float] = [0.0, 0.0, 0.0]
        """Number of rounds learnt from, and the sum and maximum of their lags, in optimisation steps."""
        self._waits_before = (0.0, 0.0, time.perf_counter())
        self._scalars = Scalars()

    # --- for the trainer ---

    def restart(self) -> "ActorPool":
        """Close this pool; return another with new environments, and the same counts."""
        self.close()
        pool = ActorPool(self.actor_fns, self.programs, self.interrupt, self._opts, self.log, self._last)
        pool.refill = self.refill
        pool.restore(self.facts())
        return pool

    def run(self, state: PyTree, sums: PyTree, t: int, stop: int) -> tuple[PyTree, PyTree, int, list[EpisodeEnds]]:
        """Run iterations `t .. stop-1`, or until a stop request or a failure.

        Return also the next iteration, and the ended episodes of each, if the program reports them.
        """
        endings: list[EpisodeEnds] = []
        # Start with the first call: the actors' keys come from the state.
        if not self._threads:
            self._start(state, t)
        while t < stop:
            arrival = self._receive(t)
            if arrival is None:
                if t == 0:  # a resumed run makes the whole warm-up again
                    state = state._replace(processor=self._processor)
                break
            # A block that only fills the buffer is not an iteration: it moves no counter and no sum.
            if self._fill:
                # The steps of a refill are in no statistics.
                state = self.programs.push(t == 0, state, arrival, np.uint32(self._fill[0]))
                self._fill = self._fill[1:]
                self._publish(state, t, self.actor_fns.learns)
                continue
            state, sums, *ended = self.programs.run(state, sums, arrival, np.uint32(t))
            self._scalars.add(self._arrived)
            endings += ended
            rounds, total, most = self._lags
            self._lags = [rounds + 1, total + float(arrival.lag), max(most, float(arrival.lag))]
            t += 1
            # At the first iteration at or past each multiple of the interval.
            due = (t * self._opts) % self.actor_fns.config.sync_interval < self._opts
            self._publish(state, t, due)
        return state, sums, t, endings

    def columns(self) -> dict[str, float | None]:
        """Return the columns of a row: the environments' scalars and the shares of waiting since the previous row."""
        now, learner_0, actors_0, then = time.perf_counter(), *self._waits_before
        actors = sum(stats.waited_so_far() for stats in self._stats)
        # Actors wait on while they are asked: the interval has both ends, so that no share exceeds 1.
        seconds = max(time.perf_counter() - then, 1e-9)
        self._waits_before = (self.waited_s, actors, now)
        return {
            **self._scalars.columns(),
            "learner_waits": (self.waited_s - learner_0) / seconds,
            "actors_wait": (actors - actors_0) / seconds / len(self._stats),
        }

    def summary(self) -> dict[str, Any]:
        """Return the totals of the run: work and waiting of each actor, waiting of the learner, staleness."""
        rounds, total, most = self._lags
        return {
            "learner_waited_s": self.waited_s,
            "staleness": total / rounds if rounds else None,
            "staleness_max": most if rounds else None,
            "actors": [
                {
                    "env_steps": stats.env_steps,
                    "episodes": stats.episodes,
                    "mean_return": stats.returns / stats.episodes if stats.episodes else None,
                    "waited_s": stats.waited_s,
                }
                for stats in self._stats
            ],
        }

    def facts(self) -> dict[str, Any]:
        """Return the counts as facts of a checkpoint, for JSON."""
        return {"waited_s": self.waited_s, "lags": self._lags, "actors": [stats.facts() for stats in self._stats]}

    def restore(self, facts: Any) -> None:
        """Restore the counts from `facts()`; ignore them if malformed or for another number of actors."""
        like: Any = jax.tree.structure(self.facts())
        finite = all(type(x) in (int, float) and math.isfinite(x) for x in jax.tree.leaves(facts))
        if not finite or like != jax.tree.structure(facts):
            return
        self.waited_s, self._lags = float(facts["waited_s"]), [float(lag) for lag in facts["lags"]]
        for stats, counted in zip(self._stats, facts["actors"], strict=True):
            stats.restore(counted)
        self._waits_before = (self.waited_s, sum(stats.waited_s for stats in self._stats), time.perf_counter())

    def close(self) -> None:
        """End every actor, its environments and their processes.

        A thread stuck outside of Python, in compiled code of an environment or in a system call, outlives it, as it
        cannot be killed; run such environments in `processes`.
        """
        self._server.close()
        self._join()
        # For threads stuck in their environments: killing these may free them, and an exception ends those in Python.
        stuck = [i for i, thread in enumerate(self._threads) if thread.is_alive()]
        for i in stuck:
            self._actors[i].close(kill=True)
            _raise_in(self._threads[i])
        if stuck:
            self._join()  # threads that waited for a process are free now

    def _join(self) -> None:
        """Join all threads; those inside a call of their environment for at most `PATIENCE_S` in total."""
        deadline = time.perf_counter() + PATIENCE_S
        for thread, stats in zip(self._threads, self._stats, strict=False):
            while thread.is_alive() and not (stats.inside and time.perf_counter() > deadline):
                thread.join(POLL_S)

    # --- the learner's side ---

    def _publish(self, state: PyTree, t: int, due: bool) -> None:
        """Mark the round as learnt from; publish the new parameters if `due`."""
        agent, processor_stats = self.programs.publish(state) if due else (None, ())
        self._server.finish_round(agent, t * self._opts, processor_stats)

    def _start(self, state: PyTree, t: int) -> None:
        # A copy: the state is donated to the warm-up.
        self._processor = jax.tree.map(lambda x: x.copy(), state.processor) if t == 0 else None
        self._fill = self.refill if t else range(self.actor_fns.fill)
        random = self.actor_fns.fill if self.actor_fns.random_fill and not t else 0
        agent, processor_stats = self.programs.publish(state)
        self._server.open(agent, t * self._opts, processor_stats, len(self._fill) + self._last - t)
        # Fold in the iteration too, so that a resumed run does not repeat the episodes from before.
        key = fold(fold(state.key, streams.ACTORS), t)
        self._actors = self._make_actors([ActorSpec(i, fold(key, i), random) for i in range(self.actor_fns.actors)])
        for i in range(self.actor_fns.actors):
            work = lambda i=i: self._work(i)
            self._threads.append(threading.Thread(target=bind_context(work), name=f"actor {i}", daemon=True))
            self._threads[-1].start()

    def _make_actors(self, specs: list[ActorSpec]) -> list[Actor | RemoteActor]:
        """Return the actors, local or remote."""
        halted, engine = lambda: self._server.closed, self.actor_fns.config.actor_engine
        make: Callable[[ActorSpec, ActorStats], Actor | RemoteActor]
        if engine == "threads":
            make = lambda spec, stats: Actor(self.actor_fns, self.programs, spec, stats, halted)
        else:
            start = RayWorker if engine == "ray" else ProcessWorker
            make = partial(
                RemoteActor,
                RemoteContext(start, self.actor_fns, halted, self._opening_turn, self._restart_messages.append),
            )
        return list(map(make, specs, self._stats))

    def _receive(self, t: int) -> ActorBatch | None:
        """Wait for the next round; return `None` on a stop request or a failure."""
        begun = time.perf_counter()
        blocks = None
        while blocks is None:
            while self._restart_messages:
                self.log("actor_restart", self._restart_messages.pop(0))
            if self.interrupt or self.failure:
                return None
            checked = time.perf_counter()
            # Wait in short intervals, to notice signals and failures.
            blocks = self._server.take(self.actor_fns.actors, POLL_S)
            self._check_health(time.perf_counter() - checked)
        self.waited_s += time.perf_counter() - begun
        self._arrived, first = blocks, blocks[0].words
        # Blocks are `[T, N, ...]`: concatenate environments in the order of the actors, not of arrival.
        words: Any = {word: np.concatenate([block.words[word] for block in blocks], axis=1) for word in first}
        lag: Any = np.float32(t * self._opts - self._server.opt_step_of_round())
        fresh = jax.tree.map(lambda *x: np.stack(x), *[block.fresh for block in blocks])
        return ActorBatch(words, lag, fresh)

    def _check_health(self, seconds: float) -> None:
        """Detect actors that failed or hang; the learner has waited `seconds` since the last check."""
        if self.interrupt:
            return  # the signal may also have killed environments or workers
        late = self._hangs.late(seconds)
        # A thread that ended has failed, even if reporting that failed too.
        dead = [i for i, thread in enumerate(self._threads) if not thread.is_alive()]
        if self._server.failure is not None:
            line, trace = self._server.failure
            self.failure = ActorError(line), trace
        elif dead:
            self.failure = (
                ActorError(f"actor {', '.join(map(str, dead))} failed: its thread has ended without a reason"),
                "",
            )
        elif late:
            who, limit_s, name = ", ".join(map(str, late)), max(late.values()), self.actor_fns.env.spec.name
            self.failure = (
                ActorError(f"actor {who}{hang_message(name, limit_s)}"),
                "\n".join(f"{self._threads[i].name}:\n{stack_of(self._threads[i].ident)}" for i in late),
            )

    # --- the actors' side ---

    def _work(self, actor: int) -> None:
        own = self._actors[actor]
        with self._reported(actor):
            with self._opening_turn():
                own.open()
            for number in count():
                with self._stats[actor].waiting():
                    published = self._server.begin(number)
                self._server.deliver(number, actor, own.run_round(number, published))
                del published  # or it would be kept while this actor waits for the next ones
        with self._reported(actor):  # an error from closing does not hide an earlier one
            own.close()

    @contextmanager
    def _reported(self, actor: int) -> Iterator[None]:
        try:
            yield
        except Stopped:
            pass
        except BaseException as error:
            self._server.fail(actor, error)

    @contextmanager
    def _opening_turn(self) -> Iterator[None]:
        """With `open_in_turn`, hold the lock for opening environments."""
        # Poll: closing the server does not release this lock.
        while self.actor_fns.config.open_in_turn and not self._opening.acquire(timeout=POLL_S):
            if self._server.closed:
                raise Stopped
        try:
            yield
        finally:
            if self.actor_fns.config.open_in_turn:
                self._opening.release()


def _raise_in(thread: threading.Thread) -> None:
    """Raise `Stopped` in a thread as soon as it runs Python, which also ends an infinite loop."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))


def pool_of(
    strategy: Strategy, run: Callable[..., Any], interrupt: Interrupt, log: LogFn, last: int
) -> ActorPool | None:
    """Return the actor pool of a strategy, `None` without actors; the run ends after iteration `last`."""
    actor_fns: ActorFns | None = strategy.actor_fns
    if actor_fns is None:
        return None
    if actor_fns.config.actor_engine == "ray":
        connect(actor_fns.actors)
    return ActorPool(actor_fns, programs(actor_fns, run), interrupt, strategy.opt_steps_per_step, log, last)

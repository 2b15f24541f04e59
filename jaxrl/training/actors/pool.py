"""Actors: each has a thread, which plays or asks a worker elsewhere, while the learner in the main thread optimises."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np

from jaxrl.errors import ActorError
from jaxrl.strategies.base import EpisodeEnds, Strategy, fold
from jaxrl.strategies.host_actors import ActorBatch, ActorFns
from jaxrl.training.actors.distant import Company, DistantPlayer
from jaxrl.training.actors.in_processes import Processes
from jaxrl.training.actors.on_ray import Ray, connect
from jaxrl.training.actors.players import STREAM, Part, Player, Stopped, hanging, programs, raised
from jaxrl.training.actors.stats import COUNTED, ActorStats, Block, Published, Scalars, Watch, is_numbers, stack_of
from jaxrl.training.interrupt import Interrupt
from jaxrl.trees import PyTree
from jaxrl.xla.contexts import bind_context

POLL_S = 0.1
"""Seconds between looks at whether someone asks to stop."""
PATIENCE_S = 2.0
"""Seconds given to an actor to return from a call of its environment, when a run ends."""

Tell = Callable[[str, str], object]


class ParameterServer:
    """What actors and learner exchange; every wait ends when the server is closed."""

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self.closed = False
        self.failure: tuple[str, str] | None = None
        """Which actor failed first and why, in one line, and the traceback of what it raised."""
        self._changed = threading.Condition()
        self._published: list[Published] = []
        self._blocks: dict[tuple[int, int], Block] = {}
        self._taken = self._rounds = 0

    # --- for the learner ---

    def open(self, agent: PyTree, opt_step: int, learnt: PyTree, rounds: int) -> None:
        """Offer the first parameters; the run learns from so many `rounds`, and none beyond them begins."""
        with self._changed:
            self._rounds = rounds
            self._published = [Published(0, opt_step, agent, learnt)]
            self._changed.notify_all()

    def take(self, actors: int, seconds: float) -> list[Block] | None:
        """Return the blocks of the next round in the order of the actors, or `None` if not all came in `seconds`."""
        with self._changed:
            wanted = [(self._taken, i) for i in range(actors)]
            ready = lambda: all(key in self._blocks for key in wanted)
            if not self._changed.wait_for(lambda: ready() or self.failure, seconds) or not ready():
                return None
            return [self._blocks.pop(key) for key in wanted]

    def learnt(self, agent: PyTree = None, opt_step: int = 0, learnt: PyTree = ()) -> None:
        """Take note that the round that was taken has been learnt from, and of new parameters, if there are any.

        At once, so that no round can begin between the two with parameters that are not its own.
        """
        with self._changed:
            self._taken += 1
            if agent is not None:
                self._published.append(Published(self._taken, opt_step, agent, learnt))
                # No actor begins a round before the next that is to be taken.
                oldest = self._of_round(self._taken)
                self._published = [p for p in self._published if p.round >= oldest.round]
            self._changed.notify_all()

    def missing(self, actors: int) -> list[int]:
        """Return the actors whose block of the next round has not come."""
        with self._changed:
            return [i for i in range(actors) if (self._taken, i) not in self._blocks]

    def opt_step_of_round(self) -> int:
        """Return the optimisation step of the parameters that the next round is played with."""
        with self._changed:
            return self._of_round(self._taken).opt_step

    def close(self) -> None:
        """Let everyone who waits go."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    # --- for actors ---

    def begin(self, number: int) -> Published:
        """Wait until round `number` may begin; return the parameters to play it with."""
        # A round may begin while at most `max_lag` rounds before it are not learnt from, which bounds the age of its
        # parameters.
        may = lambda: self._published and number < min(self._rounds, self._taken + self.max_lag + 1)
        with self._changed:
            self._changed.wait_for(lambda: self.closed or may())
            if self.closed:
                raise Stopped
            return self._of_round(number)

    def deliver(self, number: int, actor: int, block: Block) -> None:
        """Send the block of a round."""
        with self._changed:
            self._blocks[number, actor] = block
            self._changed.notify_all()

    def fail(self, actor: int, error: BaseException) -> None:
        """Tell that an actor cannot go on."""
        with self._changed:
            if not self.closed and self.failure is None:
                why = raised(error)
                self.failure = f"actor {actor}{why.line}", why.trace
            self._changed.notify_all()

    def _of_round(self, number: int) -> Published:
        """Return the newest parameters that are at least `max_lag` rounds old; always the same for one round."""
        # By the number of the round, not by what is there when an actor asks: so no race decides with what a round is
        # played.
        old = [p for p in self._published if p.round <= number - self.max_lag]
        return old[-1] if old else self._published[0]


class ActorPool:
    """The actors of a run, from its first iteration in this process to its end."""

    def __init__(
        self, actor_fns: ActorFns, programs: Any, interrupt: Interrupt, opt_steps_per_step: int, tell: Tell, last: int
    ) -> None:
        """Prepare; threads and environments begin with the first call of `run`.

        `tell(event, line)` is for the log; `last` is the iteration at whose end the run ends.
        """
        self.actor_fns, self.programs, self.interrupt, self.tell = actor_fns, programs, interrupt, tell
        self.failure: tuple[ActorError, str] | None = None
        """The error that ended the actors, and what the log is to say of it."""
        self.waited_s = 0.0
        """Seconds in which the learner waited for actors."""
        self._opts, self._last = opt_steps_per_step, last
        assert actor_fns.config.max_lag is not None, "nothing is unset in the settings of a strategy's actors"
        self._server = ParameterServer(actor_fns.config.max_lag)
        self._stats = [ActorStats() for _ in range(actor_fns.actors)]
        self._watch = Watch(self._stats)
        self._players: list[Player | DistantPlayer] = []
        self._threads: list[threading.Thread] = []
        self._opening = threading.Lock()
        self._news: list[str] = []
        """What happened to actors that went on, and is not told yet."""
        self.refill = range(0)
        """Numbers of the blocks that a buffer is to be filled with which a checkpoint was saved without."""
        self._fill = range(0)
        """Numbers of the blocks to be pushed before the next iteration."""
        self._random = 0
        """Rounds whose actions are random."""
        self._arrived: list[Block] = []
        """The blocks of the round that came last."""
        self._lags: list[float] = [0.0, 0.0, 0.0]
        """Rounds learnt from, and the sum and the largest of their lags, in optimisation steps."""
        self._told = (0.0, 0.0, time.perf_counter())
        self._scalars = Scalars()

    # --- for the trainer ---

    def renewed(self) -> "ActorPool":
        """Close, and return a pool whose environments begin anew."""
        self.close()
        pool = ActorPool(self.actor_fns, self.programs, self.interrupt, self._opts, self.tell, self._last)
        pool.refill = self.refill
        pool.take_up(self.facts())
        return pool

    def run(self, state: PyTree, sums: PyTree, t: int, stop: int) -> tuple[PyTree, PyTree, int, list[EpisodeEnds]]:
        """Make iterations from `t` on, up to `stop` or until there is a reason not to.

        Return also the next, and which episodes ended in each, if the program tells.
        """
        endings: list[EpisodeEnds] = []
        # Environments are opened by the first call, once the state is there from which actors get their keys.
        if not self._threads:
            self._start(state, t)
        while t < stop:
            arrival = self._receive(t)
            if arrival is None:
                break
            # A block that only fills the buffer is no iteration: no counter and no sum moves.
            if self._fill:
                state = self.programs.push(state, arrival, np.uint32(self._fill[0]))
                self._fill = self._fill[1:]
                self._publish(state, t, self.actor_fns.learns)
                continue
            state, sums, *ended = self.programs.run(state, sums, arrival, np.uint32(t))
            self._scalars.take_up(self._arrived)
            endings += ended
            rounds, total, most = self._lags
            self._lags = [rounds + 1, total + float(arrival.lag), max(most, float(arrival.lag))]
            t += 1
            # At the first iteration at or past each multiple of the interval.
            due = (t * self._opts) % self.actor_fns.config.sync_interval < self._opts
            self._publish(state, t, due)
        return state, sums, t, endings

    def columns(self) -> dict[str, float | None]:
        """Return the columns of a row on the time since the last: what environments told, and the share of waiting."""
        actors, now = sum(stats.waited_s for stats in self._stats), time.perf_counter()
        learner_0, actors_0, then = self._told
        seconds = max(now - then, 1e-9)
        self._told = (self.waited_s, actors, now)
        return {
            **self._scalars.columns(),
            "learner_waits": (self.waited_s - learner_0) / seconds,
            "actors_wait": (actors - actors_0) / seconds / len(self._stats),
        }

    def summary(self) -> dict[str, Any]:
        """Return what each actor has done in the whole run, and how long both sides have waited."""
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
        """Return what a checkpoint keeps of that, for JSON."""
        return {"waited_s": self.waited_s, "lags": self._lags, "actors": [stats.facts() for stats in self._stats]}

    def take_up(self, facts: Any) -> None:
        """Go on counting from what `facts()` returned in an earlier process; from nothing, if it is that of others."""
        numbers: Mapping[str, Any] = facts if isinstance(facts, Mapping) else {}
        waited, lags, actors = (numbers.get(name, []) for name in ("waited_s", "lags", "actors"))
        each = isinstance(actors, list) and len(actors) == len(self._stats)
        if each and all(map(is_numbers, ([waited], lags, *actors), (1, len(self._lags), *[COUNTED] * len(actors)))):
            self.waited_s, self._lags = float(waited), [float(lag) for lag in lags]
            for stats, counted in zip(self._stats, actors, strict=True):
                stats.take_up(counted)
            self._told = (self.waited_s, sum(stats.waited_s for stats in self._stats), time.perf_counter())

    def close(self) -> None:
        """End every actor, its environments and their processes.

        What outlives it is a thread stuck outside of Python, in compiled code of an environment in this process or in
        a wait of the system: no thread can be killed there, and `processes` is for such environments.
        """
        self._server.close()
        self._join()
        # Threads that do not come back from their environments: ending these may free them, and an exception ends those
        # in Python.
        stuck = [i for i, thread in enumerate(self._threads) if thread.is_alive()]
        for i in stuck:
            self._players[i].close(kill=True)
            _raise_in(self._threads[i])
        if stuck:
            self._join()  # a thread that waited for a process is free now

    def _join(self) -> None:
        """Wait for all threads, but for those in a call of their environment no longer than `PATIENCE_S` in all."""
        deadline = time.perf_counter() + PATIENCE_S
        for thread, stats in zip(self._threads, self._stats, strict=False):
            while thread.is_alive() and not (stats.inside and time.perf_counter() > deadline):
                thread.join(POLL_S)

    # --- the learner's side ---

    def _publish(self, state: PyTree, t: int, due: bool) -> None:
        """Take note that a round was learnt from; offer its parameters, where they are `due`."""
        agent, learnt = self.programs.publish(state) if due else (None, ())
        self._server.learnt(agent, t * self._opts, learnt)

    def _start(self, state: PyTree, t: int) -> None:
        self._fill = self.refill if t else range(self.actor_fns.fill)
        self._random = self.actor_fns.fill if self.actor_fns.random_fill and not t else 0
        agent, learnt = self.programs.publish(state)
        self._server.open(agent, t * self._opts, learnt, len(self._fill) + self._last - t)
        # By the iteration as well: environments that begin anew after a resumption do not repeat the episodes of
        # before.
        key = fold(fold(state.key, STREAM), t)
        self._players = self._cast([Part(i, fold(key, i), self._random) for i in range(self.actor_fns.actors)])
        for i in range(self.actor_fns.actors):
            work = lambda i=i: self._work(i)
            self._threads.append(threading.Thread(target=bind_context(work), name=f"actor {i}", daemon=True))
            self._threads[-1].start()

    def _cast(self, parts: list[Part]) -> list[Player | DistantPlayer]:
        """Return who plays: in this process, or in others."""
        halted, engine = lambda: self._server.closed, self.actor_fns.config.actor_engine
        make: Callable[[Part, ActorStats], Player | DistantPlayer]
        if engine == "threads":
            make = lambda part, stats: Player(self.actor_fns, self.programs, part, stats, halted)
        else:
            workers = Ray() if engine == "ray" else Processes()
            make = partial(DistantPlayer, Company(workers, self.actor_fns, halted, self._turn, self._news.append))
        return list(map(make, parts, self._stats))

    def _receive(self, t: int) -> ActorBatch | None:
        """Wait for the next round; `None` where there is a reason to stop."""
        begun = time.perf_counter()
        blocks = None
        while blocks is None:
            while self._news:
                self.tell("actor_restart", self._news.pop(0))
            if self.interrupt or self.failure:
                return None
            looked = time.perf_counter()
            # In short waits, so that signals and failures are seen between them.
            blocks = self._server.take(self.actor_fns.actors, POLL_S)
            self._look(time.perf_counter() - looked)
        self.waited_s += time.perf_counter() - begun
        self._arrived, first = blocks, blocks[0].words
        # Blocks are `[T, N, ...]`. Their environments stand side by side in the order of the actors, not of arrival.
        words: Any = {word: np.concatenate([block.words[word] for block in blocks], axis=1) for word in first}
        lag: Any = np.float32(t * self._opts - self._server.opt_step_of_round())
        fresh = jax.tree.map(lambda *x: np.stack(x), *[block.fresh for block in blocks])
        return ActorBatch(words, lag, fresh)

    def _look(self, seconds: float) -> None:
        """Take note of an actor that failed or hangs; the learner has waited `seconds` since it last looked."""
        if self.interrupt:
            return  # a signal may have reached more than this process
        late = self._watch.late(seconds)
        # A thread ends by itself only after it has failed, and reporting that might have failed too.
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
                ActorError(f"actor {who}{hanging(name, limit_s)}"),
                "\n".join(f"{self._threads[i].name}:\n{stack_of(self._threads[i].ident)}" for i in late),
            )

    # --- the actors' side ---

    def _work(self, actor: int) -> None:
        player = self._players[actor]
        with self._reported(actor):
            with self._turn():
                player.open()
            for number in count():
                self._server.deliver(number, actor, player.play(number, self._begin(number, actor)))
        with self._reported(actor):  # what closing raises does not hide why it came to that
            player.close()

    @contextmanager
    def _reported(self, actor: int) -> Iterator[None]:
        try:
            yield
        except Stopped:
            pass
        except BaseException as error:
            self._server.fail(actor, error)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait, where environments are opened in turn, until no other actor opens its own."""
        # Asked again and again: closing the server does not release this lock.
        while self.actor_fns.config.open_in_turn and not self._opening.acquire(timeout=POLL_S):
            if self._server.closed:
                raise Stopped
        try:
            yield
        finally:
            if self.actor_fns.config.open_in_turn:
                self._opening.release()

    def _begin(self, number: int, actor: int) -> Published:
        begun = time.perf_counter()
        published = self._server.begin(number)
        self._stats[actor].waited_s += time.perf_counter() - begun
        return published


def _raise_in(thread: threading.Thread) -> None:
    """Raise `Stopped` in a thread, as soon as it runs Python: a loop without end comes to one."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))


def advance(
    run: Callable[..., Any], actors: ActorPool | None, state: PyTree, sums: PyTree, t: int, stop: int
) -> tuple[PyTree, PyTree, int, list[EpisodeEnds]]:
    """Make iterations `t .. stop-1` by the program `run` or by `actors`, see `ActorPool.run`."""
    if actors is not None:
        return actors.run(state, sums, t, stop)
    state, sums, *endings = run(state, sums, np.uint32(t), np.uint32(stop))
    return state, sums, stop, endings


def pool_of(
    strategy: Strategy, run: Callable[..., Any], interrupt: Interrupt, tell: Tell, last: int
) -> ActorPool | None:
    """Return the actors of a strategy whose environments are on the host; the run ends after iteration `last`."""
    actor_fns: ActorFns | None = strategy.actor_fns
    if actor_fns is None:
        return None
    if actor_fns.config.actor_engine == "ray":
        connect(actor_fns.actors)
    return ActorPool(actor_fns, programs(actor_fns, run), interrupt, strategy.opt_steps_per_step, tell, last)


def summary_of(actors: ActorPool | None) -> dict[str, Any]:
    """Return what the summary of a run has on its `actors`, if it has any."""
    return {} if actors is None else actors.summary()


def facts_of(actors: ActorPool | None) -> dict[str, Any]:
    """Return what the facts of a checkpoint have on them."""
    return {} if actors is None else {"actors": actors.facts()}


def go_on_counting(actors: ActorPool | None, facts: Mapping[str, Any]) -> None:
    """Let `actors`, if there are any, count on from the `facts` of a checkpoint."""
    if actors is not None:
        actors.take_up(facts.get("actors"))

"""What one actor does, round by round: the same in a thread of this process and in a worker of Ray."""

import math
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.envs.host import Stage
from jaxrl.errors import one_line
from jaxrl.strategies.base import fold
from jaxrl.strategies.remote import Remote
from jaxrl.training.actor_stats import ActorStats, Block, apart, block_of
from jaxrl.trees import Key, PyTree

OPENING_S = 60.0
"""Seconds that opening environments may take at the least, which begins processes and imports."""
STREAM = 2**32 - 2
"""Folded into the key of a run's stream for its actors: no iteration has this number."""


class Stopped(Exception):
    """End an actor."""


class Published(NamedTuple):
    """Parameters for actors."""

    round: int
    """The first round that may be played with them without lag."""
    opt_step: int
    agent: PyTree


class Programs(NamedTuple):
    """The compiled functions of a strategy with actors."""

    run: Callable[..., Any]
    """`(state, sums, arrival, t) -> (state, sums)`, perhaps with `Ended`; the state and sums given are donated."""
    push: Callable[..., Any]
    """`(state, arrival, t) -> state`; the state given is donated."""
    publish: Callable[..., Any]
    begin: Callable[..., Any]
    draw: Callable[..., Any]
    """`(key, number, steps, random) -> noise` of a round, by its number."""
    act: Callable[..., Any]
    take: Callable[..., Any]


def programs(remote: Remote, run: Callable[..., Any]) -> Programs:
    """Return what learner and actors call; `run` is compiled already, the others are when first called."""
    return Programs(
        run=run,
        push=jax.jit(remote.push or (lambda state, arrival, t: state), donate_argnums=0),
        publish=jax.jit(lambda state: jax.tree.map(lambda x: x.copy(), remote.publish(state))),
        # Each in a wrapper of its own: JAX would give a function traced with other forms the programs of then.
        begin=jax.jit(partial(remote.begin)),
        draw=jax.jit(
            lambda key, number, steps, random: remote.draw(fold(key, number), steps, random), static_argnums=(2, 3)
        ),
        act=jax.jit(partial(remote.act)),
        take=jax.jit(partial(remote.take)),
    )


class Part(NamedTuple):
    """What makes an actor the one that it is."""

    actor: int
    key: Key
    random: int
    """Rounds whose actions are random."""


class Player:
    """One actor: its environments, and what it keeps from round to round."""

    def __init__(
        self, remote: Remote, programs: Programs, part: Part, stats: ActorStats, halted: Callable[[], bool]
    ) -> None:
        """Prepare; nothing is opened yet. A round ends with `Stopped` once `halted()`."""
        self.remote, self.programs, self.part, self.stats, self.halted = remote, programs, part, stats, halted
        self._stage: Stage | None = None
        self._processor: PyTree = None

    def open(self) -> None:
        """Open the environments, from the actor's own seed."""
        remote = self.remote
        seed = int(jax.random.bits(self.part.key) >> 1)
        opening_s = math.inf if remote.env.compiled else max(OPENING_S, remote.config.actor_timeout)
        with self.stats.calling(opening_s):
            self._stage = Stage(remote.env, remote.num_envs, seed, remote.config.processes)

    def play(self, number: int, published: Published) -> Block:
        """Take the steps of round `number`, after those that come before an actor's first."""
        published, random = self._own(published), number < self.part.random
        if self._processor is None:
            self._begin(published, random)
        noise = self.programs.draw(self.part.key, np.uint32(number), self.remote.steps, random)
        return block_of(self._steps(published, noise, self.remote.steps))

    def close(self, kill: bool = False) -> None:
        """Close the environments; with `kill`, from another thread, without waiting for a step that hangs."""
        if self._stage is not None and kill:
            self._stage.close(kill=True)
        elif self._stage is not None:
            with self.stats.calling(self.remote.config.actor_timeout):
                self._stage.close()

    def _begin(self, published: Published, random: bool) -> None:
        """Start the episodes, and take the steps of which no transition is complete."""
        assert self._stage is not None, "opened before it is played in"
        with self.stats.calling(self.remote.config.actor_timeout):
            obs = self._stage.reset()
        self._processor = self.programs.begin(published.agent, obs, self.part.key)
        if self.remote.prime:
            noise = self.programs.draw(self.part.key, np.uint32(STREAM), self.remote.prime, random)
            self._steps(published, noise, self.remote.prime)

    def _own(self, published: Published) -> Published:
        """Return the parameters with this actor's own exploration."""
        given = self.remote.exploration[self.part.actor]
        if not given:
            return published
        agent = published.agent
        hyper = agent.hyper._replace(**{name: np.float32(value) for name, value in given.items()})
        return published._replace(agent=agent._replace(hyper=hyper))

    def _steps(self, published: Published, noise: PyTree, steps: int) -> list[Block]:
        """Take `steps` steps; return each, packed."""
        assert self._stage is not None, "opened before it is played in"
        kept, opt_step, stats = [], np.uint32(published.opt_step), self.stats
        for place in range(steps):
            if self.halted():
                raise Stopped
            action, extras = self.programs.act(published.agent, self._processor, noise, np.int32(place), opt_step)
            action = jax.tree.map(np.asarray, action)
            with stats.calling(self.remote.config.actor_timeout):
                step = self._stage.step(action)
            done = step.terminated | step.truncated
            step, told = apart(step, done)
            self._processor, words = self.programs.take(self._processor, step._replace(action=action, extras=extras))
            kept.append(Block({word: np.asarray(x) for word, x in words.items()}, told))
            stats.env_steps += self._stage.num_envs
            stats.episodes += int(done.sum())
            stats.returns += float(step.info["episode_return"][done].sum())
        return kept


class Elsewhere(Exception):
    """Tell of what ended an actor outside of this process: how its line goes on after its number, and a traceback."""

    def __init__(self, line: str, trace: str = "") -> None:
        """Keep both."""
        super().__init__(line)
        self.line, self.trace = line, trace


def raised(error: BaseException) -> Elsewhere:
    """Tell of what an actor raised."""
    if isinstance(error, Elsewhere):
        return error
    line = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
    return Elsewhere(f" failed: {line}", "".join(traceback.format_exception(error)))


def hanging(name: str, limit_s: float) -> str:
    """Say that a call of environment `name` takes too long, as `Elsewhere` does."""
    return f": a call of {name} takes more than {limit_s:g} s; it hangs, or raise actor_timeout"


def stack_of(ident: int | None) -> str:
    """Say where a thread is."""
    return "".join(traceback.format_stack(sys._current_frames().get(ident or 0)))

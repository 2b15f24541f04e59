"""What one actor does, round by round: the same in a thread of this process and in a worker of Ray."""

import math
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.host import HostVectorEnv
from jaxrl.errors import one_line
from jaxrl.strategies.base import fold
from jaxrl.strategies.remote import Remote
from jaxrl.training.actor_stats import ActorState, ActorStats, Block, Published, apart, block_of
from jaxrl.trees import Key, PyTree

OPENING_S = 60.0
"""Seconds that opening environments may take at the least, which begins processes and imports."""
STREAM = 2**32 - 2
"""Folded into the key of a run's stream for its actors: no iteration has this number."""


class Stopped(Exception):
    """End an actor."""


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
    taught: Callable[..., Any]
    joined: Callable[..., Any]


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
        taught=jax.jit(partial(remote.taught)),
        joined=jax.jit(partial(remote.joined)),
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
        self._envs: HostVectorEnv | None = None
        self._window: ActorState | None = None
        self._own: list[tuple[int, PyTree]] = []
        """What it has learnt in rounds that the learner may not have learnt from yet, by their numbers."""

    def open(self) -> None:
        """Open the environments, from the actor's own seed."""
        remote = self.remote
        seed = int(jax.random.bits(self.part.key) >> 1)
        opening_s = math.inf if remote.env.compiled else max(OPENING_S, remote.config.actor_timeout)
        with self.stats.calling(opening_s):
            self._envs = HostVectorEnv(remote.env, remote.num_envs, seed, remote.config.processes)

    def play(self, number: int, published: Published) -> Block:
        """Take the steps of round `number`, after those that come before an actor's first."""
        published, random = self._exploring(published), number < self.part.random
        window = self._begin(published, random) if self._window is None else self._informed(self._window, published)
        noise = self.programs.draw(self.part.key, np.uint32(number), self.remote.steps, random)
        self._window, kept = self._steps(published, window, noise, self.remote.steps)
        fresh = jax.tree.map(np.asarray, self._window.fresh)
        if self.remote.learns:
            self._own.append((number, fresh))
        return block_of(kept, fresh)

    def close(self, kill: bool = False) -> None:
        """Close the environments; with `kill`, from another thread, without waiting for a step that hangs."""
        if self._envs is not None and kill:
            self._envs.close(kill=True)
        elif self._envs is not None:
            with self.stats.calling(self.remote.config.actor_timeout):
                self._envs.close()

    def _begin(self, published: Published, random: bool) -> ActorState:
        """Start the episodes, and take the steps of which no transition is complete."""
        assert self._envs is not None, "opened before it is played in"
        with self.stats.calling(self.remote.config.actor_timeout):
            obs = self._envs.reset()
        window = ActorState(*self.programs.begin(published.agent, published.learnt, obs, self.part.key))
        if self.remote.prime:
            noise = self.programs.draw(self.part.key, np.uint32(STREAM), self.remote.prime, random)
            window, _ = self._steps(published, window, noise, self.remote.prime)
        return window

    def _informed(self, window: ActorState, published: Published) -> ActorState:
        """Return `window` with what all have learnt up to `published`, and this actor in its own rounds since."""
        if not self.remote.learns:
            return window
        self._own = [(round, fresh) for round, fresh in self._own if round >= published.round]
        learnt = published.learnt
        for _, fresh in self._own:
            learnt = self.programs.joined(learnt, fresh)
        blank = jax.tree.map(np.zeros_like, window.fresh)
        return ActorState(self.programs.taught(window.processor, learnt), blank)

    def _exploring(self, published: Published) -> Published:
        """Return the parameters with this actor's own exploration."""
        given = self.remote.exploration[self.part.actor]
        if not given:
            return published
        agent, factor = published.agent, self.remote.factor
        times = 1.0 if factor is None else float(factor(jnp.uint32(published.opt_step)))
        hyper = agent.hyper._replace(**{name: np.float32(value * times) for name, value in given.items()})
        return published._replace(agent=agent._replace(hyper=hyper))

    def _steps(
        self, published: Published, window: ActorState, noise: PyTree, steps: int
    ) -> tuple[ActorState, list[Block]]:
        """Take `steps` steps; return the processor, and each step packed."""
        assert self._envs is not None, "opened before it is played in"
        processor, fresh = window
        kept, opt_step, stats = [], np.uint32(published.opt_step), self.stats
        for place in range(steps):
            if self.halted():
                raise Stopped
            action, extras = self.programs.act(published.agent, processor, noise, np.int32(place), opt_step)
            action = jax.tree.map(np.asarray, action)
            with stats.calling(self.remote.config.actor_timeout):
                step = self._envs.step(action)
            done = step.terminated | step.truncated
            step, scalars = apart(step, done)
            step = step._replace(action=action, extras=extras)
            processor, fresh, words = self.programs.take(processor, fresh, step)
            kept.append(Block({word: np.asarray(x) for word, x in words.items()}, scalars))
            stats.env_steps += self._envs.num_envs
            stats.episodes += int(done.sum())
            stats.returns += float(step.info["episode_return"][done].sum())
        return ActorState(processor, fresh), kept


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

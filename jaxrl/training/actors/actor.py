"""The work of one actor, round by round; the same in a local thread and in a remote worker."""

import math
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import streams
from jaxrl.env_process import EnvError
from jaxrl.envs.host import HostVectorEnv
from jaxrl.errors import describe_error
from jaxrl.strategies.actor import Packed
from jaxrl.strategies.host_actors import ActorFns
from jaxrl.training.actors.stats import ActorStats, Block, Published, split_scalars, stack_scalars
from jaxrl.trees import Key, PyTree
from jaxrl.xla.packing import HostRows

OPENING_S = 60.0
"""Minimum timeout in seconds for opening environments, which starts processes and imports."""


class Stopped(BaseException):
    """Raised to end an actor; no `Exception`, which an environment that tries again would catch."""


class Programs(NamedTuple):
    """Compiled functions of a strategy with actors."""

    run: Callable[..., Any]
    """`(state, sums, arrival, t) -> (state, sums)`, optionally with `EpisodeEnds`; the state and sums are donated."""
    push: Callable[..., Any]
    """`(learns, state, arrival, t) -> state`; the state is donated."""
    publish: Callable[..., Any]
    begin: Callable[..., Any]
    first: Callable[..., Any]
    next: Callable[..., Any]
    last: Callable[..., Any]
    replace_stats: Callable[..., Any]
    merge_stats: Callable[..., Any]


def programs(actor_fns: ActorFns, run: Callable[..., Any]) -> Programs:
    """Return the programs of learner and actors; `run` is compiled, the others compile when first called."""
    return Programs(
        run=run,
        push=jax.jit(actor_fns.push or (lambda learns, state, arrival, t: state), static_argnums=0, donate_argnums=1),
        # Copies: the state is donated to the next iteration, while actors still use these parameters.
        publish=jax.jit(lambda state: jax.tree.map(lambda x: x.copy(), actor_fns.publish(state))),
        # A new `partial` each: otherwise JAX would reuse programs traced with other forms.
        begin=jax.jit(partial(actor_fns.begin)),
        first=jax.jit(partial(actor_fns.first), static_argnums=0),
        next=jax.jit(partial(actor_fns.next), static_argnums=0),
        last=jax.jit(partial(actor_fns.last)),
        replace_stats=jax.jit(partial(actor_fns.replace_stats)),
        merge_stats=jax.jit(partial(actor_fns.merge_stats)),
    )


class ActorSpec(NamedTuple):
    """The identity of an actor."""

    actor: int
    key: Key
    random: int
    """Number of initial rounds with random actions."""


class Actor:
    """One actor: its environments, and its state between rounds."""

    def __init__(
        self, actor_fns: ActorFns, programs: Programs, spec: ActorSpec, stats: ActorStats, halted: Callable[[], bool]
    ) -> None:
        """Prepare the actor; nothing is opened yet. A round raises `Stopped` once `halted()` is true."""
        self.actor_fns, self.programs, self.spec, self.stats, self.halted = actor_fns, programs, spec, stats, halted
        self._envs: HostVectorEnv | None = None
        # Pack the results of a step into a few arrays of words: faster to transfer than one array per leaf.
        self._results = HostRows(actor_fns.result_layout, actor_fns.num_envs)
        self._window: Packed | None = None
        self._own: list[tuple[int, PyTree]] = []
        """Processor statistics of rounds that may not be in the published ones yet, with the numbers of the rounds."""
        self._shared_stats: PyTree = ()
        """The statistics published for round `_stats_round`, merged with the first `_merged` of these."""
        self._stats_round, self._merged = -1, 0

    def open(self) -> None:
        """Open the environments, seeded by the actor's key."""
        actor_fns = self.actor_fns
        seed = int(jax.random.bits(self.spec.key) >> 1)
        # No timeout for compilation; everything else has one.
        opening_s = math.inf if actor_fns.env.compiled else max(OPENING_S, actor_fns.config.actor_timeout)
        with self.stats.calling(opening_s):
            self._envs = HostVectorEnv(actor_fns.env, actor_fns.num_envs, seed, actor_fns.config.processes)
            # `_envs` is assigned before the start, so that `close` can end the processes if one hangs while starting.
            self._envs.start()

    def run_round(self, number: int, published: Published) -> Block:
        """Take the steps of round `number`; in the first call, after starting the episodes."""
        published, random = self._exploring(published), number < self.spec.random
        window = (
            self._begin(published, random) if self._window is None else self._merge_published(self._window, published)
        )
        self._window, block = self._steps(published, window, number, self.actor_fns.steps, random)
        if self.actor_fns.learns:
            self._own.append((number, block.fresh))
        return block

    def close(self, kill: bool = False) -> None:
        """Close the environments; with `kill`, from another thread, without waiting for a hanging step."""
        if self._envs is not None and kill:
            self._envs.close(kill=True)
        elif self._envs is not None:
            with self.stats.calling(self.actor_fns.config.actor_timeout):
                self._envs.close()

    def _begin(self, published: Published, random: bool) -> Packed:
        """Start the episodes, and take the steps before the first complete transition."""
        assert self._envs is not None, "opened before it is stepped"
        with self.stats.calling(self.actor_fns.config.actor_timeout):
            obs = self._envs.reset()
        obs_valid = ~self._envs.invalid_reset
        window: Packed = self.programs.begin(published.agent, published.processor_stats, obs, obs_valid, self.spec.key)
        if self.actor_fns.prime:
            # Steps that fill the processor, such as for n-step returns; their block is dropped.
            window, _ = self._steps(published, window, streams.PRIME, self.actor_fns.prime, random)
        return window

    def _merge_published(self, window: Packed, published: Published) -> Packed:
        """Return `window` with the published processor statistics, merged with those of this actor's rounds since."""
        if not self.actor_fns.learns:
            return window
        if published.round != self._stats_round:
            # Earlier rounds are part of the published statistics.
            self._own = [(round, fresh) for round, fresh in self._own if round >= published.round]
            self._shared_stats, self._stats_round, self._merged = published.processor_stats, published.round, 0
        # Merged once each: until others are published, there may be thousands of rounds.
        for _, fresh in self._own[self._merged :]:
            self._shared_stats = self.programs.merge_stats(self._shared_stats, fresh)
        self._merged = len(self._own)
        return self.programs.replace_stats(window, self._shared_stats)

    def _exploring(self, published: Published) -> Published:
        """Return the parameters with the exploration of this actor."""
        given = self.actor_fns.exploration[self.spec.actor]
        if not given:
            return published
        agent, factor = published.agent, self.actor_fns.factor
        times = 1.0 if factor is None else float(factor(jnp.uint32(published.opt_step)))
        # Hyperparameters are arrays in the agent's state, so other values do not recompile.
        hyper = agent.hyper._replace(**{name: np.float32(value * times) for name, value in given.items()})
        return published._replace(agent=agent._replace(hyper=hyper))

    def _steps(
        self, published: Published, window: Packed, number: int, steps: int, random: bool
    ) -> tuple[Packed, Block]:
        """Take the `steps` steps of round `number`; return the new window, and the steps as a block."""
        programs, agent, key = self.programs, published.agent, self.spec.key
        window, choice = programs.first(random, agent, window, key, np.array([number, published.opt_step], np.uint32))
        kept, infos, fresh = [], [], ()
        # `next` processes a step and chooses an action; `last` only processes, as the next round has other parameters.
        for step in range(1, steps + 1):
            result, info = self._step(choice.action)
            if step < steps:
                window, choice, words = programs.next(random, agent, window, choice, key, result)
            else:
                window, words, fresh = programs.last(window, choice, result)
            kept.append(words)
            infos.append(info)
        words = {word: np.stack([step[word] for step in kept]) for word in kept[0]}
        return window, Block(words, stack_scalars(infos), jax.tree.map(np.asarray, fresh))

    def _step(self, action: PyTree) -> tuple[Packed, dict[str, np.ndarray]]:
        """Step the environments; return the packed results, and the scalars of the environments."""
        assert self._envs is not None, "opened before it is stepped"
        action, stats = jax.tree.map(np.asarray, action), self.stats
        # Stop only between two steps, where the environments are consistent.
        if self.halted():
            raise Stopped
        with stats.calling(self.actor_fns.config.actor_timeout):
            step = self._envs.step(action)
        stats.env_steps += self._envs.num_envs
        done = step.terminated | step.truncated
        if ended := np.count_nonzero(done):
            stats.episodes += int(ended)
            stats.returns += float(step.info["episode_return"][done].sum())
        step, info = split_scalars(step, done)
        result: Any = self._results.pack(step._replace(action=(), extras=()))
        return result, info


class RemoteError(Exception):
    """The failure of an actor in another process: a line that follows the actor's number, and a traceback."""

    def __init__(self, line: str, trace: str = "") -> None:
        """Store the line and the traceback."""
        super().__init__(line)
        self.line, self.trace = line, trace


def to_remote_error(error: BaseException) -> RemoteError:
    """Convert an exception of an actor."""
    if isinstance(error, RemoteError):
        return error
    line = str(error) if isinstance(error, EnvError) else describe_error(error)
    return RemoteError(f" failed: {line}", "".join(traceback.format_exception(error)))


def hang_message(name: str, limit_s: float) -> str:
    """Return the line of a `RemoteError` for a call of environment `name` that takes too long."""
    return f": a call of {name} takes more than {limit_s:g} s; it hangs, or raise actor_timeout"

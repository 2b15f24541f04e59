"""Learning from replay: update schedules and updates."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax

from jaxrl.agents.base import Agent
from jaxrl.buffers.base import Buffer
from jaxrl.errors import SettingsError, check_count, check_type
from jaxrl.metrics import Metrics
from jaxrl.processors.base import DISABLED, Processor
from jaxrl.strategies.base import ReplayLearnerState, repeat
from jaxrl.strategies.guard import check_priorities, guarded_update, return_bound_metrics
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import GoalFn, Transition

State = TypeVar("State", bound=ReplayLearnerState)


class UpdateSchedule(NamedTuple):
    """Schedule of environment steps and optimisation steps; counts that depend on settings alone."""

    num_envs: int
    vector_steps: int
    """Vector steps per iteration; one takes a step in every environment."""
    updates: int
    """Optimisation steps per iteration."""
    horizon: int
    """Vector steps before the first iteration, until the first n-step transition is complete."""
    warmup_iterations: int
    """Warm-up iterations, which push without optimising."""
    random_warmup: bool

    @property
    def transitions_per_iteration(self) -> int:
        """Transitions per iteration."""
        return self.vector_steps * self.num_envs

    @property
    def lag(self) -> int:
        """Distance in the buffer from a transition to the one that starts at its `next_obs`, within an episode."""
        # An n-step transition, with a horizon of `n - 1`, has its successor `n` vector steps later.
        return (self.horizon + 1) * self.num_envs

    @property
    def warmup_vector_steps(self) -> int:
        """Vector steps before the first optimisation step."""
        return self.horizon + self.warmup_iterations * self.vector_steps

    @property
    def warmup_env_steps(self) -> int:
        return self.warmup_vector_steps * self.num_envs

    def blocks(self, capacity: int, t: int) -> range:
        """Return the indices of the blocks in a buffer of `capacity` transitions after `t` iterations."""
        # A ring overwrites its oldest blocks; the warm-up pushed the first `warmup_iterations`.
        pushed = self.warmup_iterations + t
        return range(max(0, pushed - capacity // self.transitions_per_iteration), pushed)

    def notes(self, buffer: Buffer, block: int, warmup: int) -> tuple[str, ...]:
        """Return notes on what was rounded: the capacity of `buffer`, in blocks of `block` items, and `warmup`."""
        notes = []
        asked, capacity = (buffer.settings or {}).get("capacity"), buffer.capacity(block)
        if asked is not None and asked != capacity:
            notes.append(f"buffer capacity rounded up from {asked} to {capacity}, a multiple of {block} items per push")
        if warmup != self.warmup_env_steps:
            least = f"batch of {buffer.batch_size}"
            if buffer.window is not None:
                least = f"sequence of {buffer.window.length} steps in each environment"
            notes.append(
                f"warm-up takes {self.warmup_env_steps} environment steps instead of {warmup}: "
                f"at least one {least}, in whole iterations of {self.transitions_per_iteration}"
            )
        return tuple(notes)


def adapt_buffer(agent: Agent, buffer: Buffer, num_envs: int) -> Buffer:
    """Return `buffer`, as a buffer of sequences if `agent` learns from them.

    Raises:
      SettingsError: the buffer cannot sample sequences, or is too small for one.
    """
    if agent.window is None:
        return buffer
    if buffer.as_sequence_buffer is None:
        raise SettingsError(
            f"{agent.name} with a core learns from sequences, which this buffer cannot sample; use jaxrl.uniform(...) "
            "or jaxrl.prioritised(...)"
        )
    return buffer.as_sequence_buffer(agent.window, num_envs)


def check_frames(buffer: Buffer, processor: Processor) -> None:
    """Raise `SettingsError` if `processor` stacks another number of frames than `buffer` takes apart."""
    frames, stacked = _count_frames(buffer, processor)
    if frames > 1 and stacked not in (1, frames):
        raise SettingsError(f"buffer.frames is {frames}, but processor.frame_stack is {stacked}; set both alike")


def note_of_frames(buffer: Buffer, processor: Processor) -> tuple[str, ...]:
    """Return a note if the environment itself has to stack the frames that `buffer` stores one by one."""
    frames, stacked = _count_frames(buffer, processor)
    if frames == 1 or stacked == frames:
        return ()
    return (
        f"buffer.frames is {frames} and processor.frame_stack 1: observations must be stacks of {frames} frames, which "
        "repeat the first one at the start of an episode; rows of others are not learnt from",
    )


def _count_frames(buffer: Buffer, processor: Processor) -> tuple[int, int]:
    return (buffer.settings or {}).get("frames", 1), processor.known.get("frame_stack", 1)


def set_goal_fn(buffer: Buffer, processor: Processor, name: str, goal: GoalFn | None = None) -> Buffer:
    """Return `buffer` with the reward function `goal` of the environment `name`, if it relabels goals.

    Raises:
      SettingsError: there is no `goal`, or `processor` changes rewards or observations, which `goal` does not see.
    """
    if buffer.with_goal_fn is None:
        return buffer
    for part, off in DISABLED.items():
        if processor.known.get(part, off) != off:
            raise SettingsError(
                f"buffer.hindsight goes by goals and rewards as the environment has them; leave processor.{part} at "
                f"{off}"
            )
    if "reward" in processor.changes:
        raise SettingsError(
            "buffer.hindsight computes rewards as the environment has them, which this processor changes; leave them "
            "as they are, and say so by the field changes of your Processor, as changes=('obs',)"
        )
    return buffer.with_goal_fn(goal, name)


def min_items(buffer: Buffer, num_envs: int) -> int:
    """Return the number of items that `buffer` needs before the first batch."""
    # The first sequence needs all of its steps, in whole vector steps.
    return buffer.batch_size if buffer.window is None else buffer.window.length * num_envs


def make_update_schedule(
    *,
    horizon: int,
    min_transitions: int,
    num_envs: int,
    opt_interval: int,
    updates: int,
    warmup: int,
    random_warmup: bool,
    iterations_per_send: int = 1,
) -> UpdateSchedule:
    """Return the schedule for the settings of `off_policy` and a processor of this `horizon`.

    The warm-up makes at least `min_transitions` transitions. An iteration consists of `iterations_per_send` of the
    shortest possible ones, whose steps actors send together.

    Raises:
      SettingsError: a count is too small, or counts do not divide (the message has the nearest that do).
    """
    check_count("num_envs", num_envs)
    check_count("opt_interval", opt_interval)
    check_count("updates", updates)
    check_count("warmup", warmup, least=0)
    check_ratio(num_envs, opt_interval)
    check_type("random_warmup", random_warmup, bool, "true or false")
    # Either several vector steps and one update, or one vector step and several updates.
    vector_steps = iterations_per_send * max(1, opt_interval // num_envs)
    # The first `horizon` vector steps count as warm-up, but push nothing; the rest is rounded up to whole iterations.
    missing = max(warmup - horizon * num_envs, min_transitions)
    return UpdateSchedule(
        num_envs=num_envs,
        vector_steps=vector_steps,
        updates=iterations_per_send * updates * max(1, num_envs // opt_interval),
        horizon=horizon,
        warmup_iterations=-(-missing // (vector_steps * num_envs)),
        random_warmup=random_warmup,
    )


def check_ratio(num_envs: int, opt_interval: int) -> None:
    """Raise `SettingsError`, naming the nearest settings, unless one of the two divides the other."""
    large, small = max(num_envs, opt_interval), min(num_envs, opt_interval)
    if large % small == 0:
        return
    # Multiples of `num_envs` above it, divisors below it.
    if opt_interval > num_envs:
        below = opt_interval // num_envs * num_envs
        fits = [below, below + num_envs]
    else:
        fits = [next(i for i in range(opt_interval, 0, -1) if num_envs % i == 0)]
        fits.append(next(i for i in range(opt_interval, num_envs + 1) if num_envs % i == 0))
    raise SettingsError(
        f"opt_interval {opt_interval} and num_envs {num_envs} do not divide one another; "
        f"the nearest opt_interval that does is {fits[0]} or {fits[1]}"
    )


def optimise(
    agent: Agent,
    buffer: Buffer,
    state: State,
    key: Key,
    pushes: Array,
    first_opt: Array,
    updates: int,
    apply: Callable[[Transition], Transition] | None = None,
) -> tuple[State, Metrics]:
    """Run `updates` optimisation steps from number `first_opt` on, each with a new batch.

    The buffer in `state` holds `pushes` blocks. The key is consumed. `apply` transforms the items of a batch.
    """
    update = partial(_update, agent, buffer, pushes, apply)
    return repeat(update, state, jax.random.split(key, updates), first_opt, updates)


def make_replay_transform(processor: Processor, state: PyTree) -> Callable[[Transition], Transition] | None:
    """Return the transform of replayed items by the statistics of `processor` in `state`; `None` if there is none.

    Replay holds raw items, so that all in a batch are scaled by the same, current statistics.
    """
    return processor.apply and partial(processor.apply, state)


def _update(
    agent: Agent,
    buffer: Buffer,
    pushes: Array,
    apply: Callable[[Transition], Transition] | None,
    state: State,
    key: Key,
    opt_step: Array,
) -> tuple[State, Metrics]:
    # `pushes` is constant here: all updates of an iteration sample after its push, and change priorities alone.
    sample_key, update_key = jax.random.split(key)
    batch = buffer.sample(state.buffer, sample_key, pushes, opt_step)
    if apply is not None:
        batch = batch._replace(items=apply(batch.items))
    new, health, metrics, priorities = guarded_update(agent, state.agent, state.health, batch, update_key, opt_step)
    check_priorities(agent, priorities, batch)
    # After a skipped update the priorities are -1, and the buffer keeps the old ones.
    reprioritised = buffer.reprioritise(state.buffer, batch.index, priorities)
    return state._replace(agent=new, health=health, buffer=reprioritised), {
        **return_bound_metrics(batch.items),
        **metrics,
    }

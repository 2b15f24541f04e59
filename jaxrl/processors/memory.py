"""Carry a recurrent agent's memory from step to step."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from jaxrl.errors import SettingsError
from jaxrl.processors.base import Processor, StatsFns
from jaxrl.trees import Array, PyTree, tree_repeat, tree_where
from jaxrl.types import RecurrentObs, Step, Transition


class MemoryState(NamedTuple):
    """State of the wrapped processor, and the agent's memory, leaves `[N, ...]`."""

    inner: PyTree
    memory: PyTree


def carry_memory(processor: Processor, memory: PyTree) -> Processor:
    """Add the agent's memory to the observations of `processor`.

    The agent returns its next memory in `extras["memory"]`, which becomes part of the successor's observation, also at
    the end of an episode. The next episode starts with `memory`, the initial one of one environment.

    Raises:
      SettingsError: `processor` makes transitions over several steps, whose intermediate memories are not stored.
    """
    if processor.horizon:
        raise SettingsError(
            "processor: an agent with a memory (agent.core, agent.noise_memory or agent.noise_min) learns from single "
            "steps; set processor.n_step to 1, or turn these off"
        )
    return processor._replace(
        init=lambda obs: MemoryState(processor.init(obs), tree_repeat(memory, jax.tree.leaves(obs)[0].shape[0])),
        process=partial(_process, processor, memory),
        observe=lambda state: RecurrentObs(processor.observe(state.inner), state.memory),
        stats=StatsFns(
            get=lambda state: processor.get_stats(state.inner),
            freeze=lambda stats: carry_memory(processor.freeze(stats), memory),
            merge=processor.merge_stats,
            get_shared=lambda state: processor.for_actors.get_stats(state.inner),
        ),
        replay_fns=None,  # `processor` is already the one for replay, if replay is used
        apply=processor.apply and partial(_apply, processor.apply),
    )


def _apply(apply: Callable[[PyTree, Transition], Transition], state: MemoryState, items: Transition) -> Transition:
    scaled = apply(state.inner, items._replace(obs=items.obs.obs, next_obs=items.next_obs.obs))
    return scaled._replace(
        obs=items.obs._replace(obs=scaled.obs), next_obs=items.next_obs._replace(obs=scaled.next_obs)
    )


def _process(processor: Processor, memory: PyTree, state: MemoryState, step: Step) -> tuple[MemoryState, Transition]:
    # The memory is stored with the observations; the extras would store it twice.
    extras = {name: value for name, value in step.extras.items() if name != "memory"}
    next_memory = step.extras["memory"]
    inner, transition = processor.process(state.inner, step._replace(extras=extras))
    done: Array = step.terminated | step.truncated
    with_memory = transition._replace(
        obs=RecurrentObs(transition.obs, state.memory), next_obs=RecurrentObs(transition.next_obs, next_memory)
    )
    # Only the next step starts afresh: the successor just stored belongs to the old episode, and so does its memory.
    return MemoryState(inner, tree_where(done, tree_repeat(memory, done.shape[0]), next_memory)), with_memory

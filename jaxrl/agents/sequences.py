"""Learning from sequences with a recurrent core: of rollouts, and of replay (R2D2).

Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX, section 2.3. The memory before each step is stored
with it. A sequence begins with the stored memory of its first step, and the steps of the burn-in bring that up to the
present parameters. Where an episode begins within a sequence, the memory begins anew.
"""

from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.fields import CoreConfig, SequenceConfig
from jaxrl.agents.returns import last_steps, n_step_return
from jaxrl.errors import SettingsError
from jaxrl.masks import for_policy
from jaxrl.nn import Network, memories_before, merge_axes
from jaxrl.trees import Array, PyTree
from jaxrl.types import Batch, RecurrentObs, SequenceSpec, Transition

Future = TypeVar("Future", bound=NamedTuple)
Sample = TypeVar("Sample", bound=NamedTuple)


class Memories(NamedTuple):
    """The memories of an actor and its critics; `()` if unused."""

    policy: PyTree
    critic: PyTree
    """Leaves `[K, ...]`, one for each critic."""


class Views(NamedTuple):
    """Inputs of a network for `R` steps: observations and next observations, with the memory at each."""

    now: PyTree
    then: PyTree


def initial_memories(config: SequenceConfig, critics: int) -> Memories | None:
    """Return the memories of an actor and its `critics` at the start of an episode, for one environment.

    Each network has its own core; `None` without cores.
    """
    memory = config.initial_memory()
    if memory is None:
        return None
    return Memories(memory, jax.tree.map(lambda x: np.broadcast_to(x, (critics, *x.shape)), memory))


def sequence_spec(config: SequenceConfig) -> SequenceSpec | None:
    """Return the sequences to be sampled; `None` without a core."""
    return None if config.core == "none" else SequenceSpec(config.burn_in + config.sequence, config.sequence_interval)


def check_core(config: CoreConfig, **makers: object) -> None:
    """Raise `SettingsError` for a core in a network that the user made, by one of the `makers` that is not `None`."""
    custom = [name for name, make in makers.items() if make is not None]
    if config.core != "none" and custom:
        raise SettingsError(
            f"agent.core is {config.core}, but a network of {custom[0]} has no memory; set agent.core to none"
        )


def rollout_sequences(sample: Sample, items: Transition) -> Sample:
    """Return `sample` of a rollout `[T, N]` as sequences `[N, T]`, with its fields `obs`, `memory` and `is_first` set.

    `items` are the steps of the rollout. Only the memories before the first step are kept, `[N, ...]`: a core computes
    all later ones again, with the present parameters.
    """
    rollout: Any = cast(Any, sample)._replace(obs=items.obs.obs, is_first=items.is_first)
    by_env: Any = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rollout)
    return by_env._replace(memory=jax.tree.map(lambda x: x[0], items.obs.memory))


def learnt_steps(tree: PyTree, burn_in: int) -> PyTree:
    """Return the steps of sequences `[B, L, ...]` that are learnt from, `[B * T, ...]`."""
    return jax.tree.map(lambda x: merge_axes(x[:, burn_in:]), tree)


def training_rows_of_sequences(batch: Batch, config: SequenceConfig) -> Batch:
    """Return the learnt steps of a batch of sequences, one sequence after the other, with the sequences' weights."""
    items = learnt_steps(batch.items, config.burn_in)
    return batch._replace(items=items, weight=jnp.repeat(batch.weight, config.sequence))


def observe_sequence(network: Network, variables: PyTree, items: Transition, burn_in: int) -> Views:
    """Return the inputs of `network` for the learnt steps of sequences `[B, L, ...]`, `R = B * T`.

    Gradients go back through the learnt steps, and end at the burn-in.
    """
    first = jax.tree.map(lambda x: x[:, 0], items.obs.memory)
    inputs = RecurrentObs(for_policy(items.obs.obs), first)
    memory, next_memory = memories_of(network, variables, inputs, items.is_first, burn_in)
    return Views(remembering(items.obs, memory, burn_in), remembering(items.next_obs, next_memory, burn_in))


def remembering(obs: RecurrentObs, memory: PyTree, burn_in: int) -> RecurrentObs:
    """Return the learnt steps of `obs` `[B, L, ...]` with other memories `[R, ...]`."""
    return RecurrentObs(learnt_steps(obs.obs, burn_in), memory)


def memories_of(
    network: Network, variables: PyTree, inputs: RecurrentObs, is_first: PyTree, burn_in: int
) -> tuple[PyTree, PyTree]:
    """Return the memories of `network` before and after the learnt steps of sequences, `[R, ...]` each.

    They follow from `inputs`, the observations `[B, L, ...]` and the memories before the first of them `[B, ...]`, and
    begin anew where `is_first` `[B, L]`. Gradients end at the burn-in.
    """
    # The burn-in only brings the stored memory up to the present parameters: nothing is learnt of it (R2D2, section 3).
    cut = lambda part: jax.tree.map(lambda x: x[:, part], (inputs.obs, is_first))
    (early, first_early), (late, first_late) = cut(slice(burn_in)), cut(slice(burn_in, None))
    first_memory = inputs.memory
    if burn_in:
        # With constant parameters nothing of the burn-in is differentiated; its stored memories are data.
        constant = jax.lax.stop_gradient(variables)
        burnt_in = _unroll_core(network, constant, RecurrentObs(early, first_memory), first_early)
        first_memory = jax.tree.map(lambda x: x[-1], burnt_in)
    next_memory = _unroll_core(network, variables, RecurrentObs(late, first_memory), first_late)
    memory = memories_before(first_memory, next_memory, first_late.T)
    # `[T, B, ...] -> [B * T, ...]`, the order of all other arrays.
    return jax.tree.map(lambda x: merge_axes(jnp.moveaxis(x, 0, 1)), (memory, next_memory))


def _unroll_core(network: Network, variables: PyTree, inputs: RecurrentObs, is_first: Array) -> PyTree:
    """Return the memories after each step of sequences, `[T, B, ...]`."""
    return cast(Any, network).apply(variables, inputs, is_first, method="apply_core")[0]


def sequence_targets(bootstrap: Future, items: Transition, config: SequenceConfig) -> Future:
    """Return targets over `n_step` steps of the sequences `items` `[B, L]`; `bootstrap` `[B * T]` are those over one.

    `reward` and `discount` accumulate over the steps; other fields are taken from the last.

    No target crosses an episode's end, whether it terminated or was truncated, nor a step that must not be learnt from;
    and none the sequence's end.
    """
    last = jax.vmap(last_steps)(items)[:, config.burn_in :]
    # The last step of a sequence has no later one in it, so its target bootstraps there.
    cut = last.at[:, -1].set(True)

    def over_steps(bootstrap: Any, last: Array) -> Any:
        target = n_step_return(bootstrap.reward, bootstrap.discount, last, config.n_step)
        at_last_step = jax.tree.map(lambda x: x[target.step], bootstrap)
        return at_last_step._replace(reward=target.reward, discount=target.discount)

    by_sequence = jax.tree.map(lambda x: x.reshape(*cut.shape, *x.shape[1:]), bootstrap)
    return jax.tree.map(merge_axes, jax.vmap(over_steps)(by_sequence, cut))


def sequence_priorities(error: Array, sequences: int, share: float) -> Array:
    """Return the priorities `[B]` of sequences with absolute errors `[B * T]` (section 2.3: `share` is `eta`)."""
    error = error.reshape(sequences, -1)
    return share * error.max(axis=1) + (1 - share) * error.mean(axis=1)

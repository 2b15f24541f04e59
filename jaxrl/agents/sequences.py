"""Learning from sequences of replay with a recurrent core, or with one for each of several networks (R2D2).

Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX, section 2.3. The memory before each step is stored
with it. A sequence begins with the stored memory of its first step, and the steps of the burn-in bring that up to the
present parameters. Where an episode begins within a sequence, the memory begins anew.
"""

from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.fields import SequenceConfig
from jaxrl.agents.returns import last_steps, steps_ahead
from jaxrl.errors import SettingsError
from jaxrl.masks import for_policy
from jaxrl.nn import Network, initial_memory, unroll
from jaxrl.trees import Array, PyTree
from jaxrl.types import Batch, RecurrentObs, SequenceSpec, Transition

Future = TypeVar("Future", bound=NamedTuple)


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
    memory = initial_memory(config.core, config.core_features)
    if memory is None:
        return None
    return Memories(memory, jax.tree.map(lambda x: np.broadcast_to(x, (critics, *x.shape)), memory))


def sequence_spec(config: SequenceConfig) -> SequenceSpec | None:
    """Return the sequences to be sampled; `None` without a core."""
    return None if config.core == "none" else SequenceSpec(config.burn_in + config.sequence, config.sequence_interval)


def check_core(config: SequenceConfig, **makers: object) -> None:
    """Raise `SettingsError` for a core in a network that the user made, by one of the `makers` that is not `None`."""
    custom = [name for name, make in makers.items() if make is not None]
    if config.core != "none" and custom:
        raise SettingsError(
            f"agent.core is {config.core}, but a network of {custom[0]} has no memory; set agent.core to none"
        )


def learnt_steps(tree: PyTree, burn_in: int) -> PyTree:
    """Return the steps of sequences `[B, L, ...]` that are learnt from, `[B * T, ...]`."""
    return jax.tree.map(lambda x: _flat(x[:, burn_in:]), tree)


def training_rows_of_sequences(batch: Batch, config: SequenceConfig) -> Batch:
    """Return the steps that are learnt from of a batch of sequences, one sequence after the other, with its weights."""
    items = learnt_steps(batch.items, config.burn_in)
    return batch._replace(items=items, weight=jnp.repeat(batch.weight, config.sequence))


def observe_sequence(network: Network, variables: PyTree, blank: PyTree, items: Transition, burn_in: int) -> Views:
    """Return what `network` sees of the learnt steps of sequences `[B, L, ...]`, `R = B * T`.

    Gradients go back through the learnt steps, and end at the burn-in.
    """
    first = jax.tree.map(lambda x: x[:, 0], items.obs.memory)
    seen = for_policy(items.obs.obs)
    before, after = memories_of(network, variables, blank, first, seen, items.is_first, burn_in)
    return Views(remembering(items.obs, before, burn_in), remembering(items.next_obs, after, burn_in))


def remembering(obs: RecurrentObs, memory: PyTree, burn_in: int) -> RecurrentObs:
    """Return the learnt steps of `obs` `[B, L, ...]` with other memories `[R, ...]`."""
    return RecurrentObs(learnt_steps(obs.obs, burn_in), memory)


def memories_of(
    network: Network, variables: PyTree, blank: PyTree, first: PyTree, seen: PyTree, is_first: PyTree, burn_in: int
) -> tuple[PyTree, PyTree]:
    """Return the memories of `network` before and after the learnt steps of sequences, `[R, ...]` each.

    They go on from those before the sequences, `first` `[B, ...]`, with what the network has `seen` `[B, L, ...]`, and
    anew from `blank` where `is_first` `[B, L]`. Gradients end at the burn-in.
    """
    # The burn-in only brings the stored memory up to the present parameters: nothing is learnt of it (R2D2, section 3).
    early, late = slice(burn_in), slice(burn_in, None)
    before, behind = (jax.tree.map(lambda x, part=part: x[:, part], (seen, is_first)) for part in (early, late))
    if burn_in:
        # With constant parameters nothing of the burn-in is differentiated; its stored memories are data.
        first, _ = _follow(network, jax.lax.stop_gradient(variables), blank, first, *before)
    _, made = _follow(network, variables, blank, first, *behind)
    # `[T, B, ...] -> [B * T, ...]`, the order of all other rows.
    flat: tuple[PyTree, PyTree] = jax.tree.map(lambda x: _flat(jnp.moveaxis(x, 0, 1)), made)
    return flat


def _follow(
    network: Network, variables: PyTree, blank: PyTree, memory: PyTree, seen: PyTree, is_first: Array
) -> tuple[PyTree, PyTree]:
    """Run the core over `seen` `[B, T]`; return the last memory, and those around each step, `[T, B, ...]`."""
    rows, steps = is_first.shape
    apply = partial(cast(Any, network).apply, variables)
    # The torso needs no order, so all steps pass it as one batch.
    hidden = apply(jax.tree.map(_flat, seen), method="apply_torso")

    def advance(memory: PyTree, hidden: Array) -> tuple[PyTree, PyTree]:
        after = apply(memory, hidden, method="step_core")
        # `unroll` has reset this memory where an episode begins, so it is the one that the step was taken with.
        return after, (memory, after)

    by_time = jnp.moveaxis(hidden.reshape(rows, steps, -1), 1, 0)
    return unroll(advance, blank, memory, by_time, is_first.T)


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def sequence_targets(after: Future, items: Transition, config: SequenceConfig) -> Future:
    """Let the targets of the learnt steps of `items` `[B, L]` run over `n_step` steps; `after` is of one, `[B * T]`.

    Of what is `after` a step, `reward` and `discount` are those of all the steps, and the rest that of the last.

    No target crosses an episode's end, whether it terminated or was truncated, nor a step that must not be learnt from;
    and none the sequence's end.
    """
    last = jax.vmap(last_steps)(items)[:, config.burn_in :]
    # The last step of a sequence has no later one in it, so its target bootstraps there.
    cut = last.at[:, -1].set(True)

    def one(after: Any, last: Array) -> Any:
        ahead = steps_ahead(after.reward, after.discount, last, config.n_step)
        later = jax.tree.map(lambda x: x[ahead.step], after)
        return later._replace(reward=ahead.reward, discount=ahead.discount)

    by_sequence = jax.tree.map(lambda x: x.reshape(*cut.shape, *x.shape[1:]), after)
    made: Future = jax.tree.map(_flat, jax.vmap(one)(by_sequence, cut))
    return made


def sequence_priorities(error: Array, sequences: int, share: float) -> Array:
    """Return the priorities `[B]` of sequences with absolute errors `[B * T]` (section 2.3: `share` is `eta`)."""
    error = error.reshape(sequences, -1)
    return share * error.max(axis=1) + (1 - share) * error.mean(axis=1)

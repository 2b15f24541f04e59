"""Learning from sequences of replay with a recurrent core (R2D2).

Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX, section 2.3. The memory before each step is stored
with it. A sequence begins with the stored memory of its first step, and the steps of the burn-in bring that up to the
present parameters. Where an episode begins within a sequence, the memory begins anew.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.fields import SequenceConfig
from jaxrl.agents.returns import steps_ahead
from jaxrl.agents.values import After
from jaxrl.errors import SettingsError
from jaxrl.masks import for_policy
from jaxrl.nn import Network, no_memory, unroll
from jaxrl.trees import Array, PyTree
from jaxrl.types import Remembered, Transition, Window


class Kept(NamedTuple):
    """What a recurrent agent keeps from step to step, and replay stores with each: its memory before the step."""

    core: PyTree
    """The core's memory, `[...]` for one environment."""
    begins: Array
    """Bool: an episode begins with this step. In a sequence it tells where the one before it ended, however it did."""


class Views(NamedTuple):
    """What a network sees of `R` steps: their observations and the successors, each with its own memory of them."""

    now: PyTree
    then: PyTree


def kept_at_first(config: SequenceConfig) -> Kept | None:
    """Return what is kept at the start of an episode, for one environment; `None` without a core."""
    memory = no_memory(config.core, config.core_features)
    return None if memory is None else Kept(memory, cast(Any, np.ones((), bool)))


def window_of(config: SequenceConfig) -> Window | None:
    """Return the sequences to be sampled; `None` without a core."""
    return None if config.core == "none" else Window(config.burn_in + config.sequence, config.sequence_interval)


def check_core(config: SequenceConfig, own_network: bool) -> None:
    """Raise `SettingsError` for a core in a network that the user made."""
    if config.core != "none" and own_network:
        raise SettingsError(
            f"agent.core is {config.core}, but a network of make_network has no memory; set agent.core to none"
        )


def core_of(obs: PyTree) -> PyTree:
    """Return what a recurrent network is given of what an agent sees: the memory of its core alone."""
    return Remembered(obs.obs, obs.memory.core)


def kept_after(memory: PyTree) -> Kept:
    """Return what is kept after a step, of the core's `memory` `[N, ...]`."""
    return Kept(memory, jnp.zeros(jax.tree.leaves(memory)[0].shape[0], bool))


def learnt_steps(items: Transition, burn_in: int) -> Transition:
    """Return the steps of sequences `[B, L, ...]` that are learnt from, `[B * T, ...]`."""
    flat: Transition = jax.tree.map(_flat, jax.tree.map(lambda x: x[:, burn_in:], items))
    return flat


def views_of(network: Network, variables: PyTree, blank: Kept, items: Transition, burn_in: int) -> Views:
    """Return what `network` sees of the learnt steps of sequences `[B, L, ...]`, `R = B * T`.

    Gradients go back through the learnt steps, and end at the burn-in.
    """
    memory = jax.tree.map(lambda x: x[:, 0], items.obs.memory.core)
    if burn_in:
        before = jax.tree.map(lambda x: x[:, :burn_in], items.obs)
        memory, _ = _follow(network, jax.lax.stop_gradient(variables), blank, memory, before)
    obs, next_obs = jax.tree.map(lambda x: x[:, burn_in:], (items.obs, items.next_obs))
    _, (at, after) = _follow(network, variables, blank, memory, obs)
    seen = lambda obs, core: Remembered(jax.tree.map(_flat, obs.obs), Kept(core, _flat(obs.memory.begins)))
    flat = lambda x: _flat(jnp.moveaxis(x, 0, 1))
    return Views(seen(obs, jax.tree.map(flat, at)), seen(next_obs, jax.tree.map(flat, after)))


def _follow(network: Network, variables: PyTree, blank: Kept, memory: PyTree, obs: Remembered) -> tuple[PyTree, PyTree]:
    """Run the core over `obs` `[B, T]`; return its last memory, and those before and after each step, `[T, B, ...]`."""
    rows, steps = obs.memory.begins.shape
    apply = partial(cast(Any, network).apply, variables)
    hidden = apply(jax.tree.map(_flat, for_policy(obs.obs)), method="see")

    def advance(memory: PyTree, hidden: Array) -> tuple[PyTree, PyTree]:
        after = apply(memory, hidden, method="advance")
        return after, (memory, after)

    by_time = jnp.moveaxis(hidden.reshape(rows, steps, -1), 1, 0)
    return unroll(advance, blank.core, memory, by_time, obs.memory.begins.T)


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def several_steps(after: After, items: Transition, config: SequenceConfig) -> After:
    """Let the targets of the learnt steps of `items` `[B, L]` run over `n_step` steps; `after` is of one, `[B * T]`.

    No target crosses an episode's end, whether it terminated or was truncated, nor a step that must not be learnt from;
    and none the sequence's end.
    """
    begins, worth = (x[:, config.burn_in :] for x in (items.obs.memory.begins, jnp.asarray(items.weight) > 0))
    cut = jnp.concatenate([begins[:, 1:] | ~worth[:, 1:], jnp.ones_like(worth[:, :1])], axis=1)

    def one(after: After, last: Array) -> After:
        ahead = steps_ahead(after.reward, after.discount, last, config.n_step)
        later = jax.tree.map(lambda x: x[ahead.step], (after.out, after.policy, after.penalty))
        return After(ahead.reward, ahead.discount, *later)

    by_sequence = jax.tree.map(lambda x: x.reshape(*cut.shape, *x.shape[1:]), after)
    made: After = jax.tree.map(_flat, jax.vmap(one)(by_sequence, cut))
    return made


def priorities_of(error: Array, sequences: int, share: float) -> Array:
    """Return the priorities `[B]` of sequences with absolute errors `[B * T]` (section 2.3: `share` is `eta`)."""
    error = error.reshape(sequences, -1)
    return share * error.max(axis=1) + (1 - share) * error.mean(axis=1)

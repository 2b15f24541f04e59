"""The rollout of an on-policy agent whose steps come one at a time: kept as they come, learnt from once it is whole."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.metrics import Metrics
from jaxrl.strategies.base import fold
from jaxrl.strategies.on_policy import Passes, last_steps, learn_rollout
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Rollout


class Ends(NamedTuple):
    """Which steps end an episode, bool `[T, N]`, or `[N]` for one step."""

    terminated: Array
    truncated: Array


class Stored(NamedTuple):
    """The steps of a rollout so far; those that are not taken yet are of the rollout before."""

    items: PyTree
    """Transitions, leaves `[T, N, ...]`."""
    ends: Ends


def empty(items: PyTree, rollout: int) -> Stored:
    """Return a store for `rollout` steps like `items`, the shapes of one, leaves `[N, ...]`."""
    zeros = jax.tree.map(lambda x: jnp.zeros((rollout, *x.shape), x.dtype), items)
    no = jnp.zeros((rollout, jax.tree.leaves(items)[0].shape[0]), bool)
    return Stored(zeros, Ends(no, no))


def store(stored: Stored, items: PyTree, ends: Ends, steps: Array) -> Stored:
    """Write a step, leaves `[N, ...]`, after `steps` earlier ones."""
    place = _place(stored, steps)
    write = lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, jnp.asarray(row, rows.dtype), place, 0)
    written: Stored = jax.tree.map(write, stored, Stored(items, ends))
    return written


def cut(truncated: Array, ended: Array, steps: Array) -> Array:
    """Return `Ends.truncated` once episodes are known to have ended, where `ended`, with the last of the `steps`."""
    place = (jnp.asarray(steps, jnp.uint32) - 1) % truncated.shape[0]
    return truncated.at[place].set(truncated[place] | ended)


def learn_stored(passes: Passes, learner: Any, key: Key, t: Array) -> tuple[Any, Metrics]:
    """Learn from the rollout of iteration `t`, which is whole; `learner` has the fields `agent`, `buffer`, `health`."""
    stored: Stored = learner.buffer
    learn_key = jax.random.split(fold(key, t))[1]
    rollout = Rollout(stored.items, last_steps(stored.items, stored.ends))
    return learn_rollout(passes, learner, rollout, learn_key, jnp.asarray(t, jnp.uint32) * passes.updates)


def _place(stored: Stored, steps: Array) -> Array:
    return (jnp.asarray(steps, jnp.uint32) % stored.ends.terminated.shape[0]).astype(jnp.int32)

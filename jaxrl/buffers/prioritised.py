"""A ring of the newest items, sampled in proportion to their priorities.

Prioritised experience replay (Schaul et al. 2016, https://arxiv.org/abs/1511.05952, section 3).
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl import shards
from jaxrl.buffers.base import Buffer
from jaxrl.buffers.sequences import SequenceLayout, completed_sequences, read_items, sequence_layout
from jaxrl.buffers.uniform import Ring, block_start, uniform
from jaxrl.errors import SettingsError, check_between, check_count
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, SequenceSpec, Transition

FANOUT = 8
"""Children per node. More of them mean fewer levels, each a kernel or two, but longer sums."""
MIN_PRIORITY, MAX_PRIORITY = 1e-30, 1e28
"""Bounds of a priority to the power of `alpha`: sums of 2^31 such numbers neither underflow nor overflow."""

Tree = tuple[Array, ...]
"""Levels, bottom up: a number per item, then the sum or minimum of each group of `FANOUT`, up to a single group."""


class PrioritisedState(NamedTuple):
    """Items, and trees of their priorities to the power of `alpha`; 0 for rows not written yet."""

    rows: Ring
    sums: Tree
    least: Tree
    """Minima, infinity for rows not written yet or pushed with weight 0; empty unless weights are normalised over all
    items."""
    highest: Array
    """Float32 scalar, the highest priority so far, assigned to new items."""

    @property
    def items(self) -> PyTree:
        """All items, leaves `[R, ...]`."""
        return self.rows.items


class _Settings(NamedTuple):
    ring: Buffer
    alpha: float
    beta: float
    beta_steps: int
    over_all: bool
    epsilon: float
    sequences: SequenceLayout | None = None
    """Layout of sequences in the ring; `None`: single items are sampled."""


def prioritised(
    capacity: int = 50_000,
    batch_size: int = 128,
    *,
    alpha: float = 0.6,
    beta: float = 0.4,
    beta_steps: int = 100_000,
    normalise: str = "batch",
    epsilon: float = 1e-6,
    compact: bool = False,
    ends: float = 0.125,
    frames: int = 1,
    memory: str = "device",
) -> Buffer:
    """Keep the newest `capacity` items and sample batches of `batch_size` by priority, with replacement.

    An item with `p = (priority + epsilon)^alpha` is drawn with a probability proportional to `p`, exact up to float32
    rounding of sums of `FANOUT` numbers. Its weight is `(min p / p)^beta`, the importance weight divided by the largest
    one. New items get the highest priority so far. Push, sample and reprioritise take time proportional to the
    logarithm of the capacity to base `FANOUT`.

    Args:
      capacity: number of items, rounded up to whole blocks as in `uniform`.
      batch_size: items per batch.
      alpha: exponent of priorities; 0: uniform sampling.
      beta: exponent of importance weights at the first optimisation step; 1 corrects the bias of sampling fully.
      beta_steps: optimisation steps over which `beta` rises linearly to 1; 0: constant.
      normalise: take the minimum of `p` over the `batch`, without items of weight 0, which are not learnt from; or over
        `all` items, without those pushed with weight 0. Over all sequences, these count.
      epsilon: constant added to every priority.
      compact: store observations once, as in `uniform`.
      ends: room for the ends of episodes, as a share of the capacity.
      frames: frames per stacked observation, as in `uniform`.
      memory: `device` or `host`, as in `uniform`; priorities are on the device.

    Raises:
      SettingsError: a value is out of range.
    """
    ring = uniform(capacity, batch_size, compact=compact, ends=ends, frames=frames, memory=memory)
    check_between("buffer.alpha", alpha, 0.0, 1e3)
    check_between("buffer.beta", beta, 0.0, 1.0)
    check_between("buffer.epsilon", epsilon, 0.0, 1e30)
    check_count("buffer.beta_steps", beta_steps, 0, 2**31 - 1)
    if normalise not in ("batch", "all"):
        raise SettingsError(f"buffer.normalise is {normalise!r}; expected batch or all")
    if alpha > 0 and epsilon == 0:
        raise SettingsError("buffer.epsilon is 0, so items of priority 0 would never be sampled again; raise it")
    return _make(_Settings(ring, alpha, beta, beta_steps, normalise == "all", epsilon))


def _make(settings: _Settings) -> Buffer:
    buffer = _with_priority_fns(settings, settings.ring)._replace(
        settings={
            **(settings.ring.settings or {}),
            "prioritised": True,
            "alpha": settings.alpha,
            "beta": settings.beta,
            "beta_steps": settings.beta_steps,
            "normalise": "all" if settings.over_all else "batch",
            "epsilon": settings.epsilon,
        },
        shard=settings.ring.shard and partial(_shard, settings),
    )
    return buffer._replace(as_sequence_buffer=partial(_as_sequence_buffer, settings, buffer))


def _shard(settings: _Settings, shards: int) -> Buffer:
    assert settings.ring.shard is not None  # true of what `uniform` returns
    return _make(settings._replace(ring=settings.ring.shard(shards)))


def _with_priority_fns(settings: _Settings, buffer: Buffer) -> Buffer:
    """Return `buffer` with functions that use priorities."""
    return buffer._replace(
        init=partial(_init, settings),
        push=partial(_push, settings),
        sample=partial(_sample, settings),
        reprioritise=partial(_reprioritise, settings),
    )


def _as_sequence_buffer(settings: _Settings, buffer: Buffer, window: SequenceSpec, stride: int) -> Buffer:
    """Return the buffer of sequences; a first row has the priority of its sequence, or 0 until that is complete."""
    assert settings.ring.as_sequence_buffer is not None
    ring = settings.ring.as_sequence_buffer(window, stride)
    sequences = sequence_layout(window, stride, (buffer.settings or {})["capacity"])
    return _with_priority_fns(settings._replace(ring=ring, sequences=sequences), buffer)._replace(
        as_sequence_buffer=None, window=window
    )


def _init(settings: _Settings, example: PyTree, rows: int, lag: int = 0, stride: int = 0) -> PrioritisedState:
    ring = settings.ring.init(example, rows, lag, stride)
    least = _init_tree(len(ring), math.inf) if settings.over_all else ()
    return PrioritisedState(ring, _init_tree(len(ring), 0.0), least, jnp.float32(1.0))


def _push(settings: _Settings, state: PrioritisedState, items: PyTree, pushes: Array) -> PrioritisedState:
    ring = settings.ring.push(state.rows, items, pushes)
    rows = jax.tree.leaves(items)[0].shape[0]
    start = block_start(len(ring), rows, pushes)
    # Already to the power of `alpha`, like all numbers in the trees.
    new = jnp.broadcast_to(state.highest, (rows,))
    # Groups that the block touches; a block not aligned to groups touches up to two more than it fills.
    groups = jnp.minimum(start // FANOUT + jnp.arange(rows // FANOUT + 2, dtype=jnp.int32), (len(ring) - 1) // FANOUT)
    put = lambda leaves, new: jax.lax.dynamic_update_slice_in_dim(leaves, new, start, axis=0)
    if settings.sequences is not None:
        # No sequence that starts in the new rows is complete yet, and those that started in the overwritten rows are
        # gone: all get `fill`. `index` are the starts whose sequences this block may complete.
        index, whole = completed_sequences(settings.sequences, len(ring), rows, pushes)
        groups = jnp.concatenate([groups, index // FANOUT])

    def write(tree: Tree, combine: Callable[..., Array], fill: float, new: Array) -> Tree:
        if settings.sequences is None:
            leaves = put(tree[0], new)
        else:
            leaves = put(tree[0], jnp.full(rows, fill, jnp.float32)).at[index].set(jnp.where(whole, new, fill))
        return _recompute((leaves, *tree[1:]), groups, combine)

    # Sequences count even if no step of theirs does: their steps arrive in several blocks.
    counted = new if settings.sequences is not None else jnp.where(_counts(items, new.shape), new, math.inf)
    sums = write(state.sums, jnp.sum, 0.0, new)
    least = state.least and write(state.least, jnp.min, math.inf, counted)
    return state._replace(rows=ring, sums=sums, least=least)


def _sample(settings: _Settings, state: PrioritisedState, key: Key, pushes: Array, opt_step: Array) -> Batch:
    # Descend from the top, with a fresh random number for each level. A single number, reduced by the sums passed over,
    # would be rounded at every level and could end at a neighbouring item, even one of priority 0.
    levels = jax.random.uniform(key, (len(state.sums), settings.ring.batch_size), jnp.float32)
    index = jnp.zeros(levels.shape[1:], jnp.int32)
    for numbers, u in zip(reversed(state.sums), levels, strict=True):
        children = numbers.reshape(-1, FANOUT).at[index].get(mode="promise_in_bounds")
        index = index * FANOUT + _choose_child(children, u)
    p = state.sums[0].at[index].get(mode="promise_in_bounds")
    items = read_items(state.rows, settings.sequences, index)
    # Importance weights are `1 / (R P)`. Divided by the largest one, they lose the number of items and the sum of
    # priorities, and `min p / p` remains.
    least = state.least[-1].min() if settings.over_all else jnp.where(_counts(items, p.shape), p, math.inf).min()
    if shards.is_sharded():  # each shard samples its own items, so probabilities are relative to the shard's sum
        total = state.sums[-1].sum()
        p, least = p / total, shards.pmin(least / total)
    beta = settings.beta
    if settings.beta_steps:
        beta = optax.linear_schedule(beta, 1.0, settings.beta_steps)(opt_step)
    # Items that do not count may have a smaller `p`, and it may be that none counts: their weight must be finite.
    return Batch(items, index, jnp.minimum(least / p, 1.0) ** beta)


def _counts(items: PyTree, shape: tuple[int, ...]) -> Array:
    """Return which of the items, or sequences, are learnt from: those with a step whose own weight is above 0."""
    if not isinstance(items, Transition):
        return jnp.ones(shape, bool)
    return jnp.asarray(items.weight).reshape(*shape, -1).max(-1) > 0


def _choose_child(numbers: Array, u: Array) -> Array:
    """Choose an entry of each row of `[B, FANOUT]` with a probability proportional to it; never one that is 0."""
    # Running sums added one by one never decrease, and stay bitwise the same at an entry of 0, which is thus never
    # chosen. `cumsum` guarantees neither, and takes ten times as long.
    sums = list(itertools.accumulate(numbers[:, i] for i in range(FANOUT)))
    # Below the last sum: `u` is at most 1 - 2^-23, and a float32 times that is a smaller float32.
    reached = u * sums[-1]
    return sum(((reached >= s).astype(jnp.int32) for s in sums[:-1]), jnp.zeros(u.shape, jnp.int32))


def _reprioritise(settings: _Settings, state: PrioritisedState, index: Array, priority: Array) -> PrioritisedState:
    known = priority >= 0
    powers = jnp.clip((priority + settings.epsilon) ** settings.alpha, MIN_PRIORITY, MAX_PRIORITY)
    # The power of a negative number is NaN, and is not selected.
    new = jnp.where(known, powers, state.sums[0].at[index].get(mode="promise_in_bounds"))

    def write(tree: Tree, combine: Callable[..., Array], new: Array) -> Tree:
        # If the batch holds an item more than once, its highest priority counts: unlike `set`, `max` is deterministic.
        # The 0 written first is computed from `new`, so that it is ordered after the reads of the leaves that `new`
        # needs. Otherwise XLA would copy all leaves to let this write go ahead.
        leaves = tree[0].at[index].set(jnp.minimum(new, 0.0)).at[index].max(new)
        return _recompute((leaves, *tree[1:]), index // FANOUT, combine)

    least = state.least
    if least:
        counts = jnp.isfinite(least[0].at[index].get(mode="promise_in_bounds"))
        least = write(least, jnp.min, jnp.where(counts, new, math.inf))
    return state._replace(
        sums=write(state.sums, jnp.sum, new),
        least=least,
        highest=jnp.maximum(state.highest, new.max()),
    )


# --- trees ------------------------------------------------------------------------------------------------------


def _level_sizes(items: int) -> tuple[int, ...]:
    """Return the size of each level for `items` items, bottom up, each a multiple of `FANOUT`."""
    sizes = [-(-items // FANOUT) * FANOUT]
    while sizes[-1] > FANOUT:
        # An entry for each group of the level below, padded to whole groups again.
        sizes.append(-(-sizes[-1] // FANOUT**2) * FANOUT)
    return tuple(sizes)


def _init_tree(items: int, fill: float) -> Tree:
    return tuple(jnp.full(size, fill, jnp.float32) for size in _level_sizes(items))


def _recompute(tree: Tree, groups: Array, combine: Callable[..., Array]) -> Tree:
    """Recompute `combine` over `groups` of items, then over the groups that contain these, up to the top.

    A group is recomputed from all its numbers, not by adding differences, so that rounding errors do not accumulate. A
    group listed twice is computed twice, with the same result.
    """
    levels = [tree[0]]
    for above in tree[1:]:
        children = levels[-1].reshape(-1, FANOUT).at[groups].get(mode="promise_in_bounds")
        levels.append(above.at[groups].set(combine(children, axis=-1)))
        groups = groups // FANOUT
    return tuple(levels)

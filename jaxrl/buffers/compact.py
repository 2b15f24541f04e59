"""A ring of transitions that stores each observation once.

The successor of a transition is usually the observation of a later one, so only successors at ends of episodes are
stored separately.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.buffers.frames import Frames, empty_frames
from jaxrl.errors import SettingsError
from jaxrl.trees import Array, PyTree, tree_where
from jaxrl.types import Transition
from jaxrl.xla import packing
from jaxrl.xla.packing import Layout, Rows


class Tail(NamedTuple):
    """A row without its observations."""

    link: PyTree
    """Int32, location of the successor of the row `lag` before this one: 0 if it is this row's observation (the usual
    case), otherwise 1 plus the index of an end. Stored with this row, because only its observation decides it."""
    item: Transition
    """Without `obs` and `next_obs`."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tails", "seen", "waiting", "owner", "newest", "next_end"],
    meta_fields=["lag", "layout"],
)
@dataclass(frozen=True)
class CompactRows:
    """A ring of `R` transitions, in which the successors of the newest `lag` rows are pending.

    The successor of a row is the observation of the row `lag` later, unless the episode ended in between. The two are
    compared bit by bit; if they differ, the successor is stored as an end. The newest `M` ends are kept.
    """

    tails: Rows
    """`R` tails. They must be the first field: the length of a buffer is read off its first leaf."""
    seen: Rows | Frames
    """`R + lag + M` observations: of the rows, pending successors of the newest `lag` rows, and ends. With frames, the
    last two parts are in `seen.apart`."""
    waiting: dict[str, Array]
    """A second copy of the pending successors, `[lag, W]`. Reading them from `seen` before it is written would make XLA
    copy all of `seen`."""
    owner: Array
    """`[M]` int32, the row whose link refers to each end; links of other rows to it are stale."""
    newest: Array
    """Int32 scalar, index of the last row written."""
    next_end: Array
    """Int32 scalar, index of the end to write next."""
    lag: int
    layout: Layout
    """Layout of complete transitions."""

    @property
    def block(self) -> int:
        """Rows per write."""
        return self.tails.block

    @property
    def items(self) -> PyTree:
        """All items, leaves `[R, ...]`."""
        return self.read(jnp.arange(len(self), dtype=jnp.int32))

    def __len__(self) -> int:
        return len(self.tails)

    def write(self, items: Transition, start: Array) -> "CompactRows":
        """Write a block at row `start`, directly after the previous block.

        A successor is decided `lag` rows later, when the observation that it should equal arrives. So a write of `rows`
        rows decides as many older successors: pending ones followed by the block's own are `lag + rows` successors in
        the order of their rows. The first `rows` are compared with the block's observations; equal ones are dropped,
        the others become ends. The last `lag` are pending until the next write.
        """
        layout = self._whole.layout
        obs, next_obs = packing.pack(layout, items.obs), packing.pack(layout, items.next_obs)
        rows = next(iter(obs.values())).shape[0]
        successors = {w: jnp.concatenate([x, next_obs[w]]) for w, x in self.waiting.items()}
        decided, waiting = ({w: x[part] for w, x in successors.items()} for part in (slice(rows), slice(rows, None)))
        # `decided` and `obs` are aligned: their entries `i` should be equal.
        link, place = self._place_ends(decided, obs)
        tails = self.tails.write(Tail(link, _drop_obs(items)), start)
        # One array holds `[rows | pending | ends]`, so that each part is written in place and a sample is a single
        # gather. `first` is the start of the pending part. With frames the rows are stored elsewhere.
        whole, first = self._whole, len(self._whole) - self.lag - self.owner.shape[0]
        if not isinstance(self.seen, Frames):
            whole = whole.write_words(obs, start)
        # Rows without an end point out of bounds and are dropped.
        whole = whole.write_words(waiting, jnp.int32(first)).scatter_words(decided, first + self.lag + place)
        if isinstance(self.seen, Frames):
            seen: Rows | Frames = replace(self.seen.write(items.obs, start), apart=whole)
        else:
            seen = whole
        return replace(
            self,
            tails=tails,
            seen=seen,
            waiting=waiting,
            # Owned by the row that holds the link, which is that of the observation and not of the transition.
            owner=self.owner.at[place].set(start + jnp.arange(rows, dtype=jnp.int32), mode="drop", unique_indices=True),
            newest=start + rows - 1,
            next_end=(self.next_end + jnp.sum(link != 0, dtype=jnp.int32)) % self.owner.shape[0],
        )

    @property
    def _whole(self) -> Rows:
        """Observations that are stored in full; the last parts are pending successors and ends."""
        return self.seen.apart if isinstance(self.seen, Frames) else self.seen

    def _observations(self, index: Array, place: Array) -> tuple[PyTree, PyTree, Array]:
        """Return observations at rows `index` `[B]` and at `place` `[B]` of all `R + lag + M`, and whether both are
        known."""
        size = len(index)
        if not isinstance(self.seen, Frames):
            both = self.seen.read(jnp.concatenate([index, place]))  # one gather instead of two
            return *_split_rows(both, size), jnp.ones(place.shape, bool)
        rows, apart = len(self), place >= len(self)
        # Row 0 stands in for observations stored in full, to keep the gather in bounds; the last line selects.
        both, known = self.seen.read(jnp.concatenate([index, jnp.where(apart, 0, place)]), self.newest)
        obs, stacks = _split_rows(both, size)
        known, known_after = _split_rows(known, size)
        whole = self.seen.apart.read(jnp.where(apart, place - rows, 0))
        return obs, tree_where(apart, whole, stacks), known & (known_after | apart)

    def _links(self, index: Array) -> Array:
        # `link` is the first leaf of a tail, so it is the first word of its row; no need to unpack the rest.
        return self.tails.words["uint32"].at[index, 0].get(mode="promise_in_bounds").astype(jnp.int32)

    def _place_ends(self, successors: dict[str, Array], obs: dict[str, Array]) -> tuple[Array, Array]:
        """Return the links of a block, and the index of the end for each successor; `M` or more: it needs none."""
        size = self.owner.shape[0]
        # As words, and so bit by bit: NaN equals itself, and 0 differs from -0.
        ended = jnp.any(jnp.stack([(successors[w] != obs[w]).any(axis=1) for w in obs]), axis=0)
        count = jnp.cumsum(ended, dtype=jnp.int32)
        place = (self.next_end + count - 1) % size
        # With more ends than room, only the last `M` are written. All indices differ, also those out of bounds, which
        # `unique_indices` requires.
        kept = ended & (count > count[-1] - size)
        beyond = size + jnp.arange(len(ended), dtype=jnp.int32)
        return jnp.where(ended, place + 1, 0), jnp.where(kept, place, beyond)

    def _successors(self, index: Array) -> tuple[Array, Array, Array, Array]:
        """Return for rows their ages, 0 for the newest; the rows of their successors; the links stored there; and
        whether the ends that they link to have been overwritten."""
        age, successor = (self.newest - index) % len(self), (index + self.lag) % len(self)
        link = self._links(successor)
        # Rows are reused, so an end is valid only if it still belongs to the row that links to it.
        owner = self.owner.at[jnp.maximum(link - 1, 0)].get(mode="promise_in_bounds")
        return age, successor, link, (age >= self.lag) & (link > 0) & (owner != successor)

    def is_lost(self, index: Array) -> Array:
        """Return whether the ends that the rows `index` `[B]` link to have been overwritten."""
        return self._successors(index)[3]

    def read(self, index: Array) -> Transition:
        """Return the items at rows `index` `[B]`.

        An item whose end has been overwritten has its own observation as successor, and weight 0 unless its discount is
        0, in which case the successor does not matter.
        """
        rows = len(self)
        age, successor, link, lost = self._successors(index)
        pending, ended = age < self.lag, link > 0
        # In order of precedence: pending, lost (the item's own observation stands in), an end, the observation `lag`
        # rows later.
        place = jnp.where(ended, rows + self.lag + link - 1, successor)
        place = jnp.where(pending, rows + self.lag - 1 - age, jnp.where(lost, index, place))
        obs, next_obs, known = self._observations(index, place)
        item = self.tails.read(index).item
        unusable = (lost & (item.discount != 0)) | ~known
        weight = jnp.where(unusable, jnp.zeros_like(item.weight), item.weight)
        return packing.as_read(self.layout, item._replace(obs=obs, next_obs=next_obs, weight=weight))


def _split_rows(both: PyTree, size: int) -> tuple[PyTree, PyTree]:
    """Split the leaves after the first `size` rows."""
    return jax.tree.map(lambda x: x[:size], both), jax.tree.map(lambda x: x[size:], both)


def empty_compact(
    example: PyTree,
    rows: int,
    lag: int,
    ends: float,
    frames: int = 1,
    block: int = 1,
    stride: int = 0,
    on_host: bool = False,
) -> CompactRows:
    """Return a ring of `rows` transitions, all zeros, with room for `ends * rows` ends; observations may be `on_host`.

    With `frames` above 1, observations are stacks and are stored frame by frame. `stride` is the distance in rows from
    one step of an environment to its next; `block` is the number of rows per write.

    Raises:
      SettingsError: `example` is no `Transition`, its `obs` and `next_obs` differ in layout, or `lag` is not below
        `rows`.
    """
    if not isinstance(example, Transition):
        raise SettingsError(f"buffer.compact: items are {type(example).__name__}; expected Transition")
    obs = packing.layout_of(example.obs)
    if packing.layout_of(example.next_obs) != obs or not obs.fields:
        raise SettingsError(
            "buffer.compact: next_obs and obs of the items differ in layout; set buffer.compact to False"
        )
    if not 0 < lag < rows:
        after, held = (x * shards.num_shards() for x in (lag, rows))
        raise SettingsError(
            f"buffer.compact: a successor lies {after} items after its transition, but buffer.capacity holds {held}; "
            f"raise it above {after}, or set buffer.compact to False"
        )
    size = max(1, math.ceil(ends * rows))
    if 3 * rows + size >= 2**31:  # room also for a block of indices past the end, where dropped writes go
        raise SettingsError(
            f"buffer.capacity is {rows}; a compact buffer must be below 2^29, because indices are int32"
        )
    zero = jnp.int32(0)
    tails = packing.empty(packing.layout_of(Tail(jax.ShapeDtypeStruct((), jnp.int32), _drop_obs(example))), rows, block)
    seen: Rows | Frames = packing.empty(obs, rows + lag + size, on_host=on_host and frames == 1)
    if frames > 1:
        seen = empty_frames(example.obs, frames, rows, block, stride, lag + size, on_host)
    waiting = packing.empty(obs, lag).words
    return CompactRows(tails, seen, waiting, jnp.zeros(size, jnp.int32), zero, zero, lag, packing.layout_of(example))


def _drop_obs(items: Transition) -> Transition:
    return items._replace(obs=(), next_obs=())

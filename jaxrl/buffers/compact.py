"""Transitions that store each observation once: most successors are the observation of a later transition."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.buffers.frames import Frames, empty_frames
from jaxrl.errors import SettingsError
from jaxrl.trees import Array, PyTree, tree_where
from jaxrl.types import Transition
from jaxrl.xla.packing import Layout, Rows, as_read, empty, layout_of, pack


class Tail(NamedTuple):
    """The contents of a row apart from its observation."""

    link: PyTree
    """Int32, where to find the successor of the row `lag` before this one: 0 if it is this row's observation, as it is
    for most, otherwise 1 plus the index of an end. It is stored here because it is known only once this row is
    written."""
    item: Transition
    """Without `obs` and `next_obs`."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tails", "seen", "waiting", "owner", "newest", "next_end"],
    meta_fields=["lag", "layout"],
)
@dataclass(frozen=True)
class CompactRows:
    """A ring of `R` transitions. The newest wait for their successors to be written as observations.

    The successor of a row is the observation of the row `lag` later, unless the episode ended in between. Comparing
    their bits tells which. If they differ, the successor is stored as an end; the newest `M` ends are kept.
    """

    tails: Rows
    """`R` tails. They must be the first field: a buffer's first leaf determines how many items it holds."""
    seen: Rows | Frames
    """`R + lag + M` observations: those of the rows, the successors of the newest `lag` rows, and the ends. If rows are
    stored frame by frame, the latter two are stored separately."""
    waiting: dict[str, Array]
    """A second copy of the successors of the newest rows, `[lag, W]`. If they were read from `seen` before it is
    written, XLA would copy all of `seen`."""
    owner: Array
    """`[M]` int32, the row whose link refers to each end; a link from any other row is stale."""
    newest: Array
    """Int32 scalar, index of the row written last."""
    next_end: Array
    """Int32 scalar, index of the end to write next."""
    lag: int
    layout: Layout
    """Layout of whole transitions."""

    @property
    def block(self) -> int:
        """How many rows are written at once."""
        return self.tails.block

    @property
    def items(self) -> PyTree:
        """The items as they were given, leaves `[R, ...]`."""
        return self.read(jnp.arange(len(self), dtype=jnp.int32))

    def __len__(self) -> int:
        return len(self.tails)

    def write(self, items: Transition, start: Array) -> "CompactRows":
        """Write a block from row `start` on, directly after the block written last.

        Whether a row's successor needs room of its own is known `lag` rows later, when the observation arrives that it
        should equal. So each write settles as many older successors as it brings rows. Those still waiting, followed by
        the block's own, are `lag + rows` successors in the order of their rows. The first `rows` of them belong to the
        rows `lag` before the block's, and are compared with its observations: equal ones are dropped, others become
        ends. The last `lag` wait for the next block.
        """
        layout = self._whole.layout
        now, then = pack(layout, items.obs), pack(layout, items.next_obs)
        rows = next(iter(now.values())).shape[0]
        waited = {w: jnp.concatenate([x, then[w]]) for w, x in self.waiting.items()}
        settled, waiting = ({w: x[part] for w, x in waited.items()} for part in (slice(rows), slice(rows, None)))
        link, place = self._ends(settled, now)
        tails = self.tails.write(Tail(link, _drop_obs(items)), start)
        # Whole observations lie in one array, `[rows | waiting | ends]`, so that each part is written in place and a
        # sample is a single gather. `first` is where the waiting ones begin. Frames hold the rows elsewhere.
        words, first = {}, len(self._whole) - self.lag - self.owner.shape[0]
        for w, held in self._whole.words.items():
            if not isinstance(self.seen, Frames):
                held = jax.lax.dynamic_update_slice_in_dim(held, now[w], start, axis=0)
            held = jax.lax.dynamic_update_slice_in_dim(held, waiting[w], first, axis=0)
            at = held.at[first + self.lag + place]  # out of bounds where there is no end, and dropped
            words[w] = at.set(settled[w], mode="drop", unique_indices=True)
        whole = replace(self._whole, words=words)
        if isinstance(self.seen, Frames):
            seen: Rows | Frames = replace(self.seen.write(items.obs, start), apart=whole)
        else:
            seen = whole
        return replace(
            self,
            tails=tails,
            seen=seen,
            waiting=waiting,
            owner=self.owner.at[place].set(start + jnp.arange(rows, dtype=jnp.int32), mode="drop", unique_indices=True),
            newest=start + rows - 1,
            next_end=(self.next_end + jnp.sum(link != 0, dtype=jnp.int32)) % self.owner.shape[0],
        )

    @property
    def _whole(self) -> Rows:
        """The observations that are stored whole; the last ones are the successors of the newest rows and the ends."""
        return self.seen.apart if isinstance(self.seen, Frames) else self.seen

    def _observations(self, index: Array, place: Array) -> tuple[PyTree, PyTree, Array]:
        """Return the observations of rows `index` `[B]`, those at `place` `[B]` among the `R + lag + M`, and whether
        both are known."""
        size = len(index)
        if not isinstance(self.seen, Frames):
            both = self.seen.read(jnp.concatenate([index, place]))
            return *_split_rows(both, size), jnp.ones(place.shape, bool)
        rows, apart = len(self), place >= len(self)
        both, known = self.seen.read(jnp.concatenate([index, jnp.where(apart, 0, place)]), self.newest)
        obs, stacks = _split_rows(both, size)
        known, known_after = _split_rows(known, size)
        whole = self.seen.apart.read(jnp.where(apart, place - rows, 0))
        return obs, tree_where(apart, whole, stacks), known & (known_after | apart)

    def _links(self, index: Array) -> Array:
        # The first leaf of a tail is its first word.
        return self.tails.words["uint32"].at[index, 0].get(mode="promise_in_bounds").astype(jnp.int32)

    def _ends(self, settled: dict[str, Array], now: dict[str, Array]) -> tuple[Array, Array]:
        """Return the links of a block, and the end that each successor of `settled` goes to; `M` or more means none."""
        size = self.owner.shape[0]
        ended = jnp.any(jnp.stack([(settled[w] != now[w]).any(axis=1) for w in now]), axis=0)
        count = jnp.cumsum(ended, dtype=jnp.int32)
        place = (self.next_end + count - 1) % size
        # If there are more ends than room, the last ones are kept. All places differ, so the order of writes does not
        # matter.
        stays = ended & (count > count[-1] - size)
        beyond = size + jnp.arange(len(ended), dtype=jnp.int32)
        return jnp.where(ended, place + 1, 0), jnp.where(stays, place, beyond)

    def read(self, index: Array) -> Transition:
        """Return the items at `index` `[B]`.

        An item whose end was overwritten gets its own observation as successor, and weight 0 unless its discount is 0
        anyway.
        """
        rows = len(self)
        age, after = (self.newest - index) % rows, (index + self.lag) % rows
        link = self._links(after)
        waits, ended = age < self.lag, link > 0
        lost = ~waits & ended & (self.owner.at[jnp.maximum(link - 1, 0)].get(mode="promise_in_bounds") != after)
        place = jnp.where(ended, rows + self.lag + link - 1, after)
        place = jnp.where(waits, rows + self.lag - 1 - age, jnp.where(lost, index, place))
        obs, next_obs, known = self._observations(index, place)
        item = self.tails.read(index).item
        worthless = (lost & (item.discount != 0)) | ~known
        weight = jnp.where(worthless, jnp.zeros_like(item.weight), item.weight)
        return as_read(self.layout, item._replace(obs=obs, next_obs=next_obs, weight=weight))


def _split_rows(both: PyTree, size: int) -> tuple[PyTree, PyTree]:
    """Return the first `size` rows of every leaf, and the others."""
    return jax.tree.map(lambda x: x[:size], both), jax.tree.map(lambda x: x[size:], both)


def empty_compact(
    example: PyTree, rows: int, lag: int, ends: float, frames: int = 1, block: int = 1, stride: int = 0
) -> CompactRows:
    """Return `rows` transitions, all zeros, with room for `ends * rows` ends.

    If `frames` is above 1, observations are stacks and are stored frame by frame. `stride` is the distance in rows from
    one step of an environment to its next; `block` rows are written at once.

    Raises:
      SettingsError: `example` is not a `Transition` whose `next_obs` is like its `obs`, or `lag` is not below `rows`.
    """
    if not isinstance(example, Transition):
        raise SettingsError(f"buffer.compact: items are {type(example).__name__}; expected Transition")
    obs = layout_of(example.obs)
    if layout_of(example.next_obs) != obs or not obs.fields:
        raise SettingsError("buffer.compact: next_obs of the items is not like their obs; set buffer.compact to False")
    if not 0 < lag < rows:
        raise SettingsError(
            f"buffer.compact: a successor lies {lag} items after its own, but buffer.capacity holds {rows}; "
            f"raise it above {lag}, or set buffer.compact to False"
        )
    size = max(1, math.ceil(ends * rows))
    if 3 * rows + size >= 2**31:  # room also for a block of indices past the end, where dropped writes go
        raise SettingsError(f"buffer.capacity is {rows}; a compact buffer must be below 2^29, for indices are int32")
    zero = jnp.int32(0)
    tails = empty(layout_of(Tail(jax.ShapeDtypeStruct((), jnp.int32), _drop_obs(example))), rows, block)
    seen: Rows | Frames = empty(obs, rows + lag + size)
    if frames > 1:
        seen = empty_frames(example.obs, frames, rows, block, stride, lag + size)
    waiting = empty(obs, lag).words
    return CompactRows(tails, seen, waiting, jnp.zeros(size, jnp.int32), zero, zero, lag, layout_of(example))


def _drop_obs(items: Transition) -> Transition:
    return items._replace(obs=(), next_obs=())

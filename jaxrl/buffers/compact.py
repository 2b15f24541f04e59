"""Transitions of which each observation is kept once: the successor of most is the observation of a later one."""

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
from jaxrl.xla.packing import Layout, Rows, empty, layout_of, pack, unpack


class Tail(NamedTuple):
    """What lies in a row beside its observation."""

    link: PyTree
    """Int32: where the successor of the row `lag` before this one lies: 0 if it is this row's observation, as most are;
    else 1 more than the number of its end. It is kept here because it is known only when this row is written."""
    item: Transition
    """Without `obs` and `next_obs`."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tails", "seen", "waiting", "owner", "newest", "next_end"],
    meta_fields=["lag", "layout"],
)
@dataclass(frozen=True)
class CompactRows:
    """`R` transitions in a ring, the newest of which wait for their successors to be written as observations.

    The successor of a row is the observation of the row `lag` after it, unless the episode ended in between. Whether it
    is, is found by comparing their bits; where it is not, the successor is kept as one of `M` ends, the newest.
    """

    tails: Rows
    """`R` tails. They come first: the first leaf of a buffer says how many items it holds."""
    seen: Rows | Frames
    """`R + lag + M` observations: those of the rows, the successors of the newest `lag` rows, and the ends; the latter
    two lie apart where the rows are kept frame by frame."""
    waiting: dict[str, Array]
    """Those of the newest rows once more, `[lag, W]`: read from `seen` before this is written, they would have XLA copy
    all of it."""
    owner: Array
    """`[M]` int32, by which row's link an end is known."""
    newest: Array
    """Int32 scalar, the row written last."""
    next_end: Array
    """Int32 scalar, the end to be written next."""
    lag: int
    layout: Layout
    """That of whole transitions."""

    @property
    def items(self) -> PyTree:
        """The items as they were given, leaves `[R, ...]`."""
        return self.read(jnp.arange(len(self)))

    def __len__(self) -> int:
        return len(self.tails)

    def write(self, items: Transition, start: Array) -> "CompactRows":
        """Write a block from row `start` on, behind the block written last."""
        layout = self._whole.layout
        now, then = pack(layout, items.obs), pack(layout, items.next_obs)
        rows = next(iter(now.values())).shape[0]
        waited = {w: jnp.concatenate([x, then[w]]) for w, x in self.waiting.items()}
        settled, waiting = ({w: x[part] for w, x in waited.items()} for part in (slice(rows), slice(rows, None)))
        link, place = self._ends(settled, now)
        tails = self.tails.write(Tail(link, _without_obs(items)), start)
        words, first = {}, len(self._whole) - self.lag - self.owner.shape[0]
        for w, held in self._whole.words.items():
            if not isinstance(self.seen, Frames):
                held = jax.lax.dynamic_update_slice_in_dim(held, now[w], start, axis=0)
            held = jax.lax.dynamic_update_slice_in_dim(held, waiting[w], first, axis=0)
            at = held.at[first + self.lag + place]
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
            owner=self.owner.at[place].set(start + jnp.arange(rows), mode="drop", unique_indices=True),
            newest=start + rows - 1,
            next_end=(self.next_end + jnp.count_nonzero(link)) % self.owner.shape[0],
        )

    @property
    def _whole(self) -> Rows:
        """The observations that are kept whole; the successors of the newest rows and the ends are the last of them."""
        return self.seen.apart if isinstance(self.seen, Frames) else self.seen

    def _observations(self, place: Array) -> tuple[PyTree, Array]:
        """Return the observations at `place` `[B]` of the `R + lag + M`, and whether they are known."""
        if not isinstance(self.seen, Frames):
            return self.seen.read(place), jnp.ones(place.shape, bool)
        rows, apart = len(self), place >= len(self)
        stacks, known = self.seen.read(jnp.where(apart, 0, place), self.newest)
        whole = self.seen.apart.read(jnp.where(apart, place - rows, 0))
        return tree_where(apart, whole, stacks), known | apart

    def _links(self, index: Array) -> Array:
        # The first leaf of a tail is its first word.
        return self.tails.words["uint32"].at[index, 0].get(mode="promise_in_bounds").astype(jnp.int32)

    def _ends(self, settled: dict[str, Array], now: dict[str, Array]) -> tuple[Array, Array]:
        """Return the links of a block, and to which end each of its successors `settled` goes: past `M` if to none."""
        size = self.owner.shape[0]
        ended = jnp.any(jnp.stack([(settled[w] != now[w]).any(axis=1) for w in now]), axis=0)
        count = jnp.cumsum(ended, dtype=jnp.int32)
        place = (self.next_end + count - 1) % size
        # Of more ends than there is place for the last stay; their places differ, so that the order of writing is none.
        stays = ended & (count > count[-1] - size)
        beyond = size + jnp.arange(len(ended), dtype=jnp.int32)
        return jnp.where(ended, place + 1, 0), jnp.where(stays, place, beyond)

    def read(self, index: Array) -> Transition:
        """Return the items at `index` `[B]`.

        One whose end was lost is its own successor, and gets the weight 0 unless its successor is worth nothing anyway.
        """
        rows = len(self)
        age, after = (self.newest - index) % rows, (index + self.lag) % rows
        link = self._links(after)
        waits, ended = age < self.lag, link > 0
        lost = ~waits & ended & (self.owner.at[jnp.maximum(link - 1, 0)].get(mode="promise_in_bounds") != after)
        place = jnp.where(ended, rows + self.lag + link - 1, after)
        place = jnp.where(waits, rows + self.lag - 1 - age, jnp.where(lost, index, place))
        both, known = self._observations(jnp.concatenate([index, place]))
        item = self.tails.read(index).item
        worthless = (lost & (item.discount != 0)) | ~known[: len(index)] | ~known[len(index) :]
        item = item._replace(
            obs=jax.tree.map(lambda x: x[: len(index)], both),
            next_obs=jax.tree.map(lambda x: x[len(index) :], both),
            weight=jnp.where(worthless, jnp.zeros_like(item.weight), item.weight),
        )
        # Rows of bits as plain rows are, lest XLA fuse what is above into an update, which then rounds differently.
        return unpack(self.layout, jax.lax.optimization_barrier(pack(self.layout, item)))


def empty_compact(
    example: PyTree, rows: int, lag: int, ends: float, frames: int = 1, block: int = 1, stride: int = 0
) -> CompactRows:
    """Return `rows` transitions, all zeros, with places for the ends of a share `ends` of them.

    Observations that are stacks of more than one of `frames` are kept frame by frame; `stride` rows lie between one
    step of an environment and the next, and `block` rows are written at once.

    Raises:
      SettingsError: `example` is no `Transition` whose `next_obs` is like its `obs`, or `lag` is not below `rows`.
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
    if 3 * rows + size >= 2**31:  # room also for a block of indices past the end, where what is dropped goes
        raise SettingsError(f"buffer.capacity is {rows}; a compact buffer must be below 2^29, for indices are int32")
    zero = jnp.int32(0)
    tails = empty(layout_of(Tail(jax.ShapeDtypeStruct((), jnp.int32), _without_obs(example))), rows)
    seen: Rows | Frames = empty(obs, rows + lag + size)
    if frames > 1:
        seen = empty_frames(example.obs, frames, rows, block, stride, lag + size)
    waiting = empty(obs, lag).words
    return CompactRows(tails, seen, waiting, jnp.zeros(size, jnp.int32), zero, zero, lag, layout_of(example))


def _without_obs(items: Transition) -> Transition:
    return items._replace(obs=(), next_obs=())

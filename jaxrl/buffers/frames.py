"""Stacked observations with each frame stored once."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl.errors import SettingsError
from jaxrl.masks import MASK, has_entry
from jaxrl.trees import Array, PyTree, row_struct
from jaxrl.types import RecurrentObs
from jaxrl.xla import packing
from jaxrl.xla.packing import Rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["single", "depth", "apart", "last", "last_depth", "head"],
    meta_fields=["count", "rows"],
)
@dataclass(frozen=True)
class Frames:
    """Observations of `R` rows, each a stack of `count` frames along the last axis, and others stored in full.

    An observation is assembled from the frame of its row and the frames of earlier rows, `stride` apart. Its `depth` is
    how many earlier frames belong to the same episode; older ones repeat the episode's first frame, as `frame_stack`
    does. The depth follows from comparing an observation bit by bit with the previous one.
    """

    single: Rows
    """The newest frame of each row: `R` rows and as many earlier ones as a stack extends back."""
    depth: Array
    """`[R]` int32; below `-count` if the older frames are in no row, because the observation was no stack."""
    apart: Rows
    """Observations stored in full."""
    last: PyTree
    """The newest observations, leaves `[stride, ...]`."""
    last_depth: Array
    """Their depths, `[stride]`."""
    head: Array
    """Int32 scalar, index in `single` of the last frame written."""
    count: int
    rows: int

    def write(self, obs: PyTree, start: Array) -> "Frames":
        """Write a block of observations at row `start`, directly after the previous block."""
        size, stride = jax.tree.leaves(obs)[0].shape[0], self.last_depth.shape[0]
        # A stack follows the previous one if its frames but the newest are the previous ones but the oldest, and begins
        # an episode if all its frames are the same.
        before = predecessors(self.last, obs)
        follows = rows_equal(_slice_frames(obs, self.count, 0, -1), _slice_frames(before, self.count, 1, None))
        begins = rows_equal(_slice_frames(obs, self.count, 0, -1), _slice_frames(obs, self.count, 1, None))
        depth = self._depths(follows.reshape(-1, stride), begins.reshape(-1, stride))
        num_frames = len(self.single)
        return replace(
            self,
            single=self.single.write(_slice_frames(obs, self.count, -1, None), (self.head + 1) % num_frames),
            depth=jax.lax.dynamic_update_slice_in_dim(self.depth, depth.reshape(-1), start, axis=0),
            last=jax.tree.map(lambda x: x[-stride:], obs),
            last_depth=depth[-1],
            head=(self.head + size) % num_frames,
        )

    def _depths(self, follows: Array, begins: Array) -> Array:
        """Return the depths of observations `[T, stride]` that follow the last ones."""
        start, steps = last_true(begins | ~follows)
        # Where a stack begins or is none, or else in the last observations, the depth is known; each step adds one.
        here = jnp.take_along_axis(jnp.where(begins, 0, -2 * self.count), jnp.maximum(start, 0), axis=0)
        first = jnp.where(start < 0, self.last_depth[None], here)
        # After an observation that is not a stack, it takes `count` more until all frames of a stack are known.
        return jnp.minimum(first + steps, jnp.where(first >= 0, self.count - 1, -self.count - 1))

    def read(self, index: Array, newest: Array) -> tuple[PyTree, Array]:
        """Return the observations at rows `index` `[B]` and which are known; `newest` is the last row written."""
        depth = self.depth.at[index].get(mode="promise_in_bounds")
        # A depth of `-count - 1` means that all frames are in rows again, though the episode's start is not: nothing
        # repeats.
        reach = jnp.where(depth < 0, self.count - 1, depth)
        # Distances in rows from the newest frame, oldest first; clipping to `reach` repeats the episode's first frame.
        back = (
            jnp.minimum(jnp.arange(self.count - 1, -1, -1, dtype=jnp.int32)[None], reach[:, None])
            * self.last_depth.shape[0]
        )
        # Both rings advance together, so a frame is as far behind `head` as its row is behind `newest`.
        age = (newest - index) % self.rows
        place = (self.head - age[:, None] - back) % len(self.single)
        frames = self.single.read(place.reshape(-1))
        return jax.tree.map(partial(_join_frames, self.count), frames), depth >= -self.count - 1


def _join_frames(count: int, frames: Array) -> Array:
    """Join frames `[B * count, ..., C]` to stacks `[B, ..., count * C]`."""
    split = jnp.moveaxis(frames.reshape(-1, count, *frames.shape[1:]), 1, -2)
    return split.reshape(*split.shape[:-2], -1)


def _slice_frames(obs: PyTree, count: int, start: int, stop: int | None) -> PyTree:
    """Return frames `start:stop` of each observation's stack."""

    def cut(x: Array) -> Array:
        frames = x.reshape(*x.shape[:-1], count, x.shape[-1] // count)[..., start:stop, :]
        return frames.reshape(*x.shape[:-1], -1)

    return jax.tree.map(cut, obs)


def predecessors(last: PyTree, rows: PyTree) -> PyTree:
    """Return what precedes each of the `rows` of a block by one vector step; `last` are those before the block."""
    return jax.tree.map(lambda old, new: jnp.concatenate([old, new])[: len(new)], last, rows)


def last_true(flags: Array) -> tuple[Array, Array]:
    """Return for each of `flags` `[T, N]` the last step up to it at which its column is true, -1 if none; and the steps
    since then; int32."""
    step = jnp.arange(len(flags), dtype=jnp.int32)[:, None]
    last = jax.lax.cummax(jnp.where(flags, step, -1), axis=0)
    return last, step - last


def rows_equal(a: PyTree, b: PyTree) -> Array:
    """Compare two trees row by row, bit by bit; `[rows]` bool. Unlike `==`, NaN equals itself."""
    layout = packing.layout_of(row_struct(a))
    pairs = [
        (x != y).any(axis=1)
        for x, y in zip(packing.pack(layout, a).values(), packing.pack(layout, b).values(), strict=True)
    ]
    return ~jnp.any(jnp.stack(pairs), axis=0)


def empty_frames(
    example: PyTree, count: int, rows: int, block: int, stride: int, apart: int, on_host: bool = False
) -> Frames:
    """Return storage for `rows` rows in blocks of `block`, all zeros, and for `apart` observations stored in full.

    Raises:
      SettingsError: an observation carries a memory or cannot be a stack of `count` frames, or the row of the previous
        one is unknown.
    """
    if isinstance(example, RecurrentObs):
        raise SettingsError(
            f"buffer.frames is {count}, but observations are stored with a memory, which is not stacked; leave "
            "buffer.frames out, or set agent.noise_memory and agent.noise_min to 0"
        )
    if has_entry(example, MASK):
        raise SettingsError(f"buffer.frames is {count}, but the {MASK} of an observation is not stacked; set it to 1")
    for leaf in jax.tree.leaves(example):
        if not leaf.shape or leaf.shape[-1] % count:
            raise SettingsError(
                f"buffer.frames is {count}, but an observation is {list(leaf.shape)}: its last axis is no stack of as "
                "many; set buffer.frames to what processor.frame_stack is"
            )
    if stride < 1 or block % stride:
        raise SettingsError("buffer.frames: the position of the previous frame is unknown; set it to 1")
    # Whole blocks, so that a block of frames is written in one piece and never wraps around the end of the ring.
    reach = -(-(count - 1) * stride // block) * block
    single = jax.eval_shape(
        lambda: _slice_frames(jax.tree.map(lambda x: jnp.zeros((1, *x.shape)), example), count, -1, None)
    )
    frame = jax.tree.map(lambda x, like: jax.ShapeDtypeStruct(x.shape[1:], like.dtype), single, example)
    last = jax.tree.map(lambda x: jnp.zeros((stride, *x.shape), x.dtype), example)
    return Frames(
        single=packing.empty(packing.layout_of(frame), rows + reach, on_host=on_host),
        depth=jnp.zeros(rows, jnp.int32),
        apart=packing.empty(packing.layout_of(example), apart, on_host=on_host),
        last=last,
        last_depth=jnp.full(stride, -2 * count, jnp.int32),
        head=jnp.int32(rows + reach - 1),
        count=count,
        rows=rows,
    )

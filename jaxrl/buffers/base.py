"""The interface of a buffer."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch


class BufferInit(Protocol):
    def __call__(self, example: PyTree, rows: int, lag: int = 0, stride: int = 0, /) -> PyTree:
        """Make an empty buffer for blocks of `rows` items like `example`, one item or its `ShapeDtypeStruct`.

        Unless the episode ends before, the observation of the item `lag` places on is an item's `next_obs`; 0: it is
        not known which is. That which lies `stride` places on is of the same environment's next step.
        """
        ...


class PushFn(Protocol):
    def __call__(self, state: PyTree, items: PyTree, pushes: Array, /) -> PyTree:
        """Write one block, leaves `[rows, ...]`; `pushes` blocks were written before it."""
        ...


class DrawSample(Protocol):
    def __call__(self, key: Key, pushes: Array, rows: int, /) -> PyTree:
        """Draw the randomness of one `sample` made after `pushes` blocks of `rows` items. The key is consumed."""
        ...


class SampleFn(Protocol):
    def __call__(self, state: PyTree, noise: PyTree, opt_step: Array, /) -> Batch:
        """Return a batch of `B` items for optimisation step number `opt_step` (from 0)."""
        ...


class ReprioritiseFn(Protocol):
    def __call__(self, state: PyTree, index: Array, priority: Array, /) -> PyTree:
        """Tell the buffer how much the items at `index` `[B]` matter, `priority` `[B]`; below 0 that is not known."""
        ...


class SizeFn(Protocol):
    def __call__(self, pushes: Array, rows: int, /) -> Array:
        """Return how many items are in the buffer after `pushes` blocks of `rows`."""
        ...


class Buffer(NamedTuple):
    """Pure functions over a buffer's state. How much was written is an argument (`pushes`), never part of the state:
    a population of buffers shares it, and its pushes stay contiguous."""

    init: BufferInit
    push: PushFn
    draw: DrawSample
    sample: SampleFn
    reprioritise: ReprioritiseFn
    size: SizeFn
    capacity: Any
    """`rows -> int`: the items that it holds, when written in blocks of `rows`."""
    batch_size: int
    settings: Mapping[str, Any] | None = None

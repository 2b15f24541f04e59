"""The interface of a buffer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jaxrl.parsing import format_repr, format_settings
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, GoalFn, SequenceSpec


class BufferInit(Protocol):
    def __call__(self, example: PyTree, rows: int, lag: int = 0, stride: int = 0, /) -> PyTree:
        """Make an empty buffer for blocks of `rows` items like `example`, which is one item or its `ShapeDtypeStruct`.

        `lag` is how many places later an item's `next_obs` recurs as the observation of another item, unless the
        episode ends in between; 0: unknown. `stride` is how many places later the same environment's next step lies.
        """
        ...


class PushFn(Protocol):
    def __call__(self, state: PyTree, items: PyTree, pushes: Array, /) -> PyTree:
        """Write one block, leaves `[rows, ...]`, after `pushes` earlier blocks."""
        ...


class SampleFn(Protocol):
    def __call__(self, state: PyTree, key: Key, pushes: Array, opt_step: Array, /) -> Batch:
        """Return a batch of `B` items for optimisation step number `opt_step` (from 0), after `pushes` blocks.

        The key is consumed.
        """
        ...


class ReprioritiseFn(Protocol):
    def __call__(self, state: PyTree, index: Array, priority: Array, /) -> PyTree:
        """Set the priorities of the items at `index` `[B]` to `priority` `[B]`; a negative one means unknown."""
        ...


class SequenceBufferFn(Protocol):
    def __call__(self, window: SequenceSpec, stride: int, /) -> "Buffer":
        """Return the same buffer, but of sequences: batches are `[B, L, ...]`, and an index is that of their first row.

        A block pushed holds whole vector steps of `stride` environments, one after the other. Priorities are those of
        sequences. Raise `SettingsError` where the buffer is too small.
        """
        ...


class WithGoalFn(Protocol):
    def __call__(self, goal: GoalFn | None, name: str, /) -> "Buffer":
        """Return the buffer for the environment `name`, whose field `goal` is given; raise `SettingsError` if not."""
        ...


class Buffer(NamedTuple):
    """Pure functions over a buffer's state. The number of blocks written (`pushes`) is an argument, never part of the
    state: a population of buffers shares it, and its pushes stay contiguous."""

    init: BufferInit
    push: PushFn
    sample: SampleFn
    reprioritise: ReprioritiseFn
    capacity: Any
    """`rows -> int`: the number of items that the buffer holds when they are written in blocks of `rows`."""
    batch_size: int
    settings: Mapping[str, Any] | None = None
    as_sequence_buffer: SequenceBufferFn | None = None
    """How sequences are sampled from it; `None` where they cannot be."""
    with_goal_fn: WithGoalFn | None = None
    """How a buffer that replaces goals is told what they pay; `None` for one that replaces none, or has been told."""
    window: SequenceSpec | None = None
    """The sequences in its batches; `None`: single items."""
    shard: "Callable[[int], Buffer] | None" = None
    """`(shards) -> buffer`: one of so many that share its capacity and batches; `None` where it cannot be divided."""

    def __repr__(self) -> str:
        return format_repr("Buffer", format_settings(self.settings) or f"batch_size={self.batch_size}")

"""The interface of a buffer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jaxrl.parsing import format_repr, format_settings
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, GoalFn, SequenceSpec


class BufferInit(Protocol):
    def __call__(self, example: PyTree, rows: int, lag: int = 0, stride: int = 0, /) -> PyTree:
        """Return an empty buffer for blocks of `rows` items like `example`, one item or its `ShapeDtypeStruct`.

        `lag` is the distance in rows from an item to the one whose observation equals its `next_obs`, unless the
        episode ends in between; 0: unknown. `stride` is the distance from a step of an environment to its next.
        """
        ...


class PushFn(Protocol):
    def __call__(self, state: PyTree, items: PyTree, pushes: Array, /) -> PyTree:
        """Write one block of items, leaves `[rows, ...]`; `pushes` blocks were written before."""
        ...


class SampleFn(Protocol):
    def __call__(self, state: PyTree, key: Key, pushes: Array, opt_step: Array, /) -> Batch:
        """Return a batch of `B` items for optimisation step `opt_step` (from 0); `pushes` blocks have been written.

        The key is consumed.
        """
        ...


class ReprioritiseFn(Protocol):
    def __call__(self, state: PyTree, index: Array, priority: Array, /) -> PyTree:
        """Set the priorities `[B]` of the items at `index` `[B]`; a negative priority leaves the old one."""
        ...


class SequenceBufferFn(Protocol):
    def __call__(self, window: SequenceSpec, stride: int, /) -> "Buffer":
        """Return the same buffer with sequences as items: batches are `[B, L, ...]`, indexed by the first row.

        Blocks hold whole vector steps of `stride` environments, in order. Priorities belong to sequences.

        Raises:
          SettingsError: the buffer is too small to always hold one sequence.
        """
        ...


class WithGoalFn(Protocol):
    def __call__(self, goal: GoalFn | None, name: str, /) -> "Buffer":
        """Return the buffer with the goal function of environment `name`, its field `Env.goal`.

        Raises:
          SettingsError: neither the environment nor the buffer has one.
        """
        ...


class Buffer(NamedTuple):
    """A buffer as pure functions on its state.

    The number of blocks written so far (`pushes`) is an argument and not part of the state. Under `vmap` it stays
    unbatched, so that a population writes one contiguous slice instead of a scatter per member.
    """

    init: BufferInit
    push: PushFn
    sample: SampleFn
    reprioritise: ReprioritiseFn
    capacity: Any
    """`rows -> int`: number of items held, if they are written in blocks of `rows`."""
    batch_size: int
    settings: Mapping[str, Any] | None = None
    """Settings that rebuild the buffer; `None` for a custom one."""
    as_sequence_buffer: SequenceBufferFn | None = None
    """Makes a buffer of sequences; `None` if they are not supported."""
    with_goal_fn: WithGoalFn | None = None
    """Sets the goal function of a buffer that relabels goals; `None` if it relabels none, or has its function."""
    window: SequenceSpec | None = None
    """Length and spacing of the sequences in a batch; `None`: batches of single items."""
    shard: "Callable[[int], Buffer] | None" = None
    """`(shards) -> buffer`: one shard, with its share of capacity and batch; `None` if it cannot be divided."""
    renew: Callable[[PyTree], PyTree] | None = None
    """`state -> state`: compute anew what follows from settings that have changed; `None` if nothing does."""

    def __repr__(self) -> str:
        return format_repr("Buffer", format_settings(self.settings) or f"batch_size={self.batch_size}")

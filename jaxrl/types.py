"""The data that flow through a training step: steps, transitions, rollouts, batches.

Shape legend, used in all docstrings: `N` environments, `T` time, `B` minibatch, `P` population, `D` devices.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxrl.trees import Array, PyTree


class Step(NamedTuple):
    """The result of one step of `N` environments. Every leaf has a leading axis `[N]`."""

    action: PyTree
    extras: PyTree
    """Extras that the agent's `act` returned with the action, such as log-probabilities."""
    reward: Array
    terminated: Array
    """The episode ended by itself."""
    truncated: Array
    """The episode was cut off from outside, for example by a time limit; never true together with `terminated`."""
    final_obs: PyTree
    """The true successor, before any reset."""
    obs: PyTree
    """What the policy sees next: `final_obs`, or the first observation of a new episode."""
    info: Mapping[str, Array] = {}
    valid: Array | bool = True
    """False where the environment returned a non-finite observation or reward; such a step must not be learnt from."""
    obs_valid: Array | tuple[()] = ()
    """False where a first observation was not finite: zeros replace it in `obs`, and it must not enter any statistics.
    `()` if all are finite."""
    present: Array | tuple[()] = ()
    """False where there was nobody to take a step, as in the row of an agent that is dead: such a row is not valid, and
    no episode or scalar of it is counted. `()` if all are."""


class Transition(NamedTuple):
    """The item that agents learn from. Past the processor, `discount` replaces `done`."""

    obs: PyTree
    action: PyTree
    reward: Array
    """The reward, already summed and discounted over the `n` steps of an n-step processor."""
    discount: Array
    """`gamma^k` for a successor `k` steps later; 0 if and only if the episode TERMINATED."""
    next_obs: PyTree
    extras: PyTree = ()
    weight: Array | float = 1.0
    """1, or 0 for a row that must not be learnt from."""
    is_first: Array | tuple[()] = ()
    """Bool: an episode begins with this step, the first of several. `()` in replay of single items, data and
    demonstrations, which have no order."""
    is_last: Array | tuple[()] = ()
    """Bool: the episode ends with this step, or with the last of several. It was truncated, and its successor's value
    counts, unless `discount` is 0. `()` as for `is_first`. A loop outside may cut an episode after its last step was
    learnt from: then only `is_first` of the next one says so."""


class RecurrentObs(NamedTuple):
    """The observation of a recurrent agent: the environment's, and the agent's memory of the episode so far."""

    obs: PyTree
    memory: PyTree


class SequenceSpec(NamedTuple):
    """The sequences in which an agent learns from replay: steps of one environment, in order."""

    length: int
    """Steps `L` of a sequence."""
    interval: int = 1
    """Steps from the start of one to that of the next."""


class GoalFn(Protocol):
    def __call__(self, achieved: PyTree, desired: PyTree, /) -> tuple[Array, Array | bool]:
        """Return the reward of a step that led to `achieved` where `desired` was wanted, and whether it terminates.

        Pure, for one step: two scalars. All of the reward must follow from these two.
        """
        ...


class Rollout(NamedTuple):
    """`T` steps of `N` environments, in order."""

    items: Transition
    """One-step transitions, leaves `[T, N, ...]`."""
    last: Array
    """`[T, N]` bool: no later step may count towards this one, because the episode ends here (`items.is_last`), another
    begins with the next step, or that step must not be learnt from. The rest of the return is `discount` times the
    value of `next_obs`."""


class Batch(NamedTuple):
    """`B` sampled items."""

    items: PyTree
    """The items, each leaf `[B, ...]`; for replay a `Transition`, in sequences `[B, L, ...]`."""
    index: Array  # type: ignore[assignment]
    """`[B]` int32, positions of the items in the buffer."""
    weight: Array
    """`[B]`, weight of each item in the loss (importance weights for prioritised replay; 1 otherwise)."""

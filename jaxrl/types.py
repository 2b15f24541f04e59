"""Data of a training step: steps, transitions, rollouts and batches.

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
    """The episode was cut off from outside, for example by a time limit; exclusive with `terminated`."""
    final_obs: PyTree
    """The true successor, before any reset: `obs` of an environment's `TimeStep`."""
    obs: PyTree
    """The next observation of the policy: `final_obs`, or the first one of a new episode. Not that of a `TimeStep`."""
    info: Mapping[str, Array] = {}
    valid: Array | bool = True
    """False where the environment returned a non-finite observation or reward; such a step gets weight 0."""
    obs_valid: Array | tuple[()] = ()
    """False where a first observation was not finite. `obs` is then zeros, and must not enter any statistics. `()`: all
    are finite."""
    present: Array | tuple[()] = ()
    """False for rows without a step, such as those of dead agents: they are not valid, and neither episodes nor scalars
    of them are counted. `()`: all are present."""


class Transition(NamedTuple):
    """The item that agents learn from. From the processor on, `discount` replaces `done`."""

    obs: PyTree
    action: PyTree
    reward: Array
    """The reward, already summed and discounted over the `n` steps of an n-step processor."""
    discount: Array
    """`gamma^k` for a successor `k` steps later; 0 if and only if the episode TERMINATED."""
    next_obs: PyTree
    extras: PyTree = ()
    weight: Array | float = 1.0
    """1, or 0 for a row that must be ignored in losses."""
    is_first: Array | tuple[()] = ()
    """Bool: this step (the first one of an n-step transition) starts an episode. `()` for items without an order, as in
    replay of single items, data sets and demonstrations."""
    is_last: Array | tuple[()] = ()
    """Bool: this step (the last one of an n-step transition) ends the episode. If `discount` is not 0 it was truncated,
    and the successor's value is bootstrapped. `()` as for `is_first`. A session may cut an episode after its last step
    was pushed: then only `is_first` of the next step marks it."""


class NextAction(NamedTuple):
    """The data's action after a transition, at its `next_obs`; the `extras` for agents that require it."""

    action: PyTree
    known: Array
    """Bool: false where the episode ends with the transition, so that nothing follows it."""


class Demonstrations(NamedTuple):
    """Actions that somebody else has shown, `[B, ...]`."""

    obs: PyTree
    """Observations as the policy sees them."""
    action: PyTree
    """Elements of the action space."""


class RecurrentObs(NamedTuple):
    """Observation of a recurrent agent: that of the environment, and the recurrent state before the step."""

    obs: PyTree
    memory: PyTree


class SequenceSpec(NamedTuple):
    """Sequences for learning from replay: consecutive steps of one environment."""

    length: int
    """Number of steps `L`."""
    interval: int = 1
    """Steps between the starts of consecutive sequences."""


class GoalFn(Protocol):
    def __call__(self, achieved: PyTree, desired: PyTree, /) -> tuple[Array, Array | bool]:
        """Return reward and termination of a step that achieved `achieved` with the goal `desired`: two scalars.

        A pure function for one step; the reward must depend on nothing else.
        """
        ...


class Rollout(NamedTuple):
    """`T` consecutive steps of `N` environments."""

    items: Transition
    """One-step transitions, leaves `[T, N, ...]`."""
    last: Array
    """`[T, N]` bool: returns stop here and are bootstrapped with `discount` times the value of `next_obs`, because the
    episode ends (`items.is_last`), a new one begins with the next step, or the next step has weight 0."""


class Batch(NamedTuple):
    """`B` sampled items."""

    items: PyTree
    """The items, each leaf `[B, ...]`; for replay a `Transition`, in sequences `[B, L, ...]`."""
    index: Array  # type: ignore[assignment]
    """`[B]` int32, positions of the items in the buffer."""
    weight: Array
    """`[B]`, weight of each item in the loss (importance weights for prioritised replay; 1 otherwise)."""

"""What flows through a training step: steps, transitions, rollouts, batches.

Shape legend, used in all docstrings: `N` environments, `T` time, `B` minibatch, `P` population, `D` devices.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxrl.trees import Array, PyTree


class Step(NamedTuple):
    """What one step of `N` environments yields. Every leaf begins with the axis `[N]`."""

    action: PyTree
    extras: PyTree
    """Whatever the agent's `act` returned beside the action, such as log-probabilities and values."""
    reward: Array
    terminated: Array
    """The episode reached an end of its own."""
    truncated: Array
    """The episode was cut from outside, by a time limit say; never true together with `terminated`."""
    final_obs: PyTree
    """The true successor, before any reset."""
    obs: PyTree
    """What the policy sees next: `final_obs`, or the first observation of a new episode."""
    info: Mapping[str, Array] = {}
    valid: Array | bool = True
    """False where the environment gave a non-finite observation or reward: nothing may be learnt from that step."""
    obs_valid: Array | tuple[()] = ()
    """False where a first observation was not finite: `obs` is zeros in its place, and belongs in no statistics. `()`
    where all are."""


class Transition(NamedTuple):
    """What is learnt from. Past the processor nobody sees `done`."""

    obs: PyTree
    action: PyTree
    reward: Array
    """The reward, already summed and discounted over the `n` steps of an n-step processor."""
    discount: Array
    """`gamma^k` to the successor, and 0 only where the episode TERMINATED."""
    next_obs: PyTree
    extras: PyTree = ()
    weight: Array | float = 1.0
    """1, or 0 for a row from which nothing may be learnt."""


class Remembered(NamedTuple):
    """What a recurrent agent sees: an observation, and what it remembers of the episode so far."""

    obs: PyTree
    memory: PyTree


class Rollout(NamedTuple):
    """`T` steps of `N` environments, in order."""

    items: Transition
    """Over one step each, leaves `[T, N, ...]`."""
    last: Array
    """`[T, N]` bool: no later step may be counted towards this one, for the episode ended here, was cut, or goes on
    with a step from which nothing may be learnt. What is still to come is worth `discount` times that of `next_obs`."""


class Batch(NamedTuple):
    """`B` sampled items."""

    items: PyTree
    """The items, each leaf `[B, ...]`; for replay a `Transition`."""
    index: Array  # type: ignore[assignment]
    """`[B]` int32, where the items lie in the buffer."""
    weight: Array
    """`[B]`, the weight of each item in the loss (importance weights of prioritised replay; 1 otherwise)."""

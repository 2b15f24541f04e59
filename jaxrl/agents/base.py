"""The interface of an agent."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from jaxrl.metrics import Metrics
from jaxrl.spaces import EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Rollout

Mode = Literal["explore", "exploit"]


class AgentInit(Protocol):
    def __call__(self, key: Key, /) -> PyTree:
        """Return the state of a fresh agent. The key is consumed."""
        ...


class ActFn(Protocol):
    def __call__(
        self, state: PyTree, obs: PyTree, noise: PyTree, opt_step: Array, mode: Mode, /
    ) -> tuple[PyTree, PyTree]:
        """Choose actions for `obs` `[N, ...]`; return them `[N, ...]`, and extras to be stored with them.

        `opt_step` counts the optimisation steps done so far and is shared by a whole population. With `exploit` the
        choice is greedy, `noise` may be `None`, and a state that `strip` made is enough.
        """
        ...


class DrawAct(Protocol):
    def __call__(self, key: Key, num_envs: int, /) -> PyTree:
        """Draw the randomness of one `act` in `explore` mode. The key is consumed."""
        ...


class UpdateFn(Protocol):
    def __call__(self, state: PyTree, batch: Batch, noise: PyTree, opt_step: Array, /) -> tuple[PyTree, Metrics, Array]:
        """Make optimisation step number `opt_step` (from 0); return the new state, metrics, and priorities `[B]`."""
        ...


class DrawUpdate(Protocol):
    def __call__(self, key: Key, batch_size: int, /) -> PyTree:
        """Draw the randomness of one `update` with a batch of `batch_size` items. The key is consumed."""
        ...


class StripFn(Protocol):
    def __call__(self, state: PyTree, /) -> PyTree:
        """Return `state` less what acting greedily does not need."""
        ...


class PrepareFn(Protocol):
    def __call__(self, state: PyTree, rollout: Rollout, /) -> PyTree:
        """Return what the updates learn from, advantages say, as items `[T * N, ...]` that may be shuffled.

        An agent with a memory returns sequences, one an environment: leaves `[N, ...]`.
        """
        ...


class StopFn(Protocol):
    def __call__(self, state: PyTree, metrics: Metrics, /) -> Array:
        """Say, from an update's metrics, whether the rest of the updates on the same rollout shall be left out."""
        ...


class Agent(NamedTuple):
    """Pure functions over an agent's state, which holds its parameters and, as arrays, whatever a sweep may vary."""

    name: str
    init: AgentInit
    act: ActFn
    update: UpdateFn
    draw_act: DrawAct
    draw_update: DrawUpdate
    strip: StripFn
    settings: Mapping[str, Any] | None = None
    """What rebuilds it, under the names of its settings dataclass, but for its `custom` parts; `None` for one that was
    made otherwise."""
    prepare: PrepareFn | None = None
    """Of an agent that learns on-policy, and only of such."""
    stop: StopFn | None = None
    exploration: tuple[str, ...] = ()
    """Hyperparameters by which it explores, all of which take the same number."""
    offline: bool = False
    """Whether it is meant to learn from data that others have gathered."""
    memory: PyTree | None = None
    """Of a recurrent agent: what it remembers at an episode's start, of one environment. Its `act` is given a
    `Remembered` for an observation, and puts what it remembers next into `extras`, as the entry `memory` of a dict."""
    behave: ActFn | None = None
    """`act` that also puts the log-probability `[N]` of the action into `extras`, as the entry `log_prob` of a dict.

    Actors on the host use it, for their parameters may be older than the learner's; `prepare` takes what it finds."""
    bounds_returns: bool = False
    """Whether it derives from rewards and discounts which returns there can be, for which the discount must be below
    1."""
    custom: tuple[str, ...] = ()
    """Arguments by which parts of it were made in Python, as in `make_network`."""


class AgentMaker(Protocol):
    """What `jaxrl.dqn(...)` and its sisters return: an agent that still has to be told its environment."""

    def __call__(self, spec: EnvSpec, /) -> Agent:
        """Return the agent for the spaces of `spec`; raise `SettingsError` if it cannot take them."""
        ...

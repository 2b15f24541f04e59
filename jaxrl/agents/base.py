"""The interface of an agent."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxrl.distributions import Distribution, Head
from jaxrl.metrics import Metrics
from jaxrl.parsing import format_repr, format_settings
from jaxrl.spaces import EnvSpec
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Batch, Demonstrations, Rollout, SequenceSpec

Mode = Literal["explore", "exploit"]


class AgentInit(Protocol):
    def __call__(self, key: Key, /) -> PyTree:
        """Initialise an agent's state. The key is consumed."""
        ...


class ActFn(Protocol):
    def __call__(
        self, state: PyTree, obs: PyTree, key: Key | None, opt_step: Array, mode: Mode, /
    ) -> tuple[PyTree, PyTree]:
        """Choose actions for `obs` `[N, ...]`; return them `[N, ...]`, and extras to store with them.

        The key is consumed. `opt_step` counts the optimisation steps taken so far; a whole population shares it. In
        mode `exploit` the choice is greedy, `key` may be `None`, and a state made by `strip` is enough. Extras have the
        same shapes in both modes.
        """
        ...


class UpdateFn(Protocol):
    def __call__(self, state: PyTree, batch: Batch, key: Key, opt_step: Array, /) -> tuple[PyTree, Metrics, Array]:
        """Take optimisation step number `opt_step` (from 0); return the new state, metrics, and priorities `[B]`.

        The key is consumed.
        """
        ...


class StripFn(Protocol):
    def __call__(self, state: PyTree, /) -> PyTree:
        """Return `state` without the parts that greedy acting does not need."""
        ...


class PrepareFn(Protocol):
    def __call__(self, state: PyTree, rollout: Rollout, /) -> PyTree:
        """Turn a rollout into the items that updates learn from, such as advantages: `[T * N, ...]`, in any order.

        A recurrent agent returns one sequence per environment: leaves `[N, ...]`.
        """
        ...


class StopFn(Protocol):
    def __call__(self, state: PyTree, metrics: Metrics, /) -> Array:
        """Return, from an update's metrics, whether to skip the remaining updates on the same rollout."""
        ...


class MeasureFn(Protocol):
    def __call__(self, prepared: PyTree, /) -> Metrics:
        """Return metrics of a whole rollout, given what `prepare` returned, before any update on it."""
        ...


class RefreshFn(Protocol):
    def __call__(self, state: PyTree, rollout: Rollout, prepared: PyTree, /) -> PyTree:
        """Return what `prepare` returned for a rollout, with advantages and targets by the parameters of now."""
        ...


class ImitateFn(Protocol):
    def __call__(self, items: PyTree, demos: Demonstrations, /) -> PyTree:
        """Return the items of a minibatch `[B, ...]` with a demonstration beside each, for `update` to imitate."""
        ...


class DistributionFn(Protocol):
    def __call__(self, state: PyTree, obs: PyTree, opt_step: Array, /) -> Distribution:
        """Return the distributions of raw actions `[N]` from which `act` draws in `explore` mode."""
        ...


class ValueFn(Protocol):
    def __call__(self, state: PyTree, obs: PyTree, action: PyTree, /) -> Array:
        """Return values: `[N, A]` of each number of a discrete action, or `[N]` of `obs` `[N, ...]` or of `action`.

        Continuous actions are given as elements of the action space `[N, ...]`; any others are not looked at.
        """
        ...


class PolicyFns(NamedTuple):
    """Action distributions and values of an agent's policy; a text in place of a function says why there is none."""

    distribution: DistributionFn | str
    value: ValueFn | str
    head: Head | None = None
    """The head of whose raw actions `distribution` is; `None`: they are numbers."""
    privileged: bool = False
    """Whether `value` sees the privileged state."""
    keep_critic: StripFn | None = None
    """For an agent whose `strip` leaves out the critics that `value` needs: another one that keeps them."""
    state_value: ValueFn | None = None
    """For an agent that also learns state values: the values returned where no action is given."""


class AgentFns(NamedTuple):
    """Optional functions of an agent."""

    stop: StopFn | None = None
    measure: MeasureFn | None = None
    """Metrics of a rollout, in addition to those of its updates; a non-finite one does not cause an update to be
    skipped."""
    behave: ActFn | None = None
    """A variant of `act` that also returns the log-probability `[N]` of the action in `extras["log_prob"]`.

    Actors on the host use it, because their parameters may be older than the learner's; `prepare` then uses these
    log-probabilities."""
    refresh: RefreshFn | None = None
    """Called before each epoch, if given; what it returns replaces what `prepare` returned."""
    imitate: ImitateFn | None = None
    """For an agent that learns from demonstrations beside its rollouts."""
    publish: StripFn | None = None
    """For an agent that must keep more than `strip` does to explore, as critics with memories: what actors are sent."""


class AgentInfo(NamedTuple):
    """What strategies and the host need to know of an agent."""

    settings: Mapping[str, Any] | None = None
    """Settings that rebuild the agent, except its `custom` parts, by the names of its settings dataclass; `None` for an
    agent made in another way."""
    custom: tuple[str, ...] = ()
    """Names of the arguments that supplied parts made in Python, such as `make_network`."""
    exploration: tuple[str, ...] = ()
    """Names of the hyperparameters that control exploration; actors set all of them to the same number."""
    scheduled: tuple[str, ...] = ()
    """Names of the hyperparameters that follow a schedule, see `jaxrl.agents.schedules`."""
    offline: bool = False
    """Whether the agent is meant for offline learning, from a fixed data set."""
    next_actions: bool = False
    """Whether the `extras` of transitions must be their `NextAction`, which data alone have."""
    bounds_returns: bool = False
    """Whether the agent derives the range of possible returns from rewards and discounts, which requires a discount
    below 1."""


class Agent(NamedTuple):
    """Pure functions over an agent's state: parameters and, as arrays, the hyperparameters that a sweep can vary.

    A custom agent needs the first five fields.
    """

    name: str
    init: AgentInit
    act: ActFn
    update: UpdateFn
    strip: StripFn
    prepare: PrepareFn | None = None
    """Given by on-policy agents, and only by them."""
    memory: PyTree | None = None
    """For a recurrent agent: its memory at the start of an episode, for one environment. Its `act` takes a
    `RecurrentObs` as observation, and returns the next memory in `extras["memory"]`."""
    window: SequenceSpec | None = None
    """The sequences of replay that a recurrent agent learns from; its batches are then `[B, L, ...]`. `None`: single
    items."""
    apply: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    """Its networks as pure functions, by the names of the fields of its state that hold their variables, as in
    `agent.apply["policy"](state.policy, obs)`. They take observations as the agent sees them. `docs/extending.md` has a
    table of what those of each agent return."""
    policy_fns: PolicyFns | None = None
    """Distributions and values that loaded policies return in addition to actions."""
    fns: AgentFns = AgentFns()
    info: AgentInfo = AgentInfo()

    def __repr__(self) -> str:
        return format_repr("Agent", self.name, format_settings(self.info.settings))


@runtime_checkable
class Tunable(Protocol):
    """The state of an agent whose hyperparameters can change: they are its field `hyper`, a named tuple of arrays."""

    @property
    def hyper(self) -> PyTree: ...
    def _replace(self, **fields: PyTree) -> PyTree: ...


class Maker(partial[Agent]):
    """An `AgentMaker` bound to its name and settings: it shows those that are not the defaults."""

    def __repr__(self) -> str:
        # Of the bound arguments, the settings are the only dataclass.
        (config,) = (arg for arg in self.args if is_dataclass(arg) and not isinstance(arg, type))
        usual, name = type(config)(), type(config).__name__.removesuffix("Config").lower()
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        changed = {name: value for name, value in given.items() if value != getattr(usual, name)}
        return format_repr(self.args[0] if isinstance(self.args[0], str) else name, format_settings(changed))


class AgentMaker(Protocol):
    """An agent without its environment, as `jaxrl.dqn(...)` and its siblings return it."""

    def __call__(self, spec: EnvSpec, /) -> Agent:
        """Build the agent for the spaces of `spec`; raise `SettingsError` if it does not support them."""
        ...

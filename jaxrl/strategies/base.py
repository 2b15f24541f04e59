"""Strategies, policies and the loop over iterations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl import shards
from jaxrl.distributions import Distribution
from jaxrl.envs.base import Env
from jaxrl.envs.host import HostEnv
from jaxrl.metrics import Metrics, Stat, merge_stats, stack_metrics, stat, unstack_metrics
from jaxrl.parsing import format_repr
from jaxrl.spaces import EnvSpec
from jaxrl.strategies.guard import Health
from jaxrl.trees import Array, Key, PyTree
from jaxrl.tuning import Override
from jaxrl.types import Step, Transition
from jaxrl.xla import PLATFORMS, shaped_for
from jaxrl.xla.ahead import iterate_hoisted
from jaxrl.xla.carry import PACKED_WITHIN, scan
from jaxrl.xla.packing import in_place

if TYPE_CHECKING:
    from jaxrl.strategies.host_actors import ActorFns


class StrategyInit(Protocol):
    def __call__(self, key: Key, /) -> PyTree:
        """Return the training state after the warm-up. The key is consumed; `state.key` is the stream of iterations."""
        ...


class StrategyStep(Protocol):
    def __call__(self, state: PyTree, key: Key, t: Array, /, *arrival: PyTree) -> tuple[PyTree, Metrics]:
        """Run iteration `t` (uint32); return the new state and the metrics.

        The key is `fold(state.key, t)` and is consumed. `t` is a scalar, also in a population. With actors, `arrival`
        is their batch.
        """
        ...


class PolicyOutputs(NamedTuple):
    """Action probabilities, log-probabilities and values of a policy at the current observation.

    Each function is `(params, carry, opt_step, action) -> array`, or raises `SettingsError` if the agent has none.
    """

    probabilities: Callable[[PyTree, PyTree, Array, PyTree], PyTree]
    """`[N, A]`, a tuple of these for `MultiDiscrete` actions; ignores `action`."""
    log_prob: Callable[[PyTree, PyTree, Array, PyTree], Array]
    """`[N]`, of `action`."""
    values: Callable[[PyTree, PyTree, Array, PyTree], Array]
    """`[N, A]` or `[N]`; `action` may be `()`."""
    privileged: bool = False
    """Whether values need the privileged observation."""
    distribution: Callable[[PyTree, PyTree, Array, PyTree], Distribution] | None = None
    """Distributions of raw actions `[N]`; ignores `action`. `None` if the policy has none."""


class Policy(NamedTuple):
    """Acting with a trained state, in `N` environments at once."""

    spec: EnvSpec
    """Spaces of the environment, before processing."""
    params: Callable[[PyTree], PyTree]
    """`(state) -> params`: the part of the training state needed to act greedily."""
    begin: Callable[[PyTree, PyTree], PyTree]
    """`(params, obs) -> carry` at the first observations."""
    act: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    """`(params, carry) -> (carry, action)`: act greedily."""
    observe: Callable[[PyTree, PyTree, Step], PyTree]
    """`(params, carry, step) -> carry` after a step of the environments."""
    sample: Callable[[PyTree, PyTree, Key, Array], tuple[PyTree, PyTree]] | None = None
    """`(params, carry, key, opt_step) -> (carry, action)`: act as in training; the key is consumed."""
    outputs: PolicyOutputs | None = None
    """Probabilities and values; `None` for a custom policy."""
    params_with_critic: Callable[[PyTree], PyTree] | None = None
    """`(state) -> params` including the critics that values need; `None` if `params` has them."""

    def __repr__(self) -> str:
        return format_repr("Policy", self.spec.name)


class EpisodeEnds(NamedTuple):
    """Episodes that ended in an iteration; leaves `[T, N]`."""

    length: Array
    """Int32: length of the episode that ended at this step, negative if truncated; 0 if none ended."""
    total: Array
    """Float32: its return; arbitrary if none ended."""


class CollectInfo(NamedTuple):
    """Metrics and episode ends of collected steps."""

    metrics: Metrics
    episodes: EpisodeEnds


class CollectFn(Protocol):
    def __call__(
        self, state: PyTree, key: Key, t: Array, /, *arrival: PyTree
    ) -> tuple[PyTree, Transition, CollectInfo]:
        """Collect the transitions `[T, N, ...]` of iteration `t`: act, step the environments and process.

        The key is consumed. With actors, `arrival` is their batch, which is only unpacked.
        """
        ...


class LearnerState(Protocol):
    """The part of a training state that learning reads and changes; a `NamedTuple` with these fields and any others."""

    @property
    def agent(self) -> PyTree: ...
    @property
    def health(self) -> Health: ...
    def _replace(self, *args: Any, **fields: Any) -> Any: ...


class ReplayLearnerState(LearnerState, Protocol):
    """The same with replay."""

    @property
    def buffer(self) -> PyTree: ...
    @property
    def processor(self) -> PyTree:
        """Only read: its statistics scale the items of a batch."""
        ...


class LearnFn(Protocol):
    def __call__(self, state: PyTree, items: Transition, key: Key, t: Array, /) -> tuple[PyTree, Metrics]:
        """Run the optimisation steps of iteration `t` with its transitions `items` `[T, N, ...]`.

        Does not read the environments in the state. The key is consumed.
        """
        ...


@dataclass(frozen=True)
class ComposedStep:
    """An iteration in two halves, `Strategy.step` of `off_policy` and `on_policy`: collect, then learn.

    To change one of them: `strategy._replace(step=ComposedStep(strategy.collect, my_learn))`.
    """

    collect: CollectFn
    learn: LearnFn

    def __call__(self, state: PyTree, key: Key, t: Array, /, *arrival: PyTree) -> tuple[PyTree, Metrics]:
        state, metrics, _ = self.with_episodes(state, key, t, *arrival)
        return state, metrics

    def with_episodes(self, state: PyTree, key: Key, t: Array, *arrival: PyTree) -> tuple[PyTree, Metrics, EpisodeEnds]:
        """Run iteration `t`; return also the episodes that ended. The key is consumed."""
        # In shards each has its own key: they step different environments and sample different batches.
        collect_key, learn_key = jax.random.split(shards.shard_key(key))
        state, items, info = self.collect(state, collect_key, t, *arrival)
        state, metrics = self.learn(state, items, learn_key, t)
        return state, {**info.metrics, **metrics}, info.episodes


class BufferRefill(NamedTuple):
    """Refilling of a replay buffer that a checkpoint was saved without."""

    blocks: Callable[[int], range]
    """`(t) -> range`: indices of the pushed blocks that the buffer holds after `t` iterations; of data, none."""
    fill: Callable[[PyTree, Array, Array], PyTree]
    """`(state, first, stop) -> state`: push blocks `first .. stop-1` (uint32) of new exploration into an empty
    buffer. With `actor_fns` it stays empty: actors fill it."""


class StateFns(NamedTuple):
    """Optional functions with which the host reads and changes a training state."""

    health: Callable[[PyTree], Health] | None = None
    """`(state) -> health`: counters of skipped updates. A run rolls back after too many in a row; without it, never."""
    reseed: Callable[[PyTree, int], PyTree] | None = None
    """`(state, n) -> state` for retry `n`, with new randomness and reset counters; required with `health`."""
    set_hyperparams: Callable[[PyTree], PyTree] | None = None
    """`(state) -> state`: set the hyperparameters that the state holds as arrays to their current values."""
    warm_up: Callable[[PyTree, Key], PyTree] | None = None
    """`(state, key) -> state`: the warm-up of `init(key)` anew, with agent and statistics of `state`, for initial
    weights that replace those of `init`. `None` where the warm-up does not depend on them, or is left to actors."""
    refill: BufferRefill | None = None
    """Refilling of the field `buffer`; `None`: checkpoints must hold it."""
    capacity: int | None = None
    """Capacity of the field `buffer` in transitions; `None` without one."""


class Placement(NamedTuple):
    """Placement of a training state on devices, see `jaxrl.strategies.sharded`."""

    shards: int = 1
    """Number of shards, each with its own environments."""
    by_shard: Callable[[PyTree], PyTree] | None = None
    """`(state) -> bools`: whether a leaf is per shard, `[V, ...]`, or replicated; required with `shards`."""
    devices: int = 1
    """Number of devices for the shards; results do not depend on it."""
    first_device: int = 0
    """Index of the first device, if there are several; the others follow it."""


class EvalFns(NamedTuple):
    """How a policy is evaluated, if not by episodes in the environment of the training."""

    evaluate: Callable[[PyTree, Key], tuple[Array, Array, Array]] | None = None
    """`(params, key) -> (returns, lengths, finished)`, each `[E]`: evaluation without an environment. Pure."""
    env: Env | HostEnv | None = None
    """Another environment to evaluate in."""


class StrategyInfo(NamedTuple):
    """What the host needs to know of a strategy."""

    settings: Mapping[str, Any] | None = None
    """Settings that rebuild it; `custom` lists parts made in Python. `None` for a custom strategy."""
    notes: tuple[str, ...] = ()
    """Adjustments made to the settings, for the log."""
    overrides: Mapping[str, Override] = MappingProxyType({})
    """Hyperparameters that replace those of `init`, by setting name."""
    bounds_returns: bool = False
    """As `AgentInfo.bounds_returns`."""


class Strategy(NamedTuple):
    """One pure training step, composed of environment, processor, buffer and agent.

    A custom strategy needs the first four fields, and a state with a field `key`, the stream of iterations. The host
    reads the rest of the state only through `state_fns`. Evaluation needs `policy` and either an environment (`env` or
    `evaluation.env`) or `evaluation.evaluate`, or a custom evaluator.
    """

    init: StrategyInit
    step: StrategyStep
    env_steps_per_step: int
    opt_steps_per_step: int
    warmup_env_steps: int = 0
    """Environment steps that `init` takes."""
    env: Env | HostEnv | None = None
    policy: Policy | None = None
    evaluation: EvalFns = EvalFns()
    actor_fns: "ActorFns | None" = None
    """Programs of actors for environments on the host; `step` then also takes their batch, and `init` leaves the
    warm-up to them."""
    state_fns: StateFns = StateFns()
    placement: Placement = Placement()
    info: StrategyInfo = StrategyInfo()

    @property
    def train_env(self) -> Env | HostEnv | None:
        """The environment of the training, on the device, on the host or in actors."""
        return self.actor_fns.env if self.actor_fns is not None else self.env

    @property
    def eval_env(self) -> Env | HostEnv | None:
        """The environment of evaluations and films: that of the training, unless `evaluation` names another."""
        return self.evaluation.env or self.train_env

    @property
    def host_env(self) -> HostEnv | None:
        """The environment that it trains in, if its state is not part of the training state: a resumed run starts new
        episodes."""
        if self.actor_fns is not None:
            return self.actor_fns.env
        # Without steps, the environment is for evaluation alone.
        stepped = isinstance(self.env, HostEnv) and self.env.vectorise is not None and self.env_steps_per_step > 0
        return self.env if stepped else None  # type: ignore[return-value]

    @property
    def collect(self) -> CollectFn | None:
        """First half of `step`; `None` where it is not composed, as with shards or offline: single episodes are then
        not recorded."""
        return self.step.collect if isinstance(self.step, ComposedStep) else None

    @property
    def learn(self) -> LearnFn | None:
        """Second half of `step`, the same wherever the steps were taken; goes with `collect`."""
        return self.step.learn if isinstance(self.step, ComposedStep) else None

    def __repr__(self) -> str:
        return format_repr(
            "Strategy",
            format_name(self),
            f"{self.opt_steps_per_step} optimisation and {self.env_steps_per_step} environment steps an iteration",
            f"{self.placement.shards} shards" if self.placement.shards > 1 else None,
        )


def format_name(strategy: Strategy) -> str:
    """Return a readable name: algorithm and environment."""
    # A custom strategy may have neither; offline, the policy has the spec of the data.
    spec = next((part.spec for part in (strategy.policy, strategy.env) if part is not None), None)
    return f"{(strategy.info.settings or {}).get('algo', 'custom')} on {'data' if spec is None else spec.name}"


def fold(key: Key, t: Array | int) -> Key:
    """Return the key of iteration `t` of the stream `key`."""
    return jax.random.fold_in(key, t)


def iterate(body: Callable[[PyTree, Key, Array], PyTree], key: Key, carry: PyTree, start: Array, stop: Array) -> PyTree:
    """Run `carry = body(carry, fold(key, t), t)` for `t` from `start` to `stop`.

    `start` and `stop` are traced, so one program serves all lengths, and the result does not depend on how a run is
    divided into calls.
    """
    start, stop = (jnp.asarray(t, jnp.uint32) for t in (start, stop))
    carry = in_place(carry)  # a loop's carry must not move
    # Plain form: one loop, without random numbers drawn ahead.
    if not shaped_for(*PLATFORMS):
        return jax.lax.fori_loop(start, stop, lambda t, carry: body(carry, fold(key, t), t), carry)
    return iterate_hoisted(body, lambda t: fold(key, t), carry, start, stop)


def repeat(
    body: Callable[[PyTree, PyTree, Array], tuple[PyTree, Metrics]],
    state: PyTree,
    xs: PyTree,
    first: Array,
    times: int,
) -> tuple[PyTree, Metrics]:
    """Run `state, metrics = body(state, xs[i], first + i)` for `times` inputs, such as keys; merge the metrics."""
    if times == 1:  # no loop, which would copy its carry
        return body(state, jax.tree.map(lambda x: x[0], xs), first)

    def step(carry: tuple[PyTree, Stat], inputs: tuple[PyTree, Array]) -> tuple[tuple[PyTree, Stat], None]:
        state, sums = carry
        state, metrics = body(state, *inputs)
        return (state, merge_stats(sums, stack_metrics(metrics))), None

    # Metrics are merged in the carry: stacked as outputs, every number of every metric would need its own kernel.
    inputs = (xs, first + jnp.arange(times, dtype=jnp.uint32))
    # The carry starts without measurements, so the names of the metrics must be known before the loop.
    _, like = jax.eval_shape(body, state, *jax.tree.map(lambda x: x[0], inputs))
    empty = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(like),)), stat(jnp.float32(0), False))
    (state, sums), _ = scan(step, (state, empty), inputs, on=PACKED_WITHIN)
    return state, unstack_metrics(sums, like)

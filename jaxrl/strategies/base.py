"""The interface of a strategy, the policy that it trains, and the loop over its iterations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl import shards
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

if TYPE_CHECKING:
    from jaxrl.strategies.remote import Remote


class StrategyInit(Protocol):
    def __call__(self, key: Key, /) -> PyTree:
        """Return the training state before iteration 0, warmed up. The key is consumed; `state.key` is the stream's."""
        ...


class StrategyStep(Protocol):
    def __call__(self, state: PyTree, key: Key, t: Array, /, *arrival: PyTree) -> tuple[PyTree, Metrics]:
        """Make iteration `t` (uint32); return the new state and its metrics.

        The key is `fold(state.key, t)`, and is consumed. `t` is one scalar, also for a population. With actors, what
        they have sent follows.
        """
        ...


class PolicyOutputs(NamedTuple):
    """What a policy tells beside its action, at the observation that it is to act on.

    Each function is `(params, carry, opt_step, action) -> numbers`; where there are none, it raises `SettingsError`.
    """

    probabilities: Callable[[PyTree, PyTree, Array, PyTree], PyTree]
    """`[N, A]`, or for an action of several numbers a tuple of such; `action` is not looked at."""
    log_prob: Callable[[PyTree, PyTree, Array, PyTree], Array]
    """`[N]`, of the actions given."""
    values: Callable[[PyTree, PyTree, Array, PyTree], Array]
    """`[N, A]` or `[N]`; `()` as action stands for none."""
    privileged: bool = False
    """Whether values see the privileged state."""


class Policy(NamedTuple):
    """How to act with what a strategy trained, for `N` environments at once."""

    spec: EnvSpec
    """The spaces of the environment, not those after processing."""
    params: Callable[[PyTree], PyTree]
    """`(state) -> params`: the part of a training state that acting greedily needs."""
    begin: Callable[[PyTree, PyTree], PyTree]
    """`(params, obs) -> carry`: start at the first observations."""
    act: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    """`(params, carry) -> (carry, action)`: choose greedily."""
    observe: Callable[[PyTree, PyTree, Step], PyTree]
    """`(params, carry, step) -> carry`: take in what the action led to."""
    sample: Callable[[PyTree, PyTree, Key, Array], tuple[PyTree, PyTree]] | None = None
    """`(params, carry, key, opt_step) -> (carry, action)`: choose as in training; the key is consumed."""
    outputs: PolicyOutputs | None = None
    """What it tells of probabilities and values."""
    params_with_critic: Callable[[PyTree], PyTree] | None = None
    """`(state) -> params`, with what values need beside; `None`: acting needs all of it."""

    def __repr__(self) -> str:
        return format_repr("Policy", self.spec.name)


class EpisodeEnds(NamedTuple):
    """Which steps of an iteration ended an episode; leaves `[T, N]`."""

    length: Array
    """Int32: steps of the episode that ended here, negative if it was truncated; 0 where none ended."""
    total: Array
    """Float32: its return; where none ended, any number."""


class CollectInfo(NamedTuple):
    """What `collect` reports besides the transitions."""

    metrics: Metrics
    episodes: EpisodeEnds


class CollectFn(Protocol):
    def __call__(
        self, state: PyTree, key: Key, t: Array, /, *arrival: PyTree
    ) -> tuple[PyTree, Transition, CollectInfo]:
        """Act, step the environments and process for iteration `t`; return transitions `[T, N, ...]` in order.

        The key is consumed. With actors, what they have sent follows: it is unpacked, and no actions are taken.
        """
        ...


class LearnFn(Protocol):
    def __call__(self, state: PyTree, items: Transition, key: Key, t: Array, /) -> tuple[PyTree, Metrics]:
        """Make the optimisation steps of iteration `t`; `items` are the transitions `[T, N, ...]` of its steps.

        Does not read the environments in the state. The key is consumed.
        """
        ...


class BufferRefill(NamedTuple):
    """How a replay buffer is filled again that a checkpoint was saved without."""

    blocks: Callable[[int], range]
    """`(t) -> numbers`: which of the blocks pushed so far the buffer holds after `t` iterations."""
    fill: Callable[[PyTree, Array, Array], PyTree]
    """`(state, first, stop) -> state`: push blocks `first .. stop-1` (uint32) into a new buffer, acting as the agent
    explores. With `remote` it stays empty: actors fill it."""


class StateFns(NamedTuple):
    """Optional functions on a training state, by which the host reads and changes it."""

    health: Callable[[PyTree], Health] | None = None
    """`(state) -> health`: how updates have been going. A run goes back where too many in a row were skipped; without
    it, never."""
    reseed: Callable[[PyTree, int], PyTree] | None = None
    """`(state, n) -> state`: the state for try number `n`, with other randomness and healthy; goes with `health`."""
    set_hyperparams: Callable[[PyTree], PyTree] | None = None
    """`(state) -> state`: give those settings that live in a state as arrays their present values."""
    refill: BufferRefill | None = None
    """How the field `buffer` of a state is filled again; `None` where checkpoints must hold it."""
    capacity: int | None = None
    """Transitions in that field; `None` without one."""


class Placement(NamedTuple):
    """How the state of a strategy lies on devices, see `jaxrl.strategies.shards`."""

    shards: int = 1
    """Parts with environments of their own."""
    by_shard: Callable[[PyTree], PyTree] | None = None
    """`(state) -> bools`: whether every shard has a leaf for itself, in rows `[V, ...]`; goes with `shards`."""
    devices: int = 1
    """Devices over which shards are spread in a run; they change no bit of it."""
    first_device: int = 0
    """Index of the first of these devices, if they are several; the rest follow it."""


class Strategy(NamedTuple):
    """One pure training step, composed of environment, processor, buffer and agent.

    A strategy of one's own needs the first four fields; its state must have a field `key`, the key of its stream. What
    else the host asks of a state, it asks by `state_fns`.
    Evaluation needs `policy` and either `env` or `judge`, or an evaluator of one's own.
    """

    init: StrategyInit
    step: StrategyStep
    env_steps_per_step: int
    opt_steps_per_step: int
    warmup_env_steps: int = 0
    """Environment steps that `init` takes."""
    env: Env | HostEnv | None = None
    policy: Policy | None = None
    judge: Callable[[PyTree, Key], tuple[Array, Array, Array]] | None = None
    """`(params, key) -> (returns, lengths, finished)`, each `[E]`: how to judge where there is no `env`. Pure."""
    eval_env: Any = None
    """The environment to evaluate in, if it is not that of the training."""
    notes: tuple[str, ...] = ()
    """Adjustments made to the settings, for the log."""
    settings: Mapping[str, Any] | None = None
    """What rebuilds it; parts made by hand are listed under `custom`. `None` for a strategy made by hand."""
    remote: "Remote | None" = None
    """What actors do, where environments are on the host; `step` then also takes what they have sent, and `init` leaves
    the warm-up to them."""
    state_fns: StateFns = StateFns()
    placement: Placement = Placement()
    values: Mapping[str, Override] = MappingProxyType({})
    """Hyperparameters that `init` puts into a state in place of its own, by the names of their settings."""
    collect: CollectFn | None = None
    """First half of `step`, see `compose_step`. `None` where `step` is not composed, as with shards or offline: single
    episodes are then not recorded."""
    learn: LearnFn | None = None
    """Second half of `step`, the same wherever the steps were taken; goes with `collect`."""

    def __repr__(self) -> str:
        return format_repr(
            "Strategy",
            format_name(self),
            f"{self.opt_steps_per_step} optimisation and {self.env_steps_per_step} environment steps an iteration",
            f"{self.placement.shards} shards" if self.placement.shards > 1 else None,
        )


def format_name(strategy: Strategy) -> str:
    """Return the algorithm and the environment of a strategy, for a person to read."""
    spec = next((part.spec for part in (strategy.policy, strategy.env) if part is not None), None)
    return f"{(strategy.settings or {}).get('algo', 'custom')} on {'data' if spec is None else spec.name}"


def fold(key: Key, t: Array | int) -> Key:
    """Return the key of iteration `t` of the stream of `key`."""
    return jax.random.fold_in(key, t)


def run_iteration(
    collect: CollectFn, learn: LearnFn, state: PyTree, key: Key, t: Array, *arrival: PyTree
) -> tuple[PyTree, Metrics, EpisodeEnds]:
    """Make iteration `t`: collect, then learn; return also which episodes ended. The key is consumed."""
    collect_key, learn_key = jax.random.split(shards.shard_key(key))
    state, items, info = collect(state, collect_key, t, *arrival)
    state, metrics = learn(state, items, learn_key, t)
    return state, {**info.metrics, **metrics}, info.episodes


@dataclass(frozen=True)
class ComposedStep:
    """`Strategy.step` made of its two halves."""

    collect: CollectFn
    learn: LearnFn

    def __call__(self, state: PyTree, key: Key, t: Array, /, *arrival: PyTree) -> tuple[PyTree, Metrics]:
        state, metrics, _ = run_iteration(self.collect, self.learn, state, key, t, *arrival)
        return state, metrics


def is_composed(strategy: "Strategy") -> bool:
    """Return whether the step of `strategy` is its `learn` after its `collect`."""
    halves = strategy.step
    return isinstance(halves, ComposedStep) and (halves.collect, halves.learn) == (strategy.collect, strategy.learn)


def compose_step(collect: CollectFn, learn: LearnFn) -> StrategyStep:
    """Return `Strategy.step` of its two halves."""
    return ComposedStep(collect, learn)


def iterate(body: Callable[[PyTree, Key, Array], PyTree], key: Key, carry: PyTree, start: Array, stop: Array) -> PyTree:
    """Run `carry = body(carry, fold(key, t), t)` for `t` from `start` to `stop`.

    `start` and `stop` are traced: one program runs every length, and how a run is cut into calls changes no bit of it.
    """
    start, stop = (jnp.asarray(t, jnp.uint32) for t in (start, stop))
    if not shaped_for(*PLATFORMS):
        return jax.lax.fori_loop(start, stop, lambda t, carry: body(carry, fold(key, t), t), carry)
    return iterate_hoisted(body, lambda t: fold(key, t), carry, start, stop)


def repeat(
    body: Callable[[PyTree, PyTree, Array], tuple[PyTree, Metrics]],
    state: PyTree,
    rows: PyTree,
    first: Array,
    times: int,
) -> tuple[PyTree, Metrics]:
    """Run `state, metrics = body(state, rows[i], first + i)` for each of `times` rows, such as keys."""
    if times == 1:
        return body(state, jax.tree.map(lambda x: x[0], rows), first)

    def one(carry: tuple[PyTree, Stat], xs: tuple[PyTree, Array]) -> tuple[tuple[PyTree, Stat], None]:
        state, sums = carry
        state, metrics = body(state, *xs)
        return (state, merge_stats(sums, stack_metrics(metrics))), None

    # Summed as they come: stacked, every number of every metric would be written by a kernel of its own.
    xs = (rows, first + jnp.arange(times, dtype=jnp.uint32))
    _, like = jax.eval_shape(body, state, *jax.tree.map(lambda x: x[0], xs))
    nothing = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(like),)), stat(jnp.float32(0), False))
    (state, sums), _ = scan(one, (state, nothing), xs, on=PACKED_WITHIN)
    return state, unstack_metrics(sums, like)

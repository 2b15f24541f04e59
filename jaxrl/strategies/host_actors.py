"""Actors for environments on the host, and the learner's side of them.

Actors work in rounds. In each, every actor takes the same number of steps with the same parameters and sends them as
one block; the learner concatenates the blocks of a round in the order of the actors, as if all environments had been
one vector. The parameters of a round depend on its number, never on time, so that asynchronous training, too, is a
function of settings and seed, as far as the environments are.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent
from jaxrl.agents.exploration import EPSILONS
from jaxrl.agents.schedules import Schedule, read_schedule
from jaxrl.envs.agents import require_single_agent
from jaxrl.envs.base import Env, TimeStep, VecEnv, vectorise
from jaxrl.envs.host import HostEnv, on_host
from jaxrl.envs.objects import LIBRARIES, library_of
from jaxrl.errors import SettingsError, check_between, check_count, check_type, require_extra
from jaxrl.metrics import Metrics, Total, stat
from jaxrl.parsing import as_int
from jaxrl.processors.base import Processor
from jaxrl.spaces import EnvSpec, space_zeros, to_zero_based
from jaxrl.strategies import actor
from jaxrl.strategies.actor import Choice, Packed
from jaxrl.strategies.base import CollectInfo, ComposedStep, Strategy
from jaxrl.strategies.interaction import Collector, StepInfo, add_episode_bounds, make_collect_info
from jaxrl.trees import Array, Key, PyTree, tree_repeat
from jaxrl.types import Transition
from jaxrl.xla.packing import Layout, empty, unpack

ENGINES = ("threads", "processes", "ray")
NEEDS_RAY = "actors on other machines"


@dataclass(frozen=True)
class ActorsConfig:
    """Settings of actors, which step environments on the host while a learner optimises."""

    actors: int | None = None
    """Number of actors, each with `num_envs` environments; unset: one for Gymnasium environments,
    none for environments in JAX, which run on the device."""
    send: int = 4
    """Iterations whose steps an actor takes before it sends them as one block; with rollouts, a block is one
    rollout."""
    max_lag: int | None = None
    """Rounds by which the actors' parameters lag behind; 0: actors and learner take turns; unset: 2 with replay, 1 with
    rollouts."""
    sync_interval: int = 1
    """Optimisation steps between updates of the actors' parameters."""
    exploration: tuple[float, ...] = ()
    """Exploration of each actor: in place of epsilon (dqn, pqn) or noise (td3, ddpg); else the temperature at which it
    draws from its policy (1 changes nothing). Given one number e, actor i of A uses e^(1 + 7 i / (A - 1)), as Ape-X
    does; unset: the agent's own settings."""
    exploration_schedule: str = ""
    """Schedule over optimisation steps that these numbers are multiplied by, as in linear(1,0.1,10000); unset: 1."""
    processes: bool = False
    """Step each Gymnasium environment in its own process."""
    actor_timeout: float = 60.0
    """Seconds that one step of an actor's environments may take before the actor counts as hung."""
    actor_engine: str = "threads"
    """Where actors run, with the same bits: in threads of this process; in processes of this machine, where none waits
    for another's Python; or by ray in workers of a Ray cluster, on any of its machines."""
    actor_restarts: int = 0
    """With processes or ray, times that an actor whose process or machine dies is started again from its seed; 0: the
    run ends."""
    open_in_turn: bool = False
    """Open the environments of one actor after those of another, for simulators that cannot begin side by side."""


class ActorFns(NamedTuple):
    """Programs and settings of the actors of a strategy. All functions are pure."""

    env: HostEnv
    config: ActorsConfig
    """With defaults filled in."""
    actors: int
    exploration: tuple[Mapping[str, float], ...]
    """Hyperparameters that replace those of the agent, for each actor."""
    factor: Schedule | None
    """Factor of `exploration`, at the optimisation step of the parameters."""
    num_envs: int
    """Environments per actor."""
    steps: int
    """Steps of each environment per round."""
    prime: int
    """Steps before the first round, until the first n-step transition is complete."""
    fill: int
    """Warm-up rounds."""
    random_fill: bool
    """Whether actions during the warm-up are uniformly random."""
    arrival: PyTree
    """Shapes of an `ActorBatch`, the last argument of `Strategy.step`."""
    result_layout: Layout
    """Layout of the packed steps of host environments, the argument `result` below."""
    begin: Callable[[PyTree, PyTree, PyTree, Array, Key], Packed]
    """`(agent, stats, obs, obs_valid, key) -> window`, an `ActorState` packed into rows of bits."""
    first: Callable[[bool, PyTree, Packed, Key, Array], tuple[Packed, Choice]]
    """`(random, agent, window, key, counters) -> (window, choice)`: begin a round, with uniform actions if `random`.
    The key is the actor's; `counters` are uint32: number of the round and optimisation step of the parameters."""
    next: Callable[[bool, PyTree, Packed, Choice, Key, Packed], tuple[Packed, Choice, Packed]]
    """`(random, agent, window, choice, key, result) -> (window, choice, words)`: process a step and select the next
    actions."""
    last: Callable[[Packed, Choice, Packed], tuple[Packed, Packed, PyTree]]
    """`(window, choice, result) -> (window, words, stats)`: process the last step of a round; `stats` are of its steps
    alone."""
    replace_stats: Callable[[Packed, PyTree], Packed]
    """`(window, stats) -> window` with the merged statistics of all actors."""
    merge_stats: Callable[[PyTree, PyTree], PyTree]
    """`(stats, new_stats) -> stats`"""
    learns: bool
    """Whether the processor has statistics, which are then published during the warm-up, too."""
    publish: Callable[[PyTree], tuple[PyTree, PyTree]]
    """`(state) -> (agent, stats)`: the part of the training state needed to act."""
    push: Callable[[bool, PyTree, PyTree, Array], PyTree] | None
    """`(learns, state, arrival, t) -> state`: push block `t`, and merge its statistics if it `learns` from them."""


class HostActors(NamedTuple):
    """Environments on the host and their actors."""

    env: HostEnv
    config: ActorsConfig
    """With defaults filled in."""
    actors: int


def check_actors(config: ActorsConfig) -> None:
    """Raise `SettingsError` if a setting is invalid or settings contradict each other."""
    check_count("actors", 1 if config.actors is None else config.actors)
    for name in ("send", "sync_interval"):
        check_count(name, getattr(config, name))
    check_count("max_lag", 0 if config.max_lag is None else config.max_lag, least=0)
    check_between("actor_timeout", config.actor_timeout, 0.1, 1e6)
    if config.actor_engine not in ENGINES:
        raise SettingsError(f"actor_engine is {config.actor_engine!r}; expected threads, processes or ray")
    check_count("actor_restarts", config.actor_restarts, least=0)
    if not isinstance(config.exploration, tuple | list):
        raise SettingsError(
            f"exploration is {config.exploration!r}; expected a tuple of one number, or of one an actor"
        )
    for value in config.exploration:
        check_between("exploration", value, 0.0, 1e6)
    if config.exploration_schedule and not config.exploration:
        raise SettingsError(
            "exploration_schedule is what exploration is multiplied by, which is unset; set it, or give the agent's "
            "own setting a schedule"
        )
    if config.exploration_schedule:
        read_schedule(str(config.exploration_schedule))
    if len(config.exploration) not in (0, 1, config.actors or 1):
        raise SettingsError(
            f"exploration has {len(config.exploration)} numbers for {config.actors or 1} actors; "
            "give one, or one an actor"
        )


def settings_of_actors(host_actors: HostActors | None) -> dict[str, Any]:
    """Return the settings of actors by name; empty without actors."""
    return {} if host_actors is None else asdict(host_actors.config)


def split_env(env: Env | HostEnv, config: ActorsConfig | None, max_lag: int) -> tuple[Env | HostEnv, HostActors | None]:
    """Return the learner's environment, and those of the actors, or `None` if compiled programs step `env`.

    With actors, the learner has a placeholder with the same spaces. `max_lag` is the default of that setting.
    """
    require_env(env)
    check_type("actors", config, ActorsConfig, "jaxrl.ActorsConfig(...)")
    config = config or ActorsConfig()
    check_actors(config)
    if config.actors is None and (isinstance(env, Env) or env.vectorise is not None):
        return env, None
    if isinstance(env, Env) and any(callable(value) for value in env.values.values()):
        raise SettingsError(f"{env.spec.name} has values that follow a schedule, which actors do not; leave actors out")
    if isinstance(env, Env) and config.processes:
        raise SettingsError(f"{env.spec.name} is written in JAX; processes are for environments of Gymnasium")
    if config.actor_engine == "ray":
        require_extra("ray", NEEDS_RAY)
    elif config.actor_engine == "threads" and config.actor_restarts:
        raise SettingsError(
            f"actor_restarts is {config.actor_restarts}, but threads die with their process; set actor_engine to "
            "processes or ray, or leave actor_restarts out"
        )
    host = on_host(require_single_agent(env, "actors")) if isinstance(env, Env) else env
    count = config.actors or 1
    lag, schedule = max_lag if config.max_lag is None else config.max_lag, config.exploration_schedule
    config = replace(config, actors=count, max_lag=lag, exploration_schedule=schedule and str(schedule))
    return placeholder_env(host.spec)._replace(settings=host.settings), HostActors(host, config, count)


def make_shard_envs(
    env: Env | HostEnv,
    num_envs: int,
    host_actors: HostActors | None,
    resets: str,
    shards: int,
    stagger: bool,
    **divided: int,
) -> tuple[VecEnv, int]:
    """Return the environments of one shard, and the number of shards; `num_envs` are those of each actor, if any.

    `stagger` has no effect on environments without a time limit, and on those on the host.

    Raises:
      SettingsError: environments, or one of `divided`, do not divide among the shards; shards or `resets` are not
        supported with environments on the host.
    """
    check_count("num_envs", num_envs)
    shards, total = as_int(shards), num_envs * (host_actors.actors if host_actors else 1)
    _check_shards(shards, num_envs=total, **divided)
    stateful = host_actors is not None or isinstance(env, HostEnv)
    if stateful and shards > 1:
        raise SettingsError("shards divide environments written in JAX; give others actors, and leave shards at 1")
    resets = _check_resets(resets, stateful)
    if isinstance(env, HostEnv):
        assert env.vectorise is not None  # otherwise it has actors, and `env` is a placeholder
        return env.vectorise(total), shards
    if host_actors is None:
        return vectorise(env, total // shards, resets, stagger and env.spec.time_limit is not None), shards
    # A placeholder for shapes: it counts from 0, while discrete spaces of the host may have another start.
    like = env._replace(spec=to_zero_based(env.spec))
    return vectorise(like, total // shards, resets)._replace(spec=env.spec), shards


def _check_shards(shards: int, **divided: int) -> None:
    """Raise `SettingsError`, naming the nearest settings, unless `shards` divides every one of `divided`."""
    check_count("shards", shards)
    for name, value in divided.items():
        if value % shards:
            below = value - value % shards
            nearest = " or ".join(str(x) for x in (below, below + shards) if x)
            raise SettingsError(f"{name} {value} does not divide into {shards} shards; set it to {nearest}")


def _check_resets(resets: str, stateful: bool) -> str:
    """Return the kind of `resets` on the device; environments on the host reset themselves.

    Raises:
      SettingsError: environments on the host with other than fresh resets.
    """
    if not stateful:
        return resets
    if resets not in ("auto", "fresh"):
        raise SettingsError(
            f"resets is {resets!r}; environments that are not written in JAX reset only what ended: leave resets out"
        )
    return "fresh"


def require_env(env: object) -> None:
    """Raise `SettingsError`, with a remedy, unless `env` is an environment of jaxrl."""
    if isinstance(env, Env | HostEnv):
        return
    if isinstance(env, str):
        raise SettingsError(f"env is the name {env!r}; build the environment first, by jaxrl.make_env({env!r})")
    kind = library_of(env)
    if kind is not None:
        raise SettingsError(f"env is {type(env).__name__} of {kind}; give jaxrl.{LIBRARIES[kind].maker}(env) instead")
    if hasattr(env, "observation_space") and hasattr(env, "step"):
        raise SettingsError(
            f"env is {type(env).__name__} with Gymnasium's interface; give jaxrl.gymnasium_env(NAME) instead, or keep "
            "the loop and drive it by jaxrl.Session"
        )
    raise SettingsError(f"env is {type(env).__name__}; expected an environment, as jaxrl.make_env(...) returns it")


def placeholder_env(spec: EnvSpec) -> Env:
    """Return an environment with the spaces of `spec`, all of whose observations are zeros."""
    zeros = lambda: space_zeros(spec.observation_space)
    return Env(
        spec=spec,
        reset=lambda key: ((), zeros()),
        step=lambda state, action, key: ((), TimeStep(zeros(), 0.0, False)),
    )


def resolve_exploration(host_actors: HostActors, agent: Agent) -> list[dict[str, float]]:
    """Return the exploration hyperparameters of each actor.

    Raises:
      SettingsError: the agent has no such hyperparameter, or it follows a schedule already; or an epsilon exceeds 1.
    """
    count, given, names = host_actors.actors, host_actors.config.exploration, agent.info.exploration
    if given and not names:
        raise SettingsError(f"{agent.name} has no setting by which it explores; leave exploration unset")
    if given and (both := sorted({*names} & {*agent.info.scheduled})):
        raise SettingsError(
            f"exploration sets agent.{both[0]} of each actor, which also follows a schedule; keep one: "
            "exploration_schedule is for both"
        )
    if names == EPSILONS:
        for value in given:
            check_between("exploration", value, 0.0, 1.0)
    if len(given) == 1 < count:
        # Horgan et al. 2018, https://arxiv.org/abs/1803.00933, section 4.1.
        given = tuple(given[0] ** (1 + 7 * i / (count - 1)) for i in range(count))
    return [dict.fromkeys(names, value) for value in given] or [{}] * count


# --- actors -----------------------------------------------------------------------------------------------------


class ActorBatch(NamedTuple):
    """Steps of all actors for one iteration of the learner."""

    words: dict[str, Array]
    """Steps `[T, N, W]` of all actors' environments, packed."""
    lag: Array
    """Float32: optimisation steps since the parameters of the actors were published."""
    fresh: PyTree = ()
    """Statistics of these steps from each actor's processor, leaves `[A, ...]`."""


def make_actor_fns(
    collector: Collector,
    host_actors: HostActors,
    *,
    steps: int,
    fill: int,
    random_fill: bool,
    push: Any,
) -> ActorFns:
    """Return the programs of actors that take `steps` steps per round; `collector` has the environments of all.

    The first `fill` rounds are warm-up, which `push(learns, state, arrival, t)` writes.
    """
    processor = collector.processor.for_actors
    collector = collector._replace(processor=processor)
    # Used for its shapes, and to check that the statistics of several actors can be merged.
    nothing = init_stats(processor, host_actors)
    jax.eval_shape(processor.merge_stats, nothing, nothing)  # raises if unsupported
    num_envs = collector.env.num_envs // host_actors.actors
    # The collector of a single actor, which has its share of the environments.
    one = collector._replace(env=collector.env._replace(num_envs=num_envs))
    layouts = actor.Layouts(
        actor.make_step_layout(collector), actor.make_state_layout(one, nothing), actor.make_result_layout(one)
    )
    # Only the shapes of a round's batch; nothing is allocated.
    words = lambda: tree_repeat(empty(layouts.step, collector.env.num_envs).words, steps)
    fresh = tree_repeat(nothing, host_actors.actors)
    arrival = jax.eval_shape(lambda: ActorBatch(words(), jnp.float32(0), fresh))
    sent = collector.agent.fns.publish or collector.agent.strip
    return ActorFns(
        env=host_actors.env,
        config=host_actors.config,
        actors=host_actors.actors,
        exploration=tuple(resolve_exploration(host_actors, collector.agent)),
        factor=read_schedule(host_actors.config.exploration_schedule)
        if host_actors.config.exploration_schedule
        else None,
        num_envs=num_envs,
        steps=steps,
        prime=collector.processor.horizon,
        fill=fill,
        random_fill=random_fill,
        arrival=arrival,
        result_layout=layouts.result,
        begin=partial(actor.begin, one, layouts.state),
        first=partial(actor.first, one, layouts.state),
        next=partial(actor.next, one, layouts),
        last=partial(actor.last, one, layouts),
        replace_stats=partial(actor.replace_stats, one, layouts.state),
        merge_stats=processor.merge_stats,
        learns=bool(jax.tree.leaves(nothing)),
        publish=lambda state: (sent(state.agent), processor.get_stats(state.processor)),
        push=push,
    )


def init_stats(processor: Processor, host_actors: HostActors) -> PyTree:
    """Return the statistics of `processor` before the first observation."""
    return processor.for_actors.get_stats(processor.init(space_zeros(host_actors.env.spec.observation_space, 1)))


def reset_stats(processor: Processor, state: PyTree, host_actors: HostActors) -> PyTree:
    """Return `state` of the learner's `processor` with the statistics from before the first observation."""
    return processor.for_actors.set_stats(state, init_stats(processor, host_actors))


# --- learner ----------------------------------------------------------------------------------------------------


def with_actors(
    strategy: Strategy,
    collector: Collector,
    host_actors: HostActors,
    *,
    steps: int,
    begin: Callable[[Key], Any],
    fill: int = 0,
    random_fill: bool = False,
    push: Callable[[Any, Transition, Array], Any] | None = None,
    empty: Callable[[Any], Any] | None = None,
) -> Strategy:
    """Return `strategy` with actors that collect instead of the device; learning is unchanged.

    Args:
      strategy: a strategy with `collect` and `learn`.
      collector: the agent in the version of actors, with the environments of all actors.
      host_actors: these environments.
      steps: steps of each environment per iteration, which is one round.
      begin: `(key) -> state` before the warm-up.
      fill: warm-up rounds.
      random_fill: whether actions during the warm-up are uniformly random.
      push: `(state, items, t) -> state`: push the transitions of a warm-up round.
      empty: `(state) -> state` with an empty buffer, which actors then fill.
    """
    assert strategy.learn is not None
    taking: Any = partial(_receive, collector, host_actors)

    def init(key: Key) -> PyTree:
        state = begin(key)
        # The statistics sent by the actors include the first observations, so the learner's start empty.
        return state._replace(processor=reset_stats(collector.processor, state.processor, host_actors))

    def push_arrival(learns: bool, state: PyTree, arrival: PyTree, t: Array) -> PyTree:
        learnt, items, _ = taking(state, None, t, arrival)
        assert push is not None
        return push(learnt if learns else state, items, t)

    state_fns = strategy.state_fns._replace(warm_up=None)
    if state_fns.refill and empty:
        # The actors refill it with new rounds.
        state_fns = state_fns._replace(refill=state_fns.refill._replace(fill=lambda state, first, stop: empty(state)))
    return strategy._replace(
        init=init,
        step=ComposedStep(taking, strategy.learn),
        state_fns=state_fns,
        actor_fns=make_actor_fns(
            collector, host_actors, steps=steps, fill=fill, random_fill=random_fill, push=push_arrival if push else None
        ),
    )


def _receive(
    collector: Collector, host_actors: HostActors, state: Any, key: Key | None, t: Array, arrival: ActorBatch
) -> tuple[Any, Transition, CollectInfo]:
    """Unpack the batch of the actors, as `CollectFn`."""
    processor = merge_all_stats(collector.processor, state.processor, arrival.fresh)
    items, seen, metrics = unpack_batch(collector, host_actors, arrival)
    items = add_episode_bounds(items, seen.terminated | seen.truncated)
    return state._replace(processor=processor), items, make_collect_info(seen, metrics)


def merge_all_stats(processor: Processor, state: PyTree, fresh: PyTree) -> PyTree:
    """Return `state` of `processor` with the statistics `fresh` `[A, ...]` of each actor merged in, in order."""
    if not jax.tree.leaves(fresh):
        return state
    processor = processor.for_actors
    # In the order of the actors: merging is not associative in floating point.
    stats = processor.get_stats(state)
    for i in range(jax.tree.leaves(fresh)[0].shape[0]):
        stats = processor.merge_stats(stats, jax.tree.map(lambda x, i=i: x[i], fresh))
    return processor.set_stats(state, stats)


def unpack_batch(
    collector: Collector, host_actors: HostActors, arrival: ActorBatch
) -> tuple[Transition, StepInfo, Metrics]:
    """Return transitions and `StepInfo`, leaves `[T, N, ...]`, and metrics of each actor."""
    items, seen = jax.vmap(partial(unpack, actor.make_step_layout(collector)))(arrival.words)
    done = seen.terminated | seen.truncated
    metrics: dict[str, Any] = {"staleness": arrival.lag}
    each = collector.env.num_envs // host_actors.actors
    for i in range(host_actors.actors):
        # The environments of one actor lie side by side, in the order of the actors.
        own = slice(i * each, (i + 1) * each)
        metrics[f"actor{i}/env_steps"] = Total(jnp.int32(done[:, own].size))
        metrics[f"actor{i}/episodes"] = Total(done[:, own].sum(dtype=jnp.int32))
        metrics[f"actor{i}/episode_return"] = stat(seen.info["episode_return"][:, own], done[:, own])
    return items, seen, metrics

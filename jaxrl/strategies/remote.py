"""Environments that are not on the device: what actors do on the host, and how what they send comes to the learner.

Actors go in rounds. In each, every actor takes the same number of steps with the same parameters and sends them as one
block; the learner takes up the blocks of a round together, in the order of the actors, as if all environments had been
one vector. Which parameters a round is played with is a matter of its number alone, never of time: so asynchronous
training, too, is a function of settings and seed, as far as the environments are.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent
from jaxrl.agents.schedules import Schedule, read_schedule
from jaxrl.envs.agents import require_single_agent
from jaxrl.envs.base import Env, TimeStep, VecEnv, vectorise
from jaxrl.envs.host import HostEnv, on_host
from jaxrl.envs.objects import LIBRARIES, library_of
from jaxrl.errors import SettingsError, check_between, check_count, require_extra
from jaxrl.metrics import Metrics, Total, stat
from jaxrl.parsing import as_int
from jaxrl.processors.base import Processor
from jaxrl.spaces import EnvSpec, space_zeros, to_zero_based
from jaxrl.strategies import actor
from jaxrl.strategies.actor import Choice, Packed
from jaxrl.strategies.base import CollectInfo, Strategy, compose_step
from jaxrl.strategies.interaction import Acting, StepInfo, add_episode_bounds, make_collect_info
from jaxrl.strategies.shards import check_shards
from jaxrl.trees import Array, Key, PyTree
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


class Remote(NamedTuple):
    """What actors do for a strategy whose environments are on the host, in rounds. All functions are pure."""

    env: HostEnv
    config: ActorsConfig
    """With nothing unset."""
    actors: int
    exploration: tuple[Mapping[str, float], ...]
    """For each actor, what takes the place of hyperparameters of the agent."""
    factor: Schedule | None
    """What that is multiplied by, at the optimisation step of the parameters."""
    num_envs: int
    """Environments of each actor."""
    steps: int
    """Steps of each environment in a round."""
    prime: int
    """Steps before the first round, of which no transition is complete."""
    fill: int
    """Rounds of warm-up."""
    random_fill: bool
    """Whether actions during it are uniformly random."""
    arrival: PyTree
    """Shapes of what the learner is given beside the key: the last argument of `Strategy.step`."""
    result_layout: Layout
    """How an actor tells programs what its environments did: a `Step` of each, as a row of bits."""
    begin: Callable[[PyTree, PyTree, PyTree, Key], Packed]
    """`(agent, learnt, obs, key) -> window`, which is a `ActorState` as one row of bits."""
    first: Callable[[bool, PyTree, Packed, Key, Array], tuple[Packed, Choice]]
    """`(random, agent, window, key, place) -> (window, choice)`: begin a round, with `random` of uniform actions; the
    key is the actor's, and `place` uint32: the number of the round, and the optimisation step of the parameters."""
    next: Callable[[bool, PyTree, Packed, Choice, Key, Packed], tuple[Packed, Choice, Packed]]
    """`(random, agent, window, choice, key, told) -> (window, choice, words)`: take a step in, and choose for the
    next."""
    last: Callable[[Packed, Choice, Packed], tuple[Packed, Packed, PyTree]]
    """`(window, choice, told) -> (window, words, fresh)`: take a round's last step in; `fresh` was learnt in it."""
    replace_stats: Callable[[Packed, PyTree], Packed]
    """`(window, learnt) -> window`: with what was learnt by all in place of what it has learnt, and nothing fresh."""
    merge_stats: Callable[[PyTree, PyTree], PyTree]
    """`(learnt, fresh) -> learnt`"""
    learns: bool
    """Whether the processor learns anything; what it has learnt is then published also during the warm-up."""
    publish: Callable[[PyTree], tuple[PyTree, PyTree]]
    """`(state) -> (agent, learnt)`: what acting needs of a training state."""
    push: Callable[[PyTree, PyTree, Array], PyTree] | None
    """`(state, arrival, t) -> state`: take up round `t` of the warm-up."""


class HostActors(NamedTuple):
    """Environments on the host."""

    env: HostEnv
    config: ActorsConfig
    """With nothing unset."""
    actors: int


def check_actors(config: ActorsConfig) -> None:
    """Raise `SettingsError` for what cannot be."""
    check_count("actors", 1 if config.actors is None else config.actors)
    for name in ("send", "sync_interval"):
        check_count(name, getattr(config, name))
    check_count("max_lag", 0 if config.max_lag is None else config.max_lag, least=0)
    check_between("actor_timeout", config.actor_timeout, 0.1, 1e6)
    if config.actor_engine not in ENGINES:
        raise SettingsError(f"actor_engine is {config.actor_engine!r}; expected threads, processes or ray")
    check_count("actor_restarts", config.actor_restarts, least=0)
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
    """Return the settings of actors as those of a run; without any, none."""
    return {} if host_actors is None else asdict(host_actors.config)


def split_env(env: Env | HostEnv, config: ActorsConfig | None, max_lag: int) -> tuple[Env, HostActors | None]:
    """Return the environment as the learner sees it, and those which actors step, if there are to be any.

    `max_lag` is that of actors whose settings leave it unset.
    """
    require_env(env)
    config = config or ActorsConfig()
    check_actors(config)
    if isinstance(env, Env) and config.actors is None:
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
    env: Env, num_envs: int, host_actors: HostActors | None, resets: str, shards: int, **divided: int
) -> tuple[VecEnv, int]:
    """Return the environments of one shard, of `num_envs` or of so many for each actor, and the number of shards.

    Raises:
      SettingsError: they do not divide among the shards, nor does what else is to be `divided`; shards of environments
        on the host, which are divided among actors; starts that environments on the host do not have.
    """
    shards, total = as_int(shards), num_envs * (host_actors.actors if host_actors else 1)
    check_shards(shards, num_envs=total, **divided)
    if host_actors is not None and shards > 1:
        raise SettingsError("shards divide environments on the device; use actors for those on the host, or shards 1")
    resets = _check_resets(resets, host_actors)
    if host_actors is None:
        return vectorise(env, total // shards, resets), shards
    # Of environments on the host only the shapes are here; their numbers may start elsewhere.
    like = env._replace(spec=to_zero_based(env.spec))
    return vectorise(like, total // shards, resets)._replace(spec=env.spec), shards


def _check_resets(resets: str, host_actors: HostActors | None) -> str:
    """Return where episodes begin on the device; environments on the host begin theirs by themselves.

    Raises:
      SettingsError: anything but fresh starts is asked of environments on the host.
    """
    if host_actors is None:
        return resets
    if resets not in ("auto", "fresh"):
        raise SettingsError(f"resets is {resets!r}; environments on the host reset only what ended: leave resets out")
    return "fresh"


def require_env(env: object) -> None:
    """Raise `SettingsError`, with what to give instead, unless `env` is an environment of jaxrl."""
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
    """Return an environment of which only the shapes are true."""
    zeros = lambda: space_zeros(spec.observation_space)
    return Env(
        spec=spec,
        reset=lambda key: ((), zeros()),
        step=lambda state, action, key: ((), TimeStep(zeros(), 0.0, False)),
    )


def resolve_exploration(host_actors: HostActors, agent: Agent) -> list[dict[str, float]]:
    """Return, for each actor, what takes the place of the hyperparameters by which `agent` explores.

    Raises:
      SettingsError: the agent explores by nothing that could be set, or by what follows a schedule of the agent.
    """
    count, given, names = host_actors.actors, host_actors.config.exploration, agent.exploration
    if given and not names:
        raise SettingsError(f"{agent.name} has no setting by which it explores; leave exploration unset")
    if given and (both := sorted({*names} & {*agent.scheduled})):
        raise SettingsError(
            f"exploration sets agent.{both[0]} of each actor, which also follows a schedule; keep one: "
            "exploration_schedule is for both"
        )
    if len(given) == 1 < count:
        # Horgan et al. 2018, https://arxiv.org/abs/1803.00933, section 4.1.
        given = tuple(given[0] ** (1 + 7 * i / (count - 1)) for i in range(count))
    return [dict.fromkeys(names, value) for value in given] or [{}] * count


# --- what an actor does -----------------------------------------------------------------------------------------


class ActorBatch(NamedTuple):
    """What the learner is given for an iteration."""

    words: dict[str, Array]
    """Steps `[T, N, W]` of all actors' environments, packed."""
    lag: Array
    """Float32, optimisation steps made since the parameters that the steps were taken with."""
    fresh: PyTree = ()
    """What the processor of each actor has learnt of these steps, leaves `[A, ...]`."""


def make_remote(
    acting: Acting,
    host_actors: HostActors,
    *,
    steps: int,
    fill: int = 0,
    random_fill: bool = False,
    push: Any = None,
) -> Remote:
    """Say what actors do: `actors` stand before the environments of all, and take `steps` steps in a round.

    `fill` rounds of warm-up come first; `push(state, arrival, t)` takes them up.
    """
    processor = acting.processor.for_actors
    acting = acting._replace(processor=processor)
    nothing = init_stats(processor, host_actors)
    jax.eval_shape(processor.merge_stats, nothing, nothing)  # raises where it cannot be done
    num_envs = acting.env.num_envs // host_actors.actors
    one = acting._replace(env=acting.env._replace(num_envs=num_envs))
    layouts = actor.Layouts(
        actor.make_step_layout(acting), actor.make_state_layout(one, nothing), actor.make_result_layout(one)
    )
    words = lambda: _repeat_steps(empty(layouts.step, acting.env.num_envs).words, steps)
    fresh = jax.tree.map(lambda x: jnp.broadcast_to(x, (host_actors.actors, *x.shape)), nothing)
    arrival = jax.eval_shape(lambda: ActorBatch(words(), jnp.float32(0), fresh))
    sent = acting.agent.publish or acting.agent.strip
    return Remote(
        env=host_actors.env,
        config=host_actors.config,
        actors=host_actors.actors,
        exploration=tuple(resolve_exploration(host_actors, acting.agent)),
        factor=read_schedule(host_actors.config.exploration_schedule)
        if host_actors.config.exploration_schedule
        else None,
        num_envs=num_envs,
        steps=steps,
        prime=acting.processor.horizon,
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


def _repeat_steps(words: dict[str, Array], steps: int) -> dict[str, Array]:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (steps, *x.shape)), words)


def init_stats(processor: Processor, host_actors: HostActors) -> PyTree:
    """Return what `processor` has learnt before the first observation."""
    return processor.for_actors.get_stats(processor.init(space_zeros(host_actors.env.spec.observation_space, 1)))


def reset_stats(processor: Processor, state: PyTree, host_actors: HostActors) -> PyTree:
    """Return the `state` of `processor` in the learner, before its actors have seen anything."""
    return processor.for_actors.set_stats(state, init_stats(processor, host_actors))


# --- what the learner makes of it -------------------------------------------------------------------------------


def with_actors(
    strategy: Strategy,
    acting: Acting,
    host_actors: HostActors,
    *,
    steps: int,
    begin: Callable[[Key], Any],
    fill: int = 0,
    random_fill: bool = False,
    push: Callable[[Any, Transition, Array], Any] | None = None,
    empty: Callable[[Any], Any] | None = None,
) -> Strategy:
    """Return `strategy` with actors who collect for it; it learns as it did.

    Args:
      strategy: what collects on the device and learns.
      acting: the agent as actors have it, before the environments of all.
      host_actors: these environments.
      steps: steps of each environment in an iteration, which is a round.
      begin: `(key) -> state`, before the warm-up.
      fill: rounds of warm-up.
      random_fill: whether actions during it are uniformly random.
      push: `(state, items, t) -> state`: write the transitions of a round of the warm-up.
      empty: `(state) -> state`: with an empty buffer, which actors then fill.
    """
    assert strategy.learn is not None
    taking: Any = partial(_receive, acting, host_actors)

    def init(key: Key) -> PyTree:
        state = begin(key)
        return state._replace(processor=reset_stats(acting.processor, state.processor, host_actors))

    def take_up(state: PyTree, arrival: PyTree, t: Array) -> PyTree:
        state, items, _ = taking(state, None, t, arrival)
        assert push is not None
        return push(state, items, t)

    state_fns = strategy.state_fns
    if state_fns.refill and empty:
        state_fns = state_fns._replace(refill=state_fns.refill._replace(fill=lambda state, first, stop: empty(state)))
    return strategy._replace(
        init=init,
        step=compose_step(taking, strategy.learn),
        collect=taking,
        state_fns=state_fns,
        remote=make_remote(
            acting, host_actors, steps=steps, fill=fill, random_fill=random_fill, push=take_up if push else None
        ),
    )


def _receive(
    acting: Acting, host_actors: HostActors, state: Any, key: Key | None, t: Array, arrival: ActorBatch
) -> tuple[Any, Transition, CollectInfo]:
    """Take up what actors have sent, as `CollectFn`."""
    processor = merge_all_stats(acting.processor, state.processor, arrival.fresh)
    items, seen, metrics = unpack_batch(acting, host_actors, arrival)
    items = add_episode_bounds(items, seen.terminated | seen.truncated)
    return state._replace(processor=processor), items, make_collect_info(seen, metrics)


def merge_all_stats(processor: Processor, state: PyTree, fresh: PyTree) -> PyTree:
    """Return the `state` of `processor` with what each actor has learnt, leaves of `fresh` `[A, ...]`, one by one."""
    if not jax.tree.leaves(fresh):
        return state
    processor = processor.for_actors
    learnt = processor.get_stats(state)
    for i in range(jax.tree.leaves(fresh)[0].shape[0]):
        learnt = processor.merge_stats(learnt, jax.tree.map(lambda x, i=i: x[i], fresh))
    return processor.set_stats(state, learnt)


def unpack_batch(acting: Acting, host_actors: HostActors, arrival: ActorBatch) -> tuple[Transition, StepInfo, Metrics]:
    """Unpack what arrived: transitions and what was seen, leaves `[T, N, ...]`, and metrics of each actor."""
    items, seen = jax.vmap(partial(unpack, actor.make_step_layout(acting)))(arrival.words)
    done = seen.terminated | seen.truncated
    metrics: dict[str, Any] = {"staleness": arrival.lag}
    each = acting.env.num_envs // host_actors.actors
    for i in range(host_actors.actors):
        own = slice(i * each, (i + 1) * each)
        metrics[f"actor{i}/env_steps"] = Total(jnp.int32(done[:, own].size))
        metrics[f"actor{i}/episodes"] = Total(done[:, own].sum(dtype=jnp.int32))
        metrics[f"actor{i}/episode_return"] = stat(seen.info["episode_return"][:, own], done[:, own])
    return items, seen, metrics

"""Off-policy training: act, step the environments, process, push, sample, update; one pure step of it all."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.buffers.dataset import Dataset
from jaxrl.buffers.prioritised import prioritised
from jaxrl.buffers.uniform import uniform
from jaxrl.envs.base import Env, VecEnvState
from jaxrl.envs.host import HostEnv
from jaxrl.envs.resets import resets_note
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics
from jaxrl.parsing import as_int
from jaxrl.processors.base import Processor
from jaxrl.registry import defaults_for
from jaxrl.shards import shard_key
from jaxrl.strategies.base import BufferRefill, CollectInfo, StateFns, Strategy, compose_step, fold
from jaxrl.strategies.demos import notes_of_demos, settings_of_demos, with_demos
from jaxrl.strategies.guard import Health, get_health, init_health, reseed
from jaxrl.strategies.interaction import (
    Acting,
    EnvLoopState,
    StepInfo,
    build_agent,
    connect,
    make_collect_info,
    make_default_processor,
    open_envs,
    take_steps,
)
from jaxrl.strategies.policy import make_policy
from jaxrl.strategies.remote import ActorsConfig, make_shard_envs, settings_of_actors, split_env, with_actors
from jaxrl.strategies.replay import (
    UpdateSchedule,
    adapt_buffer,
    make_replay_transform,
    make_update_schedule,
    min_rows,
    optimise,
    set_goal_fn,
)
from jaxrl.strategies.settings import set_hyperparams, settings_of
from jaxrl.strategies.shards import sharded
from jaxrl.trees import Array, Key, PyTree, row_struct
from jaxrl.types import Transition


class OffPolicyState(NamedTuple):
    """The whole truth about a run at the end of an iteration."""

    key: Key
    """The stream of iterations: never advanced, folded with the iteration's number."""
    agent: PyTree
    env: VecEnvState
    processor: PyTree
    buffer: PyTree
    health: Health


REFILL_STREAM = 2**32 - 4
"""Folded into the key of a run's stream to fill its buffer again: no iteration has this number."""


class Replay(NamedTuple):
    """What learns from replay, wherever the steps are taken."""

    agent: Agent
    processor: Processor
    buffer: Buffer
    schedule: UpdateSchedule


def off_policy(
    env: Env | HostEnv,
    agent: AgentMaker,
    *,
    buffer: Buffer | None = None,
    processor: Processor | None = None,
    num_envs: int | None = None,
    opt_interval: int | None = None,
    updates: int = 1,
    warmup: int = 1_000,
    random_warmup: bool = True,
    actors: ActorsConfig | None = None,
    resets: str = "auto",
    demos: Dataset | None = None,
    demo_share: float = 0.5,
    shards: int = 1,
) -> Strategy:
    """Compose off-policy training, as of DQN.

    Args:
      env: one environment; `num_envs` copies of it run side by side.
      agent: what `jaxrl.dqn(...)` returns.
      buffer: what `jaxrl.uniform(...)` or `jaxrl.prioritised(...)` returns.
      processor: what makes transitions of steps.
      num_envs: environments `N`.
      opt_interval: environment steps per optimisation step. At or above `num_envs` it must be a multiple of it (several
        vector steps, then one update); below, it must divide it (one vector step, then several updates).
        These four, left out, are what suits the agent: `uniform()`, `one_step()`, 10 and 10; for `rainbow` prioritised
        replay of 3 steps; for `sac`, `td3` and `ddpg` a larger buffer and batch, and an update for every step of one
        environment.
      updates: optimisation steps made each time that one is due.
      warmup: environment steps before the first optimisation; at least those of one batch are taken.
      random_warmup: whether actions during it are uniformly random, or those of the agent exploring.
      actors: who steps environments on the host, each `num_envs` of them; left out, an environment in JAX runs on the
        device, and any other with one actor.
      resets: where episodes begin, see `jaxrl.vectorise`; in environments on the host always `fresh`.
      demos: what `jaxrl.load_dataset(...)` returns: steps that others have taken, to be learnt from beside those of the
        buffer, whose batches stay as large as they are.
      demo_share: share of `demos` in what is learnt from, above 0 and below 1.
      shards: parts into which environments, buffer and batches are divided; all learn together, and as many devices can
        take part in a run as there are shards, without changing a bit of it.

    Raises:
      SettingsError: what does not divide (with the nearest settings that do), spaces that the agent cannot take.
    """
    env, host_actors = split_env(env, actors, max_lag=2)
    known = build_agent(agent, processor, env.spec)
    suits = defaults_for(known.name, "off_policy")
    num_envs, opt_interval = (
        as_int(suits[name] if value is None else value)
        for name, value in (("num_envs", num_envs), ("opt_interval", opt_interval))
    )
    updates, warmup, buffer = as_int(updates), as_int(warmup), make_default_buffer(suits) if buffer is None else buffer
    vector, shards = make_shard_envs(env, num_envs, host_actors, resets, shards, batch_size=buffer.batch_size)
    acting = Acting(vector, *connect(known, (processor or make_default_processor(suits)).for_replay))
    ring = _make_shard_buffer(buffer, acting, env, shards)
    replay_buffer = with_demos(ring, demos, demo_share, acting, env)
    schedule = make_update_schedule(
        horizon=acting.processor.horizon,
        least=min_rows(ring, vector.num_envs) * shards,
        num_envs=vector.num_envs * shards,
        opt_interval=opt_interval,
        updates=updates,
        warmup=warmup,
        random_warmup=random_warmup,
        times=host_actors.config.send if host_actors else 1,
    )
    replay = Replay(acting.agent, acting.processor, replay_buffer, schedule._replace(num_envs=vector.num_envs))
    taking, learning = partial(collect, acting, replay.schedule), partial(learn, replay)
    capacity = replay_buffer.capacity(replay.schedule.rows)
    one = Strategy(
        init=partial(_init, acting, replay),
        step=compose_step(taking, learning),
        collect=taking,
        learn=learning,
        env_steps_per_step=replay.schedule.rows,
        opt_steps_per_step=replay.schedule.updates,
        warmup_env_steps=replay.schedule.warmup_env_steps,
        env=env,
        policy=make_policy(acting.agent, acting.processor, env.spec),
        notes=(
            *schedule.notes(buffer._replace(window=ring.window), schedule.rows, warmup),
            *resets_note(resets, acting.env.resets),
            *notes_of_demos(demos, replay_buffer.batch_size * shards, buffer.batch_size),
        ),
        settings=settings_of(
            acting.agent,
            acting.processor,
            env.spec,
            env.settings,
            num_envs=num_envs,
            resets=acting.env.resets,
            **settings_of_actors(host_actors),
            opt_interval=opt_interval,
            updates=updates,
            warmup=warmup,
            random_warmup=random_warmup,
            shards=shards,
            buffer=buffer.settings,
            **settings_of_demos(demos, demo_share),
        ),
        state_fns=StateFns(
            health=get_health,
            reseed=reseed,
            set_hyperparams=partial(set_hyperparams, acting),
            refill=BufferRefill(partial(replay.schedule.blocks, capacity), partial(_refill, acting, replay)),
            capacity=capacity,
        ),
    )
    if host_actors is not None:
        return with_actors(
            one,
            acting,
            host_actors,
            steps=schedule.vector_steps,
            begin=partial(_begin, acting, replay),
            fill=schedule.fill,
            random_fill=random_warmup,
            push=partial(push, replay),
            empty=partial(_reset_buffer, acting, replay),
        )
    return sharded(one, shards, ("env", "processor", "buffer"))


def _make_shard_buffer(buffer: Buffer, acting: Acting, env: Env | HostEnv, shards: int) -> Buffer:
    """Return the buffer of one shard as the agent learns from it."""
    _require_replay(acting.agent)
    goal = env.goal if isinstance(env, Env) else None
    ring = set_goal_fn(_divide_buffer(buffer, shards), acting.processor, env.spec.name, goal)
    return adapt_buffer(acting.agent, ring, acting.env.num_envs)


def _require_replay(agent: Agent) -> None:
    """Raise `SettingsError` if the agent learns from rollouts."""
    if agent.prepare is not None:
        name = agent.name
        raise SettingsError(f"{name} learns on-policy, without a buffer; compose it by on_policy(env, {name}(...))")


def make_default_buffer(settings: Mapping[str, Any]) -> Buffer:
    """Return the buffer of the settings that suit an agent, see `registry.usual`."""
    parts = dict(settings.get("buffer", {}))
    make = prioritised if parts.pop("prioritised", False) else uniform
    return make(**parts)


def _divide_buffer(buffer: Buffer, shards: int) -> Buffer:
    """Return the buffer of one of so many `shards`; raise `SettingsError` if it cannot be divided."""
    if shards == 1:
        return buffer
    if buffer.settings is None or buffer.shard is None:
        raise SettingsError("a buffer of your own cannot be divided into shards; leave shards at 1")
    return buffer.shard(shards)


# --- the training step ------------------------------------------------------------------------------------------


def collect(
    acting: Acting, schedule: UpdateSchedule, state: OffPolicyState, key: Key, t: Array
) -> tuple[OffPolicyState, Transition, CollectInfo]:
    """Act, step the environments and process, `vector_steps` times; return the transitions `[T, N, ...]`."""
    state, items, seen = _take_steps(
        acting, state, key, schedule.vector_steps, _first_opt_step(schedule, t), random=False
    )
    return state, items, make_collect_info(seen)


def learn(replay: Replay, state: Any, items: Transition, key: Key, t: Array) -> tuple[Any, Metrics]:
    """Push the transitions `[T, N, ...]` of iteration `t`, then sample and update, `schedule.updates` times.

    `state` is a `NamedTuple` with the fields `agent`, `processor`, `buffer` and `health`. The key is consumed.
    """
    pushes = replay.schedule.fill + jnp.asarray(t, jnp.uint32)
    # Push before sampling: the other way round XLA must keep the old buffer, and copies it every iteration.
    state = push(replay, state, items, pushes)
    statistics = make_replay_transform(replay.processor, state.processor)
    first_opt, updates = _first_opt_step(replay.schedule, t), replay.schedule.updates
    return optimise(replay.agent, replay.buffer, state, key, pushes + 1, first_opt, updates, statistics)


def push(replay: Replay, state: Any, items: Transition, pushes: Array) -> Any:
    """Write the transitions `[T, N, ...]` of an iteration, of the warm-up too, after `pushes` earlier ones."""
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), _drop_bounds(replay.agent, items))
    return state._replace(buffer=replay.buffer.push(state.buffer, rows, pushes))


def _drop_bounds(agent: Agent, items: Transition) -> Transition:
    """Return what replay holds of transitions: single items have no order, so nothing tells of the steps around."""
    return items if agent.window is not None else items._replace(is_first=(), is_last=())


def _first_opt_step(schedule: UpdateSchedule, t: Array) -> Array:
    return jnp.asarray(t, jnp.uint32) * schedule.updates


def _take_steps(
    acting: Acting, state: OffPolicyState, key: Key, steps: int, opt_step: Array, random: bool
) -> tuple[OffPolicyState, Transition, StepInfo]:
    loop = EnvLoopState(state.env, state.processor)
    loop, items, seen = take_steps(acting, state.agent, opt_step, loop, key, steps, random)
    return state._replace(env=loop.env, processor=loop.processor), items, seen


# --- the beginning ----------------------------------------------------------------------------------------------


def _init(acting: Acting, replay: Replay, key: Key) -> OffPolicyState:
    """Reset, fill the processor's windows, and warm the buffer up."""
    schedule, state = replay.schedule, _begin(acting, replay, key)
    prime_key, fill_key = map(shard_key, jax.random.split(key, 5)[3:])
    warm_up = partial(_take_steps, acting, opt_step=jnp.uint32(0), random=schedule.random_warmup)

    def prime(t: Array, state: OffPolicyState) -> OffPolicyState:
        """Take a vector step whose transitions are not complete yet."""
        return warm_up(state, fold(prime_key, t), 1)[0]

    def fill(t: Array, state: OffPolicyState) -> OffPolicyState:
        state, items, _ = warm_up(state, fold(fill_key, t), schedule.vector_steps)
        made: OffPolicyState = push(replay, state, items, t)
        return made

    if schedule.horizon:
        state = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(schedule.horizon), prime, state)
    # Unlike `iterate`, plain loops: they run once, and compile in half the time.
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(schedule.fill), fill, state)


def _begin(acting: Acting, replay: Replay, key: Key) -> OffPolicyState:
    """Return the state before the warm-up."""
    stream, agent_key, env_key, *_ = jax.random.split(key, 5)
    agent = acting.agent.init(agent_key)
    loop, items = open_envs(acting, agent, shard_key(env_key))
    return OffPolicyState(stream, agent, loop.env, loop.processor, init_buffer(replay, items), init_health())


def init_buffer(replay: Replay, items: Transition) -> PyTree:
    """Return an empty buffer for iterations whose vector steps make transitions like `items`, shapes `[N, ...]`."""
    if replay.agent.window is not None and isinstance(items.is_first, tuple):
        raise SettingsError(
            f"processor: its transitions have no is_first and is_last, and {replay.agent.name} learns from sequences; "
            "set both, as jaxrl.one_step() does"
        )
    schedule, one = replay.schedule, row_struct(_drop_bounds(replay.agent, items))
    return replay.buffer.init(one, schedule.rows, schedule.lag, schedule.num_envs)


def _reset_buffer(acting: Acting, replay: Replay, state: OffPolicyState) -> OffPolicyState:
    """Return `state` with a new buffer."""
    _, items = open_envs(acting, state.agent, state.key)  # its shapes alone are asked for; nothing of it is computed
    return state._replace(buffer=init_buffer(replay, items))


def _refill(acting: Acting, replay: Replay, state: OffPolicyState, first: Array, stop: Array) -> OffPolicyState:
    """Fill a new buffer with what the agent meets as it explores from where its environments stand."""
    schedule, key = replay.schedule, fold(fold(state.key, REFILL_STREAM), stop)
    opt_step = _first_opt_step(schedule, jnp.asarray(stop, jnp.uint32) - schedule.fill)

    def fill(number: Array, state: OffPolicyState) -> OffPolicyState:
        key_now = fold(key, number)
        state, items, _ = _take_steps(acting, state, key_now, schedule.vector_steps, opt_step, random=False)
        made: OffPolicyState = push(replay, state, items, number)
        return made

    start = _reset_buffer(acting, replay, state)
    return jax.lax.fori_loop(jnp.asarray(first, jnp.uint32), jnp.asarray(stop, jnp.uint32), fill, start)

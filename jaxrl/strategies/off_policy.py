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
from jaxrl.envs.resets import note
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics
from jaxrl.processors.base import Processor
from jaxrl.registry import usual
from jaxrl.shards import merged, own
from jaxrl.strategies.base import Refill, Strategy, Telling, fold
from jaxrl.strategies.demos import notes_of_demos, settings_of_demos, with_demos
from jaxrl.strategies.guard import Health, health_of, healthy, reseed
from jaxrl.strategies.interaction import (
    Acting,
    EnvLoopState,
    StepInfo,
    collect,
    episode_metrics,
    interact,
    introduce,
    join,
    open_envs,
    step_of,
    telling_step,
    usual_processor,
)
from jaxrl.strategies.policy import make_policy
from jaxrl.strategies.remote import (
    ActorsConfig,
    Arrival,
    HostActors,
    Remote,
    arrived,
    learnt_by_all,
    of_one_shard,
    remote,
    settings_of_actors,
    stage,
    untaught,
)
from jaxrl.strategies.replay import (
    UpdateSchedule,
    applied,
    learn,
    least_rows,
    sampled_for,
    told_goals,
    update_schedule,
)
from jaxrl.strategies.settings import retune, settings_of
from jaxrl.strategies.shards import sharded
from jaxrl.trees import Array, Key, PyTree, row_struct
from jaxrl.types import Transition
from jaxrl.written import whole


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


class _Parts(NamedTuple):
    acting: Acting
    buffer: Buffer
    schedule: UpdateSchedule
    host_actors: HostActors | None
    """The environments on the host, if they are there."""


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
    env, host_actors = stage(env, actors, max_lag=2)
    known = introduce(agent, processor, env.spec)
    suits = usual(known.name, "off_policy")
    num_envs, opt_interval = (
        whole(suits[name] if value is None else value)
        for name, value in (("num_envs", num_envs), ("opt_interval", opt_interval))
    )
    updates, warmup, buffer = whole(updates), whole(warmup), usual_buffer(suits) if buffer is None else buffer
    vector, shards = of_one_shard(env, num_envs, host_actors, resets, shards, batch_size=buffer.batch_size)
    bound = Acting(vector, *join(known, (processor or usual_processor(suits)).for_replay))
    ring = _ring_of_one_shard(buffer, bound, env, shards)
    learnt_from = with_demos(ring, demos, demo_share, bound, env)
    schedule = update_schedule(
        horizon=bound.processor.horizon,
        least=least_rows(ring, vector.num_envs) * shards,
        num_envs=vector.num_envs * shards,
        opt_interval=opt_interval,
        updates=updates,
        warmup=warmup,
        random_warmup=random_warmup,
        times=host_actors.config.send if host_actors else 1,
    )
    parts = _Parts(bound, learnt_from, schedule._replace(num_envs=vector.num_envs), host_actors)
    one = Strategy(
        init=partial(_init, parts),
        step=partial(step_of, partial(_advance, parts)),
        env_steps_per_step=parts.schedule.rows,
        opt_steps_per_step=parts.schedule.updates,
        warmup_env_steps=parts.schedule.warmup_env_steps,
        env=env,
        policy=make_policy(bound.agent, bound.processor, env.spec),
        retune=partial(retune, bound),
        notes=(
            *schedule.notes(buffer._replace(window=ring.window), schedule.rows, warmup),
            *note(resets, bound.env.resets),
            *notes_of_demos(demos, learnt_from.batch_size * shards, buffer.batch_size),
        ),
        settings=settings_of(
            bound.agent,
            bound.processor,
            env.spec,
            env.settings,
            num_envs=num_envs,
            resets=bound.env.resets,
            **settings_of_actors(host_actors),
            opt_interval=opt_interval,
            updates=updates,
            warmup=warmup,
            random_warmup=random_warmup,
            shards=shards,
            buffer=buffer.settings,
            **settings_of_demos(demos, demo_share),
        ),
        health=health_of,
        reseed=reseed,
        **_host_side(parts),
    )
    return sharded(one, shards, ("env", "processor", "buffer"))


def _host_side(parts: _Parts) -> dict[str, Any]:
    """Return the fields of a strategy by which the host acts, tells of episodes and fills the buffer anew."""
    capacity = parts.buffer.capacity(parts.schedule.rows)
    return {
        "telling": Telling(partial(telling_step, partial(_advance, parts)), parts.acting.env.num_envs),
        "remote": _remote(parts, parts.host_actors) if parts.host_actors else None,
        "capacity": capacity,
        "refill": Refill(partial(parts.schedule.blocks, capacity), partial(_refill, parts)),
    }


def _ring_of_one_shard(buffer: Buffer, acting: Acting, env: Env | HostEnv, shards: int) -> Buffer:
    """Return the buffer of one shard as the agent learns from it."""
    _require_replay(acting.agent)
    goal = env.goal if isinstance(env, Env) else None
    ring = told_goals(_part_of_buffer(buffer, shards), acting.processor, env.spec.name, goal)
    return sampled_for(acting.agent, ring, acting.env.num_envs)


def _require_replay(agent: Agent) -> None:
    """Raise `SettingsError` if the agent learns from rollouts."""
    if agent.prepare is not None:
        name = agent.name
        raise SettingsError(f"{name} learns on-policy, without a buffer; compose it by on_policy(env, {name}(...))")


def usual_buffer(settings: Mapping[str, Any]) -> Buffer:
    """Return the buffer of the settings that suit an agent, see `registry.usual`."""
    parts = dict(settings.get("buffer", {}))
    make = prioritised if parts.pop("prioritised", False) else uniform
    return make(**parts)


def _part_of_buffer(buffer: Buffer, shards: int) -> Buffer:
    """Return the buffer of one of so many `shards`; raise `SettingsError` if it cannot be divided."""
    if shards == 1:
        return buffer
    if buffer.settings is None or buffer.part is None:
        raise SettingsError("a buffer of your own cannot be divided into shards; leave shards at 1")
    return buffer.part(shards)


# --- the training step ------------------------------------------------------------------------------------------


def _advance(
    parts: _Parts, state: OffPolicyState, key: Key, t: Array, arrival: Arrival | None = None
) -> tuple[OffPolicyState, Metrics, StepInfo]:
    first_opt = jnp.asarray(t, jnp.uint32) * parts.schedule.updates
    collect_key, update_key = jax.random.split(own(key))
    if arrival is None:
        state, items, seen = _collect(parts, state, collect_key, first_opt, random=False)
        metrics = merged(episode_metrics(seen))
    else:
        state = _taught(parts, state, arrival)
        items, seen, metrics = _arrived(parts, arrival)
    pushes = parts.schedule.fill + jnp.asarray(t, jnp.uint32)
    # Push before sampling: the other way round XLA must keep the old buffer, and copies it every iteration.
    state = state._replace(buffer=parts.buffer.push(state.buffer, items, pushes))
    state, learnt = learn(
        parts.acting.agent,
        parts.buffer,
        state,
        update_key,
        pushes + 1,
        first_opt,
        parts.schedule.updates,
        applied(parts.acting.processor, state.processor),
    )
    return state, {**metrics, **learnt}, seen


def _arrived(parts: _Parts, arrival: Arrival) -> tuple[Transition, StepInfo, Metrics]:
    """Return what actors have sent as one block of `rows`: transitions, what was seen, and metrics."""
    assert parts.host_actors is not None
    items, seen, metrics = arrived(parts.acting, parts.host_actors, arrival)
    items, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (items, seen))
    return items, seen, {**episode_metrics(seen), **metrics}


def _taught(parts: _Parts, state: OffPolicyState, arrival: Arrival) -> OffPolicyState:
    """Take up what the processors of actors have learnt."""
    return state._replace(processor=learnt_by_all(parts.acting.processor, state.processor, arrival.fresh))


def _remote(parts: _Parts, host_actors: HostActors) -> Remote:
    def push(state: OffPolicyState, arrival: Arrival, t: Array) -> OffPolicyState:
        state = _taught(parts, state, arrival)
        return state._replace(buffer=parts.buffer.push(state.buffer, _arrived(parts, arrival)[0], t))

    return remote(
        parts.acting,
        host_actors,
        steps=parts.schedule.vector_steps,
        fill=parts.schedule.fill,
        random_fill=parts.schedule.random_warmup,
        push=push,
    )


def _collect(
    parts: _Parts, state: OffPolicyState, key: Key, opt_step: Array, random: bool
) -> tuple[OffPolicyState, Transition, StepInfo]:
    """Take `vector_steps` steps in all environments; return transitions and what was seen as one block of `rows`.

    The key is consumed.
    """
    loop, steps = EnvLoopState(state.env, state.processor), parts.schedule.vector_steps
    if steps == 1:
        only = jax.random.split(key, 1)[0]
        loop, (items, seen) = interact(parts.acting, state.agent, opt_step, random, loop, only)
    else:
        loop, items, seen = collect(parts.acting, state.agent, opt_step, loop, key, steps, random)
        items, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (items, seen))
    return state._replace(env=loop.env, processor=loop.processor), items, seen


# --- the beginning ----------------------------------------------------------------------------------------------


def _init(parts: _Parts, key: Key) -> OffPolicyState:
    """Reset, fill the processor's windows, and warm the buffer up."""
    stream, agent_key, *others = jax.random.split(key, 5)
    env_key, prime_key, fill_key = map(own, others)
    agent = parts.acting.agent.init(agent_key)
    loop, items = open_envs(parts.acting, agent, env_key)
    state = OffPolicyState(
        key=stream,
        agent=agent,
        env=loop.env,
        processor=loop.processor,
        buffer=parts.buffer.init(row_struct(items), parts.schedule.rows, parts.schedule.lag, parts.schedule.num_envs),
        health=healthy(),
    )
    if parts.host_actors is not None:
        return state._replace(processor=untaught(parts.acting.processor, state.processor, parts.host_actors))
    state = _prime(parts, state, prime_key)

    def fill(t: Array, state: OffPolicyState) -> OffPolicyState:
        state, items, _ = _collect(parts, state, fold(fill_key, t), jnp.uint32(0), parts.schedule.random_warmup)
        return state._replace(buffer=parts.buffer.push(state.buffer, items, t))

    # Unlike `iterate`, a plain loop: it runs once, and compiles in half the time.
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(parts.schedule.fill), fill, state)


def _refill(parts: _Parts, state: OffPolicyState, first: Array, stop: Array) -> OffPolicyState:
    """Fill a new buffer with what the agent meets as it explores from where its environments stand."""
    schedule, key = parts.schedule, fold(fold(state.key, REFILL_STREAM), stop)
    opt_step = (jnp.asarray(stop, jnp.uint32) - schedule.fill) * schedule.updates
    loop, items = open_envs(parts.acting, state.agent, key)
    del loop  # its shapes alone are asked for; nothing of it is computed
    empty = parts.buffer.init(row_struct(items), schedule.rows, schedule.lag, schedule.num_envs)
    state = state._replace(buffer=empty)
    if parts.host_actors is not None:
        return state

    def fill(number: Array, state: OffPolicyState) -> OffPolicyState:
        state, items, _ = _collect(parts, state, fold(key, number), opt_step, random=False)
        return state._replace(buffer=parts.buffer.push(state.buffer, items, number))

    return jax.lax.fori_loop(jnp.asarray(first, jnp.uint32), jnp.asarray(stop, jnp.uint32), fill, state)


def _prime(parts: _Parts, state: OffPolicyState, key: Key) -> OffPolicyState:
    """Take `horizon` vector steps, whose transitions are not complete yet."""
    if not parts.schedule.horizon:
        return state
    one = parts._replace(schedule=parts.schedule._replace(vector_steps=1))

    def prime(t: Array, state: OffPolicyState) -> OffPolicyState:
        return _collect(one, state, fold(key, t), jnp.uint32(0), parts.schedule.random_warmup)[0]

    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(parts.schedule.horizon), prime, state)

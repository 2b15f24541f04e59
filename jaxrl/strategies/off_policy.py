"""Off-policy training: act, step the environments, process, push, sample, update; one pure step of it all."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.envs.base import Env, VecEnvState
from jaxrl.envs.host import HostEnv
from jaxrl.errors import SettingsError, check_count
from jaxrl.processors.base import Processor
from jaxrl.processors.n_step import one_step
from jaxrl.strategies.base import Remote, Strategy, fold, iterate, repeat
from jaxrl.strategies.guard import Health, guarded_update, healthy
from jaxrl.strategies.interaction import (
    Actors,
    Scene,
    assemble,
    collect,
    draw_steps,
    episode_metrics,
    interact,
    make_policy,
    open_scene,
    retune,
    settings_of,
)
from jaxrl.strategies.remote import ActorsConfig, Arrival, Crowd, arrived, remote, settings_of_actors, stage
from jaxrl.types import Array, Key, Metrics, PyTree, Transition, row_struct


class OffPolicyState(NamedTuple):
    """The whole truth about a run at the end of an iteration."""

    key: Key
    """The stream of iterations: never advanced, folded with the iteration's number."""
    agent: PyTree
    env: VecEnvState
    processor: PyTree
    buffer: PyTree
    health: Health


class _Parts(NamedTuple):
    actors: Actors
    buffer: Buffer
    vector_steps: int
    """Steps of all environments in one iteration."""
    updates: int
    """Optimisation steps in one iteration."""
    fill: int
    """Warm-up iterations, which push but do not optimise."""
    random_warmup: bool
    crowd: Crowd | None
    """The environments on the host, if they are there."""

    @property
    def rows(self) -> int:
        """Transitions pushed in one iteration, as one contiguous block."""
        return self.vector_steps * self.actors.env.num_envs

    @property
    def lag(self) -> int:
        """Transitions from one to that which begins where it leads to, if its episode goes on."""
        return (self.actors.processor.horizon + 1) * self.actors.env.num_envs


def off_policy(
    env: Env | HostEnv,
    agent: AgentMaker,
    *,
    buffer: Buffer,
    processor: Processor | None = None,
    num_envs: int = 10,
    opt_interval: int = 10,
    updates: int = 1,
    warmup: int = 0,
    random_warmup: bool = True,
    actors: ActorsConfig | None = None,
) -> Strategy:
    """Compose off-policy training, as of DQN.

    Args:
      env: one environment; `num_envs` copies of it run side by side.
      agent: what `jaxrl.dqn(...)` returns.
      buffer: what `jaxrl.uniform(...)` returns.
      processor: what makes transitions of steps; `one_step()` if left out.
      num_envs: environments `N`.
      opt_interval: environment steps per optimisation step. At or above `num_envs` it must be a multiple of it (several
        vector steps, then one update); below, it must divide it (one vector step, then several updates).
      updates: optimisation steps made each time that one is due.
      warmup: environment steps before the first optimisation; at least those of one batch are taken.
      random_warmup: whether actions during it are uniformly random, or those of the agent exploring.
      actors: who steps environments on the host, each `num_envs` of them; left out, an environment in JAX runs on the
        device, and any other with one actor.

    Raises:
      SettingsError: what does not divide (with the nearest settings that do), spaces that the agent cannot take.
    """
    check_count("num_envs", num_envs)
    check_count("opt_interval", opt_interval)
    check_count("updates", updates)
    check_count("warmup", warmup, least=0)
    env, crowd = stage(env, actors)
    total, times = (num_envs * crowd.actors, crowd.config.send) if crowd else (num_envs, 1)
    check_ratio(total, opt_interval)
    bound = assemble(env, agent, processor or one_step(), total)
    vector_steps = times * max(1, opt_interval // total)
    rows = vector_steps * total
    horizon_steps = bound.processor.horizon * total
    missing = max(warmup - horizon_steps, buffer.batch_size)
    parts = _Parts(
        actors=bound,
        buffer=buffer,
        vector_steps=vector_steps,
        updates=times * updates * max(1, total // opt_interval),
        fill=-(-missing // rows),
        random_warmup=random_warmup,
        crowd=crowd,
    )
    warmup_env_steps = horizon_steps + parts.fill * rows
    return Strategy(
        init=partial(_init, parts),
        draw=partial(_draw, parts),
        step=partial(_step, parts),
        env_steps_per_step=rows,
        opt_steps_per_step=parts.updates,
        warmup_env_steps=warmup_env_steps,
        env=env,
        policy=make_policy(bound.agent, bound.processor, env.spec),
        retune=partial(retune, bound),
        notes=_notes(buffer, rows, warmup, warmup_env_steps),
        settings=settings_of(
            bound,
            env,
            num_envs=num_envs,
            **settings_of_actors(crowd),
            opt_interval=opt_interval,
            updates=updates,
            warmup=warmup,
            random_warmup=random_warmup,
            buffer=buffer.settings,
        ),
        remote=_remote(parts, crowd) if crowd else None,
    )


def check_ratio(num_envs: int, opt_interval: int) -> None:
    """Raise `SettingsError`, naming the nearest settings, unless one of the two divides the other."""
    large, small = max(num_envs, opt_interval), min(num_envs, opt_interval)
    if large % small == 0:
        return
    if opt_interval > num_envs:
        below = opt_interval // num_envs * num_envs
        fits = [below, below + num_envs]
    else:
        fits = [next(i for i in range(opt_interval, 0, -1) if num_envs % i == 0)]
        fits.append(next(i for i in range(opt_interval, num_envs + 1) if num_envs % i == 0))
    raise SettingsError(
        f"opt_interval {opt_interval} and num_envs {num_envs} do not divide one another; "
        f"the nearest opt_interval that does is {fits[0]} or {fits[1]}"
    )


def _notes(buffer: Buffer, rows: int, warmup: int, warmup_env_steps: int) -> tuple[str, ...]:
    notes = []
    asked, capacity = (buffer.settings or {}).get("capacity"), buffer.capacity(rows)
    if asked is not None and asked != capacity:
        notes.append(f"buffer capacity rounded up from {asked} to {capacity}, a multiple of {rows} items per push")
    if warmup != warmup_env_steps:
        notes.append(
            f"warm-up takes {warmup_env_steps} environment steps instead of {warmup}: "
            f"at least one batch of {buffer.batch_size}, in whole iterations of {rows}"
        )
    return tuple(notes)


# --- the training step ------------------------------------------------------------------------------------------


def _step(parts: _Parts, state: OffPolicyState, noise: PyTree, t: Array) -> tuple[OffPolicyState, Metrics]:
    first_opt = jnp.asarray(t, jnp.uint32) * parts.updates
    if parts.crowd is None:
        collect_noise, update_noise = noise
        state, items, seen = _collect(parts, state, collect_noise, first_opt, random=False)
    else:
        arrival, update_noise = noise
        items, seen = _arrived(parts, arrival)
    pushes = parts.fill + jnp.asarray(t, jnp.uint32)
    # Push before sampling: the other way round XLA must keep the old buffer, and copies it every iteration.
    state = state._replace(buffer=parts.buffer.push(state.buffer, items, pushes))
    state, learnt = repeat(partial(_update, parts), state, update_noise, first_opt, parts.updates)
    return state, {**seen, **learnt}


def _arrived(parts: _Parts, arrival: Arrival) -> tuple[Transition, Metrics]:
    """Return the transitions that actors have sent as one block of `rows`."""
    assert parts.crowd is not None
    items, seen, told = arrived(parts.actors, parts.crowd, arrival)
    items, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (items, seen))
    return items, {**episode_metrics(seen), **told}


def _remote(parts: _Parts, crowd: Crowd) -> Remote:
    def push(state: OffPolicyState, arrival: Arrival, t: Array) -> OffPolicyState:
        return state._replace(buffer=parts.buffer.push(state.buffer, _arrived(parts, arrival)[0], t))

    return remote(
        parts.actors,
        crowd,
        steps=parts.vector_steps,
        fill=parts.fill,
        random_fill=parts.random_warmup,
        push=push,
    )


def _update(parts: _Parts, state: OffPolicyState, noise: PyTree, opt_step: Array) -> tuple[OffPolicyState, Metrics]:
    sample_noise, agent_noise = noise
    batch = parts.buffer.sample(state.buffer, sample_noise, opt_step)
    agent, health, metrics, priorities = guarded_update(
        parts.actors.agent, state.agent, state.health, batch, agent_noise, opt_step
    )
    buffer = parts.buffer.reprioritise(state.buffer, batch.index, priorities)
    return state._replace(agent=agent, health=health, buffer=buffer), metrics


def _collect(
    parts: _Parts, state: OffPolicyState, noise: PyTree, opt_step: Array, random: bool
) -> tuple[OffPolicyState, Transition, Metrics]:
    """Take `vector_steps` steps in all environments; return their transitions as one block of `rows`."""
    scene = Scene(state.env, state.processor)
    if parts.vector_steps == 1:
        only = jax.tree.map(lambda x: x[0], noise)
        scene, (items, seen) = interact(parts.actors, state.agent, opt_step, random, scene, only)
    else:
        scene, items, seen = collect(parts.actors, state.agent, opt_step, scene, noise, random)
        items, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (items, seen))
    return state._replace(env=scene.env, processor=scene.processor), items, episode_metrics(seen)


# --- randomness -------------------------------------------------------------------------------------------------


def _draw(parts: _Parts, key: Key, t: Array) -> PyTree:
    collect_key, update_key = jax.random.split(fold(key, t))
    pushes = parts.fill + jnp.asarray(t, jnp.uint32) + 1

    def draw_update(key: Key) -> PyTree:
        sample_key, agent_key = jax.random.split(key)
        agent = parts.actors.agent.draw_update(agent_key, parts.buffer.batch_size)
        return parts.buffer.draw(sample_key, pushes, parts.rows), agent

    update_noise = jax.vmap(draw_update)(jax.random.split(update_key, parts.updates))
    if parts.crowd is not None:
        return update_noise
    return draw_steps(parts.actors, collect_key, parts.vector_steps), update_noise


# --- the beginning ----------------------------------------------------------------------------------------------


def _init(parts: _Parts, key: Key) -> OffPolicyState:
    """Reset, fill the processor's windows, and warm the buffer up."""
    stream, agent_key, env_key, prime_key, fill_key = jax.random.split(key, 5)
    agent = parts.actors.agent.init(agent_key)
    scene, items = open_scene(parts.actors, agent, env_key)
    state = OffPolicyState(
        key=stream,
        agent=agent,
        env=scene.env,
        processor=scene.processor,
        buffer=parts.buffer.init(row_struct(items), parts.rows, parts.lag, parts.actors.env.num_envs),
        health=healthy(),
    )
    if parts.crowd is not None:
        return state
    state = _prime(parts, state, prime_key)

    def draw(key: Key, t: Array) -> PyTree:
        return draw_steps(parts.actors, fold(key, t), parts.vector_steps, parts.random_warmup)

    def fill(state: OffPolicyState, noise: PyTree, t: Array) -> OffPolicyState:
        state, items, _ = _collect(parts, state, noise, jnp.uint32(0), parts.random_warmup)
        return state._replace(buffer=parts.buffer.push(state.buffer, items, t))

    return iterate(draw, fill, fill_key, state, jnp.uint32(0), jnp.uint32(parts.fill))


def _prime(parts: _Parts, state: OffPolicyState, key: Key) -> OffPolicyState:
    """Take `horizon` vector steps, whose transitions are not complete yet."""
    one = parts._replace(vector_steps=1)

    def draw(key: Key, t: Array) -> PyTree:
        return draw_steps(parts.actors, fold(key, t), 1, parts.random_warmup)

    def prime(state: OffPolicyState, noise: PyTree, t: Array) -> OffPolicyState:
        return _collect(one, state, noise, jnp.uint32(0), parts.random_warmup)[0]

    return iterate(draw, prime, key, state, jnp.uint32(0), jnp.uint32(parts.actors.processor.horizon))

"""Off-policy training: act, step the environments, process, push, sample, update; one pure step of it all."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.envs.base import Env, VecEnvState
from jaxrl.errors import SettingsError, check_count
from jaxrl.processors.base import Processor
from jaxrl.processors.n_step import one_step
from jaxrl.strategies.base import Strategy, fold, iterate, repeat
from jaxrl.strategies.guard import Health, healthy
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
from jaxrl.strategies.replay import draw_updates, update_from
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

    @property
    def rows(self) -> int:
        """Transitions pushed in one iteration, as one contiguous block."""
        return self.vector_steps * self.actors.env.num_envs

    @property
    def lag(self) -> int:
        """Transitions from one to that which begins where it leads to, if its episode goes on."""
        return (self.actors.processor.horizon + 1) * self.actors.env.num_envs


def off_policy(
    env: Env,
    agent: AgentMaker,
    *,
    buffer: Buffer,
    processor: Processor | None = None,
    num_envs: int = 10,
    opt_interval: int = 10,
    updates: int = 1,
    warmup: int = 0,
    random_warmup: bool = True,
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

    Raises:
      SettingsError: what does not divide (with the nearest settings that do), spaces that the agent cannot take.
    """
    check_count("num_envs", num_envs)
    check_count("opt_interval", opt_interval)
    check_count("updates", updates)
    check_count("warmup", warmup, least=0)
    check_ratio(num_envs, opt_interval)
    actors = assemble(env, agent, processor or one_step(), num_envs)
    vector_steps = max(1, opt_interval // num_envs)
    rows = vector_steps * num_envs
    horizon_steps = actors.processor.horizon * num_envs
    missing = max(warmup - horizon_steps, buffer.batch_size)
    parts = _Parts(
        actors=actors,
        buffer=buffer,
        vector_steps=vector_steps,
        updates=updates * max(1, num_envs // opt_interval),
        fill=-(-missing // rows),
        random_warmup=random_warmup,
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
        policy=make_policy(actors.agent, actors.processor, env.spec),
        retune=partial(retune, actors),
        notes=_notes(buffer, rows, warmup, warmup_env_steps),
        settings=settings_of(
            actors,
            env,
            opt_interval=opt_interval,
            updates=updates,
            warmup=warmup,
            random_warmup=random_warmup,
            buffer=buffer.settings,
        ),
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
    collect_noise, update_noise = noise
    first_opt = jnp.asarray(t, jnp.uint32) * parts.updates
    state, items, seen = _collect(parts, state, collect_noise, first_opt, random=False)
    pushes = parts.fill + jnp.asarray(t, jnp.uint32)
    # Push before sampling: the other way round XLA must keep the old buffer, and copies it every iteration.
    state = state._replace(buffer=parts.buffer.push(state.buffer, items, pushes))
    update = partial(update_from, parts.actors.agent, parts.buffer)
    state, learnt = repeat(update, state, update_noise, first_opt, parts.updates)
    return state, {**seen, **learnt}


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
    collect_noise = draw_steps(parts.actors, collect_key, parts.vector_steps)
    return collect_noise, draw_updates(parts.actors.agent, parts.buffer, update_key, pushes, parts.rows, parts.updates)


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
        buffer=parts.buffer.init(row_struct(items), parts.rows, parts.lag),
        health=healthy(),
    )
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

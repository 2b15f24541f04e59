"""Off-policy training: act, step the environments, process, push, sample, update; one pure step of it all."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.envs.base import Env, VecEnv, VecEnvState, vectorise
from jaxrl.errors import SettingsError, check_count
from jaxrl.processors.base import OFF, Processor, begin
from jaxrl.processors.n_step import NStepState, one_step
from jaxrl.strategies.base import Policy, Strategy, fold, iterate
from jaxrl.strategies.guard import Health, guarded_update, healthy
from jaxrl.types import (
    Array,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    Step,
    Transition,
    reduce_metrics,
    sample_space,
    stats,
    totals,
)


class OffPolicyState(NamedTuple):
    """The whole truth about a run at the end of an iteration."""

    key: Key
    """The stream of iterations: never advanced, folded with the iteration's number."""
    agent: PyTree
    env: VecEnvState
    processor: PyTree
    buffer: PyTree
    health: Health


class Seen(NamedTuple):
    """What of a step is recorded: every leaf `[N]`, or `[T * N]` of several steps."""

    terminated: Array
    truncated: Array
    invalid: Array
    info: dict[str, Array]


class _Parts(NamedTuple):
    env: VecEnv
    processor: Processor
    buffer: Buffer
    agent: Agent
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
        return self.vector_steps * self.env.num_envs


def off_policy(
    env: Env,
    agent: AgentMaker,
    *,
    buffer: Buffer,
    processor: Processor | None = None,
    num_envs: int = 10,
    opt_interval: int = 10,
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
      warmup: environment steps before the first optimisation; at least those of one batch are taken.
      random_warmup: whether actions during it are uniformly random, or those of the agent exploring.

    Raises:
      SettingsError: what does not divide (with the nearest settings that do), spaces that the agent cannot take.
    """
    check_count("num_envs", num_envs)
    check_count("opt_interval", opt_interval)
    check_count("warmup", warmup, least=0)
    check_ratio(num_envs, opt_interval)
    processor = processor or one_step()
    if not processor.makes_transitions:
        raise SettingsError("processor: makes no transitions; end it with chain(..., one_step()) or n_step(n)")
    vector_env = vectorise(env, num_envs)
    bound = agent(env.spec._replace(observation_space=processor.space(env.spec.observation_space)))
    vector_steps = max(1, opt_interval // num_envs)
    rows = vector_steps * num_envs
    missing = max(warmup - processor.horizon * num_envs, buffer.batch_size)
    parts = _Parts(
        env=vector_env,
        processor=processor,
        buffer=buffer,
        agent=bound,
        vector_steps=vector_steps,
        updates=max(1, num_envs // opt_interval),
        fill=-(-missing // rows),
        random_warmup=random_warmup,
    )
    warmup_env_steps = processor.horizon * num_envs + parts.fill * rows
    return Strategy(
        init=partial(_init, parts),
        draw=partial(_draw, parts),
        step=partial(_step, parts),
        env_steps_per_step=rows,
        opt_steps_per_step=parts.updates,
        warmup_env_steps=warmup_env_steps,
        env=env,
        policy=make_policy(bound, processor, env.spec),
        retune=partial(_retune, parts),
        notes=_notes(buffer, rows, warmup, warmup_env_steps),
        settings=_settings(parts, env, opt_interval, warmup),
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


def _settings(parts: _Parts, env: Env, opt_interval: int, warmup: int) -> dict[str, Any]:
    """Return what rebuilds the strategy; parts made by hand are named under `custom`."""
    pieces = {
        "env": env.settings,
        "agent": parts.agent.settings,
        "buffer": parts.buffer.settings,
        "processor": parts.processor.settings and {**OFF, **parts.processor.settings},
    }
    return {
        "algo": parts.agent.name,
        "custom": [name for name, piece in pieces.items() if piece is None],
        "env": env.spec.name,
        "env_args": {},
        **(env.settings or {}),
        "num_envs": parts.env.num_envs,
        "opt_interval": opt_interval,
        "warmup": warmup,
        "random_warmup": parts.random_warmup,
        **{name: dict(piece or {}) for name, piece in pieces.items() if name != "env"},
    }


# --- the training step ------------------------------------------------------------------------------------------


def _step(parts: _Parts, state: OffPolicyState, noise: PyTree, t: Array) -> tuple[OffPolicyState, Metrics]:
    collect_noise, update_noise = noise
    first_opt = jnp.asarray(t, jnp.uint32) * parts.updates
    state, items, seen = _collect(parts, state, collect_noise, first_opt, random=False)
    pushes = parts.fill + jnp.asarray(t, jnp.uint32)
    # Push before sampling: the other way round XLA must keep the old buffer, and copies it every iteration.
    state = state._replace(buffer=parts.buffer.push(state.buffer, items, pushes))
    state, learnt = _repeat(partial(_update, parts), state, update_noise, first_opt, parts.updates)
    return state, {**seen, **learnt}


def _update(parts: _Parts, state: OffPolicyState, noise: PyTree, opt_step: Array) -> tuple[OffPolicyState, Metrics]:
    sample_noise, agent_noise = noise
    batch = parts.buffer.sample(state.buffer, sample_noise)
    agent, health, metrics, priorities = guarded_update(
        parts.agent, state.agent, state.health, batch, agent_noise, opt_step
    )
    buffer = parts.buffer.reprioritise(state.buffer, batch.index, priorities)
    return state._replace(agent=agent, health=health, buffer=buffer), metrics


def _repeat(body, state: PyTree, noise: PyTree, first: Array, times: int) -> tuple[PyTree, Metrics]:  # type: ignore[no-untyped-def]
    """Run `state, metrics = body(state, noise[i], first + i)` for each of `times` rows of `noise`."""
    if times == 1:
        return body(state, jax.tree.map(lambda x: x[0], noise), first)
    steps = first + jnp.arange(times, dtype=jnp.uint32)
    state, metrics = jax.lax.scan(lambda s, xs: body(s, *xs), state, (noise, steps))
    return state, reduce_metrics(metrics)


def _collect(
    parts: _Parts, state: OffPolicyState, noise: PyTree, opt_step: Array, random: bool
) -> tuple[OffPolicyState, Transition, Metrics]:
    """Take `vector_steps` steps in all environments; return their transitions as one block of `rows`."""
    body = partial(_interact, parts, opt_step, random)
    if parts.vector_steps == 1:
        state, (items, seen) = body(state, jax.tree.map(lambda x: x[0], noise))
        return state, items, episode_metrics(seen)
    state, (items, seen) = jax.lax.scan(body, state, noise)
    items, seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (items, seen))
    return state, items, episode_metrics(seen)


def _interact(
    parts: _Parts, opt_step: Array, random: bool, state: OffPolicyState, noise: PyTree
) -> tuple[OffPolicyState, tuple[Transition, Seen]]:
    """Take one step in all environments; their transitions and what was seen are `[N, ...]`."""
    act_noise, random_action, env_noise = noise
    obs = parts.processor.observe(state.processor)
    action, extras = parts.agent.act(state.agent, obs, act_noise, opt_step, "explore")
    action = random_action if random else action
    env_state, step = parts.env.step(state.env, action, env_noise)
    processor, items = parts.processor.process(state.processor, step._replace(extras=extras))
    return state._replace(env=env_state, processor=processor), (items, see(step))


def see(step: Step) -> Seen:
    """Keep of a step of `N` environments what is recorded of it."""
    invalid = jnp.broadcast_to(~jnp.asarray(step.valid), step.reward.shape)
    scalars = {name: value for name, value in step.info.items() if value.ndim == 1}
    return Seen(step.terminated, step.truncated, invalid, scalars)


def episode_metrics(seen: Seen) -> Metrics:
    """Summarise the episodes that ended, and the environment's own scalars."""
    done = seen.terminated | seen.truncated
    of_episodes = {name: seen.info[name] for name in ("episode_return", "episode_length")}
    own = {f"info/{name}": value for name, value in seen.info.items() if name not in of_episodes}
    events = {
        "episodes": done,
        "terminated": seen.terminated,
        "truncated": seen.truncated,
        "invalid_steps": seen.invalid,
    }
    return {**stats(of_episodes, done), **totals(events), **(stats(own) if own else {})}


# --- randomness -------------------------------------------------------------------------------------------------


def _draw(parts: _Parts, key: Key, t: Array) -> PyTree:
    collect_key, update_key = jax.random.split(fold(key, t))
    pushes = parts.fill + jnp.asarray(t, jnp.uint32) + 1

    def draw_update(key: Key) -> PyTree:
        sample_key, agent_key = jax.random.split(key)
        return parts.buffer.draw(sample_key, pushes, parts.rows), parts.agent.draw_update(agent_key)

    return _draw_collect(parts, collect_key), jax.vmap(draw_update)(jax.random.split(update_key, parts.updates))


def _draw_collect(parts: _Parts, key: Key, random: bool = False) -> PyTree:
    """Draw the randomness of `vector_steps` steps; with `random`, also actions to take instead of the agent's."""

    def draw(key: Key) -> PyTree:
        act_key, random_key, env_key = jax.random.split(key, 3)
        act = parts.agent.draw_act(act_key, parts.env.num_envs)
        actions = sample_space(parts.env.spec.action_space, random_key, parts.env.num_envs) if random else ()
        return act, actions, parts.env.draw(env_key)

    return jax.vmap(draw)(jax.random.split(key, parts.vector_steps))


# --- the beginning ----------------------------------------------------------------------------------------------


def _init(parts: _Parts, key: Key) -> OffPolicyState:
    """Reset, fill the processor's windows, and warm the buffer up."""
    stream, agent_key, env_key, prime_key, fill_key = jax.random.split(key, 5)
    agent = parts.agent.init(agent_key)
    env, obs = parts.env.reset(env_key)
    action, extras, items = _shapes(parts, agent, env, obs)
    state = OffPolicyState(
        key=stream,
        agent=agent,
        env=env,
        processor=begin(parts.processor, obs, action, extras),
        buffer=parts.buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), items), parts.rows),
        health=healthy(),
    )
    state = _prime(parts, state, prime_key)

    def draw(key: Key, t: Array) -> PyTree:
        return _draw_collect(parts, fold(key, t), parts.random_warmup)

    def fill(state: OffPolicyState, noise: PyTree, t: Array) -> OffPolicyState:
        state, items, _ = _collect(parts, state, noise, jnp.uint32(0), parts.random_warmup)
        return state._replace(buffer=parts.buffer.push(state.buffer, items, t))

    return iterate(draw, fill, fill_key, state, jnp.uint32(0), jnp.uint32(parts.fill))


def _prime(parts: _Parts, state: OffPolicyState, key: Key) -> OffPolicyState:
    """Take `horizon` vector steps, whose transitions are not complete yet."""
    one = parts._replace(vector_steps=1)

    def draw(key: Key, t: Array) -> PyTree:
        return _draw_collect(one, fold(key, t), parts.random_warmup)

    def prime(state: OffPolicyState, noise: PyTree, t: Array) -> OffPolicyState:
        return _collect(one, state, noise, jnp.uint32(0), parts.random_warmup)[0]

    return iterate(draw, prime, key, state, jnp.uint32(0), jnp.uint32(parts.processor.horizon))


def _shapes(parts: _Parts, agent: PyTree, env: VecEnvState, obs: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Return zero actions and extras `[N, ...]`, and the shapes of a vector step's transitions."""

    def first(agent: PyTree, env: VecEnvState, obs: PyTree, key: Key) -> PyTree:
        action, extras = parts.agent.act(
            agent,
            parts.processor.observe(parts.processor.init(obs)),
            parts.agent.draw_act(key, parts.env.num_envs),
            jnp.uint32(0),
            "explore",
        )
        _, step = parts.env.step(env, action, parts.env.draw(key))
        _, items = parts.processor.process(begin(parts.processor, obs, action, extras), step._replace(extras=extras))
        return action, extras, items

    action, extras, items = jax.eval_shape(first, agent, env, obs, jax.random.key(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (action, extras))
    return *zeros, items


def _retune(parts: _Parts, state: OffPolicyState) -> OffPolicyState:
    """Take the hyperparameters of the agent and the discount from the settings, all else from `state`."""
    agent, processor = state.agent, state.processor
    if hasattr(agent, "hyper"):
        agent = agent._replace(hyper=parts.agent.init(jax.random.key(0)).hyper)
    fresh = parts.processor.init(parts.env.reset(jax.random.key(0))[1])
    is_n_step = lambda part: isinstance(part, NStepState)
    swap = lambda old, new: old._replace(discount=new.discount) if is_n_step(old) else old
    return state._replace(agent=agent, processor=jax.tree.map(swap, processor, fresh, is_leaf=is_n_step))


# --- the policy -------------------------------------------------------------------------------------------------


def make_policy(agent: Agent, processor: Processor, spec: EnvSpec) -> Policy:
    """Compose the greedy policy of `agent` behind `processor`."""

    def begin_policy(params: PyTree, obs: PyTree) -> PyTree:
        seen = processor.observe(processor.init(obs))
        shapes, _ = jax.eval_shape(lambda p, o: agent.act(p, o, None, jnp.uint32(0), "exploit"), params, seen)
        return begin(processor, obs, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), ())

    def act(params: PyTree, carry: PyTree) -> tuple[PyTree, PyTree]:
        action, _ = agent.act(params, processor.observe(carry), None, jnp.uint32(0), "exploit")
        return carry, action

    def observe(params: PyTree, carry: PyTree, step: Step) -> PyTree:
        return processor.process(carry, step._replace(extras=()))[0]

    return Policy(spec, lambda state: agent.strip(state.agent), begin_policy, act, observe)

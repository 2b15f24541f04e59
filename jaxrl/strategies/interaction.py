"""What every strategy with environments does: act in them, process the steps, and say what was seen."""

from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.agents.schedules import follow
from jaxrl.envs.base import Env, VecEnv, VecEnvState, apply_schedules, obs_valid, vectorise
from jaxrl.errors import SettingsError, check_count
from jaxrl.masks import random_action
from jaxrl.metrics import Metrics, stats, totals
from jaxrl.processors.base import Processor, chain, dummy_step, init_processor
from jaxrl.processors.memory import carry_memory
from jaxrl.processors.n_step import n_step
from jaxrl.processors.normalise import normalise_reward
from jaxrl.shards import merge_metrics
from jaxrl.spaces import EnvSpec
from jaxrl.strategies.base import CollectInfo, EpisodeEnds
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Step, Transition
from jaxrl.xla.carry import scan_rows


class Acting(NamedTuple):
    """An agent before `N` environments, and the processor between them."""

    env: VecEnv
    processor: Processor
    agent: Agent


class EnvLoopState(NamedTuple):
    """Where the environments stand, and the processor."""

    env: VecEnvState
    processor: PyTree


EPISODE_PREFIX = "episode_"
"""How the names of those scalars begin that are of a whole episode, and are recorded where one ends."""


def scalar_column(scalar: str) -> str:
    """Return the name of the column that holds a scalar of an environment's `info`."""
    return scalar if scalar.startswith(EPISODE_PREFIX) else f"info/{scalar}"


class StepInfo(NamedTuple):
    """The part of a `Step` that is logged: every leaf `[N]`, or `[T, N]` for several steps."""

    terminated: Array
    truncated: Array
    invalid: Array
    info: dict[str, Array]
    present: Array | tuple[()] = ()
    """That of `Step`; where it is false, the flags before are so too."""


def make_acting(env: Env, agent: AgentMaker, processor: Processor, num_envs: int, resets: str = "auto") -> Acting:
    """Put `agent` before `num_envs` copies of `env`.

    Raises:
      SettingsError: the processor makes no transitions, or the agent cannot take the spaces.
    """
    check_count("num_envs", num_envs)
    return Acting(vectorise(env, num_envs, resets), *build_processor_and_agent(agent, processor, env.spec))


def build_processor_and_agent(agent: AgentMaker, processor: Processor, spec: EnvSpec) -> tuple[Processor, Agent]:
    """Tell `agent` what it will see of an environment; an agent with a memory gets a processor that keeps it.

    Raises:
      SettingsError: the processor makes no transitions, or the agent cannot take the spaces or the discount.
    """
    return connect(build_agent(agent, processor, spec), processor)


def build_agent(agent: AgentMaker, processor: Processor | None, spec: EnvSpec) -> Agent:
    """Tell `agent` what it will see of an environment: without a processor, what the environment shows.

    Raises:
      SettingsError: the processor makes no transitions, or the agent cannot take the spaces.
    """
    if processor is not None and not processor.makes_transitions:
        raise SettingsError("processor: makes no transitions; end it with chain(..., one_step()) or n_step(n)")
    check_agent_maker(agent)
    if processor is None:
        return follow(agent(spec))
    return follow(agent(spec._replace(observation_space=processor.space(spec.observation_space))))


def connect(bound: Agent, processor: Processor) -> tuple[Processor, Agent]:
    """Put an agent that knows its spaces behind `processor`, which for one with a memory keeps that too.

    Raises:
      SettingsError: the agent cannot take the discount.
    """
    settings = processor.settings or {}
    if bound.bounds_returns and settings.get("discount") == 1:
        raise SettingsError(
            "processor.discount is 1, under which rewards do not tell how large returns can be; "
            "set agent.v_min and agent.v_max, or a discount below 1"
        )
    if bound.bounds_returns and settings.get("normalise_reward"):
        raise SettingsError(
            "processor.normalise_reward scales the first rewards by too little for a support to be derived from them; "
            "set agent.v_min and agent.v_max, or leave rewards as they are"
        )
    return (processor if bound.memory is None else carry_memory(processor, bound.memory)), bound


def make_default_processor(settings: Mapping[str, Any]) -> Processor:
    """Return the processor of the settings that suit an agent, see `registry.usual`; it leaves observations alone."""
    parts = settings.get("processor", {})
    last = n_step(parts.get("n_step", 1))
    return chain(normalise_reward(), last) if parts.get("normalise_reward") else last


def check_agent_maker(agent: object) -> None:
    """Raise `SettingsError` unless `agent` may be what `jaxrl.dqn(...)` or another of jaxrl's agents returns."""
    name = getattr(agent, "__name__", type(agent).__name__)
    if isinstance(agent, FunctionType) and agent.__module__.startswith("jaxrl.agents.") and agent.__qualname__ == name:
        raise SettingsError(f"agent is jaxrl.{name} itself; call it, as in {name}() or {name}(lr=1e-3)")
    if not callable(agent):
        expected = "what jaxrl.dqn(...) or another of jaxrl's agents returns"
        raise SettingsError(f"agent is {agent!r:.60}; expected {expected}")


# --- acting -----------------------------------------------------------------------------------------------------


def interact(
    acting: Acting, agent: PyTree, opt_step: Array, random: bool, loop: EnvLoopState, key: Key
) -> tuple[EnvLoopState, tuple[Transition, StepInfo]]:
    """Take one step in all environments; their transitions and what was seen are `[N, ...]`. The key is consumed."""
    act_key, env_key = jax.random.split(key)
    obs = acting.processor.observe(loop.processor)
    action, extras = select_actions(acting.agent, acting.env.spec, agent, obs, act_key, opt_step, random)
    env, step = acting.env.step(apply_schedules(acting.env, loop.env, opt_step), action, env_key)
    processor, items = acting.processor.process(loop.processor, step._replace(extras=extras))
    return EnvLoopState(env, processor), (items, step_info(step))


def select_actions(
    agent: Agent, spec: EnvSpec, state: PyTree, obs: PyTree, key: Key, opt_step: Array, random: bool
) -> tuple[PyTree, PyTree]:
    """Return the agent's actions for `obs` `[N, ...]`, or if `random` uniform ones, and extras. The key is consumed."""
    act_key, random_key = jax.random.split(key)
    action, extras = agent.act(state, obs, act_key, opt_step, "explore")
    return random_action(spec, random_key, obs) if random else action, extras


def take_steps(
    acting: Acting, agent: PyTree, opt_step: Array, loop: EnvLoopState, key: Key, steps: int, random: bool = False
) -> tuple[EnvLoopState, Transition, StepInfo]:
    """Take `steps` steps in all environments; return transitions and what was seen, leaves `[T, N, ...]`.

    The key is consumed.
    """
    keys = jax.random.split(key, steps)
    if steps == 1:  # without the loop, which would pack and unpack what it carries
        loop, made = interact(acting, agent, opt_step, random, loop, keys[0])
        items, seen = jax.tree.map(lambda x: x[None], made)
    else:
        step = partial(interact, acting, agent, opt_step, random)
        loop, (items, seen) = scan_rows(step, loop, keys)
    return loop, add_episode_bounds(items, seen.terminated | seen.truncated), seen


def add_episode_bounds(items: Transition, ended: Array) -> Transition:
    """Return the transitions of steps `[T, N]` with `is_first` and `is_last`, where a processor of one's own has none.

    `ended` `[T, N]` says which steps ended an episode. Whether one begins with the first of them is then not known.
    """
    if not isinstance(items.is_first, tuple) and not isinstance(items.is_last, tuple):
        return items
    return items._replace(is_first=jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]]), is_last=ended)


def step_info(step: Step) -> StepInfo:
    """Keep of a step of `N` environments what is recorded of it."""
    invalid = jnp.broadcast_to(~jnp.asarray(step.valid), step.reward.shape)
    scalars = {name: value for name, value in step.info.items() if value.ndim == 1}
    there = step.present
    if isinstance(there, tuple):
        return StepInfo(step.terminated, step.truncated, invalid, scalars)
    return StepInfo(step.terminated & there, step.truncated & there, invalid & there, scalars, there)


def episode_metrics(seen: StepInfo) -> Metrics:
    """Summarise the episodes that ended, and the environment's own scalars."""
    done = seen.terminated | seen.truncated
    of_episodes = {name: value for name, value in seen.info.items() if name.startswith(EPISODE_PREFIX)}
    own = {scalar_column(name): value for name, value in seen.info.items() if name not in of_episodes}
    events = {
        "episodes": done,
        "terminated": seen.terminated,
        "truncated": seen.truncated,
        "invalid_steps": seen.invalid,
    }
    there: Any = True if isinstance(seen.present, tuple) else seen.present
    return {**stats(of_episodes, done), **totals(events), **(stats(own, there) if own else {})}


def make_collect_info(seen: StepInfo, more: Metrics | None = None) -> CollectInfo:
    """Return what is recorded of steps `[T, N]`, with `more` metrics."""
    metrics: Metrics = {**merge_metrics(episode_metrics(seen)), **(more or {})}
    return CollectInfo(metrics, _episode_ends(seen))


def _episode_ends(seen: StepInfo) -> EpisodeEnds:
    length = jnp.asarray(seen.info["episode_length"], jnp.int32)
    length = jnp.where(seen.terminated, length, jnp.where(seen.truncated, -length, 0))
    return EpisodeEnds(length, jnp.asarray(seen.info["episode_return"], jnp.float32))


# --- the beginning ----------------------------------------------------------------------------------------------


def open_envs(acting: Acting, agent: PyTree, key: Key) -> tuple[EnvLoopState, PyTree]:
    """Reset the environments; return where they stand, and the shapes of a vector step's transitions."""
    env, obs = acting.env.reset(key)
    opened = open_processor(acting.agent, acting.processor, agent, obs, obs_valid(env))
    return EnvLoopState(env, opened.processor), opened.items


class Opened(NamedTuple):
    """A processor at the first observations, and what an action looks like there."""

    processor: PyTree
    action: PyTree
    """Zeros `[N, ...]`, as are the extras."""
    extras: PyTree
    items: PyTree
    """The shapes of the transitions of a vector step."""


def open_processor(
    agent: Agent, processor: Processor, state: PyTree, obs: PyTree, obs_valid: Array | tuple[()] = ()
) -> Opened:
    """Start `processor` at the first observations `[N, ...]`, before an agent in `state`.

    `obs_valid` is that of `Step`.
    """

    def first(state: PyTree, obs: PyTree, key: Key) -> PyTree:
        action, extras = agent.act(state, processor.observe(processor.init(obs)), key, jnp.uint32(0), "explore")
        started = init_processor(processor, obs, action, extras)
        return action, extras, processor.process(started, dummy_step(obs, action, extras))[1]

    *acted, items = jax.eval_shape(first, state, obs, make_key(0))
    action, extras = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), acted)
    return Opened(init_processor(processor, obs, action, extras, obs_valid), action, extras, items)

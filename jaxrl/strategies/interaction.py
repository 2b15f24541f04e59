"""Code shared by strategies: building agent and processor, their settings, and stepping environments."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.base import Agent, AgentMaker, Tunable
from jaxrl.agents.frozen import freeze
from jaxrl.agents.schedules import follow
from jaxrl.envs.base import VecEnv, VecEnvState, apply_schedules, obs_valid
from jaxrl.errors import SettingsError, check_type
from jaxrl.masks import random_action
from jaxrl.metrics import Metrics, stats, totals
from jaxrl.processors.base import (
    DISABLED,
    Processor,
    chain,
    dummy_step,
    init_processor,
    reward_clip,
    reward_scale,
)
from jaxrl.processors.memory import carry_memory
from jaxrl.processors.n_step import NStepState, n_step
from jaxrl.processors.normalise import RewardState, normalise_obs, normalise_reward
from jaxrl.shards import merge_metrics
from jaxrl.spaces import EnvSpec
from jaxrl.strategies.base import CollectInfo, EpisodeEnds
from jaxrl.trees import Array, Key, PyTree, make_key
from jaxrl.types import Step, Transition
from jaxrl.xla.carry import scan_rows


class Collector(NamedTuple):
    """An agent, `N` environments, and the processor between them."""

    env: VecEnv
    processor: Processor
    agent: Agent


class EnvLoopState(NamedTuple):
    """State of the environments and of the processor."""

    env: VecEnvState
    processor: PyTree


EPISODE_PREFIX = "episode_"
"""Prefix of per-episode scalars, which are logged when the episode ends."""


def scalar_column(scalar: str) -> str:
    """Return the metric name of a scalar of `info`."""
    return scalar if scalar.startswith(EPISODE_PREFIX) else f"info/{scalar}"


class StepInfo(NamedTuple):
    """The part of a `Step` that is logged: every leaf `[N]`, or `[T, N]` for several steps."""

    terminated: Array
    truncated: Array
    invalid: Array
    info: dict[str, Array]
    present: Array | tuple[()] = ()
    """As `Step.present`; where it is false, so are the flags above."""


def build_processor_and_agent(agent: AgentMaker, processor: Processor, spec: EnvSpec) -> tuple[Processor, Agent]:
    """Build `agent` for the processed spaces of `spec`, and connect it to `processor`.

    Raises:
      SettingsError: the processor makes no transitions, or the agent does not support the spaces or the discount.
    """
    return connect(processor, build_agent(agent, processor, spec))


def build_agent(agent: AgentMaker, processor: Processor | None, spec: EnvSpec) -> Agent:
    """Build `agent` for the spaces of `spec`, processed by `processor` if there is one.

    Raises:
      SettingsError: the processor makes no transitions, or the agent does not support the spaces.
    """
    check_type("processor", processor, Processor, "what jaxrl.n_step(...) or jaxrl.chain(...) returns")
    if processor is not None and not processor.makes_transitions:
        raise SettingsError("processor: makes no transitions; end it with chain(..., one_step()) or n_step(n)")
    check_agent_maker(agent)
    if processor is not None:
        spec = spec._replace(observation_space=processor.space(spec.observation_space))
    # `follow` sets scheduled hyperparameters before each action and update, `freeze` undoes updates of some parts.
    return freeze(follow(agent(spec)))


def connect(processor: Processor, agent: Agent) -> tuple[Processor, Agent]:
    """Return `processor`, which carries the memory of `agent` if there is one, and `agent`, built for its spaces.

    Raises:
      SettingsError: the agent cannot derive bounds of returns with this discount or reward scaling.
    """
    if agent.info.bounds_returns:
        require_discounting(processor.known.get("discount", 0.0))
    if agent.info.bounds_returns and processor.known.get("normalise_reward"):
        raise SettingsError(
            "processor.normalise_reward scales the first rewards by too little for a support to be derived from them; "
            "set agent.v_min and agent.v_max, or leave rewards as they are"
        )
    return (processor if agent.memory is None else carry_memory(processor, agent.memory)), agent


def require_discounting(discount: float) -> None:
    """Raise `SettingsError` for a discount from which an agent can derive no bounds of returns."""
    # They are derived from the largest reward, as `reward / (1 - discount)` in float32.
    if np.float32(discount) == 1:
        raise SettingsError(
            f"processor.discount is {discount:g}, under which rewards do not tell how large returns can be; "
            "set agent.v_min and agent.v_max, or a discount below 1"
        )


def make_default_processor(settings: Mapping[str, Any]) -> Processor:
    """Return the default processor of an agent, from `registry.defaults_for`; it keeps the space of observations."""
    parts = settings.get("processor", {})
    discount = parts.get("discount", 0.99)
    # In the order of the command line: rewards are scaled before they are summed over `n` steps.
    scales = {
        "normalise_obs": normalise_obs,
        "reward_scale": lambda: reward_scale(parts["reward_scale"]),
        "reward_clip": lambda: reward_clip(parts["reward_clip"]),
        "normalise_reward": lambda: normalise_reward(discount),
    }
    steps = n_step(parts.get("n_step", 1), discount)
    return chain(*(make() for name, make in scales.items() if parts.get(name, DISABLED[name]) != DISABLED[name]), steps)


def check_agent_maker(agent: object) -> None:
    """Raise `SettingsError` unless `agent` can be an agent maker, as `jaxrl.dqn(...)` returns it."""
    # A common mistake is the function itself, `jaxrl.dqn` instead of `jaxrl.dqn()`.
    name = getattr(agent, "__name__", type(agent).__name__)
    module = getattr(agent, "__module__", None) or ""
    if isinstance(agent, FunctionType) and module.startswith("jaxrl.agents.") and agent.__qualname__ == name:
        raise SettingsError(f"agent is jaxrl.{name} itself; call it, as in {name}() or {name}(lr=1e-3)")
    if isinstance(agent, Agent):
        raise SettingsError(
            f"agent is {agent.name}, already built for one environment; pass what builds it, as in "
            "off_policy(env, jaxrl.dqn()), or lambda spec: agent"
        )
    if not callable(agent):
        expected = "what jaxrl.dqn(...) or another of jaxrl's agents returns"
        raise SettingsError(f"agent is {agent!r:.60}; expected {expected}")


# --- settings ---------------------------------------------------------------------------------------------------


def set_hyperparams(collector: Collector, state: Any) -> Any:
    """Return `state` with the hyperparameters of agent, processor and environments reset to the settings."""
    # Only the `tunable` numbers of a new state, which have their present values, are used, so the key does not matter.
    env, obs = collector.env.reset(make_key(0))
    fresh = collector.processor.init(obs)
    discounted = lambda part: isinstance(part, NStepState | RewardState)
    given = iter([part.discount for part in jax.tree.leaves(fresh, is_leaf=discounted) if discounted(part)])
    # Paired in order: the parts of a chain may have different discounts, as `normalise_reward` and `n_step` do.
    swap = lambda old: old._replace(discount=next(given)) if discounted(old) else old
    return state._replace(
        agent=set_hyperparams_of(collector.agent, state.agent),
        env=state.env._replace(values=env.values) if env.values else state.env,
        processor=jax.tree.map(swap, state.processor, is_leaf=discounted),
    )


def set_hyperparams_of(agent: Agent, state: PyTree) -> PyTree:
    """Return `state` of `agent` with its hyperparameters reset to the settings; unchanged if it has none.

    Scheduled ones keep their values: they are set before each action and update anyway.
    """
    if not isinstance(state, Tunable):
        return state
    # Only the hyperparameters of this state are used: the key does not matter, and XLA leaves out all the rest. A new
    # function, because JAX caches programs by function, and `tunable` takes its values from the context.
    fresh = jax.jit(lambda: agent.init(make_key(0)).hyper)()
    return state._replace(hyper=fresh._replace(**{name: getattr(state.hyper, name) for name in agent.info.scheduled}))


def settings_of(
    agent: Agent,
    processor: Processor,
    spec: EnvSpec | None,
    made: Mapping[str, Any] | None,
    *,
    offline: bool = False,
    custom: Sequence[str] = (),
    **others: Any,
) -> dict[str, Any]:
    """Return the settings that rebuild a strategy; `made` are those of the environment, if there is one.

    `custom` lists what settings cannot rebuild: arguments of the agent, custom parts, those in `custom`, and
    `training` if the command line would not train this agent as here (`offline` or not).
    """
    # `None` marks a piece that settings cannot rebuild.
    pieces = {
        "env": made,
        "agent": agent.info.settings,
        "processor": processor.settings and {**DISABLED, **processor.settings},
        **{name: piece for name, piece in others.items() if name == "buffer"},
        "training": {} if agent.info.offline == offline else None,
    }
    return {
        "algo": agent.name,
        "custom": [*agent.info.custom, *(name for name, piece in pieces.items() if piece is None), *custom],
        "env": spec and spec.name,
        "env_args": {},
        **(made or {}),
        **others,
        **{name: dict(piece or {}) for name, piece in pieces.items() if name not in ("env", "training")},
    }


# --- acting -----------------------------------------------------------------------------------------------------


def step_envs(
    collector: Collector, agent: PyTree, opt_step: Array, random: bool, loop: EnvLoopState, key: Key
) -> tuple[EnvLoopState, tuple[Transition, StepInfo]]:
    """Take one step in all environments; return transitions and `StepInfo`, `[N, ...]`. The key is consumed."""
    act_key, env_key = jax.random.split(key)
    obs = collector.processor.observe(loop.processor)
    action, extras = select_actions(collector.agent, collector.env.spec, agent, obs, act_key, opt_step, random)
    # Scheduled values of the environment follow the optimisation step, like those of the agent.
    env, step = collector.env.step(apply_schedules(collector.env, loop.env, opt_step), action, env_key)
    processor, items = collector.processor.process(loop.processor, step._replace(extras=extras))
    return EnvLoopState(env, processor), (items, step_info(step))


def select_actions(
    agent: Agent, spec: EnvSpec, state: PyTree, obs: PyTree, key: Key, opt_step: Array, random: bool
) -> tuple[PyTree, PyTree]:
    """Return exploring actions for `obs` `[N, ...]`, uniform ones if `random`, and extras. The key is consumed."""
    act_key, random_key = jax.random.split(key)
    action, extras = agent.act(state, obs, act_key, opt_step, "explore")
    # The agent acts even if `random`: transitions need extras of the same shapes. XLA drops its action.
    return random_action(spec, random_key, obs) if random else action, extras


def take_steps(
    collector: Collector, agent: PyTree, opt_step: Array, loop: EnvLoopState, key: Key, steps: int, random: bool = False
) -> tuple[EnvLoopState, Transition, StepInfo]:
    """Take `steps` steps in all environments; return transitions and `StepInfo`, leaves `[T, N, ...]`.

    The key is consumed.
    """
    keys = jax.random.split(key, steps)
    if steps == 1:  # no loop, which would pack and unpack its carry
        loop, step_outputs = step_envs(collector, agent, opt_step, random, loop, keys[0])
        items, infos = jax.tree.map(lambda x: x[None], step_outputs)
    else:
        step = partial(step_envs, collector, agent, opt_step, random)
        loop, (items, infos) = scan_rows(step, loop, keys)
    return loop, add_episode_bounds(items, infos.terminated | infos.truncated), infos


def add_episode_bounds(items: Transition, ended: Array) -> Transition:
    """Return transitions `[T, N, ...]` with `is_first` and `is_last`, if a custom processor left them out.

    `ended` `[T, N]` marks the steps that ended an episode. Whether an episode begins at the first step is unknown;
    `is_first` is false there.
    """
    if not isinstance(items.is_first, tuple) and not isinstance(items.is_last, tuple):
        return items
    return items._replace(is_first=jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]]), is_last=ended)


def step_info(step: Step) -> StepInfo:
    """Return the part of a step of `N` environments that is logged."""
    invalid = jnp.broadcast_to(~jnp.asarray(step.valid), step.reward.shape)
    # Only scalars per environment: images and other arrays in `info` are not logged.
    scalars = {name: value for name, value in step.info.items() if value.ndim == 1}
    # Where an agent is absent, nothing counts: neither the end of an episode nor an invalid step.
    present = step.present
    if isinstance(present, tuple):
        return StepInfo(step.terminated, step.truncated, invalid, scalars)
    return StepInfo(step.terminated & present, step.truncated & present, invalid & present, scalars, present)


def episode_metrics(infos: StepInfo) -> Metrics:
    """Return metrics of the episodes that ended, and of the environment's scalars at every step."""
    done = infos.terminated | infos.truncated
    totalled = {name: infos.info[name] for name in ("episode_return", "episode_length")}
    scalars = {scalar_column(name): value for name, value in infos.info.items() if name not in totalled}
    of_episodes = {name: value for name, value in scalars.items() if name.startswith(EPISODE_PREFIX)}
    of_steps = {name: value for name, value in scalars.items() if name not in of_episodes}
    events = {
        "episodes": done,
        "terminated": infos.terminated,
        "truncated": infos.truncated,
        "invalid_steps": infos.invalid,
    }
    # Scalars of the environment count where an episode ended or at every step, but not at an invalid one, and only of
    # agents that are present.
    counts = ~infos.invalid if isinstance(infos.present, tuple) else infos.present & ~infos.invalid
    return {
        **stats(totalled, done),
        **totals(events),
        **(stats(of_episodes, done & counts) if of_episodes else {}),
        **(stats(of_steps, counts) if of_steps else {}),
    }


def make_collect_info(infos: StepInfo, more: Metrics | None = None) -> CollectInfo:
    """Return metrics and episode ends of steps `[T, N]`, with `more` metrics."""
    metrics: Metrics = {**merge_metrics(episode_metrics(infos)), **(more or {})}
    return CollectInfo(metrics, _episode_ends(infos))


def _episode_ends(infos: StepInfo) -> EpisodeEnds:
    length = jnp.asarray(infos.info["episode_length"], jnp.int32)
    # The sign marks truncation. A step that is both terminated and truncated counts as terminated.
    length = jnp.where(infos.terminated, length, jnp.where(infos.truncated, -length, 0))
    return EpisodeEnds(length, jnp.asarray(infos.info["episode_return"], jnp.float32))


# --- initialisation ---------------------------------------------------------------------------------------------


def reset_envs(collector: Collector, agent: PyTree, key: Key) -> tuple[EnvLoopState, PyTree]:
    """Reset the environments; return their state, and the shapes of one vector step's transitions."""
    env, obs = collector.env.reset(key)
    start = reset_processor(collector.agent, collector.processor, agent, obs, obs_valid(env))
    return EnvLoopState(env, start.processor), start.items


class ProcessorReset(NamedTuple):
    """A processor at the first observations, with zero actions and extras."""

    processor: PyTree
    action: PyTree
    """Zeros `[N, ...]`, like the extras."""
    extras: PyTree
    items: PyTree
    """Shapes of one vector step's transitions."""


def reset_processor(
    agent: Agent, processor: Processor, state: PyTree, obs: PyTree, obs_valid: Array | tuple[()] = ()
) -> ProcessorReset:
    """Initialise `processor` at the first observations `[N, ...]`, for an agent in `state`.

    `obs_valid` is as in `Step`.
    """

    def first_step(state: PyTree, obs: PyTree, key: Key) -> PyTree:
        action, extras = agent.act(state, processor.observe(processor.init(obs)), key, jnp.uint32(0), "explore")
        started = init_processor(processor, obs, action, extras)
        return action, extras, processor.process(started, dummy_step(obs, action, extras))[1]

    # Shapes alone are evaluated: the agent does not act, and no key is consumed.
    *action_and_extras, items = jax.eval_shape(first_step, state, obs, make_key(0))
    action, extras = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), action_and_extras)
    return ProcessorReset(init_processor(processor, obs, action, extras, obs_valid), action, extras, items)

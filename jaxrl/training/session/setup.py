"""The parts of a session that its settings ask for, and how it describes itself."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.errors import SettingsError, check_count
from jaxrl.processors.base import Processor
from jaxrl.processors.n_step import one_step
from jaxrl.registry import algorithm_names, defaults_for, join_names
from jaxrl.spaces import EnvSpec
from jaxrl.strategies.interaction import build_agent, connect, make_default_processor, settings_of
from jaxrl.strategies.off_policy import Replay
from jaxrl.strategies.on_policy import ROLLOUT_SETTINGS, make_minibatch_schedule, settings_of_schedule
from jaxrl.strategies.replay import UpdateSchedule, adapt_buffer, make_update_schedule, min_rows, set_goal_fn
from jaxrl.strategies.stepwise import Stepwise, StepwiseState
from jaxrl.training.memory import Plan, plan_of_state
from jaxrl.training.processes import require_alone
from jaxrl.training.schedule import MAX_COUNT, Schedule, rounded_up
from jaxrl.training.settings import SessionConfig, rounding
from jaxrl.trees import PyTree
from jaxrl.xla import attempts

OF_REPLAY = ("opt_interval", "updates", "warmup", "random_warmup")
"""Settings that only agents read which learn from replay."""


def put_together(
    config: SessionConfig, spec: EnvSpec, agent: AgentMaker, buffer: Buffer | None, processor: Processor | None
) -> Stepwise:
    """Put the parts together; raise `SettingsError` for those that do not fit one another.

    A processor that is left out is one of single steps; of an on-policy agent, what suits it.
    """
    require_alone("a session")
    known = build_agent(agent, processor, spec)
    if known.prepare is None and known.info.offline:
        able = join_names([*algorithm_names("off_policy"), *algorithm_names("on_policy")], "or")
        raise SettingsError(f"a session learns from its own steps, and {known.name} from data; use {able}")
    if known.prepare is not None:
        require_default(config, OF_REPLAY, f"{known.name} learns from rollouts, and keeps no replay")
        if buffer is not None:
            raise SettingsError(f"{known.name} learns from rollouts, and keeps no replay; leave buffer out")
        suits = defaults_for(known.name, "on_policy")
        return _from_rollouts(config, spec, *connect(known, processor or make_default_processor(suits)))
    require_default(config, ROLLOUT_SETTINGS, f"{known.name} learns from replay, not from rollouts")
    if buffer is None:
        raise SettingsError(f"{known.name} learns from replay; give buffer, as in buffer=jaxrl.uniform(50_000)")
    return _from_replay(config, spec, *connect(known, (processor or one_step()).for_replay), buffer)


def rounded(config: SessionConfig, stepwise: Stepwise) -> tuple[SessionConfig, list[str]]:
    """Return settings whose `max_opts` is made of whole iterations, and what to say of it."""
    length = rounded_up(config.max_opts, stepwise.schedule.updates)
    return replace(config, max_opts=length), rounding(config.max_opts, length, stepwise.schedule.updates)


def _from_replay(config: SessionConfig, spec: EnvSpec, processor: Processor, agent: Agent, buffer: Buffer) -> Stepwise:
    buffer = adapt_buffer(agent, set_goal_fn(buffer, processor, spec.name), config.num_envs)
    schedule = make_update_schedule(
        horizon=processor.horizon,
        least=min_rows(buffer, config.num_envs),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        updates=config.updates,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
    )
    return Stepwise(spec, agent, processor, schedule, Replay(agent, processor, buffer, schedule))


def _from_rollouts(config: SessionConfig, spec: EnvSpec, processor: Processor, agent: Agent) -> Stepwise:
    check_count("num_envs", config.num_envs)
    asked = (getattr(config, name) for name in ROLLOUT_SETTINGS)
    passes = make_minibatch_schedule(agent, processor, config.num_envs, *asked)
    schedule = UpdateSchedule(config.num_envs, passes.rollout, passes.updates, horizon=0, fill=0, random_warmup=False)
    return Stepwise(spec, agent, processor, schedule, passes)


def require_default(config: SessionConfig, names: tuple[str, ...], why: str) -> None:
    """Raise `SettingsError`, saying `why`, if one of the settings `names` is not as it is left out."""
    for name in names:
        if getattr(config, name) != getattr(SessionConfig, name):
            raise SettingsError(f"{name} is {getattr(config, name)}, but {why}; leave it out")


def schedule_of(config: SessionConfig, stepwise: Stepwise) -> Schedule:
    schedule = stepwise.schedule
    return Schedule(
        max_opts=config.max_opts or _endless(schedule),
        opt_steps_per_step=schedule.updates,
        env_steps_per_step=schedule.rows,
        warmup_env_steps=schedule.warmup_env_steps,
        record_interval=config.record_interval,
        save_interval=config.save_interval,
        max_env_steps=config.max_env_steps,
    )


def _endless(schedule: UpdateSchedule) -> int:
    """Return how many optimisation steps can be counted, in whole iterations."""
    most = min(MAX_COUNT // schedule.updates, MAX_COUNT - schedule.warmup_env_steps // schedule.rows - 1)
    return most * schedule.updates


def notes_of(config: SessionConfig, stepwise: Stepwise, state: StepwiseState) -> list[str]:
    """Return what is said as a session begins."""
    more = (
        ()
        if stepwise.buffer is None
        else stepwise.schedule.notes(stepwise.buffer, stepwise.schedule.rows, config.warmup)
    )
    return [str(plan_of_session(stepwise, state)), *more, *attempts.notes()]


def plan_of_session(stepwise: Stepwise, state: PyTree) -> Plan:
    """Return the memory plan of a session whose `state` is given, or its shapes."""
    capacity = None if stepwise.buffer is None else stepwise.buffer.capacity(stepwise.schedule.rows)
    return plan_of_state(state, capacity)


def settings_of_session(config: SessionConfig, stepwise: Stepwise, made: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of a session; `made` is what builds one of its environments, if anything does."""
    own = asdict(config)
    del own["run_dir"]  # a run can be moved
    for name in ROLLOUT_SETTINGS if stepwise.passes is None else OF_REPLAY:
        del own[name]
    if stepwise.passes is not None:
        own |= settings_of_schedule(stepwise.passes)
    if stepwise.buffer is not None:
        own["buffer"] = stepwise.buffer.settings
    settings = settings_of(stepwise.agent, stepwise.processor, stepwise.spec, made, **own)
    return {**settings, "custom": [*settings["custom"], "loop"], "driven": "from outside"}

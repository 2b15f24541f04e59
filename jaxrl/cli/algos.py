"""The settings of each kind of run, and the functions that build a strategy from them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.agents import Agent, AgentMaker
from jaxrl.buffers.dataset import Dataset
from jaxrl.envs import make_env
from jaxrl.envs.base import Env, require_same_spaces
from jaxrl.envs.host import HostEnv
from jaxrl.errors import SettingsError
from jaxrl.processors import (
    Processor,
    chain,
    frame_stack,
    n_step,
    normalise_obs,
    normalise_reward,
    one_hot,
    reward_clip,
    reward_scale,
)
from jaxrl.registry import ALGORITHMS, DEFAULT_SETTINGS, algorithm_maker, config_class
from jaxrl.spaces import EnvSpec
from jaxrl.strategies import ActorsConfig, Strategy, off_policy, offline, on_policy
from jaxrl.strategies.off_policy import make_default_buffer
from jaxrl.training.data.files import load_dataset
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.settings import TrainerConfig

EnvArgs = dict[str, int | float | bool | str]
"""Parameters of an environment. A list is written as in YAML, `[8, 8]`."""


@dataclass(frozen=True)
class ProcessorConfig:
    """How environment steps become transitions, in this order."""

    one_hot: int = 0
    """Show each whole number of grids and rows as this many flags, one for each value from 0; 0: as numbers."""
    frame_stack: int = 1
    """Number of latest observations stacked for the policy; 1: no stacking."""
    normalise_obs: bool = False
    """Normalise observations by their running mean and standard deviation."""
    reward_scale: float = 1.0
    """Factor that every reward is multiplied by."""
    reward_clip: float = 0.0
    """Clip rewards between minus and plus this bound; 0: no clipping."""
    normalise_reward: bool = False
    """Divide rewards by the running standard deviation of their discounted sum."""
    n_step: int = 1
    """Steps that a transition spans (n-step returns); 1 for on-policy agents."""
    discount: float = 0.99
    """Discount factor (gamma)."""


@dataclass(frozen=True)
class BufferConfig:
    """The replay buffer."""

    capacity: int = 50_000
    """Number of newest transitions to keep; rounded up to whole pushes."""
    batch_size: int = 128
    """Transitions per batch."""
    compact: bool = False
    """Store each observation once, in about half the memory; samples stay the same."""
    ends: float = 0.125
    """Room in a compact buffer for transitions next to an episode's end, as a share of its capacity; the oldest beyond
    it are lost."""
    frames: int = 1
    """Frames stacked in each observation (as processor.frame_stack); a compact buffer stores each frame once."""
    memory: str = "device"
    """Where transitions are kept: device, or host for the memory of the host, from which each batch is read."""
    prioritised: bool = False
    """Sample by priority (the size of the temporal-difference error); otherwise uniformly."""
    alpha: float = 0.6
    """Exponent of priorities; 0: uniform sampling. This and the settings below apply to prioritised replay only."""
    beta: float = 0.4
    """Exponent of importance weights at the first optimisation step."""
    beta_steps: int = 100_000
    """Optimisation steps over which beta rises linearly to 1; 0: constant."""
    normalise: str = "batch"
    """Scale importance weights so that the largest is 1 in each batch (batch) or in the whole buffer (all)."""
    epsilon: float = 1e-6
    """Constant added to every priority."""
    hindsight: float = 0.0
    """Share of each batch whose steps get the goal that their episode reached later (HER), 0.8 as published; for
    environments with goals. 0: none."""


@dataclass(frozen=True)
class EnvRun(ActorsConfig, TrainerConfig):
    """Train in an environment."""

    env: str = "CartPole-v1"
    """Environment."""
    env_args: EnvArgs = field(default_factory=dict)
    """Parameters of the environment in place of its defaults, as in `--env-args max_steps_in_episode 200`; numbers,
    true or false, text, or lists as in [8,8]."""
    eval_env: str | None = None
    """Environment to evaluate in, with the same spaces; unset: that of the training."""
    eval_env_args: EnvArgs = field(default_factory=dict)
    """Parameters of the environment to evaluate in; without eval_env, in place of those in env_args."""
    resets: str = "auto"
    """Where episodes begin: fresh (reset all at every step), pool or pool:K (each reset is made once and kept),
    optimistic or optimistic:R (R environments share a reset); auto: fresh where that is cheap, otherwise pool."""
    stagger: bool = False
    """Truncate the first episode of each environment after another share of the time limit, so that they do not all
    begin and end together; only environments on the device that have a time limit."""
    shards: int = 1
    """Parts into which environments, buffer and batches are divided, at most one for each device; the bits of a run
    depend on them, but not on how many devices they are spread over."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyRun(EnvRun):
    """Train off-policy, from a replay buffer."""

    num_envs: int = DEFAULT_SETTINGS["off_policy"]["num_envs"]
    """Number of parallel environments."""
    opt_interval: int = DEFAULT_SETTINGS["off_policy"]["opt_interval"]
    """Environment steps per optimisation step; a multiple of num_envs, or a divisor of it."""
    updates: int = DEFAULT_SETTINGS["off_policy"]["updates"]
    """Optimisation steps taken each time one is due."""
    warmup: int = DEFAULT_SETTINGS["off_policy"]["warmup"]
    """Environment steps before the first optimisation step."""
    random_warmup: bool = DEFAULT_SETTINGS["off_policy"]["random_warmup"]
    """Take uniformly random actions during the warm-up instead of the agent's."""
    demos: tuple[str, ...] = ()
    """Demonstrations to learn from beside the buffer: .npz files, as `jaxrl.collect` writes them, or minari:NAME."""
    demos_sha256: str = ""
    """SHA-256 of the demonstrations' arrays, which a run records; others are then refused. Unset: any."""
    demo_share: float = 0.5
    """Share of the demonstrations in what is learnt from; batches from the buffer stay as large as they are."""
    buffer: BufferConfig = field(default_factory=BufferConfig)
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    agent: Any


@dataclass(frozen=True, kw_only=True)
class OnPolicyRun(EnvRun):
    """Train on-policy. Each iteration collects a rollout and takes `epochs * minibatches` optimisation steps on it."""

    num_envs: int = DEFAULT_SETTINGS["on_policy"]["num_envs"]
    """Number of parallel environments."""
    rollout: int = DEFAULT_SETTINGS["on_policy"]["rollout"]
    """Steps of each environment in a rollout."""
    epochs: int = DEFAULT_SETTINGS["on_policy"]["epochs"]
    """Passes over each rollout."""
    minibatches: int = DEFAULT_SETTINGS["on_policy"]["minibatches"]
    """Minibatches per epoch, one optimisation step each; must divide the number of steps in a rollout (with a recurrent
    core, of environments)."""
    teacher: str | None = None
    """Run whose best policy is learnt from too, by the weight agent.teacher_coef, or the directory of one of its
    checkpoints; unset: none."""
    teacher_sha256: str = ""
    """SHA-256 of the teacher, which a run records; another is then refused. Unset: any."""
    demos: tuple[str, ...] = ()
    """Demonstrations to imitate too, by the weight agent.imitation_coef: .npz files, as `jaxrl.collect` writes them, or
    minari:NAME."""
    demos_sha256: str = ""
    """SHA-256 of the demonstrations' arrays, which a run records; others are then refused. Unset: any."""
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    agent: Any


@dataclass(frozen=True, kw_only=True)
class OfflineRun(TrainerConfig):
    """Train offline, from a fixed data set."""

    data: tuple[str, ...] = ()
    """Data sets: .npz files, as `jaxrl.collect` writes them or with the names of D4RL, or minari:NAME."""
    data_sha256: str = ""
    """SHA-256 of the data's arrays, which a run records; other data are then refused. Unset: any data."""
    env: str | None = None
    """Environment to evaluate the policy in; unset: score it by how closely it matches the actions of held-out
    episodes."""
    env_args: EnvArgs = field(default_factory=dict)
    """Parameters of the environment in place of its defaults, as in `--env-args max_steps_in_episode 200`; numbers,
    true or false, text, or lists as in [8,8]."""
    batch_size: int = 256
    """Transitions per batch; 0: all of the data."""
    replacement: bool = True
    """Draw batches with replacement; without, go through the data in epochs, each in a new random order."""
    scale_rewards_by: str = "none"
    """Scale rewards by the returns of the data's episodes: none, range (largest less smallest become 1000, as IQL does
    on D4RL) or std (divide by their standard deviation)."""
    updates: int = 1
    """Optimisation steps per iteration; must divide max_opts."""
    holdout: float | None = None
    """Share of the episodes held out from training; unset: 0 with an env, 0.1 without."""
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    agent: Any


def build(algo: str, config: Any, teacher: GreedyPolicy | None = None) -> Strategy:
    """Build the strategy that `config` describes; raise `SettingsError` for settings that cannot work.

    `teacher` is what `jaxrl.loading.teacher_of(config)` returns.
    """
    _, make = KINDS[ALGORITHMS[algo].kind]
    agent = algorithm_maker(algo)(config.agent)
    agent = agent if ALGORITHMS[algo].make is None else partial(_build_of_kind, algo, agent)
    if teacher is None and getattr(config, "teacher", None) is not None:
        raise SettingsError(f"teacher is {config.teacher}, and was not loaded; give build what teacher_of returns")
    strategy = make(agent, config) if teacher is None else build_on_policy(agent, config, teacher)
    return with_eval_env(strategy, config) if isinstance(config, EnvRun) else strategy


def _build_of_kind(algo: str, agent: AgentMaker, spec: EnvSpec) -> Agent:
    """Build the agent of a user's algorithm; raise `SettingsError` unless it learns as the algorithm is registered."""
    built, kind = agent(spec), ALGORITHMS[algo].kind
    needed = "on_policy" if built.prepare is not None else "off_policy" if kind == "on_policy" else kind
    if kind != needed:
        has = "no prepare" if built.prepare is None else "prepare"
        raise SettingsError(
            f"{algo} makes an {needed} agent (it has {has}), but is known as {kind}; register it in its module: "
            f'jaxrl.register_algorithm("NAME", make, kind="{needed}")'
        )
    return built


def with_eval_env(strategy: Strategy, config: EnvRun) -> Strategy:
    """Evaluate `strategy` in the environment that `config` names for it, if it does.

    Raises:
      SettingsError: its spaces are not those of the training.
    """
    if config.eval_env is None and not config.eval_env_args:
        return strategy
    given = {"eval_env": config.eval_env, "eval_env_args": dict(config.eval_env_args)}
    same = config.eval_env is None
    env_args: dict[str, Any] = {**(config.env_args if same else {}), **config.eval_env_args}
    env = make_env(config.eval_env or config.env, **env_args)
    assert strategy.policy is not None
    require_same_spaces(env.spec, strategy.policy.spec)
    info = strategy.info._replace(settings={**(strategy.info.settings or {}), **given})
    return strategy._replace(evaluation=strategy.evaluation._replace(env=env), info=info)


def general(algo: str) -> Any:
    """Return the default settings of a run, before presets, files and flags apply."""
    row = ALGORITHMS[algo]
    run, _ = KINDS[row.kind]
    config = run(agent=config_class(algo)(), env=row.env)
    parts = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in row.settings.items()
    }
    return replace(config, **parts)


def build_off_policy(agent: AgentMaker, config: Any) -> Strategy:
    """Build the off-policy strategy that `config` describes; this reads its demonstrations."""
    env = make_env(config.env, **config.env_args)
    return off_policy(
        env,
        agent,
        buffer=make_default_buffer({"buffer": asdict(config.buffer)}),
        processor=build_processor(config.processor),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        updates=config.updates,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
        actors=part_of(config, ActorsConfig),
        resets=config.resets,
        stagger=config.stagger,
        shards=config.shards,
        demos=_load_demos(config, env),
        demo_share=config.demo_share,
    )


def _load_demos(config: Any, env: Env | HostEnv) -> Dataset | None:
    """Load the demonstrations that the settings of a run name, if any."""
    return load_dataset(*config.demos, spec=env.spec, sha256=config.demos_sha256) if config.demos else None


def build_on_policy(agent: AgentMaker, config: Any, teacher: GreedyPolicy | None = None) -> Strategy:
    """Build the on-policy strategy that `config` describes, whose teacher has been loaded."""
    env = make_env(config.env, **config.env_args)
    strategy = on_policy(
        env,
        agent,
        processor=build_processor(config.processor),
        num_envs=config.num_envs,
        rollout=config.rollout,
        epochs=config.epochs,
        minibatches=config.minibatches,
        actors=part_of(config, ActorsConfig),
        resets=config.resets,
        stagger=config.stagger,
        shards=config.shards,
        teacher=teacher,
        demos=_load_demos(config, env),
    )
    if teacher is None:
        return strategy
    settings = dict(strategy.info.settings or {})
    # Known by its place, it is no part made in Python.
    path, custom = str(Path(config.teacher).absolute()), [part for part in settings["custom"] if part != "teacher"]
    settings |= {"teacher": path, "custom": custom}
    return strategy._replace(info=strategy.info._replace(settings=settings))


Part = TypeVar("Part")


def part_of(config: Any, kind: type[Part]) -> Part:
    """Return the part of a run's settings that belongs to the dataclass `kind`."""
    return kind(**{f.name: getattr(config, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def build_offline(agent: AgentMaker, config: Any) -> Strategy:
    """Build the offline strategy that `config` describes; this reads its data."""
    if not config.data:
        raise SettingsError("data is unset; name what to learn from, as in --data FILE.npz (jaxrl.collect makes one)")
    if config.env_args and config.env is None:
        raise SettingsError("env_args are parameters of an environment; name it as env")
    env = None if config.env is None else make_env(config.env, **config.env_args)
    return offline(
        load_dataset(*config.data, spec=env and env.spec, sha256=config.data_sha256),
        agent,
        batch_size=config.batch_size,
        env=env,
        processor=build_processor(config.processor),
        updates=config.updates,
        replacement=config.replacement,
        scale_rewards_by=config.scale_rewards_by,
        holdout=(0.1 if env is None else 0.0) if config.holdout is None else config.holdout,
    )


def build_processor(config: ProcessorConfig) -> Processor:
    """Build the chain of processors that `config` turns on."""
    parts = {
        one_hot: (config.one_hot != 0, (config.one_hot,)),
        frame_stack: (config.frame_stack != 1, (config.frame_stack,)),
        normalise_obs: (config.normalise_obs, ()),
        reward_scale: (config.reward_scale != 1.0, (config.reward_scale,)),
        reward_clip: (config.reward_clip != 0.0, (config.reward_clip,)),
        normalise_reward: (config.normalise_reward, (config.discount,)),
        n_step: (True, (config.n_step, config.discount)),
    }
    return chain(*(part(*args) for part, (wanted, args) in parts.items() if wanted))  # type: ignore[operator]


KINDS: dict[str, tuple[Any, Callable[[AgentMaker, Any], Strategy]]] = {
    "off_policy": (OffPolicyRun, build_off_policy),
    "on_policy": (OnPolicyRun, build_on_policy),
    "offline": (OfflineRun, build_offline),
}
"""For each kind of run, the type of its settings and the function that builds its strategy."""

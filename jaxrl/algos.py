"""The settings of a run of each kind, and how what they say is built."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from jaxrl.agents import AgentMaker
from jaxrl.buffers import Buffer, prioritised, uniform
from jaxrl.envs import make_env
from jaxrl.errors import SettingsError
from jaxrl.processors import (
    Processor,
    chain,
    frame_stack,
    n_step,
    normalise_obs,
    normalise_reward,
    reward_clip,
    reward_scale,
)
from jaxrl.registry import ALGORITHMS, named
from jaxrl.strategies import ActorsConfig, Strategy, off_policy, offline, on_policy
from jaxrl.training.data.files import load_dataset
from jaxrl.training.settings import TrainerConfig

AgentConfig = TypeVar("AgentConfig")


@dataclass(frozen=True)
class ProcessorConfig:
    """How steps become transitions, in this order."""

    normalise_obs: bool = False
    """Bring observations to running mean 0 and deviation 1."""
    frame_stack: int = 1
    """Observations that the policy sees at once; 1: the latest alone."""
    reward_scale: float = 1.0
    """Factor of every reward."""
    reward_clip: float = 0.0
    """Bound to which rewards are clipped on both sides; 0: not at all."""
    normalise_reward: bool = False
    """Divide rewards by the running deviation of their discounted sum."""
    n_step: int = 1
    """Steps over which a transition goes; 1 for agents that learn on-policy."""
    discount: float = 0.99
    """Discount of the next reward against this one (gamma)."""


@dataclass(frozen=True)
class BufferConfig:
    """The replay buffer."""

    capacity: int = 50_000
    """Transitions kept, the newest; rounded up to whole pushes."""
    batch_size: int = 128
    """Transitions in a batch."""
    compact: bool = False
    """Keep each observation once, in about half of the memory; samples stay the same."""
    ends: float = 0.125
    """Places of a compact buffer for transitions next to an episode's end, as a share of all; older ones are lost."""
    frames: int = 1
    """Frames stacked in an observation, as processor.frame_stack says, of which a compact buffer keeps each once."""
    prioritised: bool = False
    """Sample by priority, the size of the temporal-difference error; otherwise uniformly."""
    alpha: float = 0.6
    """Power of a priority; 0: all items alike. This and the rest are of prioritised replay alone."""
    beta: float = 0.4
    """Power of importance weights at the first optimisation step."""
    beta_steps: int = 100_000
    """Optimisation steps in which beta rises to 1; 0: it stays."""
    normalise: str = "batch"
    """Over what the largest importance weight is 1: batch, or all."""
    epsilon: float = 1e-6
    """Added to every priority."""


@dataclass(frozen=True)
class EnvRun(ActorsConfig, TrainerConfig):
    """Train in an environment."""

    env: str = "CartPole-v1"
    """Environment."""
    env_args: dict[str, float] = field(default_factory=dict)
    """Parameters of the environment in place of its defaults, as in `--env-args max_steps_in_episode 200`."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyRun(EnvRun, Generic[AgentConfig]):
    """Train off-policy, from a replay buffer."""

    num_envs: int = 10
    """Environments side by side."""
    opt_interval: int = 10
    """Environment steps per optimisation step; a multiple of num_envs, or a divisor of it."""
    updates: int = 1
    """Optimisation steps made each time that one is due."""
    warmup: int = 1_000
    """Environment steps before the first optimisation step."""
    random_warmup: bool = True
    """Take random actions during the warm-up, not the agent's."""
    buffer: BufferConfig = field(default_factory=BufferConfig)
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    agent: AgentConfig


@dataclass(frozen=True, kw_only=True)
class OnPolicyRun(EnvRun, Generic[AgentConfig]):
    """Train on-policy. An iteration is a rollout and `epochs * minibatches` optimisation steps on it."""

    num_envs: int = 8
    """Environments side by side."""
    rollout: int = 128
    """Steps of each environment in an iteration."""
    epochs: int = 4
    """Times that a rollout is gone through."""
    minibatches: int = 4
    """Equal parts of an epoch, one optimisation step each; must divide the steps of a rollout."""
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    agent: AgentConfig


@dataclass(frozen=True, kw_only=True)
class OfflineRun(TrainerConfig, Generic[AgentConfig]):
    """Train from data alone."""

    data: tuple[str, ...] = ()
    """Data sets, as `jaxrl.collect` writes them or of D4RL, .npz files all; or minari:NAME."""
    data_sha256: str = ""
    """Of the arrays, as a run has found it: no other data will do. Unset: whatever it is."""
    env: str | None = None
    """Environment to judge the policy in; unset: by how near it comes to the actions of the episodes held out."""
    env_args: dict[str, float] = field(default_factory=dict)
    """Parameters of the environment in place of its defaults, as in `--env-args max_steps_in_episode 200`."""
    batch_size: int = 256
    """Transitions in a batch."""
    updates: int = 1
    """Optimisation steps in one iteration; must divide max_opts."""
    holdout: float | None = None
    """Share of the episodes that are not learnt from; unset: 0 with an env, else 0.1."""
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    agent: AgentConfig


def build(algo: str, config: Any) -> Strategy:
    """Build the strategy of `config`; raise `SettingsError` for what cannot be."""
    _, make = KINDS[ALGORITHMS[algo].kind]
    return make(maker(algo)(config.agent), config)


def maker(algo: str) -> Callable[..., AgentMaker]:
    """Return the function that makes the agent, as `jaxrl.dqn`."""
    return named(ALGORITHMS[algo].module, algo)


def run_type(algo: str) -> Any:
    """Return the type of the settings of a run, as `OffPolicyRun[DQNConfig]`."""
    row = ALGORITHMS[algo]
    run, _ = KINDS[row.kind]
    return run[named(row.module, row.config)]


def general(algo: str) -> Any:
    """Return the settings of a run before presets, files and flags."""
    row = ALGORITHMS[algo]
    config = run_type(algo)(agent=named(row.module, row.config)(), env=row.env)
    parts = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in row.settings.items()
    }
    return replace(config, **parts)


def build_off_policy(agent: AgentMaker, config: Any) -> Strategy:
    """Build an off-policy strategy of `config`."""
    return off_policy(
        make_env(config.env, **config.env_args),
        agent,
        buffer=build_buffer(config.buffer),
        processor=build_processor(config.processor),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        updates=config.updates,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
        actors=part_of(config, ActorsConfig),
    )


def build_on_policy(agent: AgentMaker, config: Any) -> Strategy:
    """Build an on-policy strategy of `config`."""
    return on_policy(
        make_env(config.env, **config.env_args),
        agent,
        processor=build_processor(config.processor),
        num_envs=config.num_envs,
        rollout=config.rollout,
        epochs=config.epochs,
        minibatches=config.minibatches,
        actors=part_of(config, ActorsConfig),
    )


Part = TypeVar("Part")


def part_of(config: Any, kind: type[Part]) -> Part:
    """Return those settings of a run that are the fields of the dataclass `kind`."""
    return kind(**{f.name: getattr(config, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def build_offline(agent: AgentMaker, config: Any) -> Strategy:
    """Build an offline strategy of `config`, whose data are read."""
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
        holdout=(0.1 if env is None else 0.0) if config.holdout is None else config.holdout,
    )


def build_buffer(config: BufferConfig) -> Buffer:
    """Build the replay buffer of `config`."""
    if not config.prioritised:
        ring = {name: getattr(config, name) for name in ("compact", "ends", "frames")}
        return uniform(config.capacity, config.batch_size, **ring)
    settings = {name: value for name, value in asdict(config).items() if name != "prioritised"}
    return prioritised(**settings)


def build_processor(config: ProcessorConfig) -> Processor:
    """Build the chain of `config`, less what it leaves off."""
    parts = {
        normalise_obs: (config.normalise_obs, ()),
        frame_stack: (config.frame_stack != 1, (config.frame_stack,)),
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
"""The settings of a run of each kind, and what builds its strategy."""

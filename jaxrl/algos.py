"""The algorithms that the command line knows: the settings of each, what suits an environment, and how it is built."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from jaxrl.agents import (
    A2CConfig,
    AgentMaker,
    AWACConfig,
    BCConfig,
    CQLConfig,
    CQLDQNConfig,
    DDPGConfig,
    DQNConfig,
    IMPALAConfig,
    IQLConfig,
    PPOConfig,
    PQNConfig,
    RainbowConfig,
    REINFORCEConfig,
    SACConfig,
    TD3BCConfig,
    TD3Config,
    a2c,
    awac,
    bc,
    cql,
    cql_dqn,
    ddpg,
    dqn,
    impala,
    iql,
    ppo,
    pqn,
    rainbow,
    reinforce,
    sac,
    td3,
    td3_bc,
)
from jaxrl.buffers import Buffer, prioritised, uniform
from jaxrl.envs import make_env
from jaxrl.errors import SettingsError
from jaxrl.presets import (
    A2C_PRESETS,
    AWAC_PRESETS,
    BC_PRESETS,
    CQL_DQN_PRESETS,
    CQL_PRESETS,
    DDPG_PRESETS,
    DQN_PRESETS,
    IMPALA_PRESETS,
    IQL_PRESETS,
    PPO_PRESETS,
    PQN_PRESETS,
    RAINBOW_PRESETS,
    REINFORCE_PRESETS,
    SAC_PRESETS,
    TD3_BC_PRESETS,
    TD3_PRESETS,
)
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
from jaxrl.strategies import ActorsConfig, Strategy, off_policy, offline, on_policy
from jaxrl.training.data.files import load_dataset
from jaxrl.training.settings import TrainerConfig


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


@dataclass(frozen=True)
class OffPolicyRun(EnvRun):
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


@dataclass(frozen=True)
class DQNRun(OffPolicyRun):
    """Train DQN."""

    agent: DQNConfig = field(default_factory=DQNConfig)


@dataclass(frozen=True)
class RainbowRun(OffPolicyRun):
    """Train Rainbow: DQN with all of double, dueling, c51, noisy, several steps and prioritised replay."""

    agent: RainbowConfig = field(default_factory=RainbowConfig)
    buffer: BufferConfig = field(default_factory=lambda: BufferConfig(prioritised=True, alpha=0.5))
    processor: ProcessorConfig = field(default_factory=lambda: ProcessorConfig(n_step=3))


@dataclass(frozen=True)
class _ContinuousRun(OffPolicyRun):
    env: str = "Pendulum-v1"
    """Environment."""
    num_envs: int = 1
    """Environments side by side."""
    opt_interval: int = 1
    """Environment steps per optimisation step; a multiple of num_envs, or a divisor of it."""
    buffer: BufferConfig = field(default_factory=lambda: BufferConfig(capacity=100_000, batch_size=256))


@dataclass(frozen=True)
class SACRun(_ContinuousRun):
    """Train SAC."""

    agent: SACConfig = field(default_factory=SACConfig)


@dataclass(frozen=True)
class TD3Run(_ContinuousRun):
    """Train TD3."""

    agent: TD3Config = field(default_factory=TD3Config)


@dataclass(frozen=True)
class DDPGRun(_ContinuousRun):
    """Train DDPG."""

    agent: DDPGConfig = field(default_factory=DDPGConfig)


@dataclass(frozen=True)
class OnPolicyRun(EnvRun):
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


@dataclass(frozen=True)
class PPORun(OnPolicyRun):
    """Train PPO. An iteration is a rollout and `epochs * minibatches` optimisation steps on it."""

    agent: PPOConfig = field(default_factory=PPOConfig)


@dataclass(frozen=True)
class A2CRun(OnPolicyRun):
    """Train A2C. An iteration is a rollout and one optimisation step on the whole of it."""

    epochs: int = 1
    """Times that a rollout is gone through."""
    minibatches: int = 1
    """Equal parts of an epoch, one optimisation step each; must divide the steps of a rollout."""
    agent: A2CConfig = field(default_factory=A2CConfig)


@dataclass(frozen=True)
class REINFORCERun(A2CRun):
    """Train REINFORCE. An iteration is a rollout and one optimisation step on the whole of it."""

    agent: REINFORCEConfig = field(default_factory=REINFORCEConfig)


@dataclass(frozen=True)
class IMPALARun(A2CRun):
    """Train IMPALA. An iteration is a rollout and one optimisation step on the whole of it."""

    agent: IMPALAConfig = field(default_factory=IMPALAConfig)


@dataclass(frozen=True)
class PQNRun(OnPolicyRun):
    """Train PQN. An iteration is a rollout and `epochs * minibatches` optimisation steps on it."""

    agent: PQNConfig = field(default_factory=PQNConfig)


@dataclass(frozen=True)
class OfflineRun(TrainerConfig):
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


@dataclass(frozen=True)
class BCRun(OfflineRun):
    """Train by behavioural cloning."""

    agent: BCConfig = field(default_factory=BCConfig)


@dataclass(frozen=True)
class TD3BCRun(OfflineRun):
    """Train TD3+BC."""

    agent: TD3BCConfig = field(default_factory=TD3BCConfig)


@dataclass(frozen=True)
class CQLRun(OfflineRun):
    """Train by conservative Q-learning with a policy, SAC's."""

    agent: CQLConfig = field(default_factory=CQLConfig)


@dataclass(frozen=True)
class CQLDQNRun(OfflineRun):
    """Train by conservative Q-learning without a policy, on DQN."""

    agent: CQLDQNConfig = field(default_factory=CQLDQNConfig)


@dataclass(frozen=True)
class AWACRun(OfflineRun):
    """Train AWAC."""

    agent: AWACConfig = field(default_factory=AWACConfig)


@dataclass(frozen=True)
class IQLRun(OfflineRun):
    """Train IQL."""

    agent: IQLConfig = field(default_factory=IQLConfig)


def build(algo: str, config: Any) -> Strategy:
    """Build the strategy of `config`; raise `SettingsError` for what cannot be."""
    return ALGOS[algo].build(ALGOS[algo].agent(config.agent), config)


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


class Algo(NamedTuple):
    """What the command line knows of an algorithm."""

    config: type[Any]
    agent: Callable[..., AgentMaker]
    build: Callable[[AgentMaker, Any], Strategy]
    presets: Mapping[str, Mapping[str, Any]]
    """Settings by environment that `--env` alone brings along; `*` stands for anything."""


ALGOS: dict[str, Algo] = {
    "dqn": Algo(DQNRun, dqn, build_off_policy, DQN_PRESETS),
    "rainbow": Algo(RainbowRun, rainbow, build_off_policy, RAINBOW_PRESETS),
    "sac": Algo(SACRun, sac, build_off_policy, SAC_PRESETS),
    "td3": Algo(TD3Run, td3, build_off_policy, TD3_PRESETS),
    "ddpg": Algo(DDPGRun, ddpg, build_off_policy, DDPG_PRESETS),
    "ppo": Algo(PPORun, ppo, build_on_policy, PPO_PRESETS),
    "a2c": Algo(A2CRun, a2c, build_on_policy, A2C_PRESETS),
    "reinforce": Algo(REINFORCERun, reinforce, build_on_policy, REINFORCE_PRESETS),
    "impala": Algo(IMPALARun, impala, build_on_policy, IMPALA_PRESETS),
    "pqn": Algo(PQNRun, pqn, build_on_policy, PQN_PRESETS),
    "bc": Algo(BCRun, bc, build_offline, BC_PRESETS),
    "td3_bc": Algo(TD3BCRun, td3_bc, build_offline, TD3_BC_PRESETS),
    "cql": Algo(CQLRun, cql, build_offline, CQL_PRESETS),
    "cql_dqn": Algo(CQLDQNRun, cql_dqn, build_offline, CQL_DQN_PRESETS),
    "awac": Algo(AWACRun, awac, build_offline, AWAC_PRESETS),
    "iql": Algo(IQLRun, iql, build_offline, IQL_PRESETS),
}

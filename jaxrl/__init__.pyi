"""The public names, and where they are: for type checkers, and for `jaxrl/__init__.py`, which reads them from here."""

from .agents import (
    A2CConfig as A2CConfig,
    Agent as Agent,
    AgentFns as AgentFns,
    AgentInfo as AgentInfo,
    AgentMaker as AgentMaker,
    AWACConfig as AWACConfig,
    BCConfig as BCConfig,
    CQLConfig as CQLConfig,
    CQLDQNConfig as CQLDQNConfig,
    CrossQConfig as CrossQConfig,
    DDPGConfig as DDPGConfig,
    DQNConfig as DQNConfig,
    DroQConfig as DroQConfig,
    EDACConfig as EDACConfig,
    FastSACConfig as FastSACConfig,
    FastTD3Config as FastTD3Config,
    IMPALAConfig as IMPALAConfig,
    IQLConfig as IQLConfig,
    PPOConfig as PPOConfig,
    PQNConfig as PQNConfig,
    RainbowConfig as RainbowConfig,
    ReBRACConfig as ReBRACConfig,
    REDQConfig as REDQConfig,
    REINFORCEConfig as REINFORCEConfig,
    REPPOConfig as REPPOConfig,
    SACConfig as SACConfig,
    SACNConfig as SACNConfig,
    Schedule as Schedule,
    SimBaConfig as SimBaConfig,
    TD3BCConfig as TD3BCConfig,
    TD3Config as TD3Config,
    TQCConfig as TQCConfig,
    XQCConfig as XQCConfig,
    a2c as a2c,
    awac as awac,
    bc as bc,
    constant as constant,
    cosine as cosine,
    cql as cql,
    cql_dqn as cql_dqn,
    crossq as crossq,
    ddpg as ddpg,
    dqn as dqn,
    droq as droq,
    edac as edac,
    exponential as exponential,
    fast_sac as fast_sac,
    fast_td3 as fast_td3,
    impala as impala,
    iql as iql,
    linear as linear,
    ppo as ppo,
    pqn as pqn,
    rainbow as rainbow,
    rebrac as rebrac,
    redq as redq,
    register_algorithm as register_algorithm,
    reinforce as reinforce,
    reppo as reppo,
    sac as sac,
    sac_n as sac_n,
    simba as simba,
    td3 as td3,
    td3_bc as td3_bc,
    tqc as tqc,
    xqc as xqc,
)
from .buffers import (
    Dataset as Dataset,
    hindsight as hindsight,
    prioritised as prioritised,
    uniform as uniform,
)
from .envs import (
    Env as Env,
    HostEnv as HostEnv,
    TimeStep as TimeStep,
    check_env as check_env,
    env_names as env_names,
    envelope_env as envelope_env,
    gymnasium_env as gymnasium_env,
    gymnasium_envs as gymnasium_envs,
    make_env as make_env,
    on_host as on_host,
    randomise as randomise,
    register_env as register_env,
    stoa_env as stoa_env,
    vectorise as vectorise,
)
from .errors import (
    JaxrlError as JaxrlError,
    SettingsError as SettingsError,
)
from .loading import (
    load_policy as load_policy,
)
from .metrics import (
    stat as stat,
    total as total,
)
from .processors import (
    chain as chain,
    frame_stack as frame_stack,
    map_reward as map_reward,
    n_step as n_step,
    normalise_obs as normalise_obs,
    normalise_reward as normalise_reward,
    one_hot as one_hot,
    one_step as one_step,
    reward_clip as reward_clip,
    reward_scale as reward_scale,
)
from .spaces import (
    Box as Box,
    Discrete as Discrete,
    EnvSpec as EnvSpec,
    MultiDiscrete as MultiDiscrete,
)
from .strategies import (
    ActorsConfig as ActorsConfig,
    ComposedStep as ComposedStep,
    EvalFns as EvalFns,
    Policy as Policy,
    StateFns as StateFns,
    Strategy as Strategy,
    StrategyInfo as StrategyInfo,
    fold as fold,
    off_policy as off_policy,
    offline as offline,
    on_policy as on_policy,
)
from .strategies.population import (
    Population as Population,
    between as between,
    log_uniform as log_uniform,
    population as population,
    sweepable as sweepable,
)
from .strategies.search import (
    PBT as PBT,
    Halving as Halving,
)
from .training import (
    ConsoleRecorder as ConsoleRecorder,
    Evaluation as Evaluation,
    Evaluator as Evaluator,
    Histogram as Histogram,
    Hooks as Hooks,
    Interrupt as Interrupt,
    JSONLRecorder as JSONLRecorder,
    MemoryRecorder as MemoryRecorder,
    Recorder as Recorder,
    RunInfo as RunInfo,
    Service as Service,
    ServiceRecorder as ServiceRecorder,
    Session as Session,
    SessionConfig as SessionConfig,
    SessionHooks as SessionHooks,
    Statistics as Statistics,
    TensorBoardRecorder as TensorBoardRecorder,
    Trainer as Trainer,
    TrainerConfig as TrainerConfig,
    Video as Video,
    find_runs as find_runs,
)
from .training.data.collect import (
    gather as gather,
)
from .training.data.files import (
    load_dataset as load_dataset,
    save_dataset as save_dataset,
)
from .training.population.scores import (
    PopulationResult as PopulationResult,
)
from .training.population.trainer import (
    PopulationTrainer as PopulationTrainer,
)
from .training.storage.opening import (
    extract as extract,
)
from .tuning import (
    tunable as tunable,
)
from .types import (
    Step as Step,
    Transition as Transition,
)

__version__: str

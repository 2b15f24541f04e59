"""Agents turn batches into better parameters."""

from jaxrl.agents.actor_critic import A2CConfig, IMPALAConfig, PPOConfig, REINFORCEConfig, a2c, impala, ppo, reinforce
from jaxrl.agents.advantage import AWACConfig, IQLConfig, awac, iql
from jaxrl.agents.base import Agent, AgentFns, AgentInfo, AgentMaker
from jaxrl.agents.bc import BCConfig, bc
from jaxrl.agents.dqn import CQLDQNConfig, DQNConfig, RainbowConfig, cql_dqn, dqn, rainbow
from jaxrl.agents.outside import register_algorithm
from jaxrl.agents.pqn import PQNConfig, pqn
from jaxrl.agents.reppo import REPPOConfig, reppo
from jaxrl.agents.sac import (
    CQLConfig,
    CrossQConfig,
    DroQConfig,
    EDACConfig,
    FastSACConfig,
    REDQConfig,
    SACConfig,
    SACNConfig,
    SimBaConfig,
    TQCConfig,
    XQCConfig,
    cql,
    crossq,
    droq,
    edac,
    fast_sac,
    redq,
    sac,
    sac_n,
    simba,
    tqc,
    xqc,
)
from jaxrl.agents.schedules import Schedule, constant, cosine, exponential, linear
from jaxrl.agents.td3 import (
    DDPGConfig,
    FastTD3Config,
    ReBRACConfig,
    TD3BCConfig,
    TD3Config,
    ddpg,
    fast_td3,
    rebrac,
    td3,
    td3_bc,
)

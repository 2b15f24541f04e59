"""Agents: from batches to better parameters."""

from jaxrl.agents.actor_critic import A2CConfig, PPOConfig, REINFORCEConfig, a2c, ppo, reinforce
from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.agents.dqn import DQNConfig, RainbowConfig, dqn, rainbow
from jaxrl.agents.pqn import PQNConfig, pqn
from jaxrl.agents.sac import SACConfig, sac
from jaxrl.agents.td3 import DDPGConfig, TD3Config, ddpg, td3

__all__ = [
    "A2CConfig",
    "Agent",
    "AgentMaker",
    "DDPGConfig",
    "DQNConfig",
    "PPOConfig",
    "PQNConfig",
    "REINFORCEConfig",
    "RainbowConfig",
    "SACConfig",
    "TD3Config",
    "a2c",
    "ddpg",
    "dqn",
    "ppo",
    "pqn",
    "rainbow",
    "reinforce",
    "sac",
    "td3",
]

"""Agents: from batches to better parameters."""

from jaxrl.agents.actor_critic import A2CConfig, PPOConfig, REINFORCEConfig, a2c, ppo, reinforce
from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.agents.dqn import DQNConfig, dqn
from jaxrl.agents.pqn import PQNConfig, pqn

__all__ = [
    "A2CConfig",
    "Agent",
    "AgentMaker",
    "DQNConfig",
    "PPOConfig",
    "PQNConfig",
    "REINFORCEConfig",
    "a2c",
    "dqn",
    "ppo",
    "pqn",
    "reinforce",
]

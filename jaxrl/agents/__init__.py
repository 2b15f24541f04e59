"""Agents: from batches to better parameters."""

from jaxrl.agents.base import Agent, AgentMaker
from jaxrl.agents.dqn import DQNConfig, dqn

__all__ = ["Agent", "AgentMaker", "DQNConfig", "dqn"]

"""Settings of the DQN family."""

from dataclasses import dataclass
from typing import Annotated

from jaxrl.agents.fields import (
    AtLeast,
    Between,
    Count,
    NetworkConfig,
    OneOf,
    OptimizerConfig,
    Rate,
    Real,
    SequenceConfig,
    Share,
    Steps,
    Weight,
    Widths,
)


@dataclass(frozen=True)
class DQNConfig(SequenceConfig, NetworkConfig, OptimizerConfig):
    """Settings of DQN."""

    lr: Rate = 2.5e-4
    features: Widths = (120, 84)
    loss: Annotated[str, OneOf(("huber", "squared"))] = "squared"
    """Loss of the temporal-difference error: squared, or huber, which is linear beyond 1 and suits rewards of that
    scale."""
    double: bool = True
    """Choose the next action with the online network (double Q-learning)."""
    dueling: bool = False
    """Split the head into a value and advantages (dueling network)."""
    epsilon_start: Share = 1.0
    """Probability of a random action at the first optimisation step."""
    epsilon_end: Share = 0.05
    """Probability of a random action after the decay."""
    epsilon_decay: Steps = 2_500
    """Optimisation steps over which epsilon decays linearly; 0: epsilon_end from the start."""
    boltzmann: Weight = 0.0
    """Temperature of exploration: in place of the greedy action, draw one with probabilities in proportion to
    exp(value / temperature); 0: off. Random actions by epsilon come on top."""
    target_interval: Count = 100
    """Optimisation steps between updates of the target network."""
    tau: Share = 1.0
    """Weight of the online network in a target update: 1 copies it (hard update), less averages it in (soft update)."""
    values: Annotated[str, OneOf(("expected", "c51", "qr", "iqn"))] = "expected"
    """What to learn of the return: its mean (expected), or its distribution, as probabilities of fixed atoms (c51), as
    fixed quantiles (qr) or as quantiles at any level (iqn)."""
    atoms: Annotated[int, AtLeast(2)] = 51
    """Atoms of c51 or quantiles of qr for each action; for iqn, quantiles sampled for each transition."""
    v_min: Real | None = None
    """Lowest return that c51 can represent; unset: the lowest possible under the rewards and discounts learnt from so
    far."""
    v_max: Real | None = None
    """Highest return that c51 can represent; unset: as for `v_min`."""
    noisy: Weight = 0.0
    """Initial scale of the parameter noise used to explore (NoisyNet; 0.5 as published, with epsilon 0); 0: off."""
    munchausen: Weight = 0.0
    """Weight of the scaled log-policy that is added to rewards (0.9 as published; replaces double); 0: off."""
    munchausen_temperature: Annotated[float, Between(1e-6, 1e30)] = 0.03
    """Temperature of the Munchausen policy."""
    cql: Weight = 0.0
    """Weight of the conservative (CQL) penalty; 0 turns it off."""


@dataclass(frozen=True)
class RainbowConfig(DQNConfig):
    """Settings of Rainbow."""

    dueling: bool = True
    values: Annotated[str, OneOf(("expected", "c51", "qr", "iqn"))] = "c51"
    noisy: Weight = 0.5
    epsilon_start: Share = 0.0
    epsilon_end: Share = 0.0
    epsilon_decay: Steps = 0


@dataclass(frozen=True)
class CQLDQNConfig(DQNConfig):
    """Settings of conservative Q-learning for discrete actions."""

    cql: Weight = 1.0

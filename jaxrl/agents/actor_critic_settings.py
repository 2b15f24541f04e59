"""Settings of the policy-gradient agents with a critic."""

from dataclasses import dataclass
from typing import Annotated

from jaxrl.agents.fields import (
    Activation,
    Count,
    NetworkConfig,
    OneOf,
    OptimizerConfig,
    Rate,
    Real,
    Share,
    Weight,
    Widths,
)


@dataclass(frozen=True)
class PPOConfig(NetworkConfig, OptimizerConfig):
    """Settings of PPO."""

    lr: Rate = 2.5e-4
    max_grad_norm: Weight = 0.5
    features: Widths = (64, 64)
    activation: Activation = "tanh"
    gae_lambda: Share = 0.95
    """Lambda of the advantage estimate (GAE, or V-trace); 0: one-step errors, 1: Monte-Carlo returns."""
    baseline: bool = True
    """Subtract the value from the return to get the advantage."""
    rho_clip: Weight = 0.0
    """Bound on the importance ratios by which V-trace corrects for actors' stale parameters (1 as published); 0: no
    V-trace."""
    c_clip: Weight = 1.0
    """Bound on the importance ratios by which V-trace passes later errors back; used only with rho_clip."""
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "clipped"
    """Policy objective: clipped (PPO), plain (policy gradient), or weighted (policy gradient times the importance
    ratio, which is clipped at rho_clip)."""
    clip_eps: Weight = 0.2
    """How far the probability ratio may move from 1 before the clipped objective stops rewarding it."""
    vf_clip_eps: Weight = 0.0
    """How far values may move from those before the first epoch (value clipping); 0: no limit."""
    ent_coef: Real = 0.01
    """Weight of the entropy bonus."""
    vf_coef: Weight = 0.5
    """Weight of the value loss."""
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "minibatch"
    """Normalise advantages to mean 0 and standard deviation 1 over each minibatch, over the whole batch, or not at all
    (none). A minibatch of a single sample is left as it is."""
    target_kl: Weight = 0.0
    """Approximate KL divergence from the old policy above which the remaining epochs are skipped; 0: never."""
    squash: bool = False
    """Squash continuous actions into their bounds with tanh; otherwise they are clipped."""
    free_scale: bool = True
    """Learn one scale of continuous actions for all observations; otherwise the network predicts it from the
    observation."""
    layer_norm: bool = False
    """Apply layer normalisation before each activation."""
    shared: bool = False
    """Share one torso between policy and value; otherwise each has its own."""
    core: Annotated[str, OneOf(("none", "gru", "lstm"))] = "none"
    """Recurrent core after the torso, which policy and value then share: none, gru or lstm."""
    core_features: Count = 64
    """Width of the recurrent core."""


@dataclass(frozen=True)
class A2CConfig(PPOConfig):
    """Settings of A2C."""

    lr: Rate = 1e-3
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "plain"
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "none"


@dataclass(frozen=True)
class REINFORCEConfig(A2CConfig):
    """Settings of REINFORCE."""

    gae_lambda: Share = 1.0
    ent_coef: Real = 0.0
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "batch"


@dataclass(frozen=True)
class IMPALAConfig(A2CConfig):
    """Settings of IMPALA."""

    gae_lambda: Share = 1.0
    rho_clip: Weight = 1.0
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "weighted"

"""Settings of the agents that learn by policy gradients with a critic."""

from dataclasses import dataclass
from typing import Annotated

from jaxrl.agents.fields import Activation, Count, DType, OneOf, Rate, Real, Share, Steps, Torso, Weight, Widths


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO."""

    lr: Rate = 2.5e-4
    """Learning rate."""
    lr_decay: Steps = 0
    """Optimisation steps over which the learning rate falls linearly to 0; 0: it stays."""
    optimizer: str = "adam"
    """Optax optimizer: adam, adamw, lion, nadam, radam, rmsprop or sgd."""
    max_grad_norm: Weight = 0.5
    """Global norm to which gradients are clipped."""
    accumulate: Count = 1
    """Equal pieces in which a minibatch is taken, gradients averaged; must divide its size."""
    gae_lambda: Share = 0.95
    """Decay of later errors in an advantage; 0: one-step errors, 1: Monte-Carlo returns."""
    baseline: bool = True
    """Subtract the value from the return to get the advantage."""
    rho_clip: Weight = 0.0
    """Bound on the ratios of probabilities by which V-trace corrects for actors' old parameters (1 as published); 0: no
    V-trace."""
    c_clip: Weight = 1.0
    """Bound on the ratios by which V-trace passes later errors back; used with rho_clip alone."""
    surrogate: Annotated[str, OneOf(("clipped", "plain", "weighted"))] = "clipped"
    """What is climbed: clipped (by the ratio of probabilities), plain (log-probability times advantage), or weighted
    (plain, times the ratio up to rho_clip)."""
    clip_eps: Weight = 0.2
    """How far the ratio of probabilities may go from 1."""
    vf_clip_eps: Weight = 0.0
    """How far values may go from those before the epochs; 0: anywhere."""
    ent_coef: Real = 0.01
    """Weight of the entropy."""
    vf_coef: Weight = 0.5
    """Weight of the value loss."""
    normalise_advantage: Annotated[str, OneOf(("minibatch", "batch", "none"))] = "minibatch"
    """Over what advantages are brought to mean 0 and deviation 1: minibatch, batch, or none."""
    target_kl: Weight = 0.0
    """Approximate divergence from the old policy beyond which the rest of the epochs is left out; 0: never."""
    squash: bool = False
    """Bring continuous actions within their bounds by tanh; otherwise they are clipped."""
    free_scale: bool = True
    """Let the scale of continuous actions be a parameter; otherwise it depends on the observation."""
    torso: Torso = "auto"
    """Network torso: mlp, minatar (also called conv), nature, impala; or auto: mlp without images [H, W, C], nature for
    images with sides of at least 36, minatar for smaller ones."""
    features: Widths = (64, 64)
    """Widths of the dense layers."""
    channels: Widths = ()
    """Channels of the convolutions; none: the torso's own (minatar 16, nature 32 64 64, impala 16 32 32)."""
    dtype: DType = "float32"
    """What torsos compute in: float32 or bfloat16; parameters, heads and outputs are float32 anyway."""
    activation: Activation = "tanh"
    """Activation: relu, tanh, gelu, silu or elu."""
    layer_norm: bool = False
    """Normalise layers before their activation."""
    shared: bool = False
    """One torso for policy and value; otherwise each has its own."""
    core: Annotated[str, OneOf(("none", "gru", "lstm"))] = "none"
    """Recurrent core behind the (then shared) torso: none, gru or lstm."""
    core_features: Count = 64
    """Width of the core."""


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

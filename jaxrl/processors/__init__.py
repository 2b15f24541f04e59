"""Processors turn environment steps into transitions."""

from jaxrl.processors.base import (
    Processor,
    ReplayFns,
    StatsFns,
    chain,
    frame_stack,
    init_processor,
    map_reward,
    reward_clip,
    reward_scale,
)
from jaxrl.processors.memory import carry_memory
from jaxrl.processors.n_step import n_step, one_step
from jaxrl.processors.normalise import normalise_obs, normalise_reward
from jaxrl.processors.one_hot import one_hot

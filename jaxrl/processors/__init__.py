"""Processors: from environment steps to transitions."""

from jaxrl.processors.base import Processor, begin, chain, frame_stack, map_reward, reward_clip, reward_scale
from jaxrl.processors.n_step import n_step, one_step

__all__ = [
    "Processor",
    "begin",
    "chain",
    "frame_stack",
    "map_reward",
    "n_step",
    "one_step",
    "reward_clip",
    "reward_scale",
]

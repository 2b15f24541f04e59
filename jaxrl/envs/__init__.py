"""Environments: pure functions of one, `N` of them with auto-reset, adapters, and a check for one's own."""

from jaxrl.envs.base import Env, TimeStep, VecEnv, draw_key, draw_nothing, vectorise
from jaxrl.envs.check import check_env
from jaxrl.envs.registry import env_names, make_env, register_env

__all__ = [
    "Env",
    "TimeStep",
    "VecEnv",
    "check_env",
    "draw_key",
    "draw_nothing",
    "env_names",
    "make_env",
    "register_env",
    "vectorise",
]

"""Environments: the interface, vectorisation with auto-reset, adapters for other libraries, and `check_env`."""

from jaxrl.envs.base import Env, TimeStep, VecEnv, vectorise
from jaxrl.envs.check import check_env
from jaxrl.envs.envelope import envelope_env
from jaxrl.envs.host import HostEnv, gymnasium_env, gymnasium_envs, on_host
from jaxrl.envs.randomise import randomise
from jaxrl.envs.registry import env_names, make_env, register_env
from jaxrl.envs.stoa import stoa_env

"""From a name to an environment: the one table of environments that the command line knows."""

from collections.abc import Callable
from typing import Any

from jaxrl.envs import envpool
from jaxrl.envs.base import Env
from jaxrl.envs.host import PREFIX, HostEnv, gymnasium_env
from jaxrl.errors import SettingsError, nearest

EnvFactory = Callable[..., Env | HostEnv]

_REGISTERED: dict[str, EnvFactory] = {}


def register_env(name: str, factory: EnvFactory) -> None:
    """Make `factory` answer to `make_env(name)` and `--env name` in this process.

    Raises:
      SettingsError: the name is taken.
    """
    if name in _REGISTERED:
        raise SettingsError(f"an environment is already registered as {name!r}; choose another name")
    _REGISTERED[name] = factory


def bare_name(name: str) -> str:
    """Return the name of an environment without that of the suite it is from."""
    return name.removeprefix(PREFIX).removeprefix(envpool.PREFIX)


def make_env(name: str, **params: Any) -> Any:
    """Build an environment by name: one that `register_env` was told of, or one of gymnax's.

    `params` replace the environment's default parameters, such as `max_steps_in_episode=200`. One of Gymnasium's, as
    `gymnasium:CartPole-v1`, or of EnvPool's, as `envpool:CartPole-v1`, comes as a `HostEnv`, any other as an `Env`.

    Raises:
      SettingsError: unknown name (with the nearest known ones) or parameter.
    """
    if name in _REGISTERED:
        env = _REGISTERED[name](**params)
        return env._replace(settings={"env": name, "env_args": dict(params)})
    if name.startswith(PREFIX):
        return gymnasium_env(name, **params)
    if name.startswith(envpool.PREFIX):
        return envpool.envpool_env(name, **params)
    from jaxrl.envs import gymnax

    if name not in gymnax.names():
        raise SettingsError(f"unknown environment {name!r}; {nearest(name, env_names())}")
    return gymnax.make(name, **params)


def env_names() -> list[str]:
    """Return every name that `make_env` takes."""
    from jaxrl.envs import gymnax

    return [*_REGISTERED, *gymnax.names()]

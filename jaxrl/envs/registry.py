"""Environments by name: the table behind `make_env` and `--env`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.envs.base import Env
from jaxrl.envs.host import PREFIX, HostEnv, gymnasium_names
from jaxrl.errors import SettingsError, close_to, nearest
from jaxrl.registry import SUITES, listed, named, suite_of

EnvFactory = Callable[..., Env | HostEnv]

_REGISTERED: dict[str, EnvFactory] = {}


def register_env(name: str, factory: EnvFactory) -> None:
    """Make `factory` answer to `make_env(name)` and `--env name` in this process.

    Raises:
      SettingsError: the name is already taken.
    """
    if name in _REGISTERED:
        raise SettingsError(f"an environment is already registered as {name!r}; choose another name")
    _REGISTERED[name] = factory


def registered() -> Mapping[str, EnvFactory]:
    """Return what `register_env` made known."""
    return _REGISTERED


def make_env(name: str, **params: Any) -> Any:
    """Build an environment by name: one registered by `register_env`, or one of gymnax, Gymnasium or EnvPool.

    `params` replace the environment's default parameters, such as `max_steps_in_episode=200`. Environments of Gymnasium
    (`gymnasium:CartPole-v1`) and EnvPool (`envpool:CartPole-v1`) are returned as a `HostEnv`, all others as an `Env`.

    Raises:
      SettingsError: the name (with the nearest known ones) or a parameter is unknown.
    """
    if name in _REGISTERED:
        env = _REGISTERED[name](**params)
        return env._replace(settings={"env": name, "env_args": dict(params)})
    suite, _ = suite_of(name)
    if suite is not None:
        return named(*suite)(name, **params)
    from jaxrl.envs import gymnax

    if not gymnax.knows(name):
        raise SettingsError(f"unknown environment {name!r}; {_meant(name)}")
    return gymnax.make(name, **params)


def _meant(name: str) -> str:
    """Return a hint at known names that an unknown one may have meant, here or in Gymnasium."""
    prefix, _, rest = name.rpartition(":")
    others = gymnasium_names()
    if name in others:
        return f"Gymnasium has it: {PREFIX}{name}"
    own = close_to(rest.rpartition("/")[2], env_names())
    close = own or [PREFIX + other for other in close_to(rest, others)]
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if prefix and all(part.isidentifier() for part in prefix.split(".")):
        return (
            f"there is no {prefix}: here, only {listed(f'{suite}:' for suite in SUITES)}; a function of your own is "
            f"imported only where you name it: --env {name} on the command line; in Python, call it, or register_env"
        )
    if prefix:
        return f"there is no {prefix}: here, only {listed(f'{suite}:' for suite in SUITES)}, as in {PREFIX}Hopper-v5"
    return f"{nearest(name, env_names())}; --list-envs shows all, and {PREFIX}NAME is one of Gymnasium's"


def env_names() -> list[str]:
    """Return every name that `make_env` accepts."""
    from jaxrl.envs import gymnax

    return [*_REGISTERED, *gymnax.names()]

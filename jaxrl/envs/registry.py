"""Environments by name: the table behind `make_env` and `--env`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.envs.base import Env
from jaxrl.envs.host import PREFIX, HostEnv, gymnasium_names
from jaxrl.envs.wrappers import apply_wrappers, parse_wrappers
from jaxrl.errors import SettingsError, UnnamedPathError, close_matches, suggest
from jaxrl.registry import SUITES, import_name, join_names, split_suite

EnvFactory = Callable[..., Env | HostEnv]

NAME_TAKEN = "no parameter can be called name, which is that of the environment itself"
"""Error message for a parameter that `make_env` cannot take, having an argument of that name."""

_REGISTERED: dict[str, EnvFactory] = {}


def register_env(name: str, factory: EnvFactory) -> None:
    """Register `factory` under `name`, for `make_env(name)` and `--env name` in this process.

    Raises:
      SettingsError: the name is already taken.
    """
    if name in _REGISTERED:
        raise SettingsError(f"an environment is already registered as {name!r}; choose another name")
    _REGISTERED[name] = factory


def registered_envs() -> Mapping[str, EnvFactory]:
    """Return the environments of `register_env`."""
    return _REGISTERED


def make_env(name: str, *, wrap: str | Sequence[str] = (), **params: Any) -> Any:
    """Build an environment by name: one registered by `register_env`, or one of gymnax, Gymnasium, EnvPool or a suite.

    `params` replace the environment's default parameters, such as `max_steps_in_episode=200`; `wrap` names wrappers to
    apply from left to right, such as `["sticky_actions:0.25", "time"]`, see `jaxrl.envs.wrappers`. Environments of
    Gymnasium (`gymnasium:CartPole-v1`), EnvPool (`envpool:CartPole-v1`) and ALE (`ale:Pong`) are returned as a
    `HostEnv`, all others as an `Env`.

    Raises:
      SettingsError: the name (with the nearest known ones), a parameter or a wrapper is unknown, or a registered
        function returned no environment of jaxrl.
    """
    env = _make(name, params)
    if not wrap:
        return env
    if isinstance(env, HostEnv) and env.vectorise is not None:
        raise SettingsError(f"{name} is no environment written in JAX, which alone are wrapped; leave wrap out")
    if isinstance(env, HostEnv):
        raise SettingsError(f"{name} is stepped on the host; wrap it by Gymnasium's own wrappers in Python")
    names = parse_wrappers(wrap)
    # The wrappers are rebuilt by name, as part of the environment's arguments.
    given = env.settings and {**env.settings, "env_args": {**env.settings["env_args"], "wrap": names}}
    return apply_wrappers(env, names)._replace(settings=given)


def _make(name: str, params: Mapping[str, Any]) -> Any:
    if name in _REGISTERED:
        env = _REGISTERED[name](**params)
        if not isinstance(env, Env | HostEnv):
            raise SettingsError(
                f"{name} was registered with a function that returned {type(env).__name__}; expected a jaxrl.Env, or "
                "what jaxrl.gymnasium_env, gymnasium_envs, stoa_env or envelope_env return"
            )
        return env._replace(settings={"env": name, "env_args": dict(params)})
    suite, _ = split_suite(name)
    if suite is not None:
        return import_name(suite.module, suite.make)(name, **params)
    from jaxrl.envs import gymnax

    if not gymnax.is_registered(name):
        raise SettingsError(f"unknown environment {name!r}; {_suggest_env(name)}")
    return gymnax.make(name, **params)


def _suggest_env(name: str) -> str:
    """Return a suggestion for an unknown name: known names here or in Gymnasium, or what to install."""
    prefix, _, rest = name.rpartition(":")
    others = gymnasium_names()
    if name in others:
        return f"Gymnasium has it: {PREFIX}{name}"
    # In `package.module:NAME` with a user's module, `NAME` is not a task with a prefix.
    foreign = prefix and not close_matches(prefix, SUITES)
    here = [known for known in env_names() if not (foreign and ":" in known)]
    close_here = close_matches(rest.rpartition("/")[2], here)
    if name.startswith("ALE/"):
        like = f"; in JAX, there is {' or '.join(close_here)}" if close_here else ""
        return f"that is one of Atari, in Gymnasium: pip install 'jaxrl[atari]', then {PREFIX}{name}{like}"
    close = close_here or [PREFIX + other for other in close_matches(rest, others)]
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if prefix and all(part.isidentifier() for part in prefix.split(".")):
        return (
            f"give --env {name}: a function of your own is imported only where you name it on the command line (in "
            f"Python, call it, or register_env); there is no {prefix}: here, only "
            f"{join_names(f'{suite}:' for suite in SUITES)}"
        )
    if prefix:
        return (
            f"there is no {prefix}: here, only {join_names(f'{suite}:' for suite in SUITES)}, as in {PREFIX}Hopper-v5"
        )
    return f"{suggest(name, env_names())}; --list-envs shows all, and {PREFIX}NAME is one of Gymnasium's"


def module_to_import(name: str) -> str | None:
    """Return the module in a name such as `package.module:NAME`; `None` if it has none."""
    module, colon, _ = name.removeprefix(PREFIX).rpartition(":")
    named = all(part.isidentifier() for part in module.split("."))
    return module if colon and named and module not in SUITES else None


def is_imported(name: str) -> bool:
    """Return whether `make_env` may call the code behind `name`: that of a user's module only once it is imported."""
    module = module_to_import(name)
    return module is None or name in _REGISTERED or (name.startswith(PREFIX) and module in sys.modules)


def env_names() -> list[str]:
    """Return every name that `make_env` accepts, except those of other libraries' suites."""
    from jaxrl.envs import gymnax, memory

    return [*_REGISTERED, *gymnax.names(), *memory.names()]


# --- environments of run directories, which may come from others ---------------------------------------------------


def check_plain_args(env_args: object, source: str) -> Mapping[str, Any]:
    """Return `env_args` of a run directory if they are safe to use.

    Raises:
      SettingsError: they are not plain values by name.
      UnnamedPathError: one is a path, which the user must give explicitly.
    """
    if not isinstance(env_args, Mapping) or not all(isinstance(name, str) for name in env_args):
        raise SettingsError(f"{source} has env_args {env_args!r:.80}; expected names with values")
    for name, value in env_args.items():
        if not _plain(value):
            raise SettingsError(f"{source}: env_args.{name} is {value!r:.80}; expected plain values")
        if is_path(value):
            raise UnnamedPathError(
                f"{source}: env_args.{name} is the path {value!r:.80}; name it again, as in --env-args {name} PATH"
            )
    return env_args


def is_path(value: object) -> bool:
    """Return whether `value` is a path, or a list that contains one."""
    return any("/" in text or "\\" in text for text in _texts(value))


def _plain(value: object) -> bool:
    return isinstance(value, int | float | str | None) or (isinstance(value, list) and all(map(_plain, value)))


def _texts(value: object) -> list[str]:
    """Return the strings in `value`."""
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []

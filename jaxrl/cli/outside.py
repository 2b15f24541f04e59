"""User code by name: `--env my_package.envs:make_maze`, `gymnasium:my_package:Maze-v0`, or the algorithm
`my_package.algos:make`.

Importing such a name executes code. So it is imported only if typed on the command line, never because a run directory
or a settings file contains it: those may come from a stranger.
"""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.agents.outside import register_algorithm
from jaxrl.envs.base import Env
from jaxrl.envs.host import PREFIX, HostEnv, gymnasium_envs, gymnasium_spec
from jaxrl.envs.objects import LIBRARIES, adapt_object, install_hint
from jaxrl.envs.registry import module_to_import, register_env, registered_envs
from jaxrl.errors import SettingsError, describe_error, error_text, suggest
from jaxrl.registry import ALGORITHMS, SUITES


def admit(name: str | None, trained_in: object = None) -> str | None:
    """Import the module in a name that a person typed, and register its function under the full name.

    Return `trained_in`, the environment of a run, if the module has registered the same function as that; else `name`.

    Raises:
      SettingsError: there is no such module or function, or importing it failed.
    """
    module = None if name is None else module_to_import(name)
    if name is None or module is None:
        return name
    known = registered_envs()
    if name not in known:
        found = _import(name, module)
        if not name.startswith(PREFIX) and name not in known:  # unless its module registers it
            register_env(name, partial(_make, name, _function(name, found)))
    same = isinstance(trained_in, str) and known.get(trained_in) in getattr(known.get(name), "args", ())
    return str(trained_in) if same else name


def admit_algorithm(name: str | None) -> None:
    """Import the algorithm of this name, which a person typed, and register it under its full name.

    Unless its module registers it, its settings class is what annotates its first parameter, and its kind that of the
    built-in agent that it returns; if it returns another, it is off-policy.

    Raises:
      SettingsError: there is no such module or function, importing it failed, or the function makes no algorithm.
    """
    module = None if name is None else module_to_import(name)
    if name is None or module is None or name in ALGORITHMS:
        return
    function = _function(name, _import(name, module))
    for row in list(ALGORITHMS.values()):
        if row.make is function or (isinstance(row.make, partial) and function in row.make.args):
            ALGORITHMS[name] = row
            return
    register_algorithm(name, function)


def require_algorithm(named: str | None, algo: object, run_dir: str | Path) -> None:
    """Raise `SettingsError` if an algorithm is `named` that is not `algo`, that of the run."""
    row = ALGORITHMS.get(named or "")
    if named is not None and named != algo and (row is None or row is not ALGORITHMS.get(str(algo))):
        raise SettingsError(
            f"{run_dir} is a run of {algo}, not of {named}; leave the algorithm out, or give --algo {algo}"
        )


def _import(name: str, module: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise SettingsError(
                f"{name}: importing {module} failed: {error_text(error)}{install_hint(error)}"
            ) from error
        raise SettingsError(
            f"{name}: there is no module {error.name}; start where it lies, or install it (known suites: "
            f"{', '.join(SUITES)})"
        ) from None
    except (Exception, SystemExit) as error:  # a script without a guard ends in `sys.exit`
        raise SettingsError(f"{name}: importing {module} failed: {describe_error(error)}") from error


def _function(name: str, module: Any) -> Any:
    function = name.rpartition(":")[2]
    found = getattr(module, function, None)
    if not callable(found):
        makers = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SettingsError(f"{name}: {module.__name__} has no function {function}; {suggest(function, makers)}")
    return found


def _make(name: str, function: Any, /, **params: Any) -> Env | HostEnv:
    """Call a user's function, and adapt its result if it is an environment of another library."""
    try:
        made = function(**params)
    except (Exception, SystemExit) as error:
        reason = f"{describe_error(error)}{install_hint(error)}"
        raise SettingsError(f"{name} failed with {dict(params)}: {reason}") from error
    if isinstance(made, Env | HostEnv):
        return made
    if (theirs := adapt_object(made, name)) is not None:
        return theirs
    if hasattr(made, "observation_space") and hasattr(made, "action_space"):
        spec = gymnasium_spec(made)._replace(name=name, time_limit=_time_limit(made))
        made.close()
        return gymnasium_envs(spec, partial(function, **params))
    raise SettingsError(
        f"{name} returned {type(made).__name__}; expected a jaxrl.Env, or an environment of Gymnasium, "
        f"{' or '.join(LIBRARIES)}"
    )


def _time_limit(env: Any) -> int | None:
    """Return the limit of Gymnasium's wrapper `TimeLimit` around `env`; `None` without one.

    The `spec` of `env` would not do: one that is not registered has none, and an unwrapped one keeps a limit that
    nothing enforces.
    """
    while env is not None and type(env).__name__ != "TimeLimit":
        env = getattr(env, "env", None)
    return None if env is None else env._max_episode_steps

"""Environments of gymnax 1.0 (https://github.com/RobertTLange/gymnax), imported on demand.

Where possible, only the module of the requested environment is imported. All of gymnax imports matplotlib, seaborn,
pandas and SciPy, which takes longer than all other imports together.
"""

import importlib
import importlib.util
import math
import reprlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import cast_like, check_params, reads_key
from jaxrl.errors import SettingsError, error_text
from jaxrl.spaces import Box, Discrete, EnvSpec, Space, space_struct
from jaxrl.trees import Array, Key, PyTree, make_key

TIME_LIMIT = "max_steps_in_episode"
"""The parameter that every gymnax environment has."""
FLOAT_MAX = float(np.finfo(np.float32).max)

_MODULES = {
    "CartPole-v1": "classic_control.cartpole:CartPole",
    "Pendulum-v1": "classic_control.pendulum:Pendulum",
    "Acrobot-v1": "classic_control.acrobot:Acrobot",
    "MountainCar-v0": "classic_control.mountain_car:MountainCar",
    "MountainCarContinuous-v0": "classic_control.continuous_mountain_car:ContinuousMountainCar",
    "Asterix-MinAtar": "minatar.asterix:MinAsterix",
    "Breakout-MinAtar": "minatar.breakout:MinBreakout",
    "Freeway-MinAtar": "minatar.freeway:MinFreeway",
    "Seaquest-MinAtar": "minatar.seaquest:MinSeaquest",
    "SpaceInvaders-MinAtar": "minatar.space_invaders:MinSpaceInvaders",
    "Catch-bsuite": "bsuite.catch:Catch",
    "DeepSea-bsuite": "bsuite.deep_sea:DeepSea",
    "DiscountingChain-bsuite": "bsuite.discounting_chain:DiscountingChain",
    "MemoryChain-bsuite": "bsuite.memory_chain:MemoryChain",
    "SimpleBandit-bsuite": "bsuite.bandit:SimpleBandit",
    "UmbrellaChain-bsuite": "bsuite.umbrella_chain:UmbrellaChain",
    "BernoulliBandit-misc": "misc.bernoulli_bandit:BernoulliBandit",
    "FrozenLake-misc": "misc.frozen_lake:FrozenLake",
    "GaussianBandit-misc": "misc.gaussian_bandit:GaussianBandit",
    "Reacher-misc": "misc.reacher:Reacher",
    "Swimmer-misc": "misc.swimmer:Swimmer",
}
"""Modules of the gymnax 1.0 environments that import neither SciPy, pandas nor seaborn (`catch` brings matplotlib)."""


def names() -> list[str]:
    """Return the names of all environments that gymnax registers."""
    from gymnax.registration import registered_envs

    return list(registered_envs)


def is_registered(name: str) -> bool:
    """Return whether gymnax registers `name`; names that are not in `_MODULES` import all of gymnax."""
    return name in _MODULES or name in names()


def _make(name: str) -> tuple[Any, Any]:
    """Return the environment `name` and its parameters, as `gymnax.make` does."""
    if name in _MODULES and "gymnax.registration" not in sys.modules:
        module, _, kind = _MODULES[name].partition(":")
        # The packages around the module are registered without running them; only the module itself is imported.
        for package in ("gymnax", "gymnax.environments", f"gymnax.environments.{module.split('.')[0]}"):
            _import_lazily(package)
        env = getattr(importlib.import_module(f"gymnax.environments.{module}"), kind)()
        return env, env.default_params
    import gymnax

    env, defaults = gymnax.make(name)
    return env, defaults


def _import_lazily(package: str) -> None:
    """Register a package without running its code, so that its modules can be imported.

    Its code runs when any other attribute is read. Later imports see the complete package, with the same modules.
    """
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no package {package}")
    module = importlib.util.module_from_spec(spec)
    # Reading anything that the package's code defines then runs that code.
    module.__getattr__ = partial(_get_attribute, module)  # type: ignore[method-assign]
    sys.modules[package] = module
    parent, _, child = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _get_attribute(module: ModuleType, name: str) -> Any:
    """Return a missing attribute of `module`: a submodule, or one defined by the package's code, which then runs."""
    path = f"{module.__name__}.{name}"
    if path in sys.modules:
        return sys.modules[path]
    # Tools look for optional dunder names; these must not import all of gymnax.
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(path) is not None:
        return importlib.import_module(path)
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    # Remove the hook while the code runs, which would otherwise run it again for each missing name. It is restored if
    # the code fails, so that a later read tries again.
    lazily = module.__dict__.pop("__getattr__", None)
    try:
        module.__spec__.loader.exec_module(module)
    except BaseException:
        if lazily is not None:
            module.__getattr__ = lazily  # type: ignore[method-assign]
        raise
    return getattr(module, name)


def make(name: str, /, **params: Any) -> Env:
    """Build the gymnax environment `name`, with `params` in place of its default parameters.

    Raises:
      SettingsError: the environment has no such parameter, or gymnax cannot make it on this machine.
    """
    try:
        env, defaults = _make(name)
    except Exception as error:
        raise SettingsError(f"gymnax cannot make {name}: {error_text(error)}") from error
    check_params(name, params, vars(defaults))
    # The limit is a whole number, also where gymnax's own default is a float.
    own = {**vars(defaults), TIME_LIMIT: 0}
    given = {word: _convert_number(f"{name}: {word}", value, own[word]) for word, value in params.items()}
    return wrap(name, env, defaults.replace(**given), {"env": name, "env_args": dict(params)})


def _convert_number(name: str, value: Any, default: Any) -> int | float:
    """Return a number in the type of `default`; raise `SettingsError` for one that does not fit its 32 bits."""
    if not isinstance(default, int | float):
        raise SettingsError(f"{name} is an array of shape {list(np.shape(default))}, which cannot be set; leave it out")
    if not isinstance(value, int | float):
        raise SettingsError(f"{name} is {reprlib.repr(value)}; expected a number")
    if not isinstance(value, int) and not math.isfinite(value):
        raise SettingsError(f"{name} is {value}; expected a finite number")
    if isinstance(default, int):
        most = 1 if isinstance(default, bool) else np.iinfo(np.int32).max
        if value != int(value) or abs(value) > most:
            what = "0 or 1" if isinstance(default, bool) else f"a whole number of at most {most}"
            raise SettingsError(f"{name} is {reprlib.repr(value)}; expected {what}")
    elif abs(value) > FLOAT_MAX:
        raise SettingsError(f"{name} is {reprlib.repr(value)}; expected at most {FLOAT_MAX:g}")
    return type(default)(value)


def wrap(name: str, env: Any, params: Any, settings: dict[str, Any] | None = None) -> Env:
    """Wrap a `gymnax.environments.environment.Environment` object and its parameters."""
    obs, state = jax.eval_shape(lambda key: env.reset_env(key, params), make_key(0))
    action_space = _space(env.action_space(params))
    # With a constant key, the keys of its steps are never computed.
    step = lambda state, action, key: env.step_env(key, state, action, params)
    uses_key = reads_key(step, state, space_struct(action_space))
    limit = getattr(params, TIME_LIMIT, None)
    return Env(
        spec=EnvSpec(
            name=name,
            observation_space=_observation_space(env, params, obs),
            action_space=action_space,
            time_limit=int(limit) if limit is not None and math.isfinite(limit) else None,
        ),
        reset=partial(_reset, env, params, (obs, state)),
        step=partial(_step, env, params, uses_key, (obs, state)),
        render=partial(_render, name, env, params),
        settings=settings,
    )


def _reset(env: Any, params: Any, like: PyTree, key: Key) -> tuple[PyTree, PyTree]:
    """Reset, in the dtypes that the environment was made with, also where 64 bits have been enabled since."""
    obs, state = cast_like(env.reset_env(key, params), like)
    return state, obs


def _step(
    env: Any, params: Any, uses_key: bool, like: PyTree, state: PyTree, action: PyTree, key: Key
) -> tuple[PyTree, TimeStep]:
    """Step without gymnax's auto-reset, in the dtypes of the reset (several environments change theirs)."""
    key = key if uses_key else make_key(0)
    obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
    # The carry of a loop must not change its dtypes.
    obs, state = cast_like((obs, state), like)
    truncated = env.is_truncated(state, params)
    return state, TimeStep(obs, jnp.asarray(reward, jnp.float32).reshape(()), terminated, truncated)


def _space(space: Any) -> Space:
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), np.dtype(space.dtype).name)
    if isinstance(space, spaces.Box):
        return Box(
            _bound(space.low, space.shape),
            _bound(space.high, space.shape),
            tuple(space.shape),
            _dtype_name(space.dtype),
        )
    if isinstance(space, spaces.Dict):
        return {name: _space(part) for name, part in space.spaces.items()}
    return tuple(_space(part) for part in space.spaces)


def _observation_space(env: Any, params: Any, obs: PyTree) -> Space:
    """Return the space of `reset`'s actual shape and dtype, with the declared bounds if they fit."""
    try:
        # An environment may declare no space of observations, or fail to.
        declared = _space(env.observation_space(params))
    except (NotImplementedError, AttributeError, TypeError):
        declared = None
    if isinstance(declared, Discrete) and obs.shape == ():
        return Discrete(declared.n, _dtype_name(obs.dtype))

    def leaf_space(leaf: Any) -> Box:
        if isinstance(declared, Box) and declared.shape == leaf.shape:
            return Box(declared.low, declared.high, leaf.shape, _dtype_name(leaf.dtype))
        return Box(-math.inf, math.inf, leaf.shape, _dtype_name(leaf.dtype))

    return jax.tree.map(leaf_space, obs)


def _dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name


def _bound(bound: Any, shape: tuple[int, ...]) -> float | tuple[float, ...]:
    """Return a bound as one number if all entries are equal, otherwise as one number per entry."""
    values = np.broadcast_to(np.asarray(bound, np.float64), shape).ravel()
    if values.size == 0 or (values == values[0]).all():
        return float(values[0]) if values.size else 0.0
    return tuple(float(v) for v in values)


def _render(name: str, env: Any, params: Any, state: PyTree) -> np.ndarray:
    from jaxrl.envs.render import draw_state

    obs: Array = env.observe(make_key(0), state, None, params)
    return draw_state(name, state, jax.tree.map(np.asarray, obs))

"""Environments stepped on the host: those of Gymnasium (https://gymnasium.farama.org), imported on demand.

Environments written in JAX can be stepped by actors too, on the host or on another device: see `on_host`.
"""

import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import spaces
from jaxrl.env_process import UNGUARDED, EnvMaker, mask_signals
from jaxrl.envs.base import Env, VecEnv
from jaxrl.errors import ActorError, SettingsError, error_text, require_extra, suggest
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space
from jaxrl.supervisor import END
from jaxrl.trees import PyTree, make_key, tree_where
from jaxrl.types import Step

PREFIX = "gymnasium:"
"""Prefix of the names of Gymnasium's environments, as in `gymnasium:CartPole-v1`."""
PURPOSE = "environments of Gymnasium"
BOOKKEEPING = ("env_id", "players", "final_obs", "final_info")
"""Bookkeeping entries of EnvPool and Gymnasium, which are not recorded."""
TERMINATION_TIMEOUT_S = 5.0
"""Seconds in which a process must end itself and its children before it is killed."""


class HostStep(NamedTuple):
    """Result of a step of `N` environments on the host; leaves `[N, ...]`."""

    obs: PyTree
    """True successors."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: Mapping[str, np.ndarray]
    """Scalars to record, NaN where an environment lacks one; the names may differ from step to step."""


class HostVector(Protocol):
    """`N` environments that never reset themselves; a method `start()`, if there is one, is called before all others.

    Observations are NumPy arrays `[N, ...]` of the spec's dtypes. Discrete observations and actions count from 0,
    whatever the `start` of the environment's spaces.
    """

    def reset(self, which: np.ndarray | None = None) -> PyTree:
        """Start episodes where `which` `[N]` is true, or everywhere; return the first observations of those."""
        ...

    def step(self, action: PyTree) -> HostStep:
        """Advance all environments, and reset none."""
        ...

    def close(self, kill: bool = False) -> None:
        """Release all resources; with `kill`, without waiting for a hanging step."""
        ...


class HostEnv(NamedTuple):
    """An environment that is stepped on the host."""

    spec: EnvSpec
    open: Callable[[int, int, bool], HostVector]
    """`(num_envs, seed, processes)`: open a vector of environments, each in a process of its own if `processes`."""
    make_renderable: Callable[[], Any] | None = None
    """`()`: make one environment that can render, with Gymnasium's `reset`, `step` and `render`."""
    settings: Mapping[str, Any] | None = None
    """Arguments with which `make_env` rebuilds it; `None` for a custom environment."""
    compiled: bool = False
    """Whether opening it compiles programs, which can take arbitrarily long."""
    eval_env: "HostEnv | None" = None
    """The environment for evaluation, if it differs: whole games if training episodes are lives, for example."""
    vectorise: Callable[[int], VecEnv] | None = None
    """`(num_envs)`: `N` environments that a compiled program steps, for training without actors. Their state is not
    part of `VecEnvState`: a step from a state that they have left is not `present`, and starts a new episode."""


class HostVectorEnv:
    """`N` environments on the host with auto-reset and the same bookkeeping as `vectorise`."""

    def __init__(self, env: HostEnv, num_envs: int, seed: int, processes: bool = False) -> None:
        """Open the environments, without resetting them yet; processes begin with `start`, or the first reset."""
        self.spec, self.num_envs = env.spec, num_envs
        self.vector = env.open(num_envs, seed, processes)
        self._returns = np.zeros(num_envs, np.float32)
        self._lengths = np.zeros(num_envs, np.int32)
        self._all, self._none = np.ones(num_envs, bool), np.zeros(num_envs, bool)
        self._all.flags.writeable = self._none.flags.writeable = False  # because they are returned
        self.invalid_reset = self._none
        """Whether the latest first observation of an episode was not finite, and no step has been taken since."""

    def start(self) -> None:
        """Start the environments' processes, if they have any; `close` by another thread ends those so far."""
        getattr(self.vector, "start", lambda: None)()

    def reset(self) -> PyTree:
        """Reset all environments; return first observations, with zeros in place of non-finite ones."""
        # New arrays: the last step returned may hold the old ones.
        self._returns, self._lengths = np.zeros_like(self._returns), np.zeros_like(self._lengths)
        return self._mark_invalid(self.vector.reset(), np.ones(self.num_envs, bool))

    def _mark_invalid(self, obs: PyTree, where: np.ndarray) -> PyTree:
        """Set `invalid_reset` for the first observations in `where`; return `obs` with non-finite ones zeroed."""
        self.invalid_reset = where & ~_finite_rows(obs)
        return _zeros_where(self.invalid_reset, obs)

    def step(self, action: PyTree) -> Step:
        """Advance all environments, in NumPy; when an episode ends, the next one starts in the same step.

        The result is as for `vectorise`: `final_obs` is the true successor, and `obs` the next observation of the
        policy. A non-finite observation or reward truncates its episode; the step is marked `valid=False`, and its
        values are replaced by zeros. After a non-finite first observation, that is the step taken from it. In `info`,
        NaN marks a scalar that an environment lacks, and the names may differ from step to step.
        """
        # The same bookkeeping as `_step` in `base.py`, with the selects left out where nothing is to be selected.
        successor, reward, terminated, truncated, scalars = self.vector.step(action)  # type: Any, Any, Any, Any, Any
        with np.errstate(over="ignore"):  # a reward beyond float32 is infinite, and found below
            reward = np.asarray(reward, np.float32)
        valid: Any = self._all
        # In the common case all is finite, and the selects below are skipped.
        if np.count_nonzero(self.invalid_reset) or not all(map(_all_finite, [reward, *_floats(successor)])):
            valid = np.isfinite(reward) & _finite_rows(successor) & ~self.invalid_reset
            reward, successor = np.where(valid, reward, 0.0), _zeros_where(~valid, successor)
            terminated, truncated = terminated & valid, truncated | ~valid
        # New arrays rather than in place: the old ones belong to steps already returned.
        self._returns, self._lengths = self._returns + reward, self._lengths + 1
        if self.spec.time_limit:
            truncated = truncated | (self._lengths >= self.spec.time_limit)
        info: Any = {**scalars, "episode_return": self._returns, "episode_length": self._lengths}
        self.invalid_reset = self._none
        obs, seen = successor, self._all  # type: Any, Any
        done = terminated | truncated
        if np.count_nonzero(done):
            truncated = truncated & ~terminated
            fresh = self._mark_invalid(self.vector.reset(done), done)
            obs = jax.tree.map(lambda new, old: np.where(_expand_mask(done, new), new, old), fresh, successor)
            self._returns, self._lengths = np.where(done, 0, self._returns), np.where(done, 0, self._lengths)
            seen = ~self.invalid_reset
        return Step(action, (), reward, terminated, truncated, successor, obs, info, valid, seen)

    def close(self, kill: bool = False) -> None:
        """Close the environments; with `kill`, without waiting for a step that hangs."""
        self.vector.close(kill)


def _expand_mask(mask: np.ndarray, x: np.ndarray) -> np.ndarray:
    return mask.reshape(mask.shape + (1,) * (x.ndim - 1))


def _zeros_where(mask: np.ndarray, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.where(_expand_mask(mask, x), np.zeros_like(x), x), tree)


def _finite_rows(tree: PyTree) -> Any:
    floats = [np.isfinite(x).reshape(len(x), -1).all(axis=1) for x in _floats(tree)]
    return np.logical_and.reduce(floats or [True])


def _floats(tree: PyTree) -> list[np.ndarray]:
    leaves = [tree] if isinstance(tree, np.ndarray) else jax.tree.leaves(tree)
    return [x for x in leaves if x.dtype.kind in "fc"]


def _all_finite(x: np.ndarray) -> bool:
    return np.count_nonzero(np.isfinite(x)) == x.size


# --- Gymnasium --------------------------------------------------------------------------------------------------


def gymnasium_env(name: str, /, **kwargs: Any) -> HostEnv:
    """Return Gymnasium's environment `name` (with or without `gymnasium:`); `kwargs` go to `gymnasium.make`.

    Games of Atari, `ALE/NAME`, are preprocessed: see `jaxrl.envs.atari`.

    Raises:
      SettingsError: Gymnasium is not installed, knows no such name, or cannot make it on this machine.
    """
    from jaxrl.envs.atari import ATARI, atari_env

    gymnasium = require_extra("gymnasium", PURPOSE)
    if name.removeprefix(PREFIX).startswith(ATARI):
        return atari_env(name, **kwargs)
    id_ = check_gymnasium_id(name)
    return make_gymnasium_host(id_, partial(gymnasium.make, id_, **floats_to_ints(kwargs)), kwargs)


def make_gymnasium_host(id_: str, make: Callable[..., Any], given: Mapping[str, Any]) -> HostEnv:
    """Return the Gymnasium environment `make()` as a `HostEnv`; `make_env` rebuilds it with the arguments `given`.

    Raises:
      SettingsError: it cannot be made on this machine.
    """
    try:
        # One environment is made and closed again, for its spaces alone.
        one = make()
    except Exception as error:
        raise SettingsError(f"Gymnasium cannot make {id_}: {error_text(error)}") from error
    # The environment truncates at its limit by itself; evaluation has to know how long an episode can be.
    limit = getattr(one.spec, "max_episode_steps", None)
    spec = gymnasium_spec(one)._replace(name=PREFIX + id_, time_limit=limit)
    one.close()
    settings = {"env": PREFIX + id_, "env_args": dict(given)}
    return HostEnv(spec, partial(_Gymnasium, make, spec), partial(make, render_mode="rgb_array"), settings)


def gymnasium_names() -> list[str]:
    """Return the names that Gymnasium registers; none if it is not installed."""
    try:
        return list(importlib.import_module("gymnasium").registry)
    except ImportError:
        return []


PASSIVE_WRAPPERS = tuple(f":{name}" for name in ("HumanRendering", "RecordEpisodeStatistics", "RecordVideo"))
"""Gymnasium's wrappers that do not change episodes, as suffixes of their paths."""


def gymnasium_settings(env: Any) -> dict[str, Any] | None:
    """Return the arguments with which `make_env` rebuilds a Gymnasium environment, or one of a vector of them.

    These are its name and plain numbers. The result is `None` if another process could not rebuild it from them: it is
    not one of Gymnasium's, is wrapped by hand, or was made with arguments other than numbers.
    """
    spec: Any = getattr(env, "spec", None)
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    known = registry.get(getattr(spec, "id", None))
    # Registered under its name by Gymnasium itself, not by code that another process may lack.
    if known is None or known.entry_point != spec.entry_point or not str(spec.entry_point).startswith("gymnasium."):
        return None
    wrappers = [wrapper.entry_point for wrapper in spec.additional_wrappers]
    # A vector may also be wrapped from outside, which its spec does not show.
    while hasattr(env, "single_action_space") and env is not env.unwrapped:
        wrappers.append(f"{type(env).__module__}:{type(env).__name__}")
        env = env.env
    if not all(path.startswith("gymnasium.wrappers.") and path.endswith(PASSIVE_WRAPPERS) for path in wrappers):
        return None
    kwargs = {"max_episode_steps": spec.max_episode_steps, **spec.kwargs}
    as_known = {"max_episode_steps": known.max_episode_steps, **known.kwargs}
    # How it is drawn or vectorised does not change its episodes.
    for name in ("render_mode", "num_envs", "vectorization_mode", "vector_kwargs"):
        kwargs.pop(name, None)
    other = {name: x for name, x in kwargs.items() if name not in as_known or not is_same_value(x, as_known[name])}
    numbers = all(isinstance(x, int | float) for x in other.values())
    return {"env": PREFIX + spec.id, "env_args": other} if numbers else None


def is_same_value(a: Any, b: Any) -> bool:
    """Return whether two values are the same number or string, or both `None`."""
    return isinstance(a, int | float | str | None) and type(a) is type(b) and a == b


def floats_to_ints(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with integral floats as `int`; the command line passes all numbers as floats."""
    return {key: int(x) if isinstance(x, float) and x.is_integer() else x for key, x in numbers.items()}


def gymnasium_envs(spec: EnvSpec, make: Callable[[], Any]) -> HostEnv:
    """Return a host environment from `make()`, which returns a `gymnasium.Env` with the spaces of `spec`."""
    spec = spec._replace(observation_space=spaces.to_channels_last(spec.observation_space))
    return HostEnv(spec, partial(_Gymnasium, make, spec))


def _make_checked(make: Callable[[], Any]) -> Any:
    """Make an environment that checks rewards and flags of its steps, and keeps only the numbers of `info`.

    Gymnasium's vectors accept "5" as a reward and None as a flag, and fail on anything in `info` that is no number.
    """
    gymnasium, env = require_extra("gymnasium", PURPOSE), make()
    name = type(env.unwrapped).__name__

    class Checked(gymnasium.Wrapper):  # type: ignore[name-defined]
        def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
            obs, info = self.env.reset(**options)
            return obs, _scalar_info(info)

        def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            obs, reward, terminated, truncated, info = self.env.step(action)
            if not (_is_number(reward) or _is_single_number(reward, "biuf")):
                raise SettingsError(f"{name}.step returned the reward {spaces.short_repr(reward)}; expected a number")
            for word, flag in (("terminated", terminated), ("truncated", truncated)):
                if not (isinstance(flag, bool | np.bool_) or (_is_single_number(flag, "biu") and flag in (0, 1))):
                    raise SettingsError(
                        f"{name}.step returned {word} {spaces.short_repr(flag)}; expected True or False"
                    )
            reward, ends = np.asarray(reward).item(), [bool(flag) for flag in (terminated, truncated)]
            return obs, reward, *ends, _scalar_info(info)

    return Checked(env)


def _is_single_number(value: Any, kinds: str) -> bool:
    """Return whether `value` is one number or an array of one, of dtype kinds `kinds`."""
    if isinstance(value, str | bytes | None):
        return False
    array = np.asarray(value)
    return array.size == 1 and array.dtype.kind in kinds


class _Gymnasium:
    def __init__(self, make: Callable[[], Any], spec: EnvSpec, num_envs: int, seed: int, processes: bool) -> None:
        gymnasium = require_extra("gymnasium", PURPOSE)
        vector = gymnasium.vector
        # Resets happen in `reset`, where `HostVectorEnv` asks for them, so that the true successor is seen.
        mode = {"autoreset_mode": vector.AutoresetMode.DISABLED}
        self._seed: int | None = seed
        self._killing = threading.Lock()
        self._space, self._name = spec.observation_space, spec.name
        self._in_processes = processes
        kind = vector.AsyncVectorEnv if processes else vector.SyncVectorEnv
        # Filled by `start`, during which another thread may have to kill what it has started.
        self._env = kind.__new__(kind)
        if processes:
            # Spawned, because a forked process may hang if JAX runs threads.
            start = partial(self._env.__init__, context="spawn", **mode)
            makers = lambda file: [EnvMaker(partial(_make_checked, make), file)] * num_envs
            self._start: Callable[[str], None] | None = lambda file: start(makers(file))
        else:
            self._start = None
            self._env.__init__([partial(_make_checked, make)] * num_envs, **mode)

    def start(self) -> None:
        """Start the processes, unless that is done; raise `ActorError` if one dies meanwhile."""
        start, self._start = self._start, None
        if start is None:
            return
        try:
            with tempfile.NamedTemporaryFile() as file, mask_signals(signal.SIG_BLOCK):
                self._call(partial(start, file.name))  # which ends when all processes have read the file
        except BaseException:
            self._kill()
            raise

    def reset(self, which: np.ndarray | None = None) -> PyTree:
        self.start()
        options = None if which is None else {"reset_mask": which}
        # Only the first reset is seeded; later ones continue the environments' random streams.
        seed, self._seed = self._seed, None
        obs = self._call(partial(self._env.reset, seed=seed, options=options))[0]
        return convert_obs(self._name, self._space, obs)

    def step(self, action: PyTree) -> HostStep:
        actions = convert_action(self._env.single_action_space, action)
        obs, reward, terminated, truncated, info = self._call(partial(self._env.step, actions))
        scalars = vector_scalars(info, self._env.num_envs)
        return HostStep(convert_obs(self._name, self._space, obs), reward, terminated, truncated, scalars)

    def close(self, kill: bool = False) -> None:
        if kill and self._in_processes:
            self._kill()
        elif not kill and self._start is None:
            self._env.close()

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the environments; raise `ActorError` if one of their processes has died."""
        try:
            return function()
        except (EOFError, ConnectionError) as error:
            if not getattr(self._env, "processes", ()):
                raise  # of the environment itself: there are no processes, or none yet
            # The pipe to a process is closed: the process has died. The others would wait for commands, so they are
            # ended too.
            sentinels = wait([process.sentinel for process in self._env.processes], TERMINATION_TIMEOUT_S)
            ended = [process for process in self._env.processes if process.sentinel in sentinels]
            for process in ended:
                process.join(TERMINATION_TIMEOUT_S)  # its exit code comes after its sentinel
            codes = [process.exitcode for process in ended]
            self._kill()
            if UNGUARDED in codes:
                raise ActorError(
                    "the script that trains would run again in each process that steps its environments; put what it "
                    'does below if __name__ == "__main__":'
                ) from error
            raise ActorError("a process that steps its environments has ended: killed, or out of memory?") from error

    def _kill(self) -> None:
        """End the processes and their children, which would otherwise keep this process from exiting."""
        with self._killing:  # of two threads, the one that notices a death must not be ended before it reports it
            # So that Gymnasium does not wait for replies; nor for those of processes that it is about to start.
            self._env.closed = True
            processes = [process for process in getattr(self._env, "processes", ()) if process.pid is not None]
            # Signal all before waiting for any, so that they end concurrently.
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, END)
            for process in processes:
                process.join(TERMINATION_TIMEOUT_S)
                process.kill()  # a stopped process does not receive `END`
                process.join()


def convert_obs(name: str, space: Space, obs: PyTree) -> PyTree:
    """Convert observations `[N, ...]` of environment `name` to the containers, dtypes and shapes of `space`.

    Discrete values then count from 0, and images have channels last.

    Raises:
      SettingsError: integers that do not fit the dtype of `space`.
    """
    # The common case, without a tree.
    if isinstance(obs, np.ndarray) and spaces.is_leaf(space):
        return _convert_leaf(name, space, obs)
    flat = jax.tree.leaves(obs if not isinstance(obs, dict) else dict(obs))
    like, treedef = jax.tree.flatten(space, is_leaf=spaces.is_leaf)
    return jax.tree.unflatten(treedef, [_convert_leaf(name, s, x) for s, x in zip(like, flat, strict=True)])


def _convert_leaf(name: str, space: Box | Discrete | MultiDiscrete, x: Any) -> np.ndarray:
    # Discrete values count from 0 inside, whatever the start of the space.
    array = spaces.to_dtype(f"an observation of {name}", np.asarray(x), space.dtype)
    if not isinstance(space, Box) and np.any(space.start):
        array = array - np.asarray(space.start, array.dtype)
    if array.shape[1:] == space.shape:
        return array
    array = spaces.match_image_layout(array, space.shape)
    return array.reshape(len(array), *space.shape)


# --- scalars ----------------------------------------------------------------------------------------------------


def vector_scalars(info: Mapping[str, Any], num_envs: int) -> dict[str, np.ndarray]:
    """Return the scalars in the `info` of a vector of environments, float32 `[N]`, NaN where one is missing.

    Nested entries are named with a slash, such as `episode/l`. Gymnasium's mask `_NAME` marks the environments that
    have NAME. Anything but one number per environment is left out.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in info.items():
        if name in BOOKKEEPING or (name.startswith("_") and name[1:] in info):
            continue
        if isinstance(value, Mapping):
            # A dict that an environment lacks is masked as a whole.
            inner = vector_scalars(value, num_envs)
            found |= {f"{name}/{word}": _mask_missing(info.get(f"_{name}"), x) for word, x in inner.items()}
        elif getattr(value, "shape", None) == (num_envs,) and np.asarray(value).dtype.kind in "biuf":
            found[name] = _mask_missing(info.get(f"_{name}"), np.asarray(value, np.float32))
    return found


def _scalar_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in the `info` of one environment as floats, nested as they are.

    Gymnasium's vectors can stack only these: anything else, and integers of more than 64 bits, is left out.
    """
    found: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, Mapping):
            found[name] = _scalar_info(value)
        elif _is_number(value) and not (isinstance(value, int) and not -(2**63) <= value < 2**63):
            found[name] = float(value)
    return found


def _is_number(value: Any) -> bool:
    """Return whether `value` is a single real number."""
    if isinstance(value, bool | int | float):
        return True
    return isinstance(value, np.generic | np.ndarray) and value.shape == () and value.dtype.kind in "biuf"


def _mask_missing(mask: Any, values: np.ndarray) -> np.ndarray:
    return values if mask is None else np.where(mask, values, np.float32(np.nan))


# --- JAX --------------------------------------------------------------------------------------------------------


def on_host(env: Env, device: Any = None) -> HostEnv:
    """Return an environment written in JAX as a `HostEnv`, stepped on `device` (default: JAX's first device)."""
    return HostEnv(env.spec, partial(_Jax, env, device), settings=env.settings, compiled=True)


class _Jax:
    def __init__(self, env: Env, device: Any, num_envs: int, seed: int, processes: bool) -> None:
        # One program steps all environments, so there is nothing for processes to do.
        del processes
        self._device, self._count = device or jax.devices()[0], 0
        self._key = jax.device_put(make_key(seed), self._device)
        self._fresh = jax.jit(lambda key: jax.vmap(env.reset)(jax.random.split(key, num_envs)))
        self._mix = jax.jit(tree_where)
        self._step = jax.jit(partial(_step_all, env, num_envs))
        self._state: Any = None
        self._compile(env, num_envs)

    def _compile(self, env: Env, num_envs: int) -> None:
        """Call every program once, so that none compiles while an actor waits; the results are discarded."""
        action = jax.tree.map(np.asarray, spaces.space_zeros(env.spec.action_space, num_envs))
        with jax.default_device(self._device):
            fresh, _ = self._fresh(self._key)
            stepped, *_ = self._step(self._mix(np.ones(num_envs, bool), fresh, fresh), action, self._key)
            self._step(self._mix(np.ones(num_envs, bool), fresh, stepped), action, self._key)

    def reset(self, which: np.ndarray | None = None) -> PyTree:
        with jax.default_device(self._device):
            # Reset all and select the requested states, so that one program serves every mask.
            state, obs = self._fresh(self._next_key())
            self._state = state if which is None else self._mix(which, state, self._state)
        return jax.tree.map(np.asarray, obs)

    def step(self, action: PyTree) -> HostStep:
        with jax.default_device(self._device):
            self._state, out = self._step(self._state, action, self._next_key())
        return HostStep(*jax.tree.map(np.asarray, out))

    def close(self, kill: bool = False) -> None:
        self._state = None

    def _next_key(self) -> Any:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


def _step_all(env: Env, num_envs: int, state: PyTree, action: PyTree, key: Any) -> tuple[PyTree, tuple[PyTree, ...]]:
    state, out = jax.vmap(env.step)(state, action, jax.random.split(key, num_envs))
    flags = (jnp.broadcast_to(jnp.asarray(x, bool), (num_envs,)) for x in (out.terminated, out.truncated))
    scalars = {name: jnp.asarray(value, jnp.float32) for name, value in out.info.items() if jnp.ndim(value) == 1}
    return state, (out.obs, jnp.asarray(out.reward, jnp.float32), *flags, scalars)


# --- spaces -----------------------------------------------------------------------------------------------------


def gymnasium_spec(env: Any) -> EnvSpec:
    """Describe a Gymnasium environment, or one of a vector of them; raise `SettingsError` for an unsupported space.

    The spec has no time limit: the environment itself reports where it truncates an episode. Images with channels first
    are described as `[H, W, C]` (see `to_channels_last`), and their observations are transposed to match.
    """
    single = "single_" if hasattr(env, "single_action_space") else ""
    observations, actions = getattr(env, f"{single}observation_space"), getattr(env, f"{single}action_space")
    spec = getattr(env, "spec", None)
    name = PREFIX + (spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__)
    return EnvSpec(
        name, spaces.to_channels_last(spaces.convert_space(name, observations)), spaces.convert_space(name, actions)
    )


def convert_action(space: Any, action: PyTree) -> PyTree:
    """Convert actions `[N, ...]`, counted from 0, to elements of Gymnasium's `space` of one action."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: convert_action(part, action[key]) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(convert_action(part, x) for part, x in zip(space.spaces, action, strict=True))
    array = np.asarray(action)
    if kind in ("Discrete", "MultiDiscrete"):
        return array + space.start
    cast = array.astype(space.dtype)
    # A bound of float64 may be rounded up in float32, and what is clipped to that lies outside of the space.
    return np.clip(cast, space.low, space.high) if kind == "Box" and array.dtype != cast.dtype else cast


def check_gymnasium_id(name: str) -> str:
    """Return the Gymnasium id in `name`, with or without `PREFIX`; raise `SettingsError` if it is unknown."""
    registry = require_extra("gymnasium", PURPOSE).registry
    id_ = name.removeprefix(PREFIX)
    module, colon, rest = id_.rpartition(":")
    if colon and module not in sys.modules:
        raise SettingsError(
            f"{name} would import {module}, which happens only where you name it: --env {name} on the command line, "
            "or import it first, in Python"
        )
    if rest not in registry:
        raise SettingsError(f"unknown environment {name!r}; {suggest(name, [PREFIX + known for known in registry])}")
    return id_

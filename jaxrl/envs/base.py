"""An environment as pure functions, and `N` copies of it with auto-reset."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import spaces
from jaxrl.envs.resets import Resets, Starts, make_resets
from jaxrl.errors import SettingsError, check_count, describe_error
from jaxrl.parsing import format_repr
from jaxrl.spaces import EnvSpec
from jaxrl.trees import Array, Key, PyTree, make_key, require_same, tree_where
from jaxrl.tuning import tunable
from jaxrl.types import GoalFn, Step
from jaxrl.xla.reductions import all_true

INVALID_RESET = -1
"""Episode length that marks a non-finite first observation; the episode is truncated at its first step."""


class TimeStep(NamedTuple):
    """The result of one step of one environment; all fields but `obs` and `info` are scalars."""

    obs: PyTree
    """The true successor. An environment must not reset itself inside a step."""
    reward: Array | float
    terminated: Array | bool
    """The episode ended by itself, so its value is not bootstrapped."""
    truncated: Array | bool = False
    """The episode was cut off from outside. `vectorise` adds the limit `EnvSpec.time_limit`."""
    info: Mapping[str, Array] = {}
    """Scalars to record at every step, or only at the end of an episode if the name begins with `episode_`."""


class ResetFn(Protocol):
    def __call__(self, key: Key, /, *values: PyTree) -> tuple[PyTree, PyTree]:
        """Start an episode; return its state and first observation. The key is consumed.

        An environment with `Env.values` takes a dict of these numbers as optional second argument.
        """
        ...


class StepFn(Protocol):
    def __call__(self, state: PyTree, action: PyTree, key: Key, /) -> tuple[PyTree, TimeStep]:
        """Advance one step. The key is consumed."""
        ...


class ScoreFn(Protocol):
    def __call__(self, reward: Array, alive: Array, /) -> Array:
        """Reduce the rewards `[A]` of a step to a score; rewards of agents that are not `alive` are 0."""
        ...


class RenderFn(Protocol):
    def __call__(self, state: PyTree, /) -> np.ndarray:
        """Render one state on the host as `[H, W, 3]` uint8."""
        ...


def mean_reward(reward: Array, alive: Array) -> Array:
    """Return the mean over all agents, so that the score of an episode is the mean of the agents' returns."""
    del alive
    return reward.mean()


class Env(NamedTuple):
    """An environment: two pure functions and a specification."""

    spec: EnvSpec
    reset: ResetFn
    step: StepFn
    render: RenderFn | None = None
    settings: Mapping[str, Any] | None = None
    """Arguments with which `make_env` rebuilds it; `None` for a custom environment."""
    goal: GoalFn | None = None
    """Reward and termination for a goal, for `jaxrl.hindsight`; needs `achieved_goal` and `desired_goal` observed."""
    values: Mapping[str, Any] = {}
    """Numbers or schedules by name that `reset` takes as optional second argument, see `randomise`."""
    agents: int | None = None
    """Number of agents that share one policy. Observations, actions, rewards and terminations then have a leading axis
    `[A]`, and the spec describes one agent. See `jaxrl.envs.agents`."""
    score: ScoreFn = mean_reward
    """Reduces the rewards of several agents to the score that evaluations sum up."""
    deterministic: bool = False
    """Whether `reset` and `step` intentionally ignore their keys, for `check_env`."""
    fixed_length: bool = False
    """Whether every episode intentionally terminates after the same number of steps, for `check_env`."""

    def __repr__(self) -> str:
        return format_repr("Env", self.spec.name, f"actions {self.spec.action_space}")


class VecEnvState(NamedTuple):
    """State of `N` environments."""

    env: PyTree
    """`[N, ...]`; of games of several agents, `[G, ...]`."""
    episode_return: Array
    """Float32, sum of raw rewards of the current episode."""
    episode_length: Array
    """Int32, steps of the current episode; `INVALID_RESET` if its first observation was not finite."""
    starts: PyTree = ()
    """State of the source of resets: the pool `[K, ...]`, otherwise empty."""
    values: PyTree = ()
    """Current `Env.values`, float32 scalars by name; empty if there are none."""
    limit: PyTree = ()
    """Int32, steps after which the current episode is truncated, where first episodes are shorter; otherwise empty."""


class VecEnv(NamedTuple):
    """`N` environments with auto-reset, behind one interface."""

    spec: EnvSpec
    num_envs: int
    reset: ResetFn
    step: Any
    """`(state, action, key) -> (state, Step)`; the key is consumed."""
    resets: str
    """The argument `resets` of `vectorise`, resolved: such as `pool:64`, never `auto`."""
    values: Mapping[str, Any] = {}
    """`Env.values`."""


def vectorise(env: Env, num_envs: int, resets: str = "auto", stagger: bool = False) -> VecEnv:
    """Run `num_envs` copies of `env` in parallel, with auto-reset: the next episode starts in the step that ends one.

    The returned `step` yields a `Step` with the true successor in `final_obs` and the next observation of the policy in
    `obs`. `info` has the environment's scalars, plus `episode_return` and `episode_length` up to and including the
    step. A non-finite observation or reward truncates its episode; the step is marked `valid=False`, and its values are
    replaced by zeros. If a first observation is not finite, the policy sees zeros, and the step taken from them is
    invalid.

    Each agent of a multi-agent environment counts as one of the `num_envs`.

    `resets` is the source of initial states: `fresh`, `pool`, `pool:K`, `optimistic`, `optimistic:R`, or `auto`, which
    selects `fresh` if a reset is cheap and `pool` otherwise; see `jaxrl.envs.resets`. All but `optimistic` use every
    initial state once.

    With `stagger`, the first episode of environment `i` is truncated after `ceil((i + 1) / num_envs * time_limit)`
    steps. Episodes that only the time limit ends would otherwise all begin and end together for good.

    Raises:
      SettingsError: `reset` and `step` of `env` disagree on a shape, a dtype or a structure, `resets` is unknown, `env`
        is not written in JAX, or `stagger` is set and `env` has no time limit.
    """
    if require_env_in_jax(env).agents is not None:
        from jaxrl.envs.agents import vectorise_agents

        return vectorise_agents(env, num_envs, resets, stagger)
    check_count("num_envs", num_envs)
    if env.spec.time_limit is not None:
        check_count(f"environment {env.spec.name}: time_limit", env.spec.time_limit, most=2**31 - 1)
    elif stagger:
        raise SettingsError(f"{env.spec.name} has no time limit, which stagger divides; leave stagger out")
    check_signatures(env)
    source = make_resets(resets, partial(_start, env), num_envs)
    return VecEnv(
        spec=env.spec,
        num_envs=num_envs,
        reset=partial(_reset, env, num_envs, source, stagger),
        step=partial(_step, env, source),
        resets=source.name,
        values=env.values,
    )


def _first_limits(env: Env, num_envs: int) -> Array:
    """Return the steps `[N]` after which first episodes are truncated, spread evenly up to the time limit."""
    assert env.spec.time_limit is not None
    shares = np.arange(1, num_envs + 1, dtype=np.int64)
    return jnp.asarray(-(-shares * env.spec.time_limit // num_envs), jnp.int32)


def _reset(env: Env, num_envs: int, source: Resets, stagger: bool, key: Key) -> tuple[VecEnvState, PyTree]:
    values = _initial_values(env.values)
    state, obs, length = _start(env, jax.random.split(key, num_envs), *_reset_args(values))
    # An index that the split leaves unused: with partitionable Threefry, its key `i` is that of `fold_in` with `i`.
    store = source.init(jax.random.fold_in(key, num_envs), *_reset_args(values))
    limit = _first_limits(env, num_envs) if stagger else ()
    return VecEnvState(state, jnp.zeros(num_envs, jnp.float32), length, store, values, limit), obs


def final_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the final number of each schedule."""
    return {name: getattr(value, "end", value) for name, value in values.items()}


def _initial_values(values: Mapping[str, Any]) -> PyTree:
    """Return the initial `VecEnvState.values`; a number without a schedule can be swept."""
    begin = lambda name, x: x(jnp.uint32(0)) if callable(x) else tunable(f"env_args.{name}", x)
    return {name: begin(name, value) for name, value in values.items()} if values else ()


def _reset_args(values: PyTree) -> tuple[PyTree, ...]:
    """Return the arguments of `Env.reset` after the key: without values, a `reset` may take the key alone."""
    return (values,) if values else ()


def apply_schedules(env: VecEnv, state: VecEnvState, opt_step: Array) -> VecEnvState:
    """Update the values with a schedule to optimisation step `opt_step`."""
    now = {name: value(opt_step) for name, value in env.values.items() if callable(value)}
    return state._replace(values={**state.values, **now}) if now else state


def obs_valid(state: VecEnvState) -> Array:
    """Return whether the current observations are real, not zeros in place of a non-finite first one; `[N]` bool."""
    return state.episode_length != INVALID_RESET


def _start(env: Env, keys: Array, *given: PyTree) -> Starts:
    """Reset one environment per key; return states, observations with non-finite ones zeroed, and episode lengths.

    Weak types are removed: a step would turn them into strong ones, and the carry of a loop must not change its types.
    """
    state, obs = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), jax.vmap(lambda key: env.reset(key, *given))(keys))
    finite = finite_rows(obs)
    return state, zero_invalid_rows(finite, obs), jnp.where(finite, jnp.int32(0), jnp.int32(INVALID_RESET))


def _step(env: Env, source: Resets, state: VecEnvState, action: PyTree, key: Key) -> tuple[VecEnvState, Step]:
    step_key, reset_key = jax.random.split(key)
    step_keys = jax.random.split(step_key, state.episode_length.shape[0])
    env_state, out = jax.vmap(env.step)(state.env, action, step_keys)
    length = jnp.maximum(state.episode_length, 0) + 1  # `INVALID_RESET` counts as 0
    # The step after a non-finite first observation is invalid, too, however finite its own result.
    valid = finite_rows((out.obs, out.reward)) & obs_valid(state)
    reward = jnp.where(valid, jnp.asarray(out.reward, jnp.float32), 0.0)
    total = state.episode_return + reward
    # An invalid step truncates and never terminates, so that no value of 0 is bootstrapped from it.
    terminated = jnp.asarray(out.terminated, bool) & valid
    truncated = (jnp.asarray(out.truncated, bool) | ~valid) & ~terminated
    full: Any = env.spec.time_limit
    staggered = not isinstance(state.limit, tuple)
    if full is not None:
        truncated = truncated | ((length >= (state.limit if staggered else full)) & ~terminated)
    done = terminated | truncated
    final_obs = zero_invalid_rows(valid, out.obs)
    # New episodes start with the current values.
    given = _reset_args(state.values)
    # Resets are computed whether or not an episode ended; `source` decides how many.
    starts, (fresh_state, fresh_obs, fresh_length) = source.take(state.starts, done, reset_key, *given)
    length_after = jnp.where(done, fresh_length, length)
    step = Step(
        action=action,
        extras=(),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        final_obs=final_obs,
        obs=tree_where(done, fresh_obs, final_obs),
        info={**out.info, **_value_scalars(state.values, reward), "episode_return": total, "episode_length": length},
        valid=valid,
        obs_valid=length_after != INVALID_RESET,
    )
    state = VecEnvState(
        env=tree_where(done, fresh_state, env_state),
        episode_return=jnp.where(done, 0.0, total),
        episode_length=length_after,
        starts=starts,
        values=state.values,
        limit=jnp.where(done, full, state.limit) if staggered else (),
    )
    return state, step


def _value_scalars(values: PyTree, like: Array) -> dict[str, Array]:
    return {f"values/{name}": jnp.broadcast_to(value, like.shape) for name, value in dict(values).items()}


def zero_invalid_rows(finite: Array, tree: PyTree) -> PyTree:
    """Replace the rows of leaves `[N, ...]` that are not `finite` `[N]` by zeros."""
    return tree_where(finite, tree, jax.tree.map(jnp.zeros_like, tree))


def finite_rows(tree: PyTree) -> Array:
    """Return which rows of leaves `[N, ...]` are finite in all floating-point entries; `[N]` bool."""
    leaves = jax.tree.leaves(tree)
    valid = jnp.ones(leaves[0].shape[0], bool)
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            valid = valid & all_true(jnp.isfinite(leaf).reshape(valid.shape[0], -1))
    return valid


def require_env_in_jax(env: Env) -> Env:
    """Return `env`; raise `SettingsError` unless it is an environment written in JAX."""
    if not isinstance(env, Env):
        name = getattr(getattr(env, "spec", None), "name", type(env).__name__)
        raise SettingsError(f"{name} is not written in JAX; expected a jaxrl.Env")
    return env


def require_same_spaces(one: EnvSpec, other: EnvSpec) -> None:
    """Raise `SettingsError` unless a policy for `other` can act in `one`."""
    for what in ("observation_space", "action_space"):
        mine, theirs = getattr(one, what), getattr(other, what)
        alike = [
            (spaces.space_struct(space), spaces.space_sizes(space), spaces.space_starts(space))
            for space in (mine, theirs)
        ]
        if alike[0] != alike[1]:
            raise SettingsError(
                f"{one.name} has the {what.replace('_', ' ')} {mine}; expected that of {other.name}, {theirs}"
            )


# --- signatures, checked by tracing only ------------------------------------------------------------------------

_KEY = jax.eval_shape(lambda: make_key(0))


def _traced(name: str, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return the shapes that a function of the environment `name` returns; it may not end the process."""
    try:
        return jax.eval_shape(function, *args)
    except SystemExit as error:
        raise SettingsError(f"environment {name}: {what} raised {describe_error(error)}") from error


def check_signatures(env: Env) -> None:
    """Raise `SettingsError` unless `reset`, `step` and the spec agree in structure, shapes and dtypes."""
    name = env.spec.name
    for space in (env.spec.observation_space, env.spec.action_space):
        spaces.check_zero_based(name, space)
    # Traced without values: a `reset` that takes them has defaults for them.
    first = _traced(name, "reset", env.reset, _KEY)
    if not (isinstance(first, tuple) and len(first) == 2):
        raise SettingsError(f"environment {name}: reset returned {type(first).__name__}; expected (state, observation)")
    state, obs = first
    action = spaces.space_struct(env.spec.action_space)
    result = _traced(name, "step", env.step, state, action, _KEY)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
        raise SettingsError(
            f"environment {name}: step returned {type(result).__name__}; expected (state, jaxrl.TimeStep)"
        )
    next_state, out = result
    require_same(f"environment {name}: the state after step", next_state, "that after reset", state)
    require_same(f"environment {name}: the observation after step", out.obs, "that after reset", obs)
    # Paths alone do not distinguish a list from a tuple.
    after: Any = jax.tree.structure((next_state, out.obs))
    if after != jax.tree.structure((state, obs)):
        raise SettingsError(
            f"environment {name}: the state after step or its observation has other containers (tuple, list, dict) "
            "than after reset; make them the same"
        )
    require_same(
        f"environment {name}: the observation",
        obs,
        "the observation space",
        spaces.space_struct(env.spec.observation_space),
    )
    for field in ("reward", "terminated", "truncated"):
        shape = np.shape(getattr(out, field))
        if shape != ():
            raise SettingsError(f"environment {name}: {field} has shape {shape}; expected a scalar")

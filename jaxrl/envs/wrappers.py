"""Wrappers of environments, which nest in any order. Some have names for the command line.

`make_env("CartPole-v1", wrap=["sticky_actions:0.25", "time"])` applies them from left to right, as does
`--env-args wrap "[sticky_actions:0.25,time]"`. Changes that only concern learning, such as clipped or scaled rewards,
stacked frames or normalised observations, belong in processors: runs are scored by the environment's rewards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.agents import require_single_agent
from jaxrl.envs.base import Env, TimeStep
from jaxrl.errors import SettingsError, check_between, check_count, suggest
from jaxrl.masks import MASK, has_entry
from jaxrl.parsing import as_int, parse_float
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space, is_leaf, space_zeros
from jaxrl.trees import Array, Key, PyTree, tree_where


def action_repeat(env: Env, times: int) -> Env:
    """Repeat each action `times` times, or until the episode ends, and sum the rewards.

    Observation and `info` are those of the last step. The time limit is divided by `times` and rounded down: an episode
    of 500 steps is truncated after 166 repeats of 3.

    Raises:
      SettingsError: `times` is no positive integer, or exceeds the time limit, or observations have an `action_mask`.
    """
    _require_repeatable(env, "action_repeat")
    check_count("action_repeat", times)
    limit = env.spec.time_limit
    if limit is not None and times > limit:
        raise SettingsError(f"action_repeat is {times}, but episodes of {env.spec.name} have {limit} steps at most")

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        keys = jax.random.split(key, times)
        first = _to_typed_arrays(env.step(state, action, keys[0]))

        # A scan of fixed length: after the end of the episode the remaining steps are computed and discarded.
        def repeat(carry: tuple[PyTree, TimeStep], key: Key) -> tuple[tuple[PyTree, TimeStep], None]:
            state, out = carry
            # Rewards are summed up to the end of the episode, after which the carry stays unchanged.
            state_after, next_out = _to_typed_arrays(env.step(state, action, key))
            next_out = next_out._replace(reward=out.reward + next_out.reward)
            return tree_where(jnp.logical_or(out.terminated, out.truncated), carry, (state_after, next_out)), None

        return jax.lax.scan(repeat, first, keys[1:])[0]

    # Neither settings nor goal describe the wrapped environment; `make_env` adds the settings of wrappers by name.
    return env._replace(
        spec=env.spec._replace(time_limit=None if limit is None else limit // times),
        step=step,
        settings=None,
        goal=None,
    )


def _to_typed_arrays(result: tuple[PyTree, TimeStep]) -> tuple[PyTree, TimeStep]:
    """Return a result with strongly typed arrays, as the carry of a scan needs."""
    state, out = jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), result)  # none weakly typed
    ends = {name: getattr(out, name).astype(bool) for name in ("terminated", "truncated")}
    return state, out._replace(reward=out.reward.astype(jnp.float32), **ends)


def _require_repeatable(env: Env, what: str) -> None:
    """Raise `SettingsError`, naming the wrapper, unless an action can be taken again at a later step of `env`."""
    require_single_agent(env, what)
    if has_entry(env.spec.observation_space, MASK):
        raise SettingsError(
            f"observations of {env.spec.name} have an {MASK}, which may forbid an action that {what} takes again; "
            f"leave {what} out"
        )


class Sticky(NamedTuple):
    """State of an environment with sticky actions."""

    env: PyTree
    action: PyTree
    """The last action taken."""
    begun: Array
    """Bool: the episode has had a step, so `action` is valid."""


def sticky_actions(env: Env, probability: float) -> Env:
    """Repeat the last action instead of the chosen one with a `probability` (Machado et al. 2018, section 5.2).

    The first action of an episode is never replaced. The agent does not observe which action was taken.

    Raises:
      SettingsError: the probability is not between 0 and 1, or observations have an `action_mask`.
    """
    _require_repeatable(env, "sticky_actions")
    check_between("sticky_actions", probability, 0, 1)

    def reset(key: Key, *values: PyTree) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key, *values)
        return Sticky(state, space_zeros(env.spec.action_space), jnp.zeros((), bool)), obs

    def step(state: Sticky, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        sticks_key, step_key = jax.random.split(key)
        sticks = jax.random.bernoulli(sticks_key, probability)
        # In the dtype of the state, which the carry of a loop must keep.
        last = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), action, state.action)
        taken = tree_where(sticks & state.begun, state.action, last)
        after, out = env.step(state.env, taken, step_key)
        return Sticky(after, taken, jnp.ones((), bool)), out

    return _wrap(env, reset, step, lambda state: state.env)


class Clocked(NamedTuple):
    """State of an environment with the time in its observations."""

    env: PyTree
    steps: Array
    """Int32, steps of the episode so far."""


def time(env: Env) -> Env:
    """Add the remaining fraction of the time limit to observations, as `time` `[1]` from 1 to 0 (Pardo et al. 2018).

    Raises:
      SettingsError: the environment has no time limit, or observations have an entry `time` already.
    """
    limit = require_single_agent(env, "time").spec.time_limit
    if limit is None:
        raise SettingsError(f"{env.spec.name} has no time limit, so there is no remaining time to observe")

    def shown(obs: PyTree, steps: Array) -> PyTree:
        return _add_entries(obs, {"time": 1.0 - steps.astype(jnp.float32)[None] / limit})

    def reset(key: Key, *values: PyTree) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key, *values)
        return Clocked(state, jnp.int32(0)), shown(obs, jnp.int32(0))

    def step(state: Clocked, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state.env, action, key)
        # The observation after a step shows the time that is left after it.
        return Clocked(after, state.steps + 1), out._replace(obs=shown(out.obs, state.steps + 1))

    return _wrap(env, reset, step, lambda state: state.env, {"time": Box(0.0, 1.0, (1,))})


def previous(env: Env) -> Env:
    """Add the last action, one-hot if discrete, and the last reward: `previous_action` and `previous_reward`.

    Both are zeros at the start of an episode. A recurrent agent can infer from them how the environment reacts (Wang et
    al. 2016).

    Raises:
      SettingsError: observations have these entries already.
    """
    action_space = require_single_agent(env, "previous").spec.action_space
    width = _action_width(action_space)
    more: dict[str, Space] = {
        "previous_action": Box(-jnp.inf, jnp.inf, (width,)),
        "previous_reward": Box(-jnp.inf, jnp.inf, (1,)),
    }

    def shown(obs: PyTree, action: Array, reward: Array) -> PyTree:
        return _add_entries(obs, {"previous_action": action, "previous_reward": reward[None]})

    def reset(key: Key, *values: PyTree) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key, *values)
        return state, shown(obs, jnp.zeros(width, jnp.float32), jnp.float32(0))

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state, action, key)
        reward = jnp.asarray(out.reward, jnp.float32)
        return after, out._replace(obs=shown(out.obs, _flatten_action(action_space, action), reward))

    # Hindsight would change the goal, but not the reward that the next observation shows.
    return _wrap(env, reset, step, lambda state: state, more)._replace(goal=None)


def hide(env: Env, entry: int) -> Env:
    """Show 0 in place of one entry of a vector, such as a velocity, which an agent can infer only with a memory.

    Raises:
      SettingsError: observations are no vector, or have no such entry.
    """
    spec = require_single_agent(env, "hide").spec
    space = spec.observation_space
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise SettingsError(f"hide takes an entry of a vector, but observations of {spec.name} are {space}")
    if not 0 <= entry < space.shape[0]:
        raise SettingsError(f"hide is {entry}; expected an entry of {spec.name}, from 0 to {space.shape[0] - 1}")
    hidden = np.arange(space.shape[0]) == entry
    low = tuple(np.where(hidden, np.minimum(space.low, 0), space.low).tolist())
    high = tuple(np.where(hidden, np.maximum(space.high, 0), space.high).tolist())
    shown = lambda obs: jnp.where(hidden, jnp.zeros((), obs.dtype), obs)
    return transform_obs(env, shown, Box(low, high, space.shape, space.dtype))


def transform_obs(env: Env, function: Callable[[PyTree], PyTree], space: Space) -> Env:
    """Replace each observation by `function(observation)`, an element of `space`."""

    def reset(key: Key, *values: PyTree) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key, *values)
        return state, function(obs)

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state, action, key)
        return after, out._replace(obs=function(out.obs))

    spec = env.spec._replace(observation_space=space)
    return env._replace(spec=spec, reset=reset, step=step, settings=None, goal=None)


def transform_reward(env: Env, function: Callable[[PyTree, PyTree, TimeStep], Array]) -> Env:
    """Replace the reward by `function(state, action, step)`; `state` is that before the step.

    Runs are scored by the new reward too. To score by the original one, give an `Evaluator` the original environment.
    """

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state, action, key)
        return after, out._replace(reward=function(state, action, out))

    return env._replace(step=step, settings=None, goal=None)


def _wrap(env: Env, reset: Any, step: Any, inner: Callable[[Any], PyTree], more: dict[str, Space] | None = None) -> Env:
    """Return `env` with these functions; `inner` maps the new state to that of `env`, `more` are the added spaces."""
    spec = env.spec._replace(observation_space=_add_entries(env.spec.observation_space, more)) if more else env.spec
    # `render` gets the state of the wrapper, so extract the inner state for it.
    render = env.render
    render_inner = None if render is None else lambda state: render(inner(state))
    return env._replace(spec=spec, reset=reset, step=step, render=render_inner, settings=None)


def _add_entries(obs: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Add entries to an observation, or its space; one that is no dict becomes the entry `observation`."""
    entries = obs if isinstance(obs, dict) else {"observation": obs}
    if taken := sorted(entries.keys() & more.keys()):
        raise SettingsError(f"observations have an entry {taken[0]!r} already; it cannot be added twice")
    return {**entries, **more}


def _action_width(space: Space) -> int:
    """Return the length of `_flatten_action`."""
    if isinstance(space, Discrete):
        return space.n
    if isinstance(space, MultiDiscrete):
        return sum(space.n)
    if isinstance(space, Box):
        return math.prod(space.shape)
    return sum(map(_action_width, jax.tree.leaves(space, is_leaf=is_leaf)))


def _flatten_action(space: Space, action: PyTree) -> Array:
    """Return an action as `[width]` float32, discrete parts one-hot; parts of a dict in the order of their names."""
    if not is_leaf(space):
        pairs = zip(jax.tree.leaves(space, is_leaf=is_leaf), jax.tree.leaves(action), strict=True)
        return jnp.concatenate([_flatten_action(*pair) for pair in pairs])
    if isinstance(space, Discrete):
        return jax.nn.one_hot(action, space.n, dtype=jnp.float32)
    if isinstance(space, MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(action[i], n, dtype=jnp.float32) for i, n in enumerate(space.n)])
    return jnp.asarray(action, jnp.float32).reshape(-1)


# --- by name --------------------------------------------------------------------------------------------------------

WRAPPERS: dict[str, tuple[Callable[..., Env], Callable[[str], Any] | None]] = {
    "action_repeat": (action_repeat, as_int),
    "sticky_actions": (sticky_actions, parse_float),
    "hide": (hide, as_int),
    "time": (time, None),
    "previous": (previous, None),
}
"""Wrappers by name, each with the parser of its number; `None` if it takes none."""


def apply_wrappers(env: Env, wrap: str | Sequence[str]) -> Env:
    """Apply wrappers by name, such as `action_repeat:4`, from left to right.

    Raises:
      SettingsError: a name is unknown, or its number is missing, superfluous, or out of bounds.
    """
    for name in parse_wrappers(wrap):
        env = _parse_wrapper(name)(env)
    return env


def parse_wrappers(wrap: object) -> list[str]:
    """Return the names of wrappers as a list; raise `SettingsError` for anything else."""
    names = [wrap] if isinstance(wrap, str) else wrap
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SettingsError(f"wrap is {wrap!r}; expected names of wrappers, as in ['sticky_actions:0.25', 'time']")
    return list(names)


def _parse_wrapper(name: str) -> Callable[[Env], Env]:
    kind, colon, given = name.partition(":")
    if kind not in WRAPPERS:
        raise SettingsError(f"unknown wrapper {kind!r}; {suggest(kind, WRAPPERS)}")
    function, read = WRAPPERS[kind]
    # A colon without a number is an error too.
    if read is None:
        if colon:
            raise SettingsError(f"wrapper {name!r} takes no number; expected {kind!r}")
        return function
    value = read(given)
    if not isinstance(value, int | float):
        raise SettingsError(f"wrapper {name!r} has no number; expected one, as in {kind + ':' + EXAMPLES[kind]!r}")
    return lambda env: function(env, value)


EXAMPLES = {"action_repeat": "4", "sticky_actions": "0.25", "hide": "1"}

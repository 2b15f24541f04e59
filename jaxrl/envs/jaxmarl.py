"""Environments of JaxMARL (https://github.com/FLAIROx/JaxMARL), whose agents share one policy; imported on demand."""

import contextlib
import inspect
import io
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep, mean_reward
from jaxrl.envs.suites import KEY, check_id, check_int, convert_params, make_boxes
from jaxrl.errors import SettingsError, error_text, require_extra
from jaxrl.masks import MASK
from jaxrl.spaces import Box, Discrete, EnvSpec, Space
from jaxrl.trees import Array, Key, PyTree

PREFIX = "jaxmarl:"
"""Prefix of the names of JaxMARL's environments, as in `jaxmarl:MPE_simple_spread_v3`."""
NEVER = np.iinfo(np.int32).max


class Kind(NamedTuple):
    """Properties of environments of the suite."""

    timed: bool = False
    """Agents observe the time limit, or the suite reads it: it stays, and an end at the limit is a truncation."""
    masked: str | None = None
    """The method that returns legal actions, if there is one."""
    team: bool = False
    """All agents, also dead ones, get the reward of the team: the score is the mean over living agents."""
    rounds: bool = False
    """Episodes are a fixed number of rounds of fixed length, and end only by truncation."""


KINDS = {
    **{f"MPE_simple_{name}": Kind() for name in ("v3", "spread_v3", "reference_v3")},
    **{f"MPE_simple_facmac_{name}": Kind() for name in ("v1", "3a_v1", "6a_v1", "9a_v1")},
    "switch_riddle": Kind(),
    **{name: Kind(masked="get_avail_actions", team=True) for name in ("SMAX", "HeuristicEnemySMAX")},
    "overcooked": Kind(timed=True),
    "overcooked_v2": Kind(timed=True),
    "hanabi": Kind(masked="get_legal_moves"),
    "coin_game": Kind(rounds=True),
    "jaxnav": Kind(timed=True),
}
"""Environments whose agents have equal spaces, by name."""


def jaxmarl_env(name: str, *, time_limit: Any = None, **params: Any) -> Env:
    """Return JaxMARL's environment `name` (with or without `jaxmarl:`), whose agents share one policy.

    `params` replace the environment's own, as far as they are numbers or flags, such as `num_agents`. Episodes are
    truncated after `time_limit` steps; by default after as many as the suite allows. If the suite has legal actions,
    observations are dicts: `observation` and `action_mask`.

    Raises:
      SettingsError: JaxMARL is not installed, a name or a parameter is unknown or does not fit, or the agents differ.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which optional packages are missing
        require_extra("jaxmarl", "environments of JaxMARL")
        from jaxmarl import registration
    id_ = check_id(PREFIX, name, registration.registered_envs)
    name, given = PREFIX + id_, {**params, **({} if time_limit is None else {"time_limit": time_limit})}
    kind = _get_kind(name, id_)
    env = _make(registration.make, name, id_, params)
    actions, suite_limit = _action_space(name, env), _suite_limit(env, kind)
    limit = suite_limit if time_limit is None else check_int(f"{name}: time_limit", time_limit)
    # The suite reports its limit as the end of a game, so disable it where nothing else reads it.
    if suite_limit is not None and not (kind.timed or kind.rounds):
        getattr(env, "_env", env).max_steps = NEVER  # a wrapper's own attribute would hide that of the game
    reset, step = partial(_reset, env, kind), partial(_step, env, kind, suite_limit)
    _, obs = jax.eval_shape(reset, KEY)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)
    return Env(
        EnvSpec(name, make_boxes(one), actions, limit),
        reset,
        step,
        settings={"env": name, "env_args": given},
        agents=env.num_agents,
        score=_team_score if kind.team else mean_reward,
    )


def _get_kind(name: str, id_: str) -> Kind:
    """Return the properties of an environment; raise `SettingsError` if its agents cannot share a policy."""
    if id_ not in KINDS:
        raise SettingsError(
            f"{name} is not supported: its agents differ, or it needs more than JaxMARL; supported ones: "
            f"{', '.join(KINDS)}"
        )
    return KINDS[id_]


def _make(make: Any, name: str, id_: str, params: Mapping[str, Any]) -> Any:
    """Make the suite's environment with `params`, checked against the parameters of its constructors."""
    env = make(id_)
    if not params:
        return env
    kinds = {word: kind for ancestor in type(env).__mro__[:-1] for word, kind in _numeric_params(ancestor).items()}
    checked = convert_params(name, params, kinds)
    try:
        return make(id_, **checked)
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(f"{name} cannot be made with {dict(params)}: {error_text(error)}") from error


def _numeric_params(maker: type) -> dict[str, type]:
    """Return the parameters of a constructor with numbers or flags as defaults, with their types."""
    found = inspect.signature(maker).parameters.values()
    return {p.name: type(p.default) for p in found if isinstance(p.default, bool | int | float)}


def _suite_limit(env: Any, kind: Kind) -> int | None:
    """Return the number of steps after which the suite ends an episode; `None`: no limit."""
    return env.num_inner_steps * env.num_outer_steps if kind.rounds else getattr(env, "max_steps", None)


def _action_space(name: str, env: Any) -> Space:
    """Return the space of every agent's actions; raise `SettingsError` where the parameters made them unequal."""
    first, *others = env.agents
    space = _convert_space(env.action_space(first))
    for other in others:
        if (theirs := _convert_space(env.action_space(other))) != space:
            raise SettingsError(
                f"{name}: {first} has actions {space}, but {other} {theirs}; agents share a policy, so choose "
                "parameters with which all have the same"
            )
    return space


def _convert_space(space: Any) -> Space:
    choices = getattr(space, "n", None)
    if choices is not None:
        return Discrete(int(choices))
    return Box(np.asarray(space.low), np.asarray(space.high), space.shape)  # type: ignore[arg-type]


def _stack_agents(env: Any, values: Mapping[str, PyTree]) -> Any:
    """Stack a dict of one value per agent to `[A, ...]`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *(values[agent] for agent in env.agents))


def _convert_obs(env: Any, kind: Kind, state: PyTree, obs: Mapping[str, PyTree]) -> PyTree:
    seen = _stack_agents(env, obs)
    if kind.masked is None:
        return seen
    legal = getattr(env, kind.masked)(state)
    return {"observation": seen, MASK: _stack_agents(env, legal).astype(bool)}


def _reset(env: Any, kind: Kind, key: Key) -> tuple[PyTree, PyTree]:
    obs, state = env.reset(key)
    return state, _convert_obs(env, kind, state, obs)


def _step(env: Any, kind: Kind, limit: int | None, state: Any, action: Array, key: Key) -> tuple[PyTree, TimeStep]:
    """Step without the suite's auto-reset."""
    obs, after, rewards, dones, info = env.step_env(key, state, dict(zip(env.agents, action, strict=True)))
    after = jax.tree.map(lambda x, like: jnp.asarray(x, jnp.asarray(like).dtype), after, state)
    over = jnp.asarray(dones["__all__"], bool)
    # Where the limit stays, an end at it is a truncation.
    late = over if kind.rounds else over & (after.step >= limit) if kind.timed else jnp.zeros((), bool)
    ended = (_stack_agents(env, dones).astype(bool) | over) & ~late
    reward = _stack_agents(env, rewards).astype(jnp.float32)
    values = {word: jnp.asarray(x, jnp.float32) for word, x in info.items() if not isinstance(x, Mapping)}
    return after, TimeStep(_convert_obs(env, kind, after, obs), reward, ended, late, values)


def _team_score(reward: Array, alive: Array) -> Array:
    """Return the mean reward of living agents."""
    return reward.sum() / jnp.maximum(alive.sum(), 1)

"""Check an environment for mistakes before training in it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.agents import ALIVE, as_single_env
from jaxrl.envs.base import Env, TimeStep, check_signatures, require_env_in_jax, vectorise
from jaxrl.errors import SettingsError
from jaxrl.masks import check_observation_entries, random_action
from jaxrl.spaces import Box, Space, box_bounds, is_leaf, sample_space
from jaxrl.trees import Array, Key, PyTree, is_key, make_key, tree_where
from jaxrl.xla.hoist import hoist

RESETS = 32
"""Number of resets that determine the range of initial states."""


class _Walk(NamedTuple):
    """A trajectory of random actions in one environment; leaves `[T, ...]`."""

    before: PyTree
    after: PyTree
    out: TimeStep
    length: Array
    fresh: PyTree
    """First observations of one reset per step."""


def check_env(env: Env, steps: int = 1000, seed: int = 0) -> list[str]:
    """Take `steps` random actions in `env`, which its mask allows if there is one; return the mistakes found.

    Each is one line; an empty list means none.

    Checks that states, observations and rewards keep structure, shape and dtype; that values are finite (in resets too)
    and within bounds; that keys are used and advance; that episodes end, and a time limit is not reported as
    termination; and that no reset is hidden inside a step. Errors of tracing it as training does are raised, and
    `SettingsError` for an environment that is not written in JAX.
    """
    agents, env = require_env_in_jax(env), as_single_env(env)
    try:
        check_signatures(env)
        check_observation_entries(agents.spec)
    except SettingsError as error:
        return [str(error)]
    _trace_as_training(env)
    key_resets, key_walk, key_step = jax.random.split(make_key(seed), 3)
    resets = jax.vmap(env.reset)(jax.random.split(key_resets, RESETS))
    walk = jax.jit(partial(_walk, env, partial(_random_action, agents), steps))(key_walk)
    return [
        *_check_values(env, walk),
        *_check_keys(env, resets, walk, key_step),
        *_check_ends(env, steps, walk),
        *_check_hidden_reset(resets[0], walk),
    ]


def _trace_as_training(env: Env) -> None:
    """Trace a loop over steps with random numbers hoisted out of it, as training does; raise what fails."""
    envs = vectorise(env, 2)

    def body(state: PyTree, key: Key, t: Array) -> PyTree:
        act_key, step_key = jax.random.split(key)
        return envs.step(state, sample_space(env.spec.action_space, act_key, envs.num_envs), step_key)[0]

    def loop(key: Key) -> PyTree:
        state, _ = envs.reset(key)
        keys, times = jax.random.split(key, 2), jnp.arange(2, dtype=jnp.uint32)
        parts = hoist(body, state, keys[0], jnp.uint32(0))
        drawn = jax.vmap(parts.ahead)(keys, times)
        one = lambda state, row: (parts.behind(state, *row), None)
        return jax.lax.scan(one, state, (drawn, keys, times))[0]

    jax.eval_shape(jax.jit(loop), make_key(0))


def _random_action(env: Env, obs: PyTree, key: Key) -> PyTree:
    """Return a random action that `obs` allows; of several agents, one for each, as `obs` is."""
    if env.agents is not None:
        return random_action(env.spec, key, obs)
    action = random_action(env.spec, key, jax.tree.map(lambda x: x[None], obs))
    return jax.tree.map(lambda x: x[0], action)


def _walk(env: Env, act: Callable[[PyTree, Key], PyTree], steps: int, key: Key) -> _Walk:
    def body(carry: tuple[PyTree, PyTree, Array], key: Key) -> tuple[tuple[PyTree, PyTree, Array], _Walk]:
        state, obs, length = carry
        act_key, step_key, reset_key = jax.random.split(key, 3)
        after, out = env.step(state, act(obs, act_key), step_key)
        out = jax.tree.map(jnp.asarray, out)
        done = out.terminated | out.truncated
        if env.spec.time_limit is not None:
            done = done | (length + 1 >= env.spec.time_limit)
        fresh, first = env.reset(reset_key)
        # Reset here and not by `vectorise`: the check needs the state after the end of an episode.
        following = jax.tree.map(lambda a, b: jnp.where(done, a, b), (fresh, first), (after, out.obs))
        return (*following, jnp.where(done, 0, length + 1)), _Walk(state, after, out, length + 1, first)

    start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), jax.tree.map(jnp.asarray, env.reset(key)))
    return jax.lax.scan(body, (*start, jnp.int32(0)), jax.random.split(key, steps))[1]


def _check_values(env: Env, walk: _Walk) -> list[str]:
    found = []
    for name, where, tree in (
        ("reward", "step", walk.out.reward),
        ("observation", "step", walk.out.obs),
        ("first observation", "reset", walk.fresh),
    ):
        leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
        if any(np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all() for x in leaves):
            found.append(f"a {name} is not finite; look for a division by zero or an overflow in {where}")
    # Bounds are compared only where all is finite.
    return found or _check_bounds(env.spec.observation_space, walk)


def _check_bounds(space: Space, walk: _Walk) -> list[str]:
    found, seen = [], walk.out.obs
    if ALIVE in walk.out.info:  # observations of dead agents mean nothing
        seen = tree_where(walk.out.info[ALIVE], seen, walk.fresh)
    parts = jax.tree_util.tree_flatten_with_path(space, is_leaf=is_leaf)[0]
    for (path, part), *trees in zip(parts, *map(jax.tree.leaves, (seen, walk.fresh)), strict=True):
        low, high = box_bounds(part)[:2] if isinstance(part, Box) else (np.zeros(part.shape), np.asarray(part.n) - 1)
        obs = np.concatenate([np.asarray(x, np.float64) for x in trees])
        if (obs < low - 1e-5).any() or (obs > high + 1e-5).any():
            what = f"the entry {jax.tree_util.keystr(path)} of an observation" if path else "an observation"
            found.append(
                f"{what} lies outside the declared bounds: seen {obs.min():.6g} to {obs.max():.6g}, "
                f"declared {low.min():.6g} to {high.max():.6g}; widen the observation space"
            )
    return found


def _check_keys(env: Env, resets: PyTree, walk: _Walk, key: Key) -> list[str]:
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(walk.after)[0]:
        if is_key(leaf):
            # A key that is equal before and after some step did not advance.
            before = dict(jax.tree_util.tree_flatten_with_path(walk.before)[0])[path]
            if bool(jnp.any(jnp.all(_bits(before) == _bits(leaf), axis=-1))):
                where = jax.tree_util.keystr(path)
                found.append(
                    f"the key in the state at {where} does not advance: every step draws the same numbers; "
                    "use the key that is passed to step instead"
                )
    if _all_same(resets) and not _reset_is_constant(env):
        found.append("reset uses its key but returns the same state for every key; draw from the key you are given")
    if not env.deterministic and _all_same(resets) and _reset_is_constant(env) and _step_is_blind(env, key):
        found.append(
            "reset and step both ignore their keys: all environments run the same episode; "
            "if the environment is meant to be deterministic, say so with Env(..., deterministic=True)"
        )
    return found


def _reset_is_constant(env: Env) -> bool:
    jaxpr = jax.make_jaxpr(env.reset)(make_key(0)).jaxpr  # does any equation read the key, the first input?
    return not any(var is jaxpr.invars[0] for eqn in jaxpr.eqns for var in eqn.invars)


def _step_is_blind(env: Env, key: Key) -> bool:
    """Return whether `step` ignores its key."""
    state, _ = env.reset(key)
    action = sample_space(env.spec.action_space, key)
    jaxpr = jax.make_jaxpr(lambda key, state, action: env.step(state, action, key))(key, state, action).jaxpr
    return not any(var is jaxpr.invars[0] for eqn in jaxpr.eqns for var in eqn.invars)


def _check_ends(env: Env, steps: int, walk: _Walk) -> list[str]:
    terminated, truncated = np.asarray(walk.out.terminated), np.asarray(walk.out.truncated)
    lengths, limit = np.asarray(walk.length), env.spec.time_limit
    ends = lengths[terminated]
    if env.fixed_length:
        if len(set(ends)) <= 1:
            return []
        return [
            f"episodes are terminated after {ends.min()} to {ends.max()} steps, but the environment has fixed_length: "
            "leave it out"
        ]
    # More than one termination exactly at the limit, and none before, is no coincidence.
    if limit is not None and (terminated & (lengths == limit)).sum() > 1 and not (terminated & (lengths < limit)).any():
        return [
            f"every episode is terminated at the time limit of {limit} steps: a cut is not an end; "
            "report it as truncated, or leave it to EnvSpec.time_limit; if the task itself ends there, say so with "
            "Env(..., fixed_length=True)"
        ]
    if limit is None and not (terminated | truncated).any():
        return [
            f"no episode ended in {steps} random steps and there is no time limit: truncation is missing; "
            "set EnvSpec.time_limit"
        ]
    if limit is None and not truncated.any() and len(ends) > 3 and len(set(ends)) == 1 and ends[0] >= 10:
        return [
            f"every episode is terminated after exactly {ends[0]} steps: this looks like a time limit; "
            f"set EnvSpec.time_limit={ends[0]} instead of terminating, or if the task itself ends there, say so with "
            "Env(..., fixed_length=True)"
        ]
    return []


def _check_hidden_reset(reset_state: PyTree, walk: _Walk) -> list[str]:
    """Find a reset inside `step`: states at ends of episodes then lie in the range of initial states, others do not."""
    done = np.asarray(walk.out.terminated | walk.out.truncated)
    # A row counts as initial only if all its entries lie in the ranges of the sampled resets.
    like_reset = np.ones(len(done), bool)
    for fresh, after in zip(jax.tree.leaves(reset_state), jax.tree.leaves(walk.after), strict=True):
        if is_key(fresh):
            continue
        fresh, after = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (fresh, after))
        like_reset &= ((after >= fresh.min(0)) & (after <= fresh.max(0))).all(axis=1)
    if done.any() and like_reset[done].all() and not like_reset[~done].all():
        return [
            "the state after an episode's end looks like an initial one: step resets by itself; "
            "return the true successor, vectorise does the reset"
        ]
    return []


def _bits(leaf: Array) -> Array:
    return jax.random.key_data(leaf)


def _all_same(resets: Any) -> bool:
    def same(leaf: Array) -> bool:
        leaf = _bits(leaf) if is_key(leaf) else leaf
        return bool(jnp.all(leaf == leaf[:1]))

    return all(same(leaf) for leaf in jax.tree.leaves(resets))

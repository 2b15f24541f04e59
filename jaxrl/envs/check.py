"""Check an environment for mistakes before training in it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.agents import as_single_env
from jaxrl.envs.base import Env, TimeStep, check_signatures, require_env_in_jax, vectorise
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, sample_space
from jaxrl.trees import Array, Key, PyTree, is_key, make_key
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
    """Run `steps` random actions in `env` and return the mistakes found, one line each; an empty list means none.

    Checks that states, observations and rewards keep structure, shape and dtype; that values are finite (in resets too)
    and within bounds; that keys are used and advance; that episodes end, and a time limit is not reported as
    termination; and that no reset is hidden inside a step. Errors of tracing it as training does are raised, and
    `SettingsError` for an environment that is not written in JAX.
    """
    env = as_single_env(require_env_in_jax(env))
    try:
        check_signatures(env)
    except SettingsError as error:
        return [str(error)]
    _trace_as_training(env)
    key_resets, key_walk, key_step = jax.random.split(make_key(seed), 3)
    resets = jax.vmap(env.reset)(jax.random.split(key_resets, RESETS))
    walk = jax.jit(partial(_walk, env, steps))(key_walk)
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


def _walk(env: Env, steps: int, key: Key) -> _Walk:
    def body(carry: tuple[PyTree, Array], key: Key) -> tuple[tuple[PyTree, Array], _Walk]:
        state, length = carry
        act_key, step_key, reset_key = jax.random.split(key, 3)
        action = sample_space(env.spec.action_space, act_key)
        after, out = env.step(state, action, step_key)
        out = jax.tree.map(jnp.asarray, out)
        done = out.terminated | out.truncated
        if env.spec.time_limit is not None:
            done = done | (length + 1 >= env.spec.time_limit)
        fresh, first = env.reset(reset_key)
        # Reset here and not by `vectorise`: the check needs the state after the end of an episode.
        following = jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, after)
        return (following, jnp.where(done, 0, length + 1)), _Walk(state, after, out, length + 1, first)

    state, _ = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), jax.tree.map(jnp.asarray, env.reset(key)))
    return jax.lax.scan(body, (state, jnp.int32(0)), jax.random.split(key, steps))[1]


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
    space = env.spec.observation_space
    # Bounds are compared only where all is finite.
    if isinstance(space, Box) and not found:
        obs = np.asarray(walk.out.obs, np.float64).reshape(len(walk.length), -1)
        low, high = (np.asarray(b, np.float64).reshape(1, -1) for b in (space.low, space.high))
        if (obs < low - 1e-5).any() or (obs > high + 1e-5).any():
            found.append(
                f"an observation lies outside the declared bounds: seen {obs.min():.6g} to {obs.max():.6g}, "
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

"""Multi-agent environments: agents are rows of the environment axis, and all share one policy.

An environment of `A` agents is an `Env` with `agents=A`. Its spec describes one agent; observations, actions, rewards
and terminations have a leading axis `[A]`. A game ends when all its agents have terminated, or when it is truncated. An
agent that terminated earlier is dead until then: its row is neither learnt from nor counted.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import INVALID_RESET, Env, TimeStep, VecEnv, VecEnvState, vectorise
from jaxrl.errors import SettingsError, check_count
from jaxrl.spaces import Box, Discrete, MultiDiscrete, Space, box_bounds, is_leaf
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Step

ALIVE = "agents/alive"
PER_AGENT = ("agents/reward", "agents/ended", ALIVE)
"""Entries in a game's `info` with one value per agent, `[A]`: reward, terminated, alive before the step."""


class Game(NamedTuple):
    """State of an environment with several agents."""

    env: PyTree
    alive: Array
    """Bool `[A]`: the agent has not terminated yet."""


def as_single_env(env: Env) -> Env:
    """Return `env` as a single-agent environment: itself, or `joint_env(env)` if it has several agents."""
    return env if env.agents is None else joint_env(env)


def joint_env(env: Env) -> Env:
    """Return an environment of `A` agents as a single-agent one whose action comprises those of all agents.

    Its reward is `env.score` of the agents' rewards. It terminates with its last agent.
    """
    count = env.agents or 1

    def reset(key: Key, *values: PyTree) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key, *values)
        return Game(state, jnp.ones(count, bool)), obs

    def step(state: Game, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state.env, action, key)
        if jnp.shape(out.reward) != (count,):
            raise SettingsError(
                f"{env.spec.name}: reward is {list(jnp.shape(out.reward))}; expected [{count}], one per agent"
            )
        # Dead agents earn nothing and do not terminate again.
        reward = jnp.where(state.alive, jnp.asarray(out.reward, jnp.float32), 0.0)
        ended = jnp.broadcast_to(jnp.asarray(out.terminated, bool), (count,)) & state.alive
        alive = state.alive & ~ended
        # Scalars of the game and of each agent; other shapes cannot be recorded.
        scalars = {name: x for name, x in out.info.items() if jnp.ndim(x) == 0 or jnp.shape(x) == (count,)}
        per_agent = dict(zip(PER_AGENT, (reward, ended, state.alive), strict=True))
        truncated = jnp.any(jnp.asarray(out.truncated, bool))
        # A score that only compares would hide that a reward is not finite, and the step would pass for valid.
        score = jnp.where(jnp.isfinite(reward).all(), env.score(reward, state.alive), jnp.nan)
        obs = jax.tree.map(partial(_clean_dead, state.alive), out.obs)
        return Game(after, alive), TimeStep(obs, score, ~alive.any(), truncated, {**scalars, **per_agent})

    render = env.render
    return env._replace(
        spec=env.spec._replace(
            observation_space=_stack_space(env.spec.observation_space, count),
            action_space=_stack_space(env.spec.action_space, count),
        ),
        reset=reset,
        step=step,
        render=None if render is None else lambda state: render(state.env),
        agents=None,
    )


def _clean_dead(alive: Array, obs: Array) -> Array:
    """Replace entries of observations `[A, ...]` by zeros where they are not finite, if the agent is not `alive`.

    The game would end for all agents otherwise. `check_signatures` reports observations of another shape.
    """
    if jnp.shape(obs)[:1] != alive.shape or not jnp.issubdtype(jnp.result_type(obs), jnp.inexact):
        return obs
    return jnp.where(alive.reshape(-1, *(1,) * (jnp.ndim(obs) - 1)) | jnp.isfinite(obs), obs, 0)


def _stack_space(space: Space, count: int) -> Any:
    """Return the space of `count` elements of a space, `[A, ...]`."""

    box: Any = Box  # which takes arrays as bounds

    def leaf(one: Box | Discrete | MultiDiscrete) -> Space:
        # A discrete space has one axis at most, so choices of several parts become a box of integers.
        if isinstance(one, Discrete):
            return MultiDiscrete((one.n,) * count, one.dtype)
        bounds = (np.zeros(one.shape), np.array(one.n) - 1) if isinstance(one, MultiDiscrete) else box_bounds(one)[:2]
        low, high = (np.broadcast_to(bound, (count, *one.shape)) for bound in bounds)
        return box(low, high, low.shape, one.dtype)

    return jax.tree.map(leaf, space, is_leaf=is_leaf)


def require_single_agent(env: Env, what: str) -> Env:
    """Return `env`; raise `SettingsError`, naming `what`, if it has several agents."""
    if env.agents is not None:
        raise SettingsError(
            f"{env.spec.name} has {env.agents} agents in one environment, which is unsupported with {what}"
        )
    return env


# --- rows ---------------------------------------------------------------------------------------------------------


def flatten_agents(tree: PyTree) -> Any:
    """Return leaves `[G, A, ...]` as `[G A, ...]`."""
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[2:])), tree)


def unflatten_agents(tree: PyTree, count: int) -> Any:
    """Return leaves `[G A, ...]`, of `count` agents per game, as `[G, A, ...]`."""
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, count, *jnp.shape(x)[1:])), tree)


def vectorise_agents(env: Env, num_envs: int, resets: str, stagger: bool) -> VecEnv:
    """Run `num_envs / A` games at once; row `g A + a` is agent `a` of game `g`.

    The episode of a row ends when its agent terminates, or with the game. Rows of dead agents are neither `valid` nor
    `present` until the next game.

    Raises:
      SettingsError: `num_envs` is no multiple of the number of agents, or the environment fails `check_signatures`.
    """
    check_count("num_envs", num_envs)
    count = check_count(f"environment {env.spec.name}: agents", env.agents)
    if num_envs % count:
        below = num_envs - num_envs % count
        near = " or ".join(str(x) for x in (below, below + count) if x)
        raise SettingsError(
            f"num_envs is {num_envs}, but {env.spec.name} has {count} agents, each of which takes the place of an "
            f"environment; set it to {near}"
        )
    # The games are vectorised as single-agent environments, and their results cut into rows of agents.
    games = vectorise(joint_env(env), num_envs // count, resets, stagger)
    step = partial(_step, games, count)
    return games._replace(spec=env.spec, num_envs=num_envs, reset=partial(_reset, games, count), step=step)


def _reset(games: VecEnv, count: int, key: Key) -> tuple[VecEnvState, PyTree]:
    state, obs = games.reset(key)
    length = jnp.repeat(state.episode_length, count)
    return VecEnvState(state, jnp.zeros(length.shape, jnp.float32), length, (), state.values), flatten_agents(obs)


def _step(games: VecEnv, count: int, state: VecEnvState, action: PyTree, key: Key) -> tuple[VecEnvState, Step]:
    # Schedules set the values of the outer state, which the games read at their next resets.
    inner, played = games.step(state.env._replace(values=state.values), unflatten_agents(action, count), key)
    each = partial(jnp.repeat, repeats=count)
    reward, ended, alive = (flatten_agents(played.info[name]) for name in PER_AGENT)
    # A dead agent's row is invalid until the game is over.
    valid, over = each(jnp.asarray(played.valid)) & alive, each(played.terminated | played.truncated)
    terminated = ended & valid
    truncated = over & ~terminated  # dead agents too, so that no return extends into the next game
    done = terminated | truncated
    reward = jnp.where(valid, reward, 0.0)
    total = state.episode_return + reward
    # A dead agent takes no step.
    length = jnp.maximum(state.episode_length, 0) + alive
    # A game that begins with a non-finite observation does so for all its agents.
    invalid = each(jnp.asarray(inner.episode_length == INVALID_RESET)) & over
    length_after = jnp.where(invalid, INVALID_RESET, jnp.where(over, 0, length))
    scalars = {
        name: flatten_agents(x) if x.ndim == 2 else each(x) for name, x in played.info.items() if name not in PER_AGENT
    }
    step = Step(
        action=action,
        extras=(),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        final_obs=flatten_agents(played.final_obs),
        obs=flatten_agents(played.obs),
        info={**scalars, "episode_return": total, "episode_length": length},
        valid=valid,
        # Between its termination and the end of the game, an agent has no meaningful observation.
        obs_valid=jnp.where(over, ~invalid, alive & ~done),
        present=alive,
    )
    return VecEnvState(inner, jnp.where(over, 0.0, total), length_after, (), inner.values), step

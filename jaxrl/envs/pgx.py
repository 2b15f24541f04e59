"""Games for one player of Pgx (https://github.com/sotetsuk/pgx), imported on demand."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import KEY, check_id, check_int, convert_params, make_boxes, numeric_params
from jaxrl.errors import SettingsError, check_between, require_extra
from jaxrl.spaces import Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree

PREFIX = "pgx:"
"""Prefix of the names of Pgx's games, as in `pgx:2048`."""
TIMERS = {"minatar-freeway": ("_terminate_timer", 2500)}
"""Games that terminate by a timer in their state, with its length: the timer is disabled, and a limit truncates."""


def pgx_env(name: str, *, time_limit: Any = None, **params: Any) -> Env:
    """Return Pgx's game `name` (with or without `pgx:`): `2048`, or one of the five of MinAtar.

    Observations of `2048` are dicts: `observation`, and the legal moves as `action_mask`; in MinAtar all moves are
    always legal. `params` replace the game's defaults: `sticky_action_prob`, `use_minimal_action_set`. Episodes are
    truncated after `time_limit` steps; by default after 2500 in Freeway, and never in the others.

    Raises:
      SettingsError: Pgx is not installed, a name or a parameter is unknown or does not fit, or the game is for several.
    """
    pgx = require_extra("pgx", "games of Pgx")
    id_ = check_id(PREFIX, name, pgx.available_envs())
    name, given = PREFIX + id_, {**params, **({} if time_limit is None else {"time_limit": time_limit})}
    game = pgx.make(id_)
    if game.num_players != 1:
        alone = [other for other in pgx.available_envs() if other == "2048" or other.startswith("minatar-")]
        raise SettingsError(f"{name} is a game for {game.num_players} players; those for one: {', '.join(alone)}")
    kinds = numeric_params(type(game).__init__)
    params = convert_params(name, params, kinds)
    check_between(f"{name}: sticky_action_prob", params.get("sticky_action_prob", 0.0), 0.0, 1.0)
    game, (timer, limit) = type(game)(**params), TIMERS.get(id_, (None, None))
    if time_limit is not None:
        limit = check_int(f"{name}: time_limit", time_limit)
    # Only the games of MinAtar have parameters, and there all moves are legal.
    masked = not kinds
    reset = partial(_reset, game, timer, masked)
    state, obs = jax.eval_shape(reset, KEY)
    return Env(
        EnvSpec(name, make_boxes(obs), Discrete(state.legal_action_mask.shape[0]), limit),
        reset,
        partial(_step, game, masked),
        render=partial(_render, name),
        settings={"env": name, "env_args": given},
    )


def _reset(game: Any, timer: str | None, masked: bool, key: Key) -> tuple[PyTree, PyTree]:
    state = game.init(key)
    if timer is not None:
        state = state.replace(**{timer: jnp.int32(np.iinfo(np.int32).max)})
    return state, _convert_obs(state, masked)


def _step(game: Any, masked: bool, state: PyTree, action: Array, key: Key) -> tuple[PyTree, TimeStep]:
    state = game.step(state, action, key)
    return state, TimeStep(_convert_obs(state, masked), state.rewards[0], state.terminated, state.truncated)


def _convert_obs(state: Any, masked: bool) -> PyTree:
    if not masked:
        return state.observation
    return {"observation": state.observation, "action_mask": state.legal_action_mask}


def _render(name: str, state: Any) -> np.ndarray:
    from jaxrl.envs.render import draw_state

    return draw_state(name, state, np.asarray(state.observation))

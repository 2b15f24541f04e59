"""Adapter shared by Brax and MuJoCo Playground, whose `reset(key)` and `step(state, action)` return one `State`.

The state holds observation, reward and `done` next to the physics. Both suites implement time limits and auto-reset in
wrappers, which are not used here, so `done` is a termination, and its observation the true successor.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, RenderFn, TimeStep
from jaxrl.envs.randomise import randomise
from jaxrl.envs.suites import KEY, cast_like, copy_containers, make_boxes
from jaxrl.errors import SettingsError, error_text
from jaxrl.spaces import Box, EnvSpec
from jaxrl.trees import Array, Key, PyTree


def physics_env(name: str, env: Any, limit: int, settings: Mapping[str, Any], render: RenderFn, repeat: int = 1) -> Env:
    """Return `env`, an environment without wrappers, as an `Env`.

    Args:
      name: its name in jaxrl, with the prefix of the suite.
      env: an environment of Brax or Playground, with actions from -1 to 1.
      limit: steps of the suite after which an episode is truncated.
      settings: arguments with which `make_env` rebuilds it.
      render: renders one state.
      repeat: steps of the suite per action; their rewards are summed.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(env.reset, KEY))
    spec = EnvSpec(name, make_boxes(like.obs), Box(-1.0, 1.0, (env.action_size,)), -(-limit // repeat))
    return Env(spec, partial(_reset, env, like), partial(_step, env, like, repeat), render, settings)


def _reset(env: Any, like: PyTree, key: Key) -> tuple[PyTree, PyTree]:
    first = env.reset(key)
    return cast_like(first, like), cast_like(first.obs, like.obs)


def _step(env: Any, like: PyTree, repeat: int, state: Any, action: Array, key: Key) -> tuple[PyTree, TimeStep]:
    del key  # the state has its own
    if repeat == 1:
        state = _suite_step(env, like, state, action)
        reward, done = state.reward, state.done > 0
    else:
        # The physics continue after a termination within the repeats; the step then reports it.
        body = lambda carry, _: ((after := _suite_step(env, like, carry, action)), (after.reward, after.done))
        state, (rewards, dones) = jax.lax.scan(body, state, None, repeat)
        reward, done = rewards.sum(), (dones > 0).any()
    info = {word: value for word, value in state.metrics.items() if value.ndim == 0}
    return state, TimeStep(state.obs, reward, done, False, info)


def _suite_step(env: Any, like: PyTree, state: Any, action: Array) -> Any:
    return cast_like(env.step(copy_containers(state), action), like)


# --- a model for each episode -----------------------------------------------------------------------------------

Randomiser = Callable[[Any, Key], tuple[Any, Any]]
"""As in Playground: `(model, keys [B]) -> (models, axes)`; leaves that vary have axis 0 and shape `[B, ...]`."""


class ModelState(NamedTuple):
    """State of an environment with a model drawn for each episode."""

    env: PyTree
    model: tuple[Array, ...]
    """The leaves of the model that vary, in the order of its leaves."""


def randomise_models(made: Env, env: Any, randomiser: Randomiser, share: Any) -> Env:
    """Draw a model for each episode of `made`, the `Env` of the suite's `env`.

    The model is interpolated between that of the suite (`share` 0) and one drawn by `randomiser` (`share` 1). `share`
    is a number or a schedule; it is the value `randomise` of the environment, which a population may vary.
    """
    model = env.mjx_model
    leaves, treedef = jax.tree.flatten(model, is_leaf=_is_none)
    places = _find_varied_leaves(randomiser, model)

    def swapped(parts: tuple[Array, ...]) -> Any:
        other, given = copy.copy(env), dict(zip(places, parts, strict=True))  # another thread may trace `env` itself
        other._mjx_model = jax.tree.unflatten(treedef, [given.get(place, x) for place, x in enumerate(leaves)])
        return other

    def reset(key: Key, parts: tuple[Array, ...]) -> tuple[PyTree, PyTree]:
        state, obs = _bind_env(made.reset, swapped(parts))(key)
        return ModelState(state, parts), obs

    def step(state: ModelState, action: Array, key: Key) -> tuple[ModelState, TimeStep]:
        after, out = _bind_env(made.step, swapped(state.model))(state.env, action, key)
        return ModelState(after, state.model), out

    def draw(key: Key, randomise: Any) -> tuple[Array, ...]:
        drawn = jax.tree.leaves(randomiser(model, key[None])[0], is_leaf=_is_none)
        return tuple(_interpolate(leaves[place], drawn[place][0], randomise) for place in places)

    inner: Any = made.render
    render = None if inner is None else lambda state: inner(state.env)
    parametrised: Any = made._replace(reset=reset, step=step, render=render)
    return randomise(parametrised, draw, randomise=share)


def _find_varied_leaves(randomiser: Randomiser, model: Any) -> list[int]:
    """Return the indices of the leaves of the model that `randomiser` varies."""
    traced_axes: Any = []  # axes are static, so they leave the trace by a side effect

    def drawn(key: Key) -> Any:
        models, axes = randomiser(model, key[None])
        traced_axes.append(axes)
        return models

    jax.eval_shape(drawn, KEY)
    axes = jax.tree.leaves(traced_axes[0], is_leaf=_is_none)
    if len(axes) != len(jax.tree.leaves(model, is_leaf=_is_none)):
        raise SettingsError("the axes that the randomiser returns do not fit the model; expected one for each leaf")
    return [place for place, axis in enumerate(axes) if axis == 0]


def _is_none(x: Any) -> bool:
    return x is None


def _interpolate(ours: Array, drawn: Array, share: Any) -> Array:
    """Interpolate from `ours` (`share` 0) to `drawn` (1); integers are those of `drawn`."""
    return drawn + (1 - share) * (ours - drawn) if jnp.issubdtype(drawn.dtype, jnp.inexact) else drawn


def _bind_env(function: Any, env: Any) -> Any:
    """Return a partial `_reset` or `_step` with another `env` as first argument."""
    return partial(function.func, env, *function.args[1:])


def render_picture(name: str, draw: Any) -> np.ndarray:
    """Return the image that `draw()` renders with MuJoCo; raise `SettingsError` if it fails."""
    try:
        return np.asarray(draw(), np.uint8)
    except Exception as error:
        raise SettingsError(
            f"{name} cannot be rendered here: {error_text(error)}; MuJoCo needs OpenGL, without a screen MUJOCO_GL=egl "
            "or osmesa"
        ) from error

"""What Brax and MuJoCo Playground have in common: `reset(key)` and `step(state, action)` return one `State`.

It holds the observation, the reward and the end of an episode beside the physics. Both suites leave limits of time and
resets at an episode's end to wrappers, which are not used here: so the end is an end, and its observation is the true
one.
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


def physics_env(
    name: str, env: Any, limit: int, settings: Mapping[str, Any], render: RenderFn | None = None, repeat: int = 1
) -> Env:
    """Return `env`, which is bare of wrappers, as an `Env`.

    Args:
      name: its name here, with the suite's prefix.
      env: an environment of Brax or Playground, with actions from -1 to 1.
      limit: steps of the suite after which an episode is cut.
      settings: what `make_env` rebuilds it from.
      render: draws one state.
      repeat: steps of the suite for which an action is repeated; their rewards are added.
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
        body = lambda carry, _: ((after := _suite_step(env, like, carry, action)), (after.reward, after.done))
        state, (rewards, dones) = jax.lax.scan(body, state, None, repeat)
        reward, done = rewards.sum(), (dones > 0).any()
    info = {word: value for word, value in state.metrics.items() if value.ndim == 0}
    return state, TimeStep(state.obs, reward, done, False, info)


def _suite_step(env: Any, like: PyTree, state: Any, action: Array) -> Any:
    return cast_like(env.step(copy_containers(state), action), like)


# --- a model for each episode -----------------------------------------------------------------------------------

Randomiser = Callable[[Any, Key], tuple[Any, Any]]
"""Playground's form: `(model, keys [B]) -> (models, axes)`, where what varies has the axis 0 and begins with `[B]`."""


class ModelState(NamedTuple):
    """The state of an environment whose episodes have models of their own."""

    env: PyTree
    model: tuple[Array, ...]
    """What differs in this episode from the suite's model, in the order of its leaves."""


def randomise_models(made: Env, env: Any, randomiser: Randomiser, share: Any) -> Env:
    """Give each episode of `made`, which is the suite's `env`, a model of its own.

    It lies the `share`, a number or a schedule, of the way from the suite's model to one that `randomiser` draws: 0 is
    the former, 1 the latter. That share is the value `randomise` of the environment, which a population may vary.
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
    taking: Any = made._replace(reset=reset, step=step, render=render)
    return randomise(taking, draw, randomise=share)


def _find_varied_leaves(randomiser: Randomiser, model: Any) -> list[int]:
    """Return which leaves of the model differ from episode to episode, as `randomiser` says."""
    said: Any = []

    def drawn(key: Key) -> Any:
        models, axes = randomiser(model, key[None])
        said.append(axes)
        return models

    jax.eval_shape(drawn, KEY)
    axes = jax.tree.leaves(said[0], is_leaf=_is_none)
    if len(axes) != len(jax.tree.leaves(model, is_leaf=_is_none)):
        raise SettingsError("the axes that the randomiser returns do not fit the model; expected one for each leaf")
    return [place for place, axis in enumerate(axes) if axis == 0]


def _is_none(x: Any) -> bool:
    return x is None


def _interpolate(ours: Array, drawn: Array, share: Any) -> Array:
    """Return what lies the `share` of the way from one to the other; whole numbers are those drawn."""
    return drawn + (1 - share) * (ours - drawn) if jnp.issubdtype(drawn.dtype, jnp.inexact) else drawn


def _bind_env(function: Any, env: Any) -> Any:
    """Return the `_reset` or `_step` of an environment with another `env`."""
    return partial(function.func, env, *function.args[1:])


def render_picture(name: str, draw: Any) -> np.ndarray:
    """Return the picture that `draw()` makes with MuJoCo; raise `SettingsError` where it cannot draw."""
    try:
        return np.asarray(draw(), np.uint8)
    except Exception as error:
        raise SettingsError(
            f"{name} cannot be rendered here: {error_text(error)}; MuJoCo needs OpenGL, without a screen MUJOCO_GL=egl "
            "or osmesa"
        ) from error

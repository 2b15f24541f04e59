"""What Brax and MuJoCo Playground have in common: `reset(key)` and `step(state, action)` return one `State`.

It holds the observation, the reward and the end of an episode beside the physics. Both suites leave limits of time and
resets at an episode's end to wrappers, which are not used here: so the end is an end, and its observation is the true
one.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.envs.base import Env, RenderFn, TimeStep, draw_nothing
from jaxrl.envs.suites import KEY, boxes_of, restored, stored
from jaxrl.errors import SettingsError
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
    spec = EnvSpec(name, boxes_of(like.obs), Box(-1.0, 1.0, (env.action_size,)), -(-limit // repeat))
    return Env(spec, partial(_reset, env, like), partial(_step, env, like, repeat), draw_nothing, render, settings)


def _reset(env: Any, like: PyTree, key: Key) -> tuple[PyTree, PyTree]:
    first = env.reset(key)
    return stored(first, like), stored(first.obs, like.obs)


def _step(env: Any, like: PyTree, repeat: int, state: Any, action: Array, noise: tuple[()]) -> tuple[PyTree, TimeStep]:
    del noise
    if repeat == 1:
        state = _advance(env, like, state, action)
        reward, done = state.reward, state.done > 0
    else:
        body = lambda carry, _: ((after := _advance(env, like, carry, action)), (after.reward, after.done))
        state, (rewards, dones) = jax.lax.scan(body, state, None, repeat)
        reward, done = rewards.sum(), (dones > 0).any()
    info = {word: value for word, value in state.metrics.items() if value.ndim == 0}
    return state, TimeStep(state.obs, reward, done, False, info)


def _advance(env: Any, like: PyTree, state: Any, action: Array) -> Any:
    return stored(env.step(restored(state, like), action), like)


def picture(name: str, draw: Any) -> np.ndarray:
    """Return the picture that `draw()` makes with MuJoCo; raise `SettingsError` where it cannot draw."""
    try:
        return np.asarray(draw(), np.uint8)
    except Exception as error:
        raise SettingsError(
            f"{name} cannot be rendered here: {error}; MuJoCo needs OpenGL, without a screen MUJOCO_GL=egl or osmesa"
        ) from error

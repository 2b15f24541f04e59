"""Domain randomisation: draw environment parameters for each episode, from a fixed or scheduled distribution."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.envs.base import Env, TimeStep, final_values
from jaxrl.errors import SettingsError
from jaxrl.trees import Key, PyTree


class Randomised(NamedTuple):
    """State of an environment with parameters drawn for each episode."""

    env: PyTree
    params: PyTree
    """Parameters of the current episode."""


def randomise(env: Env, draw: Callable[..., PyTree], **values: Any) -> Env:
    """Draw `params` for each episode and start it with `env.reset(key, params)` (Tobin et al. 2017).

    The `reset` of `env` takes parameters after the key, and stores those that `step` needs in its state. They are
    constant during an episode; scalars among them are recorded as `params/NAME`.

    Args:
      env: the environment, not wrapped yet.
      draw: `(key, **values) -> params`; the key is consumed.
      **values: parameters of the distribution: numbers, or schedules over optimisation steps such as
        `jaxrl.linear(0.0, 0.5, 10_000)`. Members of a population may differ in them, by the name `env_args.NAME`.
        Evaluation uses these numbers, and the final ones of schedules.

    Raises:
      SettingsError: a value is neither a finite number nor a schedule, or the environment is randomised already.
    """
    if env.values:
        raise SettingsError(f"{env.spec.name} draws parameters already; draw all of them in one randomise")
    for name, value in final_values(values).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SettingsError(f"randomise: {name} is {value!r}; expected a finite number or a schedule of numbers")
    env_reset: Any = env.reset

    def reset(key: Key, given: Mapping[str, Any] | None = None) -> tuple[PyTree, PyTree]:
        draw_key, reset_key = jax.random.split(key)
        params = draw(draw_key, **(final_values(values) if given is None else given))
        state, obs = env_reset(reset_key, params)
        return Randomised(state, jax.tree.map(jnp.asarray, params)), obs

    def step(state: Randomised, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state.env, action, key)
        return Randomised(after, state.params), out._replace(info={**out.info, **_param_scalars(state.params)})

    render = env.render
    render_inner = None if render is None else lambda state: render(state.env)
    return env._replace(reset=reset, step=step, render=render_inner, settings=None, values=dict(values))


def _param_scalars(params: PyTree) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    scalars = [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in paths if jnp.ndim(x) == 0]
    return {f"params/{name}" if name else "params": x for name, x in scalars}

"""Give each episode parameters of its own: domain randomisation, and curricula by what it draws from."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.envs.base import Env, TimeStep, final_values
from jaxrl.errors import SettingsError
from jaxrl.trees import Key, PyTree


class Randomised(NamedTuple):
    """The state of an environment whose episodes have parameters of their own."""

    env: PyTree
    params: PyTree
    """What was drawn for the episode."""


def randomise(env: Env, draw: Callable[..., PyTree], **values: Any) -> Env:
    """Draw `params` for each episode, and begin it by `env.reset(key, params)` (Tobin et al. 2017).

    `env` is one whose `reset` takes parameters beside the key, and keeps in its state what `step` needs of them. They
    are constant during an episode; those that are scalars are told in `info` as `params/NAME`.

    Args:
      env: the environment, not wrapped yet.
      draw: `(key, **values) -> params`; the key is consumed.
      **values: numbers that shape the distribution. Each may be a schedule over optimisation steps, such as
        `jaxrl.linear(0.0, 0.5, 10_000)`; members of a population may differ in them, by the name `env_args.NAME`.
        Evaluation is under the numbers given, and under the ends of schedules.

    Raises:
      SettingsError: a value is no finite number and no schedule, or the environment draws parameters already.
    """
    if env.values:
        raise SettingsError(f"{env.spec.name} draws parameters already; draw all of them at once")
    for name, value in final_values(values).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SettingsError(f"randomise: {name} is {value!r}; expected a finite number or a schedule of numbers")
    begin: Any = env.reset

    def reset(key: Key, given: Mapping[str, Any] | None = None) -> tuple[PyTree, PyTree]:
        mine, own = jax.random.split(key)
        params = draw(mine, **(final_values(values) if given is None else given))
        state, obs = begin(own, params)
        return Randomised(state, jax.tree.map(jnp.asarray, params)), obs

    def step(state: Randomised, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        after, out = env.step(state.env, action, key)
        return Randomised(after, state.params), out._replace(info={**out.info, **_param_scalars(state.params)})

    render = env.render
    draws = None if render is None else lambda state: render(state.env)
    return env._replace(reset=reset, step=step, render=draws, settings=None, values=dict(values))


def _param_scalars(params: PyTree) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    scalars = [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in paths if jnp.ndim(x) == 0]
    return {f"params/{name}" if name else "params": x for name, x in scalars}

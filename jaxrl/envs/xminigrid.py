"""Environments of XLand-MiniGrid (https://github.com/dunnolab/xland-minigrid), imported on demand.

Observations are one-hot, because tile indices are not intensities.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import check_flag, check_id, check_int, check_params
from jaxrl.errors import SettingsError, require_extra
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.trees import Array, Key, PyTree

PREFIX = "xminigrid:"
"""Prefix of the names of XLand-MiniGrid's environments, as in `xminigrid:MiniGrid-Empty-8x8`."""
LEAST = {"height": 5, "width": 5, "view_size": 3}
"""Smallest sizes, in tiles; grids have walls around them."""
_RULES = ("benchmark", "ruleset", "pickles")


def xminigrid_env(name: str, *, one_hot: Any = True, **params: Any) -> Env:
    """Return XLand-MiniGrid's environment `name` (with or without `xminigrid:`).

    `params` replace its defaults: `height`, `width`, `view_size`, `max_steps`. Observations are float32
    `[view, view, tiles + colours]`, or int32 `[view, view, 2]` without `one_hot`. `XLand-*` environments need a
    `ruleset` for their goals: an `xminigrid.types.RuleSet` (the run then cannot be rebuilt by name), or the number of
    one in a `benchmark`. Benchmarks are pickles from the internet, which can run any code when loaded, and so require
    `pickles=True`.

    Raises:
      SettingsError: XLand-MiniGrid is not installed, or a name or a parameter is unknown or does not fit.
    """
    xminigrid = require_extra("xminigrid", "environments of XLand-MiniGrid")
    id_ = check_id(PREFIX, name, xminigrid.registered_environments())
    name, given = PREFIX + id_, {**params, **({} if one_hot is True else {"one_hot": one_hot})}
    one_hot = check_flag(f"{name}: one_hot", one_hot)
    # Made twice: the first call provides the default parameters.
    _, defaults = xminigrid.make(id_)
    sizes = [field.name for field in dataclasses.fields(defaults) if isinstance(getattr(defaults, field.name), int)]
    ruled = "ruleset" in vars(defaults)
    check_params(name, params, [*sizes, *(_RULES if ruled else ())])
    sized = {word: check_int(f"{name}: {word}", params[word], LEAST.get(word, 1)) for word in sizes if word in params}
    if sized.get("view_size", 3) % 2 == 0:
        raise SettingsError(f"{name}: view_size is {sized['view_size']}; expected an odd number of at least 3")
    rules = {"ruleset": _ruleset(name, **{word: params[word] for word in _RULES if word in params})} if ruled else {}
    env, made = xminigrid.make(id_, **sized, **rules)
    spec = EnvSpec(name, _space(made.view_size, one_hot), Discrete(env.num_actions(made)), made.max_steps)
    by_name = not ruled or "benchmark" in params
    return Env(
        spec,
        partial(_reset, env, made, one_hot),
        partial(_step, env, made, one_hot),
        partial(_render, made),
        {"env": name, "env_args": given} if by_name else None,
    )


def _ruleset(name: str, benchmark: Any = None, ruleset: Any = None, pickles: Any = False) -> Any:
    """Return a ruleset: the one given, or number `ruleset` of a benchmark."""
    from xminigrid import benchmarks, types

    if isinstance(ruleset, types.RuleSet) and benchmark is None:
        return ruleset
    known = benchmarks.registered_benchmarks()
    if benchmark is None:
        raise SettingsError(
            f"{name} has no goal of its own; give a RuleSet of XLand-MiniGrid as ruleset in Python, or "
            f"benchmark='{known[0]}', ruleset=NUMBER and pickles=True"
        )
    check_id("", str(benchmark), known)
    if not check_flag(f"{name}: pickles", pickles):
        raise SettingsError(
            f"{name}: the benchmark {benchmark} is a pickle from the internet, which can run any code when it is "
            "loaded; give pickles=True if you trust it"
        )
    number, loaded = check_int(f"{name}: ruleset", ruleset, 0), benchmarks.load_benchmark(benchmark)
    if number >= loaded.num_rulesets():
        raise SettingsError(f"{name}: ruleset is {number}; {benchmark} has {loaded.num_rulesets()}, counted from 0")
    return loaded.get_ruleset(number)


def _space(view: int, one_hot: bool) -> Box:
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES

    if one_hot:
        return Box(0.0, 1.0, (view, view, NUM_TILES + NUM_COLORS))
    return Box(0, np.tile([NUM_TILES - 1, NUM_COLORS - 1], (view, view, 1)), (view, view, 2), "int32")  # type: ignore[arg-type]


def _reset(env: Any, params: Any, one_hot: bool, key: Key) -> tuple[PyTree, Array]:
    first = env.reset(params, key)
    return _drop_key(first.state), _convert_obs(first.observation, one_hot)


def _step(env: Any, params: Any, one_hot: bool, state: PyTree, action: Array, key: Key) -> Any:
    """Step; the suite's flag for a last step includes its time limit, so only a discount of 0 terminates."""
    from xminigrid.types import TimeStep as TheirStep

    del key  # the state has its own
    out = env.step(params, TheirStep(state, 1, 0.0, 1.0, ()), action)
    return _drop_key(out.state), TimeStep(_convert_obs(out.observation, one_hot), out.reward, out.discount == 0.0)


def _drop_key(state: Any) -> Any:
    """Remove the key from a state, which no step reads."""
    return state.replace(key=())


def _convert_obs(grid: Array, one_hot: bool) -> Array:
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES

    if not one_hot:
        return grid.astype(jnp.int32)
    parts = [
        jax.nn.one_hot(grid[..., 0], NUM_TILES, dtype=jnp.float32),
        jax.nn.one_hot(grid[..., 1], NUM_COLORS, dtype=jnp.float32),
    ]
    return jnp.concatenate(parts, axis=-1)


def _render(params: Any, state: Any) -> np.ndarray:
    from xminigrid.rendering.rgb_render import render

    grid, agent = jax.tree.map(np.asarray, (state.grid, state.agent))
    return np.asarray(render(grid, agent, params.view_size))

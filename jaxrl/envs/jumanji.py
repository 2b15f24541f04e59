"""Environments of Jumanji (https://github.com/instadeepai/jumanji), imported on demand."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env, TimeStep
from jaxrl.envs.suites import KEY, check_id, convert_params, make_box, numeric_params, reads_key
from jaxrl.errors import SettingsError, error_text, require_extra
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space, space_struct
from jaxrl.trees import Key, PyTree, make_key

PREFIX = "jumanji:"
"""Prefix of the names of Jumanji's environments, as in `jumanji:Snake-v1`."""
CATEGORIES = 64
"""Integers with at most this many values are categorical; others, such as step counts, are numeric."""
NEVER = int(np.iinfo(np.int32).max)


def jumanji_env(name: str, **params: Any) -> Env:
    """Return Jumanji's environment `name` (with or without `jumanji:`).

    Observations are dicts, nested as Jumanji's are, mostly with an `action_mask`. `params` are numbers or flags of the
    environment's constructor. Its `time_limit` truncates: most of Jumanji's would terminate.

    Raises:
      SettingsError: Jumanji is not installed, a name or a parameter is unknown or does not fit, the rewards are several
        agents', or the environment would load its levels from the internet.
    """
    jumanji = require_extra("jumanji", "environments of Jumanji")
    id_ = check_id(PREFIX, name, jumanji.registered_environments())
    name = PREFIX + id_
    if id_.startswith("Sokoban"):
        _check_levels(name)
    try:
        env = jumanji.make(id_)
        kinds = numeric_params(type(env).__init__)
        env = jumanji.make(id_, **convert_params(name, params, kinds)) if params else env
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"Jumanji cannot make {id_}: {error_text(error)}") from error
    limit = getattr(env, "time_limit", None)
    # The environment would terminate at its own limit: disable it, so that the limit of the spec truncates.
    if limit is not None:
        env.time_limit = NEVER
    _, first = jax.eval_shape(env.reset, KEY)
    if first.reward.shape:
        raise SettingsError(f"{name} has rewards of {first.reward.shape[0]} agents; expected one reward a step")
    space = _space(env.observation_spec, first.observation)
    actions = _action_space(name, env.action_spec, getattr(first.observation, "action_mask", None))
    state, _ = jax.eval_shape(partial(_reset, env), KEY)
    keyed = reads_key(partial(_step, env, True), state, space_struct(actions))
    made = Env(
        EnvSpec(name, space, actions, limit),
        partial(_reset, env),
        partial(_step, env, keyed),
        settings={"env": name, "env_args": dict(params)},
    )
    return _flatten_choices(made) if _is_joint(made.spec) else made


def _is_joint(spec: EnvSpec) -> bool:
    """Return whether the mask has an entry per combination of choices, not per value of each choice."""
    choices, mask = spec.action_space, spec.observation_space.get("action_mask")  # type: ignore[union-attr]
    if not isinstance(choices, MultiDiscrete) or mask is None:
        return False
    return bool(mask.shape == choices.n) and mask.shape != (len(choices.n), choices.n[0])


def _flatten_choices(env: Env) -> Env:
    """Make one `Discrete` choice of all combinations: independent choices could not respect a joint mask."""
    sizes: Any = env.spec.action_space.n  # type: ignore[union-attr]
    count = math.prod(sizes)

    def seen(obs: Any) -> PyTree:
        return {**obs, "action_mask": obs["action_mask"].reshape(count)}

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key)
        return state, seen(obs)

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
        state, out = env.step(state, jnp.stack(jnp.unravel_index(action, sizes)).astype(jnp.int32), key)
        return state, out._replace(obs=seen(out.obs))

    space = {**env.spec.observation_space, "action_mask": Box(0, 1, (count,), "bool")}  # type: ignore[dict-item]
    spec = env.spec._replace(observation_space=space, action_space=Discrete(count))
    return env._replace(spec=spec, reset=reset, step=step)


def _check_levels(name: str) -> None:
    """Raise `SettingsError` unless the levels of Sokoban are in the cache of Hugging Face."""
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache("InstaDeepAI/boxoban-levels", "unfiltered-train.npy"), str):
        raise SettingsError(
            f"{name} needs levels that it would load from the internet; load them first: "
            "hf download InstaDeepAI/boxoban-levels unfiltered-train.npy"
        )


def _reset(env: Any, key: Key) -> tuple[PyTree, PyTree]:
    state, first = env.reset(key)
    # The key is replaced in each step, so none is kept in the state.
    return jax.tree.map(jnp.asarray, state.replace(key=())), _to_dicts(first.observation)


def _step(env: Any, keyed: bool, state: Any, action: PyTree, key: Key) -> tuple[PyTree, TimeStep]:
    """Step with the given key, or with a constant one that the environment does not read."""
    state, out = env.step(state.replace(key=key if keyed else make_key(0)), action)
    terminated = out.last() & (out.discount == 0.0)
    info = {word: jnp.asarray(value, jnp.float32) for word, value in out.extras.items() if jnp.ndim(value) == 0}
    step = TimeStep(_to_dicts(out.observation), out.reward, terminated, out.last() & ~terminated, info)
    return state.replace(key=()), step


def _fields(node: Any) -> dict[str, Any] | None:
    """Return the parts of a structured observation, a tuple or a dataclass; `None` for an array."""
    if isinstance(node, tuple):
        return node._asdict()  # type: ignore[attr-defined]
    return dict(vars(node)) if dataclasses.is_dataclass(node) else None


def _to_dicts(node: Any) -> PyTree:
    fields = _fields(node)
    return jnp.asarray(node) if fields is None else {word: _to_dicts(part) for word, part in fields.items()}


def _space(spec: Any, node: Any, word: str = "") -> Space:
    """Return the space of an observation's actual shape and dtype, with the declared bounds if they fit.

    A count of steps is no category, however short the episodes are: it reaches the limit, one more than declared.
    """
    fields = _fields(node)
    if fields is not None:
        return {word: _space(getattr(spec, word, None), part, word) for word, part in fields.items()}
    values = getattr(spec, "num_values", None)
    if isinstance(values, int) and values <= CATEGORIES and node.shape == () and word != "step_count":
        return Discrete(values, node.dtype)
    low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
    return make_box(node, low, np.asarray(high) + 1 if values is not None else high)


def _action_space(name: str, spec: Any, mask: Any) -> Space:
    """Return the space of actions; a box of integers from 0 becomes several choices.

    Their number is taken from the mask: MultiCVRP declares one more than it has.
    """
    values = getattr(spec, "num_values", None)
    if values is None and np.issubdtype(spec.dtype, np.integer) and not np.any(spec.minimum):
        values = np.broadcast_to(np.asarray(spec.maximum) + 1 if mask is None else mask.shape[-1], spec.shape)
    if values is None:
        return make_box(spec, spec.minimum, spec.maximum)
    if np.ndim(values) > 1:
        raise SettingsError(f"{name} has actions of shape {np.shape(values)}; expected one choice, or a vector of them")
    return MultiDiscrete(values, spec.dtype) if np.ndim(values) else Discrete(int(values), spec.dtype)

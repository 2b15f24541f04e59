"""Environments of envelope (https://github.com/keraJLi/envelope): objects of its class `Environment`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env
from jaxrl.envs.objects import ObjectFns, ObjectStep, as_settings_error, choice_space, object_env, require_object
from jaxrl.envs.suites import make_box
from jaxrl.errors import SettingsError
from jaxrl.spaces import Space
from jaxrl.trees import PyTree

UNUSABLE_WRAPPERS = {
    "AutoResetWrapper": "resets episodes, which jaxrl does itself",
    "VectorizingWrapper": "runs many copies, which jaxrl does itself",
    "StateInjectionWrapper": "keeps states from one episode to the next, which nothing does here",
    "ObservationNormalizationWrapper": "keeps statistics from one episode to the next: take --processor.normalise-obs",
}
"""Wrappers of envelope that cannot be used, with the reason; `VectorizingWrapper` is a base class."""
STEP_FIELDS = ("obs", "reward", "terminated", "truncated")
"""Fields of every `Info`; all others are extras."""


def envelope_env(env: Any, *, name: str | None = None, time_limit: int | None = None) -> Env:
    """Return `env`, an environment of envelope, as an `Env`.

    Episodes start with `init`. Scalars among the extras of `Info` are recorded. `randomise` draws fields of the
    environment by name; of a wrapped one, fields of the innermost environment.

    Args:
      env: a single environment that neither resets itself nor is vectorised.
      name: its name in jaxrl; default: the name of its class.
      time_limit: steps after which episodes are truncated, in addition to the limit of a `TruncationWrapper`, which is
        removed. Without either there is no limit: `env.default_max_steps` is the limit of a suite, if it has one.

    Raises:
      SettingsError: envelope is not installed, `env` is none of its environments or has a wrapper that cannot be used,
        or its reset and its step disagree.
    """
    envelope = require_object("envelope", env)
    bare, limits = _strip_limits(envelope, env)
    name = name or type(env.unwrapped).__name__
    limit = min((limit for limit in (time_limit, *limits) if limit is not None), default=None)
    with as_settings_error(name):
        return object_env(
            ObjectFns(
                name,
                lambda key, drawn: _convert_step(_with_fields(envelope, bare, drawn).init(key)),
                lambda state, action, drawn: _convert_step(_with_fields(envelope, bare, drawn).step(state, action)),
                bare.observation_space,
                _action_space(bare.action_space),
                _leaf_space,
                limit,
            )
        )


def _strip_limits(envelope: Any, env: Any) -> tuple[Any, list[int]]:
    """Return `env` without its time limits, and the limits; raise `SettingsError` for unusable wrappers."""
    if not isinstance(env, envelope.Wrapper):
        return env, []
    for kind in type(env).__mro__:
        if kind.__name__ in UNUSABLE_WRAPPERS:
            raise SettingsError(
                f"{type(env).__name__} {UNUSABLE_WRAPPERS[kind.__name__]}; give the environment without it"
            )
    # From the inside out: a wrapper around a removed limit is applied to what the limit wrapped.
    inner, limits = _strip_limits(envelope, env.env)
    if isinstance(env, envelope.TruncationWrapper):
        return inner, [int(env.max_steps), *limits]
    return env.replace(env=inner) if limits else env, limits


def _with_fields(envelope: Any, env: Any, fields: Any) -> Any:
    """Return `env` with the `fields` of an episode."""
    if fields is None:
        return env
    if isinstance(env, envelope.Wrapper):
        return env.replace(env=_with_fields(envelope, env.env, fields))
    return env.replace(**fields)


def _convert_step(result: tuple[PyTree, Any]) -> tuple[PyTree, ObjectStep]:
    state, info = result
    extras = {word: part for word, part in _to_dicts(info).items() if word not in STEP_FIELDS}
    return state, ObjectStep(_to_dicts(info.obs), info.reward, info.terminated, info.truncated, extras)


def _to_dicts(tree: PyTree) -> PyTree:
    """Replace envelope's containers by dicts; their fields may differ from instance to instance."""
    is_container = lambda x: any(kind.__name__ == "Container" for kind in type(x).__mro__)
    as_dict = lambda x: {word: _to_dicts(part) for word, part in x} if is_container(x) else x
    return jax.tree.map(as_dict, tree, is_leaf=is_container)


def _action_space(space: Any) -> Space:
    """Return the space of actions, a tree if they have several parts."""
    tree = getattr(space, "tree", space)
    is_space = lambda x: any(kind.__name__ == "Space" for kind in type(x).__mro__)
    return jax.tree.map(lambda part: _leaf_space(part, part), tree, is_leaf=is_space)


def _leaf_space(space: Any, struct: Any) -> Space:
    n = getattr(space, "n", None)
    if n is not None and np.shape(n) == struct.shape and jnp.issubdtype(struct.dtype, jnp.integer):
        return choice_space(np.asarray(n), struct)
    return make_box(struct, np.asarray(getattr(space, "low", -np.inf)), np.asarray(getattr(space, "high", np.inf)))

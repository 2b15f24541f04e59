"""Environments that speak envelope (https://github.com/keraJLi/envelope): objects of its class `Environment`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import Env
from jaxrl.envs.objects import Theirs, Told, choices_of, object_env, one_line_of, require_object
from jaxrl.envs.suites import box_of
from jaxrl.errors import SettingsError
from jaxrl.spaces import Space
from jaxrl.trees import PyTree

OURS = {
    "AutoResetWrapper": "resets episodes, which jaxrl does itself",
    "VectorizingWrapper": "runs many copies, which jaxrl does itself",
    "StateInjectionWrapper": "keeps states from one episode to the next, which nothing does here",
    "ObservationNormalizationWrapper": "keeps statistics from one episode to the next: take --processor.normalise-obs",
}
"""Wrappers of envelope that cannot be used, and the kind of those that vectorise."""
EVERY_STEP = ("obs", "reward", "terminated", "truncated")
"""What each `Info` has."""


def envelope_env(env: Any, *, name: str | None = None, time_limit: int | None = None) -> Env:
    """Return `env`, an environment of envelope, as an `Env`.

    Each episode begins with `init`. Scalars among the extras of `Info` are recorded. `randomise` draws, by name, fields
    of the environment itself, those of its innermost one where it is wrapped.

    Args:
      env: a single environment, which neither resets itself nor is vectorised.
      name: its name here; by default that of its class.
      time_limit: steps after which episodes are truncated, beside the limit of a `TruncationWrapper`, which is taken
        off. Without either they are not: `env.default_max_steps` is the limit of a suite, if it has one.

    Raises:
      SettingsError: envelope is not installed, `env` is none of its environments, is wrapped in what cannot be used, or
        its reset and its step disagree.
    """
    envelope = require_object("envelope", env)
    bare, limits = _bare(envelope, env)
    name = name or type(env.unwrapped).__name__
    limit = min((limit for limit in (time_limit, *limits) if limit is not None), default=None)
    with one_line_of(name):
        return object_env(
            Theirs(
                name,
                lambda key, own: _told(_given(envelope, bare, own).init(key)),
                lambda state, action, own: _told(_given(envelope, bare, own).step(state, action)),
                bare.observation_space,
                _actions(bare.action_space),
                _leaf,
                limit,
            )
        )


def _bare(envelope: Any, env: Any) -> tuple[Any, list[int]]:
    """Return `env` without its limits, and these; raise `SettingsError` for a wrapper that cannot be used."""
    if not isinstance(env, envelope.Wrapper):
        return env, []
    for kind in type(env).__mro__:
        if kind.__name__ in OURS:
            raise SettingsError(f"{type(env).__name__} {OURS[kind.__name__]}; give the environment without it")
    inner, limits = _bare(envelope, env.env)
    if isinstance(env, envelope.TruncationWrapper):
        return inner, [int(env.max_steps), *limits]
    return env.replace(env=inner) if limits else env, limits


def _given(envelope: Any, env: Any, fields: Any) -> Any:
    """Return `env` with other `fields`, those of an episode."""
    if fields is None:
        return env
    if isinstance(env, envelope.Wrapper):
        return env.replace(env=_given(envelope, env.env, fields))
    return env.replace(**fields)


def _told(result: tuple[PyTree, Any]) -> tuple[PyTree, Told]:
    state, info = result
    extras = {word: part for word, part in _open(info).items() if word not in EVERY_STEP}
    return state, Told(_open(info.obs), info.reward, info.terminated, info.truncated, extras)


def _open(tree: PyTree) -> PyTree:
    """Return a tree with dicts in place of envelope's containers, whose fields are not those of their class alone."""
    is_container = lambda x: any(kind.__name__ == "Container" for kind in type(x).__mro__)
    as_dict = lambda x: {word: _open(part) for word, part in x} if is_container(x) else x
    return jax.tree.map(as_dict, tree, is_leaf=is_container)


def _actions(space: Any) -> Space:
    """Return the space of actions, which may have several parts."""
    tree = getattr(space, "tree", space)
    is_space = lambda x: any(kind.__name__ == "Space" for kind in type(x).__mro__)
    return jax.tree.map(lambda part: _leaf(part, part), tree, is_leaf=is_space)


def _leaf(space: Any, struct: Any) -> Space:
    n = getattr(space, "n", None)
    if n is not None and np.shape(n) == struct.shape and jnp.issubdtype(struct.dtype, jnp.integer):
        return choices_of(np.asarray(n), struct)
    return box_of(struct, np.asarray(getattr(space, "low", -np.inf)), np.asarray(getattr(space, "high", np.inf)))

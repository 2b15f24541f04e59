"""Local data sets of Minari (https://minari.farama.org); imported only on demand."""

from typing import Any

import jax
import numpy as np

from jaxrl import spaces
from jaxrl.envs.host import PREFIX
from jaxrl.errors import SettingsError, error_text, require_extra
from jaxrl.spaces import EnvSpec
from jaxrl.trees import PyTree, named_leaves


def read_minari(name: str, spec: EnvSpec | None = None) -> tuple[dict[str, np.ndarray], EnvSpec]:
    """Return the steps of the data set `name`, by flat name as in a data set's file, and their environment spec.

    The spec is `spec` if given, as Minari has other names for environments.

    Raises:
      SettingsError: Minari is not installed, or has no such local data set; the error names the command to run.
    """
    minari = require_extra("minari", "data sets of Minari")
    try:
        found = minari.load_dataset(name)
        episodes = [_episode(episode) for episode in found.iterate_episodes()]
    except Exception as error:  # its storage may raise anything for an invalid name or a damaged file
        raise SettingsError(
            f"Minari cannot read {name!r} on this machine ({error_text(error)}); fetch it with: minari download {name}"
        ) from error
    if not episodes:
        raise SettingsError(f"minari:{name} holds no steps; gather some first")
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *episodes)
    id_ = PREFIX + (found.env_spec.id if found.env_spec is not None else name)
    seen = spaces.to_channels_last(spaces.convert_space(id_, found.observation_space))
    struct = spaces.space_struct(seen)
    for name in ("obs", "next_obs"):
        whole[name] = jax.tree.map(lambda like, x: spaces.match_image_layout(x, like.shape), struct, whole[name])
    own = EnvSpec(id_, seen, spaces.convert_space(id_, found.action_space))
    return named_leaves(whole if spec is None else _shift_elements(whole, own, spec)), spec or own


def _shift_elements(steps: dict[str, PyTree], own: EnvSpec, spec: EnvSpec) -> dict[str, PyTree]:
    """Return `steps` with discrete elements shifted from the spaces of Minari's `own` spec to those of `spec`."""
    recounted = dict(steps)
    for name, what in (("obs", "observation_space"), ("action", "action_space"), ("next_obs", "observation_space")):
        theirs, ours = getattr(own, what), getattr(spec, what)
        if len(spaces.space_starts(theirs)) == len(spaces.space_starts(ours)):
            recounted[name] = spaces.to_elements(ours, spaces.to_indices(theirs, steps[name]))
    return recounted


def _episode(episode: Any) -> dict[str, PyTree]:
    """Return the `T` steps of an episode, for which Minari stores `T + 1` observations."""
    ends = np.asarray(episode.terminations, bool), np.asarray(episode.truncations, bool)
    last = np.arange(len(ends[0])) == len(ends[0]) - 1
    return {
        "obs": jax.tree.map(lambda x: np.asarray(x)[:-1], episode.observations),
        "action": jax.tree.map(np.asarray, episode.actions),
        "reward": np.asarray(episode.rewards),
        "next_obs": jax.tree.map(lambda x: np.asarray(x)[1:], episode.observations),
        "terminated": ends[0],
        "truncated": (ends[1] | last) & ~ends[0],
    }

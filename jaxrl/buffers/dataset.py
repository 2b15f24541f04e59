"""A fixed data set of steps for offline learning, and its validation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import spaces
from jaxrl.errors import SettingsError, check_between
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space
from jaxrl.trees import PyTree, named_leaves

SYNONYMS = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "next_observations": "next_obs",
    "terminals": "terminated",
    "timeouts": "truncated",
}
"""Names of entries in D4RL (Fu et al. 2020, https://arxiv.org/abs/2004.07219)."""
CHUNK = 1 << 22
"""Bytes of the rows that are compared at a time."""


class Dataset(NamedTuple):
    """`R` steps in one environment, in temporal order, episode after episode; NumPy arrays on the host.

    Discrete values count from the `start` of their spaces.
    """

    spec: EnvSpec
    """The environment in which the steps were taken."""
    obs: PyTree
    """`[R, ...]`"""
    action: PyTree
    """`[R, ...]`"""
    reward: np.ndarray
    """Float32 `[R]`."""
    next_obs: PyTree
    """`[R, ...]`, the true successors; at the end of an episode not the start of the next."""
    terminated: np.ndarray
    """Bool `[R]`: the episode terminated."""
    truncated: np.ndarray
    """Bool `[R]`: the episode was truncated. The last step of the set is one of the two."""
    settings: Mapping[str, Any] | None = None
    """Settings that reload the set, `data` and `data_sha256`; `None` if not loaded, or changed after loading."""

    @property
    def rows(self) -> int:
        """The number of steps `R`."""
        return int(self.reward.shape[0])

    @property
    def episode(self) -> np.ndarray:
        """Index of each step's episode, int32 `[R]`."""
        done = self.terminated | self.truncated
        # An episode's index is the number of ends before it, hence the shift by one step.
        return np.concatenate([[0], np.cumsum(done)[:-1]]).astype(np.int32)

    def where(self, rows: np.ndarray) -> "Dataset":
        """Return the steps where `rows` `[R]` is true, which must be complete episodes."""
        # All arrays: the first field is the spec, the last one the settings.
        kept: Any = jax.tree.map(lambda x: x[rows], self[1:-1])
        return Dataset(self.spec, *kept)


def split_holdout(data: Dataset, share: float) -> tuple[Dataset, Dataset | None]:
    """Split off `share` of the episodes, evenly spread; return the training set and the held-out one, or `None`.

    Raises:
      SettingsError: `share` is outside `[0, 0.9]`, or there are too few episodes.
    """
    check_between("holdout", share, 0.0, 0.9)
    if share == 0:
        return data, None
    episode = data.episode
    numbers = np.arange(episode[-1] + 1)
    # Episode `i` is held out where `floor(i * share)` steps up: evenly spread and without randomness.
    held = np.floor((numbers + 1) * share + 1e-9) > np.floor(numbers * share + 1e-9)
    if not held.any():
        raise SettingsError(
            f"holdout is {share:g}, but of {len(numbers)} episodes that is none; raise holdout, "
            "or set it to 0 and name an env to evaluate in"
        )
    # Both are reloaded from the same files, and split again.
    kept, rest = (data.where(rows)._replace(settings=data.settings) for rows in (~held[episode], held[episode]))
    return kept, rest


class Summary(NamedTuple):
    """Counts and return statistics of a data set."""

    transitions: int
    episodes: int
    terminated: int
    """Number of episodes that terminated."""
    returns: np.ndarray
    """Float64 `[E]`, undiscounted returns of the episodes."""
    lengths: np.ndarray
    """Int `[E]`, steps of the episodes."""

    def __str__(self) -> str:
        low, quarter, median, upper, high = np.quantile(self.returns, (0, 0.25, 0.5, 0.75, 1))
        return (
            f"{self.transitions} transitions in {self.episodes} episodes ({self.terminated} terminated), "
            f"return {self.returns.mean():.6g} (min {low:.6g}, quartiles {quarter:.6g}, {median:.6g} and {upper:.6g}, "
            f"max {high:.6g}), length {self.lengths.mean():.6g} ({self.lengths.min()} to {self.lengths.max()})"
        )


def summarise(data: Dataset) -> Summary:
    """Return the summary of `data`."""
    episode = data.episode
    returns = np.bincount(episode, weights=data.reward.astype(np.float64))
    return Summary(data.rows, len(returns), int(data.terminated.sum()), returns, np.bincount(episode))


def arrays_of(data: Dataset) -> dict[str, np.ndarray]:
    """Return the arrays of `data` by flat name."""
    trees = data._asdict()
    del trees["spec"], trees["settings"]
    # One field after the other: in a dict of all, which JAX sorts, they would have another digest.
    named = [named_leaves({name: tree}) for name, tree in trees.items()]
    return {path: np.asarray(leaf) for leaves in named for path, leaf in leaves.items()}


# --- checking ---------------------------------------------------------------------------------------------------


def require_dataset(name: str, data: object) -> Dataset:
    """Return `data`; raise `SettingsError` for anything else in place of a data set, such as the path of its file."""
    if not isinstance(data, Dataset):
        given = str(data)[:100]
        raise SettingsError(f"{name} is {given!r}; expected a data set, as jaxrl.load_dataset({given!r})")
    return data


def check_dataset(name: str, data: object) -> Dataset:
    """Return `data`, given as the argument `name`. Validate `data` unless it was loaded, which validates it.

    Raises:
      SettingsError: it is invalid, or something else, such as the path of a file.
    """
    data = require_dataset(name, data)
    if data.settings is not None:
        return data
    if not isinstance(data.spec, EnvSpec):
        raise SettingsError(f"{name}.spec is {type(data.spec).__name__}; expected an EnvSpec, as env.spec")
    return validate(name, arrays_of(data), data.spec)


def validate(source: str, entries: Mapping[str, np.ndarray], spec: EnvSpec) -> Dataset:
    """Validate the entries of a file or an argument and return the data set; raise `SettingsError` for the first
    problem."""
    rows = _rows(source, entries)
    obs, next_obs = (_read_entry(source, entries, name, spec.observation_space, rows) for name in ("obs", "next_obs"))
    action = _read_entry(source, entries, "action", spec.action_space, rows)
    reward = _numbers(source, entries, "reward", rows)
    terminated, truncated = _ends(source, entries, rows)
    data = Dataset(spec, obs, action, reward, next_obs, terminated, truncated)
    _check_order(source, data)
    return data


def _rows(source: str, entries: Mapping[str, np.ndarray]) -> int:
    if "reward" not in entries:
        raise SettingsError(f"{source} has no reward (or rewards); it has {', '.join(sorted(entries)) or 'nothing'}")
    rows = entries["reward"].shape[0] if entries["reward"].ndim else 0
    if rows == 0:
        raise SettingsError(f"{source} holds no steps; gather some first")
    return rows


def _numbers(source: str, entries: Mapping[str, np.ndarray], name: str, rows: int) -> np.ndarray:
    """Return an entry with one finite number per step, float32 `[R]`."""
    return _leaf(source, entries, name, Box(-np.inf, np.inf, ()), rows)


def _read_entry(source: str, entries: Mapping[str, np.ndarray], name: str, space: Space, rows: int) -> PyTree:
    """Return the entry `name` as a tree with the structure of `space`."""
    leaves = named_leaves({name: space}, spaces.is_leaf)
    odd = {key for key in entries if key.split("/")[0] == name} - set(leaves)
    if odd:
        raise SettingsError(f"{source} has {min(odd)}, but {name} is {' and '.join(leaves)} in that environment")
    found = [_leaf(source, entries, key, leaf, rows) for key, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(space, is_leaf=spaces.is_leaf), found)


def _leaf(source: str, entries: Mapping[str, np.ndarray], name: str, space: Any, rows: int) -> np.ndarray:
    """Return an array `[R, *shape]` of elements of `space`."""
    if name not in entries:
        old = {new: old for old, new in SYNONYMS.items()}.get(name)
        raise SettingsError(f"{source} has no {name}{f' (or {old})' if old else ''}; add it, one row a step")
    array, dtype = entries[name], np.dtype(space.dtype)
    if array.shape == (rows, 1) and space.shape == ():
        array = array[:, 0]
    if array.shape != (rows, *space.shape):
        raise SettingsError(f"{source}: {name} has shape {list(array.shape)}; expected {[rows, *space.shape]}")
    kinds = "fiub" if np.issubdtype(dtype, np.floating) else "iub"
    if array.dtype.kind not in kinds:
        raise SettingsError(f"{source}: {name} has dtype {array.dtype}; expected {dtype}")
    # Check bounds before the cast, which could wrap values around into them.
    low, high = _bounds(space, name)
    with np.errstate(over="ignore"):
        held = np.ascontiguousarray(array, dtype if dtype.kind == "f" else None)
    if held.dtype.kind == "f":
        _refuse(source, name, ~np.isfinite(held), f"is not finite as {held.dtype}")
    _refuse(source, name, (array < low) | (array > high), f"is outside {space}")
    return np.ascontiguousarray(held, dtype)


def _bounds(space: Any, name: str) -> tuple[Any, Any]:
    """Return the lowest and highest values accepted; bounds of continuous actions have some slack for rounding."""
    if isinstance(space, Discrete | MultiDiscrete):
        start = np.asarray(space.start)[None]
        return start, start + np.asarray(space.n)[None] - 1
    if np.issubdtype(space.dtype, np.floating):
        low, high, bounded = spaces.box_bounds(space)
        slack = np.where(bounded & (name.split("/")[0] == "action"), 1e-3 * (high - low), np.inf)
        return (low - slack)[None], (high + slack)[None]
    if np.dtype(space.dtype) == bool:
        return 0, 1
    return np.iinfo(space.dtype).min, np.iinfo(space.dtype).max


def _refuse(source: str, name: str, bad: np.ndarray, what: str) -> None:
    if bad.any():
        row = int(np.argmax(bad.reshape(len(bad), -1).any(1)))
        raise SettingsError(f"{source}: {name} of step {row} {what}; leave the step's episode out, or mend it")


def _ends(source: str, entries: Mapping[str, np.ndarray], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `terminated` and `truncated`, bool `[R]`; the last step is truncated unless it is terminal."""
    if "terminated" not in entries:
        raise SettingsError(f"{source} has no terminated (or terminals); add it, true where an episode ended by itself")
    terminated, truncated = (
        _leaf(source, {"truncated": np.zeros(rows, bool), **entries}, name, Discrete(2), rows).astype(bool)
        for name in ("terminated", "truncated")
    )
    if not (terminated | truncated).any():
        raise SettingsError(
            f"{source} has no end of an episode: terminated and truncated are all false; set truncated (or timeouts) "
            "where one was cut, the last step at least"
        )
    truncated = truncated & ~terminated
    truncated[-1] = not terminated[-1]
    return terminated, truncated


def _check_order(source: str, data: Dataset) -> None:
    """Raise `SettingsError` if, inside an episode, an observation differs from `next_obs` of the step before."""
    going_on = ~(data.terminated | data.truncated)[:-1]
    for obs, next_obs in zip(jax.tree.leaves(data.obs), jax.tree.leaves(data.next_obs), strict=True):
        # In parts: the difference of all rows, in float64, would take many times the memory of images.
        rows = max(1, CHUNK // max(1, obs[:1].nbytes))
        for first in range(0, len(going_on), rows):
            part = slice(first, first + rows)
            apart = _differs(obs[1:][part], next_obs[:-1][part]) & going_on[part]
            if apart.any():
                row = first + int(np.argmax(apart))
                raise SettingsError(
                    f"{source}: obs of step {row + 1} is not next_obs of step {row}, though its episode goes on; "
                    "order the steps by episode and time, or mark where episodes end (truncated)"
                )


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return for each row `[R]` of two arrays whether they differ, floating-point numbers by more than rounding."""
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    same = a == b if a.dtype.kind in "iub" else np.isclose(a, b, rtol=1e-3, atol=1e-3)
    return ~same.all(1)

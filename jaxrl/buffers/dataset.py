"""A fixed data set of steps for offline learning."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.errors import SettingsError, check_between
from jaxrl.spaces import EnvSpec
from jaxrl.trees import PyTree


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


def require_dataset(name: str, data: object) -> None:
    """Raise `SettingsError` for anything else in place of a data set, such as the path of its file."""
    if not isinstance(data, Dataset):
        given = str(data)[:100]
        raise SettingsError(f"{name} is {given!r}; expected a data set, as jaxrl.load_dataset({given!r})")


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

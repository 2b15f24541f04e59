"""Begin a run with what another has learnt: the agent's networks, and the statistics by which it saw the world.

What is left behind is what belongs to the other run: optimizer states, hyperparameters, replay, environments.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxrl.training.processes as processes
from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.training.storage.checkpoints import CheckpointError, is_step
from jaxrl.training.storage.fork import Fork, step_of
from jaxrl.training.storage.group import CHECKPOINTS, open_store
from jaxrl.training.storage.leaves import flatten, path_of
from jaxrl.training.storage.members import population_of
from jaxrl.training.storage.run_dir import require_run
from jaxrl.trees import Key, PyTree

NOT_TAKEN = ("opt_state", "hyper")
"""Fields of an agent's state whose arrays belong to the other run."""


class Weights(NamedTuple):
    """What to begin with; nothing, if there is no other run."""

    leaves: Mapping[str, np.ndarray]
    """By path in what was saved."""
    told: tuple[str, ...] = ()
    """For the log: where they come from."""

    def after(self, init: Callable[[Key], PyTree]) -> Callable[[Key], PyTree]:
        """Return `init`, which makes a fresh state and its sums, with these in their places."""

        def begin(key: Key) -> PyTree:
            fresh = init(key)
            processes.tell("weights")
            return within(fresh, self.leaves)

        return begin if self.leaves else init


def within(fresh: PyTree, saved: Mapping[str, np.ndarray] | None = None) -> PyTree:
    """Return a fresh state and its sums with what was `saved` in its places.

    Of several processes, the first gives `saved` to all, and each puts its parts.
    """
    named = dict(flatten(fresh))
    # Only these leaves of the fresh state are replaced; all others stay as `init` has made them.
    taken = {name: leaf for name, leaf in named.items() if _is_taken(name)}
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in taken.items()}
    given = shapes if saved is None else {name: saved[name] for name in taken}
    made = processes.handed_out(given, {name: leaf.sharding for name, leaf in taken.items()})
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: made.get(path_of(keys), leaf), fresh)


def weights_of(place: str | None, like: Callable[[], PyTree]) -> Weights:
    """Read what a run is to begin with, for states (and their sums) of the shapes `like()`.

    Args:
      place: directory of another run, whose newest checkpoint is meant, or of one of its checkpoints; `None`: nothing.
      like: returns the shapes of `(state, sums)`; asked only if there is something to read.

    Raises:
      SettingsError: there is no such run or checkpoint, or its networks or statistics are not those of `like()`.
      NoCheckpointError: the checkpoint is damaged.
    """
    if place is None:
        return Weights({})
    path = Path(place)
    given = is_step(path.name) and path.parent.name == CHECKPOINTS
    run = path.parent.parent if given else path
    require_run(run)
    if population_of(run) is not None:
        raise SettingsError(f"{run} is a population; begin with one of its members, as of {run}/members")
    store = open_store(run.absolute(), CHECKPOINTS)
    step = step_of(Fork(run, int(path.name) if given else "latest"), store)
    try:
        saved, _ = store.read(step)
    except CheckpointError as error:
        raise NoCheckpointError(f"checkpoint {step} of {run} {error.verdict}: {error}") from error
    wanted = dict(flatten(like()))
    saved = _for_shards(wanted, saved)
    _require_same({name: leaf for name, leaf in wanted.items() if _is_taken(name)}, saved, run)
    told = f"begins with the networks of {run.absolute()} after {step} optimisation steps"
    leaves = {name: saved[name] for name in wanted if _is_taken(name)}
    return Weights(leaves, (told,))


def _is_taken(path: str) -> bool:
    # By their place in the state: networks of the agent, and running statistics of the processor.
    match path.split("/"):
        case "state", "agent", field, *_:
            return field not in NOT_TAKEN
        case "state", "processor", *names:
            return "moments" in names
    return False


def _for_shards(wanted: Mapping[str, Any], saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what was saved with statistics for as many shards as there are now; all shards have the same ones."""
    made = dict(saved)
    for name in wanted.keys() & saved.keys():
        count = f"{name.rpartition('/')[0]}/count"
        if "moments" in name.split("/") and count in wanted and count in saved:
            # The statistics of all shards are equal, so the first stands for any number.
            one = saved[name][0] if saved[count].ndim else saved[name]
            made[name] = np.broadcast_to(one, (*wanted[count].shape, *one.shape))
    return made


def _require_same(wanted: Mapping[str, jax.ShapeDtypeStruct], saved: Mapping[str, np.ndarray], run: Path) -> None:
    """Raise `SettingsError`, naming the first leaf that is missing or different."""
    there = {name: leaf for name, leaf in saved.items() if _is_taken(name)}
    hint = "begin with a run of the same agent, with the same network and normalisation"
    for name in [*wanted, *there]:
        path = name.removeprefix("state/")
        if name not in there or name not in wanted:
            has, lacks = ("this run", run) if name in wanted else (run, "this run")
            raise SettingsError(f"init_from: {has} has {path}, but {lacks} has not; {hint}")
        new, old = wanted[name], there[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise SettingsError(
                f"init_from: {path} of {run} is {old.dtype}{list(old.shape)}, here {new.dtype}{list(new.shape)}; {hint}"
            )

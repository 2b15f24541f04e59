"""Initial weights: networks and observation statistics from another run, a file of arrays, or a tree.

Optimizer states, hyperparameters, replay and environments are never taken. Named parts of networks may come from
another agent, under other names.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxrl.training.processes as processes
from jaxrl.agents.frozen import MOVING
from jaxrl.errors import NoCheckpointError, SettingsError, suggest
from jaxrl.training.memory import host_bytes
from jaxrl.training.settings import GivenArrays, TrainerConfig, changes
from jaxrl.training.storage.arrays import read_foreign, reason
from jaxrl.training.storage.checkpoints import CheckpointError
from jaxrl.training.storage.layout import TREE
from jaxrl.training.storage.leaves import flatten
from jaxrl.training.storage.members import population_of
from jaxrl.training.storage.opening import open_store, split_checkpoint, step_of
from jaxrl.training.storage.run_dir import CHECKPOINTS, CONFIG, population_dir, read_settings, require_run
from jaxrl.trees import Key, PyTree, is_part, named_leaves, parts_of, path_of

AGENT = "state/agent/"
"""Where in a state the parts that users name begin; statistics are named from one level above, as `processor/...`."""
FILE_SUFFIXES = (".npz", ".safetensors")
"""Suffixes of supported files of arrays."""
UNFINISHED_BY_ORBAX = ".orbax-checkpoint-tmp"
"""Part of a directory's name while Orbax writes it, and for good if that never ends."""
SHOWN = 5
"""Parts that a line of the log names, at most."""


class Weights(NamedTuple):
    """The initial weights of a run; none, if it begins with its own."""

    leaves: Mapping[str, np.ndarray]
    """By path in the state."""
    notes: tuple[str, ...] = ()
    """For the log: where they come from."""

    def after(self, init: Callable[[Key], PyTree]) -> Callable[[Key], PyTree]:
        """Return `init`, which makes a fresh state and its sums, with these in their places."""

        def begin(key: Key) -> PyTree:
            fresh = init(key)
            processes.broadcast("insert_weights", list(self.leaves))
            return insert_leaves(fresh, self.leaves, self.leaves)

        return begin if self.leaves else init


def require_same_start(run: str | Path, config: TrainerConfig) -> None:
    """Raise `SettingsError` if `config` names other initial weights than those with which `run`, to be resumed, began.

    They need not be named again: its checkpoints have what became of them.
    """
    try:
        settings = read_settings(Path(run))
    except SettingsError:  # reported, or repaired, when the run is opened
        return
    began = {"init_from": settings.get("init_from"), "init_parts": settings.get("init_parts") or []}
    named = {"init_from": str(config.init_from), "init_parts": list(config.init_parts)}
    if config.init_from is not None and (found := changes(began, named)):
        raise SettingsError(
            f"{run} began with other networks ({'; '.join(map(str, found))}), which cannot change: leave --init-from "
            "and --init-parts out, or use --start-over"
        )


def insert_leaves(fresh: PyTree, names: Iterable[str], saved: Mapping[str, np.ndarray] | None = None) -> PyTree:
    """Return a fresh state and its sums with the leaves `names` replaced by those `saved`.

    With several processes, only process 0 passes `saved`; each gets its shards.
    """
    # Only these leaves of the fresh state are replaced; all others stay as `init` has made them.
    named = dict(flatten(fresh))
    taken = {name: named[name] for name in names}
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in taken.items()}
    given = shapes if saved is None else {name: saved[name] for name in taken}
    made = processes.distribute(given, {name: leaf.sharding for name, leaf in taken.items()})
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: made.get(path_of(keys), leaf), fresh)


def weights_of(origin: str | GivenArrays | None, parts: Sequence[str], like: Callable[[], PyTree]) -> Weights:
    """Read the initial weights of a run, for states (and their sums) of the shapes `like()`.

    Args:
      origin: directory of another run, for its newest checkpoint, or of one of its checkpoints; or a file of arrays; or
        the directory of a tree that Orbax has written; or a tree in memory. `None`: none are given.
      parts: which parts of the state they replace, as `Part` reads them; none: all networks and statistics of the
        other run, or all arrays of the file.
      like: returns the shapes of `(state, sums)`; asked only if there is something to read.

    Raises:
      SettingsError: there is no such run, checkpoint or file; a part is not in the state, or not there; or one has
        another shape or dtype.
      NoCheckpointError: the checkpoint is damaged.
    """
    if origin is None:
        return Weights({})
    wanted = {_short(name): (name, leaf) for name, leaf in flatten(like()) if _is_taken(name)}
    with _opened(origin, dict(wanted.values())) as source:
        pairs = _pairs(parts, wanted) if parts else _all(source, wanted)
        leaves = {wanted[name][0]: _read(source, there, name, wanted[name][1]) for name, there in pairs.items()}
    if len(pairs) == len(wanted):
        return Weights(leaves, (f"begins with the networks of {source.origin}",))
    rest = _list_modules(name for name in wanted if name not in pairs)
    return Weights(leaves, (f"begins with {_list_modules(pairs)} of {source.origin}; drawn anew: {rest}",))


class Source(NamedTuple):
    """Arrays that initial weights may come from."""

    name: str
    """Name in messages of errors."""
    origin: str
    """Name in the log."""
    arrays: Mapping[str, Callable[[], np.ndarray]]
    """Functions that return the arrays, by path with `/`, within an agent's state."""
    is_run: bool = False
    """Whether they are those of a run, which has all networks, or has other ones."""


class Part(NamedTuple):
    """Leaves whose paths begin alike, and how the paths of their initial weights do.

    Users write paths within the agent's state, as `policy/params/MLP_0`, where `*` stands for any text within a name,
    or `TO=FROM` where the other run or the file has another name for it.
    """

    to: str
    source: str

    @classmethod
    def read(cls, word: str) -> "Part":
        """Read what a user wrote; raise `SettingsError` if it cannot be read."""
        to, equals, source = (side.strip().strip("/").replace(".", "/") for side in word.partition("="))
        if not to or (equals and (not source or "*" in word)):
            raise SettingsError(
                f"init_parts has {word!r}; expected a path as policy/params/MLP_0, in which * stands for any text, or "
                "TO=FROM with two paths"
            )
        return cls(to, source or to)

    def source_of(self, path: str) -> str | None:
        """Return what `path` is called there; `None` if it does not belong to this part."""
        if not is_part(path, self.to):
            return None
        # Where the other run has another name, the pattern is none, and so as long as what it matches.
        return path if self.source == self.to else self.source + path.removeprefix(self.to)


def _of_run(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Source:
    """Return the networks and statistics of a checkpoint, these for as many shards as `wanted`."""
    run, given = split_checkpoint(path)
    _require_run(run, path)
    if population_of(run) is not None:
        raise SettingsError(f"{run} is a population; begin with one of its members, as of {run}/members")
    store = open_store(run.absolute(), CHECKPOINTS)
    step = step_of(run, "latest" if given is None else given, store)
    try:
        saved = _for_shards(wanted, store.read(step)[0])
    except CheckpointError as error:
        raise NoCheckpointError(f"checkpoint {step} of {run} {error.verdict}: {error}") from error
    arrays = {_short(name): partial(np.asarray, leaf) for name, leaf in saved.items() if _is_taken(name)}
    return Source(str(run), f"{run.absolute()} after {step} optimisation steps", arrays, is_run=True)


def _require_run(run: Path, path: Path) -> None:
    """Raise `SettingsError` for what is no run; where `path` has no weights at all, say what could have them."""
    if str(path) == GivenArrays.NAME:
        raise SettingsError(
            "init_from: this run began with arrays given in Python; give them again, as in Trainer(..., init_from=tree)"
        )
    is_run = (run / CONFIG).exists() or population_dir(run) is not None
    if path.is_dir() and not is_run and not any(path.glob(f"*/{CONFIG}")):
        inside = next((file.parent for depth in ("*", "*/*") for file in sorted(path.glob(f"{depth}/{TREE}"))), None)
        hint = "" if inside is None else f"; there is one of these in it, {inside}"
        raise SettingsError(
            f"init_from: {path} is neither a run, which has a {CONFIG}, nor a tree of arrays that Orbax has written, "
            f"which has a {TREE}{hint}"
        )
    require_run(run)


def _all(source: Source, wanted: Iterable[str]) -> dict[str, str]:
    """Return all paths of `source`, each by itself; raise `SettingsError` unless they are wanted, and all of a run."""
    origin, arrays = source.name, source.arrays
    if not arrays and not source.is_run:
        raise SettingsError(f"init_from: {origin} has no arrays; expected at least one")
    for name in wanted if source.is_run else ():
        if name not in arrays:
            raise SettingsError(
                f"init_from: this run has {name}, but {origin} has not; begin with a run of the same agent, with the "
                "same network and normalisation, or name what to take by init_parts"
            )
    for name in arrays:
        if name not in wanted:
            raise SettingsError(
                f"init_from: {origin} has {name}, and the agent no such array; name what to take by init_parts, as "
                f"TO=FROM ({suggest(name, wanted)})"
            )
    return {name: name for name in arrays}


def _pairs(words: Sequence[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return which paths are taken, and what each is called there.

    Raises:
      SettingsError: a part cannot be read, or has none.
    """
    found: dict[str, str] = {}
    for part in map(Part.read, words):
        chosen = {path: there for path in wanted if (there := part.source_of(path)) is not None}
        if not chosen:
            hint = suggest(part.to, parts_of([*wanted]))
            raise SettingsError(f"init_parts: {part.to} is no part of what this agent learns; {hint}")
        found |= chosen
    return found


def _read(source: Source, there: str, name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return what is `there` in place of the leaf `name`; raise `SettingsError` if it is not, or does not fit."""
    if there not in source.arrays:
        raise SettingsError(f"init_parts: {source.name} has no {there}; {suggest(there, source.arrays)}")
    array = source.arrays[there]()
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        raise SettingsError(
            f"init_from: {there} of {source.name} is {array.dtype}{list(array.shape)}, expected "
            f"{like.dtype}{list(like.shape)} for {name}; give the two networks the same widths, or leave it out by "
            "init_parts"
        )
    return array


def _short(name: str) -> str:
    """Return a path as users write it."""
    return name.removeprefix(AGENT).removeprefix("state/")


def _list_modules(names: Iterable[str]) -> str:
    """Return the modules whose arrays are in `names`."""
    modules = list(dict.fromkeys(name.rpartition("/")[0] or name for name in names))
    more = [f"and {len(modules) - SHOWN} more"] if len(modules) > SHOWN else []
    return ", ".join([*modules[:SHOWN], *more]) or "nothing"


def _is_taken(path: str) -> bool:
    # By their place in the state: networks of the agent, and running statistics of the processor.
    match path.split("/"):
        case "state", "agent", field, *_:
            return field not in MOVING
        case "state", "processor", *names:
            return "moments" in names and "teacher" not in names
    return False


def _for_shards(wanted: Mapping[str, Any], saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what was saved with statistics for as many shards as there are now; all shards have the same ones."""
    made = dict(saved)
    for name in wanted.keys() & saved.keys():
        count = _count_of(name, wanted)
        if count is not None and count in saved:
            # The statistics of all shards are equal, so the first stands for any number.
            one = saved[name][0] if saved[count].ndim else saved[name]
            made[name] = np.broadcast_to(one, (*wanted[count].shape, *one.shape))
    return made


def _count_of(name: str, wanted: Mapping[str, Any]) -> str | None:
    """Return the path of the count of the statistics to which the leaf `name` belongs, or `None`."""
    words = name.split("/")
    if "moments" not in words:
        return None
    # The compensation of a statistic lies one level deeper than the statistic.
    above = ("/".join([*words[:n], "count"]) for n in reversed(range(1, len(words))))
    return next((path for path in above if path in wanted), None)


# --- arrays of other programs -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(origin: str | GivenArrays, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[Source]:
    """Yield the arrays of a run, of a tree in memory or by Orbax, or of a file.

    Raises:
      SettingsError: the file is missing or damaged, or the arrays cannot be read, now or later in the context.
    """
    path = Path(str(origin))
    is_tree = path.is_dir() and (path / TREE).is_file()
    if not isinstance(origin, GivenArrays) and not is_tree and (path.is_dir() or path.suffix not in FILE_SUFFIXES):
        yield _of_run(path, wanted)
        return
    if isinstance(origin, str) and not path.exists():
        raise SettingsError(f"init_from: there is no file {origin}")
    if UNFINISHED_BY_ORBAX in path.name:
        raise SettingsError(f"init_from: {origin} was never finished by Orbax; take a tree that has been saved whole")
    try:
        with contextlib.ExitStack() as files:
            if isinstance(origin, GivenArrays):
                yield Source(str(origin), str(origin), _in_tree(origin))
            else:
                yield Source(origin, str(path.absolute()), _in_file(path, files))
    except SettingsError:
        raise
    except ImportError as error:
        raise SettingsError(f"{origin} needs the package safetensors; pip install safetensors") from error
    except Exception as error:  # an untrusted file may raise anything, and so do keys that cannot be sorted
        raise SettingsError(f"init_from: {origin} cannot be read: {reason(error)}") from error


def _in_tree(origin: GivenArrays) -> dict[str, Callable[[], np.ndarray]]:
    leaves = named_leaves(origin.tree)
    if len(leaves) < len(jax.tree.leaves(origin.tree)):
        raise SettingsError(
            f"init_from: {origin}: two have the same path, as 'a/b' and the 'b' of 'a' have; rename one"
        )
    return {name: partial(np.array, leaf) for name, leaf in leaves.items()}


def _in_file(path: Path, files: contextlib.ExitStack) -> dict[str, Callable[[], np.ndarray]]:
    """Return the arrays of a file, which stays open until `files` are closed: only those taken are read."""
    if path.is_dir():
        # Orbax reads a tree as a whole, and by no relative path. Its text has no dtype, and is left out.
        leaves = named_leaves(read_foreign(path.absolute()))
        return {name: partial(np.asarray, leaf) for name, leaf in leaves.items() if hasattr(leaf, "dtype")}
    if path.suffix == ".npz":
        archive = files.enter_context(np.load(path, allow_pickle=False))
        check_size(path, archive)
        arrays = {name.removesuffix(".npy") for name in archive.zip.namelist() if name.endswith(".npy")}
        return {_path(name): partial(archive.__getitem__, name) for name in archive.files if name in arrays}
    from safetensors import safe_open

    tensors = files.enter_context(safe_open(path, framework="numpy"))
    return {_path(name): partial(tensors.get_tensor, name) for name in tensors.keys()}  # noqa: SIM118


def check_size(file: str | Path, archive: Any) -> None:
    """Raise `SettingsError` if the arrays of an open `.npz` file, which may be compressed, do not fit into memory."""
    arrays = [info for info in archive.zip.infolist() if info.filename.endswith(".npy")]
    size, memory = sum(info.file_size for info in arrays), host_bytes()
    if size > memory:
        raise SettingsError(
            f"{file} holds {size / 2**30:.1f} GiB of arrays once unpacked, more than the {memory / 2**30:.1f} GiB of "
            "memory of this machine; leave some out"
        )
    # Read headers only: NumPy would allocate the shapes stated there before it notices that data are missing.
    for info in arrays:
        with archive.zip.open(info) as packed:
            version = np.lib.format.read_magic(packed)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(packed)
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize > info.file_size:
            raise SettingsError(f"{file}: {info.filename} is said to have shape {list(shape)[:9]}, but is shorter")


def _path(name: str) -> str:
    """Return the path of an array, with the dots of other libraries replaced by `/`, as in Flax and NumPy."""
    return name if "/" in name else name.replace(".", "/")

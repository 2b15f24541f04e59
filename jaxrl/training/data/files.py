"""Data sets on disk: atomic writing, and reading with full validation before training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import spaces
from jaxrl.buffers.dataset import Dataset, require_dataset
from jaxrl.envs.host import PREFIX
from jaxrl.errors import DISK_ERRORS, SettingsError, StorageError, error_text, require_extra
from jaxrl.paths import local, reason_of_path
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space
from jaxrl.training.storage.leaves import digest
from jaxrl.training.storage.run_dir import new_file
from jaxrl.training.storage.weights import check_size
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
MINARI = "minari:"
CHUNK = 1 << 22
"""Bytes of the rows that are compared at a time."""


# --- writing ----------------------------------------------------------------------------------------------------


def save_dataset(path: str | Path, data: Dataset) -> None:
    """Write `data` atomically as one `.npz` file.

    Its entries are `obs, action, reward, next_obs, terminated, truncated`, with leaves of nested ones as `obs/a/b`, and
    `spec`, the environment spec as JSON.

    Raises:
      SettingsError: the file cannot be written.
      StorageError: the disk is full.
    """
    require_dataset("data", data)
    path = Path(local(path))
    try:
        with new_file(path) as file:
            np.savez_compressed(file, allow_pickle=False, **_entries(data))
    except OSError as error:
        kind = StorageError if error.errno in DISK_ERRORS else SettingsError
        raise kind(f"cannot write {path}: {reason_of_path(error)}") from error


def _entries(data: Dataset) -> dict[str, np.ndarray]:
    return {**_arrays(data), "spec": np.array(json.dumps(spaces.spec_to_plain(data.spec)))}


def _arrays(data: Dataset) -> dict[str, np.ndarray]:
    """Return the arrays of `data` by flat name."""
    trees = data._asdict()
    del trees["spec"], trees["settings"]
    # One field after the other: in a dict of all, which JAX sorts, they would have another digest.
    named = [named_leaves({name: tree}) for name, tree in trees.items()]
    return {path: np.asarray(leaf) for leaves in named for path, leaf in leaves.items()}


# --- reading ----------------------------------------------------------------------------------------------------


def load_dataset(*files: str | Path, spec: EnvSpec | None = None, sha256: str | None = None) -> Dataset:
    """Read data sets and concatenate them.

    Args:
      files: `.npz` files as written by `save_dataset` or with D4RL's names, or `minari:NAME` for a local Minari data
        set.
      spec: the environment spec, for files without one; for a Minari data set it replaces Minari's.
      sha256: expected digest of the arrays, if any.

    Raises:
      SettingsError: a file cannot be read or is invalid; the error names the entry and a remedy.
    """
    if not files:
        raise SettingsError("there are no data: name at least one file")
    names = [str(local(file)) for file in files]
    parts = [_load(name, spec) for name in names]
    for file, part in zip(names, parts, strict=True):
        if _kind(part.spec) != _kind(parts[0].spec):
            raise SettingsError(
                f"{file} was gathered in {part.spec.name}, and {names[0]} in {parts[0].spec.name}; "
                "data sets of one environment alone can be learnt from together"
            )
    arrays = jax.tree.map(lambda *x: np.concatenate(x), *(part[1:-1] for part in parts))
    data = Dataset(parts[0].spec, *arrays)
    found = digest(_arrays(data))
    if sha256 and found != sha256:
        raise SettingsError(
            f"{', '.join(names)} is not what the run was trained on (sha256 {found[:12]}..., expected "
            f"{sha256[:12]}...); bring that data set back, or begin another run"
        )
    return data._replace(settings={"data": [_lasting(name) for name in names], "data_sha256": found})


def _lasting(file: str) -> str:
    """Return `file` as a name that is valid in any working directory."""
    return file if file.startswith(MINARI) else str(Path(file).absolute())


def _kind(spec: EnvSpec) -> Any:
    """Return the part of a spec that must be equal in all data sets."""
    return spaces.spec_to_plain(spec._replace(time_limit=None))


def _load(file: str, spec: EnvSpec | None) -> Dataset:
    if file.startswith(MINARI):
        entries, spec = _read_minari(file.removeprefix(MINARI), spec)
    else:
        entries = _read(file)
        spec = _spec(file, entries.pop("spec", None)) or spec
    if spec is None:
        raise SettingsError(f"{file} does not say in which environment it was gathered (entry spec); name it as env")
    return validate(file, entries, spec)


def _read(file: str) -> dict[str, np.ndarray]:
    """Return the entries of an `.npz` file under jaxrl's names."""
    if Path(file).exists() and not Path(file).is_file():
        raise SettingsError(f"cannot read {file}: it is no regular file; expected an .npz file")
    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise SettingsError(f"{file} is one array; expected an .npz file of several, by name")
        with archive:
            check_size(file, archive)
            return {_rename(name): archive[name] for name in archive.files}
    except SettingsError:
        raise
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {reason_of_path(error)}") from error
    except Exception as error:  # a damaged archive may raise any error of zipfile, zlib or NumPy
        raise SettingsError(f"cannot read {file}: expected an .npz file of plain arrays, undamaged") from error


def _rename(name: str) -> str:
    head, slash, rest = name.partition("/")
    return SYNONYMS.get(head, head) + slash + rest


def _spec(file: str, entry: np.ndarray | None) -> EnvSpec | None:
    if entry is None:
        return None
    try:
        return spaces.spec_from_plain(json.loads(str(entry)))
    except SettingsError as error:
        raise SettingsError(f"{file}: its entry spec is invalid: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{file}: its entry spec is damaged; remove it and name the env instead") from error


# --- Minari -----------------------------------------------------------------------------------------------------


def _read_minari(name: str, spec: EnvSpec | None) -> tuple[dict[str, np.ndarray], EnvSpec]:
    """Return the entries of a local data set of Minari (https://minari.farama.org), and its environment spec.

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


# --- checking ---------------------------------------------------------------------------------------------------


def validate(file: str, entries: Mapping[str, np.ndarray], spec: EnvSpec) -> Dataset:
    """Validate `entries` and return them as a data set; raise `SettingsError` for the first problem."""
    rows = _rows(file, entries)
    obs, next_obs = (_read_entry(file, entries, name, spec.observation_space, rows) for name in ("obs", "next_obs"))
    action = _read_entry(file, entries, "action", spec.action_space, rows)
    reward = _numbers(file, entries, "reward", rows)
    terminated, truncated = _ends(file, entries, rows)
    data = Dataset(spec, obs, action, reward, next_obs, terminated, truncated)
    _check_order(file, data)
    return data


def _rows(file: str, entries: Mapping[str, np.ndarray]) -> int:
    if "reward" not in entries:
        raise SettingsError(f"{file} has no reward (or rewards); it has {', '.join(sorted(entries)) or 'nothing'}")
    rows = entries["reward"].shape[0] if entries["reward"].ndim else 0
    if rows == 0:
        raise SettingsError(f"{file} holds no steps; gather some first")
    return rows


def _numbers(file: str, entries: Mapping[str, np.ndarray], name: str, rows: int) -> np.ndarray:
    """Return an entry with one finite number per step, float32 `[R]`."""
    return _leaf(file, entries, name, Box(-np.inf, np.inf, ()), rows)


def _read_entry(file: str, entries: Mapping[str, np.ndarray], name: str, space: Space, rows: int) -> PyTree:
    """Return the entry `name` as a tree with the structure of `space`."""
    leaves = named_leaves({name: space}, spaces.is_leaf)
    odd = {key for key in entries if key.split("/")[0] == name} - set(leaves)
    if odd:
        raise SettingsError(f"{file} has {min(odd)}, but {name} is {' and '.join(leaves)} in that environment")
    found = [_leaf(file, entries, key, leaf, rows) for key, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(space, is_leaf=spaces.is_leaf), found)


def _leaf(file: str, entries: Mapping[str, np.ndarray], name: str, space: Any, rows: int) -> np.ndarray:
    """Return an array `[R, *shape]` of elements of `space`."""
    if name not in entries:
        old = {new: old for old, new in SYNONYMS.items()}.get(name)
        raise SettingsError(f"{file} has no {name}{f' (or {old})' if old else ''}; add it, one row a step")
    array, dtype = entries[name], np.dtype(space.dtype)
    if array.shape == (rows, 1) and space.shape == ():
        array = array[:, 0]
    if array.shape != (rows, *space.shape):
        raise SettingsError(f"{file}: {name} has shape {list(array.shape)}; expected {[rows, *space.shape]}")
    kinds = "fiub" if np.issubdtype(dtype, np.floating) else "iub"
    if array.dtype.kind not in kinds:
        raise SettingsError(f"{file}: {name} has dtype {array.dtype}; expected {dtype}")
    # Check bounds before the cast, which could wrap values around into them.
    low, high = _bounds(space, name)
    with np.errstate(over="ignore"):
        held = np.ascontiguousarray(array, dtype if dtype.kind == "f" else None)
    if held.dtype.kind == "f":
        _refuse(file, name, ~np.isfinite(held), f"is not finite as {held.dtype}")
    _refuse(file, name, (array < low) | (array > high), f"is outside {space}")
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


def _refuse(file: str, name: str, bad: np.ndarray, what: str) -> None:
    if bad.any():
        row = int(np.argmax(bad.reshape(len(bad), -1).any(1)))
        raise SettingsError(f"{file}: {name} of step {row} {what}; leave the step's episode out, or mend it")


def _ends(file: str, entries: Mapping[str, np.ndarray], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `terminated` and `truncated`, bool `[R]`; the last step is truncated unless it is terminal."""
    if "terminated" not in entries:
        raise SettingsError(f"{file} has no terminated (or terminals); add it, true where an episode ended by itself")
    terminated, truncated = (
        _leaf(file, {"truncated": np.zeros(rows, bool), **entries}, name, Discrete(2), rows).astype(bool)
        for name in ("terminated", "truncated")
    )
    if not (terminated | truncated).any():
        raise SettingsError(
            f"{file} has no end of an episode: terminated and truncated are all false; set truncated (or timeouts) "
            "where one was cut, the last step at least"
        )
    truncated = truncated & ~terminated
    truncated[-1] = not terminated[-1]
    return terminated, truncated


def _check_order(file: str, data: Dataset) -> None:
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
                    f"{file}: obs of step {row + 1} is not next_obs of step {row}, though its episode goes on; "
                    "order the steps by episode and time, or mark where episodes end (truncated)"
                )


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return for each row `[R]` of two arrays whether they differ, floating-point numbers by more than rounding."""
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    same = a == b if a.dtype.kind in "iub" else np.isclose(a, b, rtol=1e-3, atol=1e-3)
    return ~same.all(1)

"""Data sets on disk: atomic writing and reading."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import spaces
from jaxrl.buffers.dataset import SYNONYMS, Dataset, arrays_of, require_dataset, validate
from jaxrl.envs.host import PREFIX
from jaxrl.errors import DISK_ERRORS, MissingError, SettingsError, StorageError, error_text, require_extra
from jaxrl.paths import local, reason_of_path
from jaxrl.spaces import EnvSpec
from jaxrl.training.storage.files import new_file
from jaxrl.training.storage.leaves import digest
from jaxrl.training.storage.weights import check_size
from jaxrl.trees import PyTree, named_leaves

MINARI = "minari:"


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
            spec = np.array(json.dumps(spaces.spec_to_plain(data.spec)))
            np.savez_compressed(file, allow_pickle=False, **arrays_of(data), spec=spec)
    except OSError as error:
        kind = StorageError if error.errno in DISK_ERRORS else SettingsError
        raise kind(f"cannot write {path}: {reason_of_path(error)}") from error


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
    found = digest(arrays_of(data))
    if sha256 and found != sha256:
        raise MissingError(
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
        raise MissingError(f"cannot read {file}: it is no regular file; expected an .npz file")
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
        raise MissingError(f"cannot read {file}: {reason_of_path(error)}") from error
    except Exception as error:  # a damaged archive may raise any error of zipfile, zlib or NumPy
        raise MissingError(f"cannot read {file}: expected an .npz file of plain arrays, undamaged") from error


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
        raise MissingError(
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

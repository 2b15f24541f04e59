"""All that a run writes: its directory, checkpoints and best policy. Without a directory it writes nothing."""

import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import SettingsError, StorageError
from jaxrl.training.checkpoints import Store
from jaxrl.training.recorders import trim
from jaxrl.training.run_dir import CONFIG, EPISODES, FORMAT, METRICS, RunDir, plain, read_yaml
from jaxrl.training.settings import difference
from jaxrl.types import PyTree


class Storage:
    """What a run writes. A failure is reported and survived; the newest attempt decides how the run ends."""

    def __init__(self, path: str | None, keep: int, settings: Mapping[str, Any], resume: bool) -> None:
        """Take hold of the run directory `path`, or of nothing if it is `None`.

        Raises:
          SettingsError: the directory holds something else, or a run with other settings, or cannot be written.
          RunDirInUseError: another process holds it.
        """
        self.error: StorageError | None = None
        self.report: Callable[[str], None] = lambda line: None
        self.dir: RunDir | None = None
        self.best_score: float | None = None
        """Score of the best policy on disk."""
        if path is None:
            return
        if resume:
            check_same_settings(Path(path), settings)
        self.dir = RunDir(path, resume)
        self.checkpoints = Store(self.dir / "checkpoints", keep)
        self.best = Store(self.dir / "best", 1)
        self._settings = settings

    def start(self, counters: Mapping[str, int], resume: bool) -> None:
        """Write what describes the run."""
        if self.dir is None:
            return
        self.dir.write_config(self._settings)
        created = {} if resume else {"created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.dir.write_metadata(format=FORMAT, **created, **_machine(), status="running", **counters)

    @property
    def path(self) -> Path | None:
        """The run directory."""
        return None if self.dir is None else self.dir.path

    def save(self, opt_steps: int, tree: PyTree, facts: Mapping[str, Any]) -> bool:
        """Begin a checkpoint; say whether it could be begun."""
        if self.dir is None:
            return False
        self._survive(self.checkpoints.wait)
        return self._survive(lambda: self.checkpoints.save(opt_steps, tree, facts))

    def save_best(self, opt_steps: int, params: PyTree, facts: Mapping[str, Any], score: float) -> None:
        """Keep a best policy, unless the disk has a better one: a resumed run passes its own past again."""
        if self.dir is None or (self.best_score is not None and score < self.best_score):
            return
        self._survive(self.best.wait)
        if self._survive(lambda: self.best.save(opt_steps, params, facts)):
            self.best_score = score

    def load(self, like: PyTree, params_like: PyTree) -> tuple[PyTree, PyTree | None, dict[str, Any]]:
        """Load the newest valid checkpoint and the best policy, if any; mend the logs up to there.

        Raises:
          NoCheckpointError: no checkpoint is valid.
        """
        assert self.dir is not None
        step, tree, facts = self.checkpoints.load_newest(like)
        best = None
        if self.best.steps():
            _, best, best_facts = self.best.load_newest(params_like)
            self.best_score = best_facts["score"]
            self.best.prune()
        self.checkpoints.prune()
        for log in (METRICS, EPISODES):
            trim(self.dir / log, step)
        return tree, best, facts

    def note(self, **facts: Any) -> None:
        """Merge `facts` into `metadata.json`."""
        if self.dir is not None:
            self._survive(lambda: self.dir.write_metadata(**facts))  # type: ignore[union-attr]

    def finish(self) -> None:
        """Wait for what is being written."""
        if self.dir is not None:
            self._survive(self.best.close)
            self._survive(self.checkpoints.close)

    def close(self) -> None:
        """Let go of the directory."""
        if self.dir is not None:
            self.dir.release()

    def _survive(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except (StorageError, OSError) as error:
            self.error = error if isinstance(error, StorageError) else StorageError(f"cannot write {self.dir}: {error}")
            self.report(f"warning: {self.error}; training goes on")
            return False
        self.error = None
        return True


def check_same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise `SettingsError` with the difference if the run in `path` was trained with other settings that matter."""
    if not (path / CONFIG).is_file():
        return
    changed = difference(read_yaml(path / CONFIG), plain(settings))
    if changed:
        raise SettingsError(f"{path} was trained with other settings ({'; '.join(changed)}); resume it with its own")


def _machine() -> dict[str, Any]:
    packages = ("jaxrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "gymnax", "numpy")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "devices": [str(device.device_kind) for device in jax.devices()],
        "platform": platform.platform(),
    }

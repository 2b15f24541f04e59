"""One small run for all tests that damage, alter or forge a run directory, and what they do to it."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from built import built_once

from jaxrl import train
from jaxrl.agents import DQNConfig
from jaxrl.cli.algos import BufferConfig, OffPolicyRun, ProcessorConfig
from jaxrl.training import Report, Trainer, program
from jaxrl.training.storage.checkpoints import FILES, Store, file_sums, seal
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.run import Resume, Storage

SMALL = OffPolicyRun(
    env="CartPole-v1",
    num_envs=2,
    opt_interval=2,
    warmup=16,
    agent=DQNConfig(features=(4,), epsilon_decay=20, target_interval=5),
    buffer=BufferConfig(64, 8),
    processor=ProcessorConfig(n_step=3),
    max_opts=40,
    eval_interval=20,
    eval_episodes=2,
    record_interval=10,
    save_interval=10,
    keep=4,
    quiet=True,
)
BEFORE, NEWEST, LAST = 20, 30, 40
"""The small run was stopped at `NEWEST`, of `LAST` optimisation steps."""


class SmallRun(NamedTuple):
    """A run that was stopped on its way, for all tests to copy and none to change."""

    path: Path
    whole: Path
    """The same run, which nobody has stopped."""
    like: Any
    digests: dict[int, str]
    """What a checkpoint of each step must hold; that of the last step is of the whole run."""
    facts: dict[int, Any]

    def copy(self, path: Path) -> Path:
        return Path(shutil.copytree(self.path, path))

    def digest(self, run: Path, step: int) -> str:
        """Return the digest of a checkpoint of the copy `run`."""
        store = Store(run / "checkpoints", 1)
        try:
            return state_digest(store.load(step, self.like)[0])
        finally:
            store.close()


def small_run(factory: pytest.TempPathFactory) -> SmallRun:
    """Make the small run, and beside it one that nobody stops."""
    path, whole = (factory.mktemp("small") / name for name in ("run", "whole"))
    with built_once():
        strategy = train.build("dqn", SMALL)
    for run, end in ((path, NEWEST), (whole, LAST)):
        config = train.trainer_config(SMALL).changed(run_dir=str(run))
        Trainer(strategy, config, stop=_stop_at(end)).train()
    like = program.state_shapes(strategy)
    store = Store(whole / "checkpoints", 4)
    loaded = {step: store.load(step, like) for step in store.steps()}
    store.close()
    digests = {step: state_digest(tree) for step, (tree, _) in loaded.items()}
    assert sorted(digests) == [10, BEFORE, NEWEST, LAST]
    store = Store(path / "checkpoints", 4)
    facts = {step: store.manifest(step)["facts"] for step in store.steps()}
    store.close()
    assert sorted(facts) == [10, BEFORE, NEWEST]
    return SmallRun(path, whole, like, digests, facts)


def _stop_at(end: int) -> Callable[[Report], bool]:
    return lambda report: report.opt_steps >= end


def rewrite_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], Any], reseal: bool = True) -> None:
    """Let `change` alter the manifest of a checkpoint in place, and mend every checksum afterwards."""
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(seal(manifest) if reseal else manifest))
    mend(checkpoint)


def mend(checkpoint: Path) -> None:
    """Write the list of files of a checkpoint anew, so that its files are read further than to their checksums."""
    (checkpoint / FILES).write_text(json.dumps(file_sums(checkpoint)))


class Taken(NamedTuple):
    """What a resumed run goes on from, and what it was warned of."""

    step: int
    digest: str
    facts: dict[str, Any]
    warnings: list[str]


def resume(small: SmallRun, run: Path) -> Taken:
    """Load what a resumed run loads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage = Storage(str(run), 4, small.facts[NEWEST]["settings"], Resume(enabled=True))
        try:
            step, tree, facts = storage.load(small.like)
        finally:
            storage.finish()
            storage.close()
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return Taken(step, state_digest(tree), facts, said)

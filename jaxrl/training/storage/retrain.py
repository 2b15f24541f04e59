"""Retraining between the checkpoints of a run, to verify that they are reproduced bit for bit."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.strategies.base import Strategy
from jaxrl.training.program import Saved, compile_all, forms_of, state_shapes, without_replay
from jaxrl.training.storage.checkpoints import CheckpointError, Store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.run_dir import plain
from jaxrl.trees import PyTree, make_key


def replay(strategy: Strategy, store: Store, steps: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Train from each of `steps` to the next, or from scratch to the only one; yield both and whether they are equal.

    A pair is skipped if the run was rolled back in between, or was not trained under the settings of `strategy`, since
    settings or versions changed then or later. Checkpoints without replay buffer cannot be trained from: they are
    reached from scratch, up to the first resume of the run.
    """
    if strategy.host_env is not None:
        raise SettingsError(
            f"the environments of {strategy.host_env.spec.name} are not part of a checkpoint, so that what was "
            "trained cannot be trained again; leave --replay out"
        )
    like, settings = state_shapes(strategy), plain(strategy.info.settings or {})
    # Compiled as for training: on a GPU, other options would round differently.
    compiled = compile_all(strategy, make_key(0), None, None, resume=True)
    store.forms, start = forms_of(strategy), 0
    before: tuple[PyTree, dict[str, int]] | None = None
    for step in steps:
        try:
            tree, facts = store.load(step, like)
        except CheckpointError:
            before = None  # removed by a running process, or of a structure that has changed since
            continue
        ledger, wanted = facts["ledger"], state_digest(tree[0])
        bare = strategy.state_fns.refill is not None and not jax.tree.leaves(tree[0].buffer)
        # Without an earlier checkpoint to train from, train from scratch.
        if len(steps) == 1 or (bare and step == steps[0]):
            key = make_key(facts["settings"]["seed"])
            before = compiled.init(key), {"t": 0, "rollbacks": 0}
        same = all(facts["settings"].get(name) == value for name, value in settings.items())
        # A run resumed at `start` without its replay buffer has refilled it, unlike the state retrained in memory.
        resumed = bare and ledger["changed_at"] == start > 0
        unchanged = same and ledger["changed_at"] <= start and not resumed
        made = None
        if unchanged and before is not None and before[1]["rollbacks"] == ledger["rollbacks"]:
            made = compiled.run(*before[0], np.uint32(before[1]["t"]), np.uint32(ledger["t"]))
            yield start, step, state_digest((without_replay(Saved(*made)) if bare else made)[0]) == wanted
        # A checkpoint without replay buffer cannot be trained from, but the state retrained up to it can.
        found = made if bare else tree
        start, before = step, None if found is None else (found, ledger)

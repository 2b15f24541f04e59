"""Train again what a run has trained, and compare."""

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
    """Train from each of `steps` to the next, or from the beginning to the only one; yield both and whether equal.

    A pair is left out if it was not trained in one go and under the settings of `strategy`: where the run went back to
    an earlier checkpoint in between, or where settings or versions were allowed to change then or later. Checkpoints
    without the replay cannot be trained from: they are come to from the beginning, as far as the run was never resumed.
    """
    if strategy.actor_fns is not None:
        raise SettingsError(
            f"the environments of {strategy.actor_fns.env.spec.name} are not part of a checkpoint, so that what was "
            "trained cannot be trained again; leave --replay out"
        )
    like, settings = state_shapes(strategy), plain(strategy.info.settings or {})
    # As training compiles it: on a GPU, other options would round otherwise.
    compiled = compile_all(strategy, make_key(0), None, None, resume=True)
    store.forms, start = forms_of(strategy), 0
    before: tuple[PyTree, dict[str, int]] | None = None
    for step in steps:
        try:
            tree, facts = store.load(step, like)
        except CheckpointError:
            before = None  # a running process has removed it, or a later one does not fit what was changed
            continue
        ledger, wanted = facts["ledger"], state_digest(tree[0])
        bare = strategy.state_fns.refill is not None and not jax.tree.leaves(tree[0].buffer)
        # Trained from the very beginning where there is no earlier checkpoint that could be gone on from.
        if len(steps) == 1 or (bare and step == steps[0]):
            key = make_key(facts["settings"]["seed"])
            before = compiled.init(key), {"t": 0, "rollbacks": 0}
        same = all(facts["settings"].get(name) == value for name, value in settings.items())
        # A run that was resumed at `start` without its replay has filled it anew, which training on in memory does not.
        resumed = bare and ledger["changed_at"] == start > 0
        unchanged = same and ledger["changed_at"] <= start and not resumed
        made = None
        if unchanged and before is not None and before[1]["rollbacks"] == ledger["rollbacks"]:
            made = compiled.run(*before[0], np.uint32(before[1]["t"]), np.uint32(ledger["t"]))
            yield start, step, state_digest((without_replay(Saved(*made)) if bare else made)[0]) == wanted
        # Without its replay a checkpoint cannot be trained on from, but the state that was trained up to it can.
        found = made if bare else tree
        start, before = step, None if found is None else (found, ledger)

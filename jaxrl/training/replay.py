"""Train again what a run has trained, and compare."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrl.strategies.base import Strategy
from jaxrl.training.checkpoints import Store
from jaxrl.training.leaves import state_digest
from jaxrl.training.program import jit_init, jit_run, state_shapes
from jaxrl.types import PyTree


def replay(strategy: Strategy, store: Store, steps: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Train from each of `steps` to the next, or from the beginning to the only one; yield both and whether equal.

    A pair between which the run went back to an earlier checkpoint is left out: it was not trained in one go.
    """
    like, program = state_shapes(strategy), jit_run(strategy)
    start = 0
    before: tuple[PyTree, dict[str, int]] | None = None
    for step in steps:
        tree, facts = store.load(step, like)
        ledger, wanted = facts["ledger"], state_digest(tree[0])
        if len(steps) == 1:
            key = jax.random.key(facts["settings"]["seed"])
            before = jit_init(strategy)(key), {"t": 0, "rollbacks": 0}
        if before is not None and before[1]["rollbacks"] == ledger["rollbacks"]:
            state, _ = program(*before[0], np.uint32(before[1]["t"]), np.uint32(ledger["t"]))
            yield start, step, state_digest(state) == wanted
        start, before = step, (tree, ledger)

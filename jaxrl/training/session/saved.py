"""What a checkpoint holds of a session, and the session made of it again."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.strategies.guard import reseed
from jaxrl.training.ledger import Ledger
from jaxrl.training.session.parts import Now, begun
from jaxrl.training.session.rows import Interval
from jaxrl.training.session.statistics import Statistics
from jaxrl.trees import PyTree


def tree_of(now: Now) -> PyTree:
    """Return the arrays of a checkpoint."""
    return now.state, (now.past, now.sums), now.host


def shapes_of(now: Now) -> PyTree:
    """Return their shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_of(now))


def facts_of(now: Now) -> dict[str, Any]:
    """Return what only a session tells beside its arrays, for JSON."""
    return {
        "steps": now.steps,
        "invalid": now.invalid,
        "statistics": now.statistics.facts(),
        "interval": now.interval.facts(),
    }


def restored(tree: PyTree, facts: Mapping[str, Any], ledger: Ledger, statistics: Statistics) -> Now:
    """Return the session of a checkpoint; `statistics` are fresh ones of the present choices.

    Raises:
      KeyError, TypeError, ValueError: `facts` are not what `facts_of` returns.
    """
    state, (past, sums), host = tree
    steps, invalid = facts["steps"], facts["invalid"]
    if type(steps) is not int or type(invalid) is not int:
        raise ValueError("steps and invalid are counts")
    statistics, interval = statistics.take_up(facts["statistics"]), Interval().take_up(facts["interval"])
    host = jax.tree.map(np.array, host)
    return Now(state, sums, past, host, ledger, steps, invalid, statistics, interval, resumed=True)


def for_another_try(now: Now) -> Now:
    """Return a session that went back, with other random numbers to go on with.

    Its environments did not go back: the running episodes are cut.
    """
    state = reseed(now.state, now.ledger.rollbacks)
    return now._replace(state=state, host=begun(now.host, np.ones_like(now.host.ended)))

"""What a checkpoint holds of a session, and the session made of it again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.strategies.guard import reseed
from jaxrl.strategies.interaction import set_hyperparams_of
from jaxrl.strategies.stepwise import Stepwise, count_iterations
from jaxrl.training.changes import Change
from jaxrl.training.ledger import Ledger
from jaxrl.training.program import Sums
from jaxrl.training.schedule import Schedule
from jaxrl.training.session.parts import Host, SessionState, begun
from jaxrl.training.session.rows import Interval
from jaxrl.training.session.statistics import Statistics
from jaxrl.trees import PyTree


class SavedSession(NamedTuple):
    """What a checkpoint holds of a session."""

    state: PyTree
    sums: Sums
    """Of the metrics since the last row, and of all before."""
    past: Sums
    host: Host


def tree_of(now: SessionState) -> SavedSession:
    """Return the arrays of a checkpoint."""
    return SavedSession(now.state, now.sums, now.past, now.host)


def shapes_of(now: SessionState) -> PyTree:
    """Return their shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_of(now))


def facts_of(now: SessionState) -> dict[str, Any]:
    """Return what only a session has beside its arrays, for JSON."""
    return {
        "steps": now.steps,
        "invalid": now.invalid,
        "statistics": now.statistics.facts(),
        "interval": now.interval.facts(),
    }


def restored(tree: PyTree, facts: Mapping[str, Any], ledger: Ledger, statistics: Statistics) -> SessionState:
    """Return the session of a checkpoint; `statistics` are fresh ones of the present choices.

    Raises:
      KeyError, TypeError, ValueError: `facts` are not what `facts_of` returns.
    """
    state, sums, past, host = tree
    steps, invalid = facts["steps"], facts["invalid"]
    if type(steps) is not int or type(invalid) is not int:
        raise ValueError("steps and invalid are counts")
    statistics, interval = statistics.take_up(facts["statistics"]), Interval().take_up(facts["interval"])
    host = jax.tree.map(np.array, host)
    return SessionState(state, sums, past, host, ledger, steps, invalid, statistics, interval, resumed=True)


def with_changes(now: SessionState, stepwise: Stepwise, schedule: Schedule, changes: Sequence[Change]) -> SessionState:
    """Give a session that was loaded the settings that were allowed to change, if there are such `changes`.

    Raises:
      SettingsError: the processor is among them: what it holds of the running episodes was made by the old one.
    """
    changed = [str(change) for change in changes if change.name.startswith("processor")]
    if changed:
        raise SettingsError(f"{'; '.join(changed)}: a session keeps its processor; go on with that, or begin anew")
    if not changes:
        return now
    state = now.state._replace(agent=set_hyperparams_of(stepwise.agent, now.state.agent))
    changed_at = schedule.opt_steps(count_iterations(stepwise.schedule, now.steps))
    return now._replace(state=state, ledger=replace(now.ledger, changed_at=changed_at))


def for_another_try(now: SessionState) -> SessionState:
    """Return a session that went back, with other random numbers to go on with.

    Its environments did not go back: the running episodes are cut.
    """
    state = reseed(now.state, now.ledger.rollbacks)
    return now._replace(state=state, host=begun(now.host, np.ones_like(now.host.ended)))

"""What a session is between two calls, what a checkpoint holds of it, and the session made of that again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics, Total, stack_metrics
from jaxrl.strategies.guard import reseed
from jaxrl.strategies.interaction import set_hyperparams_of
from jaxrl.strategies.stepwise import (
    Learner,
    PackedProcessor,
    StepResult,
    Stepwise,
    StepwiseState,
    count_iterations,
    learn_once,
)
from jaxrl.training.changes import Change
from jaxrl.training.ledger import Ledger
from jaxrl.training.program import Sums, add
from jaxrl.training.report import Hook
from jaxrl.training.schedule import Schedule
from jaxrl.training.session.inputs import ends
from jaxrl.training.session.rows import Episode, Interval
from jaxrl.training.session.statistics import Statistics
from jaxrl.training.session.trial import Trial
from jaxrl.training.storage.run import Best
from jaxrl.trees import PyTree
from jaxrl.types import Transition


class SessionHooks(NamedTuple):
    """Functions called as a session goes on, each once what it reports has wholly happened; one each, or a list."""

    episode: Hook = None
    """`(episode)`, after each episode."""
    learnt: Hook = None
    """`(learnt)`, after each time that optimisation steps were made."""
    evaluated: Hook = None
    """`(evaluation)`, an `Evaluation`, once the episodes of `evaluate_episodes` are played."""
    save: Hook = None
    """`(opt_steps)`, when a checkpoint is whole on the disk, given its optimisation step."""


class Learnt(Mapping[str, float]):
    """Means of the metrics of the optimisation steps just made, by name; fetched from the device when first read.

    A metric of which nothing was measured, as of a skipped update, is NaN.
    """

    def __init__(self, names: list[str], means: jax.Array) -> None:
        self._names, self._means = names, means
        self._read: dict[str, float] | None = None

    def _values(self) -> dict[str, float]:
        if self._read is None:
            # Reading waits for the device; a loop that reads nothing never waits.
            self._read = dict(zip(self._names, np.asarray(self._means).tolist(), strict=True))
        return self._read

    def __getitem__(self, name: str) -> float:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Learnt({self._values()})"


class Host(NamedTuple):
    """What the host knows of the running episodes; every leaf `[N, ...]`."""

    returns: np.ndarray
    lengths: np.ndarray
    seen: PyTree
    """The latest observations."""
    ended: np.ndarray
    """Whether the next observation begins an episode."""
    spoilt: np.ndarray
    """Whether the latest observation was not finite, so that nothing may be learnt from the step that leaves it."""


class SessionState(NamedTuple):
    """All that a session is between two calls. It is replaced as a whole, so that it is never half of anything."""

    state: StepwiseState
    sums: Sums
    """Of the metrics since the last row."""
    past: Sums
    """Of those before."""
    host: Host
    ledger: Ledger
    steps: int = 0
    """Vector steps taken."""
    invalid: int = 0
    """Steps of one environment that were not finite."""
    statistics: Statistics = Statistics()
    interval: Interval = Interval()
    best: Best | None = None
    chosen: tuple[PyTree, PyTree] | None = None
    """Actions and extras for the latest observations, if they are chosen already."""
    acted: bool = False
    """Whether the actions were given out, and wait for what they lead to."""
    stop: str | None = None
    """Why the session is done, if by an evaluation or because it diverged."""
    trial: Trial | None = None
    """The evaluation that is going on, if one is. It is not saved: a session that is resumed goes on with training."""
    resetting: np.ndarray | None = None
    """Whether the vector of environments begins an episode in its next step instead of acting, `[N]`; not saved."""
    resumed: bool = False
    """Whether the running episodes may have been lost with the process that drove them."""


def begun(host: Host, where: np.ndarray) -> Host:
    """Return `host` once episodes begin `where` `[N]` they do."""
    return host._replace(
        returns=np.where(where, np.float32(0), host.returns),
        lengths=np.where(where, np.int32(0), host.lengths),
        ended=host.ended | where,
    )


def differ(obs: PyTree, seen: PyTree, num_envs: int) -> np.ndarray:
    """Say for each environment whether two observations of it differ; bool `[N]`."""
    other = np.zeros(num_envs, bool)
    for a, b in zip(jax.tree.leaves(obs), jax.tree.leaves(seen), strict=True):
        entries = a != b
        if np.count_nonzero(entries):
            other |= entries.reshape(num_envs, -1).any(axis=1)
    return other


def episodes_of(host: Host, result: StepResult, reset: np.ndarray, opt_steps: int, env_steps: int) -> list[Episode]:
    """Return the episodes that a step ends; `host` is what was known before it, the counts are those after it.

    Where `reset` `[N]`, there was no step.
    """
    reward, terminated, _, _ = result.numbers
    return [
        Episode(
            i, float(host.returns[i] + reward[i]), int(host.lengths[i]) + 1, bool(terminated[i]), opt_steps, env_steps
        )
        for i in np.flatnonzero(ends(result) & ~reset).tolist()
    ]


def over(statistics: Statistics, episodes: list[Episode]) -> Statistics:
    """Take episodes into the statistics."""
    for episode in episodes:
        statistics = statistics.note({**episode.numbers, "terminated": float(episode.terminated)})
    return statistics


def learn_and_sum(
    stepwise: Stepwise, learner: Learner, sums: Sums, items: Transition, window: PackedProcessor, key: Any, t: Any
) -> tuple[Learner, Sums, jax.Array]:
    """Make the optimisation steps of iteration `t`; return also the sums with their metrics added, and their means."""
    learner, metrics = learn_once(stepwise, learner, items, window, key, t)
    return learner, add(sums, metrics), _means(metrics)


def _means(metrics: Metrics) -> jax.Array:
    """Return the means of metrics in the order of their sorted names, NaN of nothing; of events their number."""
    stats = stack_metrics(metrics)
    events = np.array([isinstance(metric, Total) for _, metric in sorted(metrics.items())])
    means = jnp.where(stats.count > 0, stats.sum / jnp.maximum(stats.count, 1), jnp.nan)
    return jnp.where(events, stats.count.astype(jnp.float32), means)


# --- what a checkpoint holds --------------------------------------------------------------------------------------


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
    # Types are checked, since a stranger may have written them.
    steps, invalid = facts["steps"], facts["invalid"]
    if type(steps) is not int or type(invalid) is not int:
        raise ValueError("steps and invalid are counts")
    statistics, interval = statistics.take_up(facts["statistics"]), Interval().take_up(facts["interval"])
    # NumPy again: the loader has made arrays of the device of them.
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

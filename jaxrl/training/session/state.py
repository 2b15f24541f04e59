"""The state of a session between two calls; saving and restoring it."""

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
from jaxrl.training.ledger import Ledger
from jaxrl.training.program import Sums, add
from jaxrl.training.report import Hook
from jaxrl.training.schedule import Schedule
from jaxrl.training.session.evaluation import EpisodeEvaluation
from jaxrl.training.session.inputs import ends
from jaxrl.training.session.statistics import Episode, Interval, Series, Statistics
from jaxrl.training.settings import Change
from jaxrl.training.storage.run import Best
from jaxrl.trees import PyTree
from jaxrl.types import Transition


class SessionHooks(NamedTuple):
    """Callbacks of a session, each called after the event is complete; a function each, or a list."""

    episode: Hook = None
    """`(episode)`, after each episode."""
    learnt: Hook = None
    """`(learnt)`, after the optimisation steps of an iteration."""
    evaluated: Hook = None
    """`(evaluation)`, an `Evaluation`, after the last episode of `evaluate_episodes`."""
    save: Hook = None
    """`(opt_steps)`, when a checkpoint is complete on disk, with its optimisation step."""


class Learnt(Mapping[str, float]):
    """Mean metrics of the latest optimisation steps, by name; fetched from the device when first read.

    A metric without a measurement, as in a skipped update, is NaN.
    """

    def __init__(self, names: list[str], means: jax.Array) -> None:
        self._names, self._means = names, means
        self._read: dict[str, float] | None = None

    def _values(self) -> dict[str, float]:
        if self._read is None:
            # Reading blocks on the device: a loop that reads nothing never waits.
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
    """Host-side state of the running episodes; every leaf is `[N, ...]`."""

    returns: np.ndarray
    lengths: np.ndarray
    seen: PyTree
    """The latest observations."""
    ended: np.ndarray
    """Whether the next observation begins an episode."""
    spoilt: np.ndarray
    """Whether the latest observation was not finite, so that the step from it is not learnt from."""


class Resets(NamedTuple):
    """Resets that a Gymnasium vector, in mode `NEXT_STEP`, makes in place of its next step."""

    due: np.ndarray
    """Whether the next step resets this environment instead of acting, `[N]`."""
    seen: PyTree
    """The last observations of the vector, `[N, ...]`: if others follow, the user has reset it."""


class SessionState(NamedTuple):
    """The complete state of a session between two calls; immutable, so that updates are atomic."""

    state: StepwiseState
    sums: Sums
    """Sums of the metrics since the last row."""
    past: Sums
    """Sums of the metrics before."""
    host: Host
    ledger: Ledger
    steps: int = 0
    """Vector steps taken."""
    invalid: int = 0
    """Environment steps that were not finite."""
    statistics: Statistics = Statistics()
    interval: Interval = Interval()
    recorded: Series = Series()
    """Returns of the episodes in the last row. Not saved."""
    best: Best | None = None
    chosen: tuple[PyTree, PyTree] | None = None
    """Actions and extras for the latest observations, if already chosen."""
    acted: bool = False
    """Whether `act` has returned the actions, and their results are pending."""
    stop: str | None = None
    """Why the session is done, if because of an evaluation or divergence."""
    evaluation: EpisodeEvaluation | None = None
    """The evaluation in progress, if any. It is not saved: a resumed session continues with training."""
    resets: Resets | None = None
    """Resets that are due. They are neither saved nor undone by a rollback, as the user's vector does not go back."""
    resumed: bool = False
    """Whether the running episodes may have been lost with an earlier process."""
    unfinished: np.ndarray | None = None
    """Whether an evaluation began the running episode, so that it is none of training, `[N]`. Not saved."""


def start_episodes(host: Host, where: np.ndarray) -> Host:
    """Return `host` with new episodes started `where` `[N]` true."""
    return host._replace(
        returns=np.where(where, np.float32(0), host.returns),
        lengths=np.where(where, np.int32(0), host.lengths),
        ended=host.ended | where,
    )


def differ(obs: PyTree, seen: PyTree, num_envs: int) -> np.ndarray:
    """Return for each environment whether its two observations differ; bool `[N]`."""
    other = np.zeros(num_envs, bool)
    for a, b in zip(jax.tree.leaves(obs), jax.tree.leaves(seen), strict=True):
        entries = a != b
        if np.count_nonzero(entries):
            other |= entries.reshape(num_envs, -1).any(axis=1)
    return other


def episodes_of(host: Host, result: StepResult, no_end: np.ndarray, opt_steps: int, env_steps: int) -> list[Episode]:
    """Return the episodes that a step ends; `host` is the state before it, the counts are those after it.

    Where `no_end` `[N]`, the step ends no episode of training: it was a reset, or an evaluation began the episode.
    """
    reward, terminated, _, _ = result.numbers
    return [
        Episode(
            i, float(host.returns[i] + reward[i]), int(host.lengths[i]) + 1, bool(terminated[i]), opt_steps, env_steps
        )
        for i in np.flatnonzero(ends(result) & ~no_end).tolist()
    ]


def learn_and_sum(
    stepwise: Stepwise, learner: Learner, sums: Sums, items: Transition, window: PackedProcessor, key: Any, t: Any
) -> tuple[Learner, Sums, jax.Array]:
    """Run the optimisation steps of iteration `t`; return also the updated sums, and the means of the metrics."""
    learner, metrics = learn_once(stepwise, learner, items, window, key, t)
    return learner, add(sums, metrics), _means(metrics)


def _means(metrics: Metrics) -> jax.Array:
    """Return the means of metrics, sorted by name (NaN if empty); for a `Total`, the number of events."""
    stats = stack_metrics(metrics)
    events = np.array([isinstance(metric, Total) for _, metric in sorted(metrics.items())])
    means = jnp.where(stats.count > 0, stats.sum / jnp.maximum(stats.count, 1), jnp.nan)
    return jnp.where(events, stats.count.astype(jnp.float32), means)


# --- checkpoints --------------------------------------------------------------------------------------------------


class SavedSession(NamedTuple):
    """The arrays of a session's checkpoint."""

    state: PyTree
    sums: Sums
    """Sums of the metrics since the last row; `past` has those before."""
    past: Sums
    host: Host


def tree_of(now: SessionState) -> SavedSession:
    """Return the arrays of a checkpoint."""
    return SavedSession(now.state, now.sums, now.past, now.host)


def shapes_of(now: SessionState) -> PyTree:
    """Return the shapes of the arrays of a checkpoint."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_of(now))


def restore_session(tree: PyTree, facts: Mapping[str, Any], ledger: Ledger, statistics: Statistics) -> SessionState:
    """Return the session of a checkpoint; `statistics` are empty ones with the current choices.

    Raises:
      KeyError, TypeError, ValueError: `facts` are not those of a saved session.
    """
    state, sums, past, host = tree
    # Check types: the checkpoint may come from an untrusted source.
    steps, invalid = facts["steps"], facts["invalid"]
    if type(steps) is not int or type(invalid) is not int:
        raise ValueError("steps and invalid are counts")
    interval = Interval.of(statistics).restore(facts["interval"])
    statistics = statistics.restore(facts["statistics"])
    # Convert back to NumPy: the loader returns device arrays.
    host = jax.tree.map(np.array, host)
    return SessionState(state, sums, past, host, ledger, steps, invalid, statistics, interval, resumed=True)


def with_changes(now: SessionState, stepwise: Stepwise, schedule: Schedule, changes: Sequence[Change]) -> SessionState:
    """Apply changed settings, if there are `changes`, to a loaded session.

    Raises:
      SettingsError: the processor has changed: its saved state of the running episodes is from the old one.
    """
    changed = [str(change) for change in changes if change.name.startswith("processor")]
    if changed:
        raise SettingsError(f"{'; '.join(changed)}: a session keeps its processor; go on with that, or begin anew")
    if not changes:
        return now
    state = now.state._replace(agent=set_hyperparams_of(stepwise.agent, now.state.agent))
    changed_at = schedule.opt_steps(count_iterations(stepwise.schedule, now.steps))
    return now._replace(state=state, ledger=replace(now.ledger, changed_at=changed_at))


def with_best(now: SessionState, best: Best | None) -> SessionState:
    """Return a loaded session with the best policy; where that is of a later step, the session learns of its score."""
    ledger = now.ledger if best is None else now.ledger.with_best(best.score, best.opt_steps)
    return now._replace(ledger=ledger, best=best)


def reseed_after_rollback(now: SessionState) -> SessionState:
    """Return a session after a rollback, with another random stream.

    Its environments were not rolled back, so the running episodes are truncated.
    """
    state = reseed(now.state, now.ledger.rollbacks)
    return now._replace(state=state, host=start_episodes(now.host, np.ones_like(now.host.ended)))

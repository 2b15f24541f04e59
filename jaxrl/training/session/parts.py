"""What a session is made of: the records of where it stands, and the parts that its settings ask for."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.base import AgentMaker
from jaxrl.buffers.base import Buffer
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics, Total, columns_of
from jaxrl.processors.base import Processor
from jaxrl.registry import listed, names_of
from jaxrl.spaces import EnvSpec
from jaxrl.strategies.driven import Driven, DrivenState, Learner, StepResult, learn_once
from jaxrl.strategies.interaction import bind, settings_of
from jaxrl.strategies.replay import least_rows, sampled_for, take_turns, told_goals
from jaxrl.training.ledger import Ledger
from jaxrl.training.program import Sums, add
from jaxrl.training.report import Hook
from jaxrl.training.schedule import Schedule
from jaxrl.training.session.rows import Episode, Interval
from jaxrl.training.session.statistics import Statistics
from jaxrl.training.settings import SessionConfig
from jaxrl.training.storage.run import Best
from jaxrl.trees import PyTree


class SessionHooks(NamedTuple):
    """Functions called as a session goes on, each once what it reports has wholly happened; one each, or a list."""

    episode: Hook = None
    """`(episode)`, after each episode."""
    learnt: Hook = None
    """`(learnt)`, after each time that optimisation steps were made."""
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


class Now(NamedTuple):
    """All that a session is between two calls. It is replaced as a whole, so that it is never half of anything."""

    state: DrivenState
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


def ends(result: StepResult) -> np.ndarray:
    """Say for each environment whether its episode ends with a step; bool `[N]`."""
    return np.asarray(result.numbers[1] + result.numbers[2] > 0)


def episodes_of(host: Host, result: StepResult, opt_steps: int, env_steps: int) -> list[Episode]:
    """Return the episodes that a step ends; `host` is what was known before it, the counts are those after it."""
    reward, terminated, _, _ = result.numbers
    return [
        Episode(
            i, float(host.returns[i] + reward[i]), int(host.lengths[i]) + 1, bool(terminated[i]), opt_steps, env_steps
        )
        for i in np.flatnonzero(ends(result)).tolist()
    ]


def over(statistics: Statistics, episodes: list[Episode]) -> Statistics:
    """Take episodes into the statistics."""
    for episode in episodes:
        statistics = statistics.note({**episode.numbers, "terminated": float(episode.terminated)})
    return statistics


def put_together(
    config: SessionConfig, spec: EnvSpec, agent: AgentMaker, buffer: Buffer, processor: Processor
) -> Driven:
    """Put the parts together; raise `SettingsError` for those that do not fit one another."""
    processor, bound = bind(agent, processor, spec)
    if bound.prepare is not None:
        able = listed(names_of("off_policy"), "or")
        raise SettingsError(f"a session learns from replay, and {bound.name} does not; use {able}")
    buffer = sampled_for(bound, told_goals(buffer, processor, spec.name), config.num_envs)
    turns = take_turns(
        horizon=processor.horizon,
        least=least_rows(buffer, config.num_envs),
        num_envs=config.num_envs,
        opt_interval=config.opt_interval,
        updates=config.updates,
        warmup=config.warmup,
        random_warmup=config.random_warmup,
    )
    return Driven(spec, bound, processor, buffer, turns)


def schedule_of(config: SessionConfig, driven: Driven) -> Schedule:
    return Schedule(
        max_opts=config.max_opts,
        opt_steps_per_step=driven.turns.updates,
        env_steps_per_step=driven.turns.rows,
        warmup_env_steps=driven.turns.warmup_env_steps,
        record_interval=config.record_interval,
        save_interval=config.save_interval,
        max_env_steps=config.max_env_steps,
    )


def settings_of_session(config: SessionConfig, driven: Driven, made: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all settings of a session; `made` is what builds one of its environments, if anything does."""
    own = asdict(config)
    del own["run_dir"]  # a run can be moved
    settings = settings_of(driven.agent, driven.processor, driven.spec, made, buffer=driven.buffer.settings, **own)
    return {**settings, "custom": [*settings["custom"], "loop"], "driven": "from outside"}


def learn_and_sum(driven: Driven, learner: Learner, sums: Sums, key: Any, t: Any) -> tuple[Learner, Sums, jax.Array]:
    """Make the optimisation steps of iteration `t`; return also the sums with their metrics added, and their means."""
    learner, metrics = learn_once(driven, learner, key, t)
    return learner, add(sums, metrics), _means(metrics)


def _means(metrics: Metrics) -> jax.Array:
    """Return the means of metrics in the order of their sorted names, NaN of nothing; of events their number."""
    stats = columns_of(metrics)
    events = np.array([isinstance(metric, Total) for _, metric in sorted(metrics.items())])
    means = jnp.where(stats.count > 0, stats.sum / jnp.maximum(stats.count, 1), jnp.nan)
    return jnp.where(events, stats.count.astype(jnp.float32), means)

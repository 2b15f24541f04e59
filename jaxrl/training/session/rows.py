"""The rows of metrics of a session: like a trainer's, over what the loop reported since the previous row."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.training.evaluator import Evaluation, eval_columns
from jaxrl.training.session.statistics import AGGREGATIONS, Statistics

IN_ROWS = ("mean", "min", "max")
"""Default aggregations of a series in rows."""
OF_EPISODES = Statistics({"episode_return": ["mean"], "episode_length": ["mean"]}, window=1)


class Episode(NamedTuple):
    """A finished episode."""

    env: int
    """Index of the environment."""
    episode_return: float
    """Undiscounted."""
    length: int
    terminated: bool
    """Whether it terminated; otherwise it was truncated."""
    opt_steps: int
    """Optimisation steps at its end."""
    env_steps: int

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers for statistics."""
        return {"episode_return": self.episode_return, "episode_length": float(self.length)}


class Interval(NamedTuple):
    """Host-side statistics since the previous row; metrics of the updates are in the sums on the device."""

    statistics: Statistics = OF_EPISODES
    terminated: int = 0
    """Number of terminated episodes."""
    opt_steps: int = 0
    """Value at the start of the interval, like those below."""
    env_steps: int = 0
    invalid: int = 0
    wall: float = 0.0
    """Seconds of the session."""

    def over(self, episodes: list[Episode]) -> "Interval":
        """Add finished episodes."""
        statistics = self.statistics
        for episode in episodes:
            statistics = statistics.note(episode.numbers)
        ends = sum(episode.terminated for episode in episodes)
        return self._replace(statistics=statistics, terminated=self.terminated + ends)

    def add_notes(self, values: Mapping[str, float | None]) -> "Interval":
        """Add numbers noted by the user."""
        return self._replace(statistics=self.statistics.note({f"info/{name}": x for name, x in values.items()}))

    def columns(
        self, opt_steps: int, env_steps: int, invalid: int, wall: float, chosen: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """Return the columns of a row at these counts; speeds are per wall-clock second, the user's loop included.

        `chosen` has the aggregations of noted numbers by name, in place of the default `IN_ROWS`.
        """
        seconds = wall - self.wall
        rates = {"opt_steps_per_sec": opt_steps - self.opt_steps, "env_steps_per_sec": env_steps - self.env_steps}
        columns: dict[str, Any] = {name: steps / seconds if seconds > 0 else None for name, steps in rates.items()}
        for name, series in self.statistics.series.items():
            kinds = chosen.get(name.removeprefix("info/"), IN_ROWS) if name.startswith("info/") else IN_ROWS
            for kind in kinds:
                number = AGGREGATIONS[kind](series) if series.count else None
                columns[name if kind == "mean" else f"{name}_{kind}"] = number
        # Episodes whose return overflowed count, too.
        returns = self.statistics.series["episode_return"]
        episodes = returns.count + returns.not_finite
        return {
            **columns,
            "episodes": episodes,
            "terminated": self.terminated,
            "truncated": episodes - self.terminated,
            "invalid_steps": invalid - self.invalid,
        }

    def facts(self) -> dict[str, Any]:
        """Return the interval as a dict, for JSON."""
        return {**self._asdict(), "statistics": self.statistics.facts()}

    def take_up(self, facts: Mapping[str, Any]) -> "Interval":
        """Return the interval from `facts()`; raise `ValueError` if they are malformed."""
        like = Interval()._asdict()
        if not isinstance(facts, Mapping) or facts.keys() != like.keys():
            raise ValueError(f"expected an interval of {', '.join(like)}")
        if any(type(facts[name]) not in (type(x), int) for name, x in like.items() if name != "statistics"):
            raise ValueError("an interval is made of numbers")
        return Interval(**{**facts, "statistics": OF_EPISODES.take_up(facts["statistics"])})


def score_columns(score: float, is_best: bool, interval: Interval) -> dict[str, Any]:
    """Return the columns of the score of a policy, evaluated during `interval`."""
    returns = interval.statistics.series["episode_return"]
    train_return = returns.mean if returns.count else None
    return {"eval_reward": score, "score": score, "is_best": is_best, "train_return": train_return}


def columns_of_trial(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the further columns of a score from an evaluation, named as in a trainer's row; none without one."""
    if evaluation is None:
        return {}
    columns = eval_columns(evaluation, 0.0, None, False)
    return {name: columns[name] for name in ("eval_reward_std", "eval_reward_min", "eval_reward_max", "eval_length")}

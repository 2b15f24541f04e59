"""Host-side state of a run: counters, scores and timings."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.training.sanity import Extremes, extremes, support_missed, values_beyond
from jaxrl.training.schedule import Schedule
from jaxrl.training.settings import RunConfig

PARTS = ("compile", "init", "train", "evaluate", "confirm", "record", "save")
ACTIVITIES = {
    "compile": "the compilation",
    "init": "the initialisation",
    "evaluate": "the evaluation",
    "confirm": "the evaluation",
    "save": "the save",
}
"""Parts that may take long, in words for messages."""


@dataclass
class Ledger:
    """Exact counters, scores and timings in seconds; saved with every checkpoint."""

    t: int = 0
    """Iterations done."""
    best_score: float | None = None
    best_opt_steps: int | None = None
    last_score: float | None = None
    evals_without_best: int = 0
    rollbacks: int = 0
    """Number of rollbacks to a checkpoint."""
    tries: int = 0
    """Rollbacks since the run last made progress."""
    changed_at: int = 0
    """Optimisation step of the last change to settings or versions that decide the training; 0: never."""
    interval_start: int = 0
    """First iteration of the current interval of metrics."""
    interval_s: float = 0.0
    """Seconds of training in the current interval."""
    wall_s: float = 0.0
    """Seconds of the run before it was last started or resumed."""
    seen_reward: float = 0.0
    """Largest magnitude of a reward so far; likewise the two below, see `sanity.Extremes`."""
    seen_discount: float = 0.0
    seen_bonus: float = 0.0
    warned_values: bool = False
    """Whether a warning about values beyond all possible returns was logged."""
    warned_support: bool = False
    """Whether a warning about a support that is too narrow was logged."""
    warned_greedy: bool = False
    """Whether a warning about greedy actions that return far less than sampled ones was logged."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _begun: float = field(default_factory=lambda: time.perf_counter())

    # Not fields, so not saved: seconds of training since the last save in this process, and the part being timed.
    unsaved_s = 0.0
    doing = ""

    @property
    def wall(self) -> float:
        """Total seconds of the run."""
        return self.wall_s + time.perf_counter() - self._begun

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the duration of the block to `part`."""
        # Parts may be nested: restore the outer one afterwards.
        begun, before, self.doing = time.perf_counter(), self.doing, part
        try:
            yield
        finally:
            self.doing = before
            self.seconds[part] += time.perf_counter() - begun

    @property
    def activity(self) -> str:
        """What the run will finish before it stops, in words for messages."""
        return ACTIVITIES.get(self.doing, "this part of the training")

    def record_training(self, t: int, seconds: float) -> None:
        """Record that training advanced to iteration `t`, in `seconds`."""
        self.t = t
        self.seconds["train"] += seconds
        self.interval_s += seconds
        self.unsaved_s += seconds

    def is_better(self, score: float) -> bool:
        """Return whether `score` is finite and strictly greater than the best."""
        return math.isfinite(score) and (self.best_score is None or score > self.best_score)

    def record_score(self, score: float, opt_steps: int, again: float | None = None) -> bool:
        """Record the score of an evaluation; return whether it is the best.

        The score of a confirmation, `again`, must also beat the best, and is the one recorded as best.
        """
        kept = score if again is None else again
        is_best = self.is_better(score) and self.is_better(kept)
        self.last_score = score if math.isfinite(score) else None
        self.evals_without_best = 0 if is_best else self.evals_without_best + 1
        if is_best:
            self.best_score, self.best_opt_steps = kept, opt_steps
        return is_best

    def limit_reached(self, config: RunConfig, mean_return: float) -> str | None:
        """Return the limit that a recorded evaluation has reached, `stop_reward` or `patience`, or `None`."""
        if config.stop_reward is not None and mean_return >= config.stop_reward:
            return "stop_reward"
        return "patience" if config.patience and self.evals_without_best >= config.patience else None

    def watch(self, row: Mapping[str, Any], agent: Mapping[str, Any]) -> dict[str, str]:
        """Check a row of metrics; return warnings by the name of their event, each once in a run."""
        allowed = extremes(row, agent, Extremes(self.seen_reward, self.seen_discount, self.seen_bonus))
        self.seen_reward, self.seen_discount, self.seen_bonus = allowed
        warnings: dict[str, str] = {}
        if not self.warned_values and (message := values_beyond(row, agent, allowed)):
            self.warned_values, warnings["values"] = True, message
        if not self.warned_support and (message := support_missed(row, agent)):
            self.warned_support, warnings["support"] = True, message
        return warnings

    def with_best(self, score: float, opt_steps: int) -> "Ledger":
        """Return this ledger with the score of the best policy on disk, maybe of a later step, if it is better."""
        return replace(self, best_score=score, best_opt_steps=opt_steps) if self.is_better(score) else self

    def forget_scores(self) -> None:
        """Reset the best score, as old scores are not comparable with new ones."""
        self.best_score, self.best_opt_steps, self.evals_without_best = None, None, 0

    @property
    def has_scores(self) -> bool:
        """Whether any evaluation was recorded."""
        return self.best_score is not None or self.evals_without_best > 0

    def counters(self, schedule: Schedule) -> dict[str, int]:
        """Return the exact counters that every row begins with."""
        return {"opt_steps": schedule.opt_steps(self.t), "env_steps": schedule.env_steps(self.t)}

    def rates(self, schedule: Schedule, iterations: int, seconds: float) -> dict[str, float | None]:
        """Return steps per second of training, without compilation, evaluation and saving."""
        rate = iterations / seconds if seconds and iterations else None
        return {
            "opt_steps_per_sec": rate and rate * schedule.opt_steps_per_step,
            "env_steps_per_sec": rate and rate * schedule.env_steps_per_step,
        }

    def for_next_call(self, wall: float) -> "Ledger":
        """Return this ledger for a run that continues in the same process, after `wall` seconds."""
        return replace(self, wall_s=wall, _begun=time.perf_counter())

    def facts(self) -> dict[str, Any]:
        """Return the ledger as a dict for a checkpoint."""
        facts = {**asdict(self), "wall_s": self.wall}
        del facts["_begun"]
        return facts

    def restore(self, facts: dict[str, Any]) -> "Ledger":
        """Return the ledger of a run that resumes from `facts`, with the seconds of this process added.

        Raises:
          ValueError: `facts` are not from `facts()`.
        """
        _check(facts)
        seconds = {part: facts["seconds"][part] + self.seconds[part] for part in PARTS}
        return Ledger(**{**facts, "seconds": seconds, "_begun": self._begun})

    def roll_back(self, facts: Mapping[str, Any] | None) -> "Ledger":
        """Return the ledger after a rollback to the checkpoint with `facts`, or to the start if `None`.

        It keeps time, best score and tries.
        """
        there = Ledger().facts() if facts is None else facts
        back = Ledger(**{**there, "seconds": self.seconds, "wall_s": self.wall_s, "_begun": self._begun})
        back.best_score, back.best_opt_steps = self.best_score, self.best_opt_steps
        # Restoring the tries too would let a run roll back for ever.
        back.rollbacks, back.tries = self.rollbacks + 1, self.tries + 1
        return back

    def before_rollback(self) -> "Ledger":
        """Return this ledger without the rollback just made, for a checkpoint that leads to it again."""
        return replace(self, rollbacks=self.rollbacks - 1, tries=self.tries - 1)

    def summary(self, schedule: Schedule) -> dict[str, Any]:
        """Return counters, speeds, scores, and seconds, in total and by part."""
        wall = self.wall
        return {
            **self.counters(schedule),
            **self.rates(schedule, self.t, self.seconds["train"]),
            "best_score": self.best_score,
            "best_opt_steps": self.best_opt_steps,
            "last_score": self.last_score,
            "rollbacks": self.rollbacks,
            "wall_s": wall,
            "seconds": {**self.seconds, "other": max(0.0, wall - sum(self.seconds.values()))},
        }


def _check(facts: Any) -> None:
    """Raise `ValueError` unless `facts` have the names and types of `Ledger.facts`."""
    like = Ledger().facts()
    if not isinstance(facts, dict) or facts.keys() != like.keys() or not isinstance(facts["seconds"], dict):
        raise ValueError(f"expected counters named {', '.join(like)}")
    if facts["seconds"].keys() != like["seconds"].keys():
        raise ValueError(f"expected seconds of {', '.join(PARTS)}")
    for name, value in [*facts.items(), *facts["seconds"].items()]:
        kind = type(like.get(name))
        if kind is bool:
            good, wanted = type(value) is bool, "true or false"
        elif kind is int:
            good, wanted = type(value) is int and value >= 0, "a count"
        else:  # a score may be none
            good, wanted = type(value) in (int, float) or (value is None and kind is not float), "a number"
        if not good and name != "seconds":
            raise ValueError(f"{name} is {value!r}; expected {wanted}")


def require_counters(checkpoint: str, step: int, facts: Mapping[str, Any], counted: Mapping[str, int]) -> None:
    """Raise `SettingsError` unless the counters under the current settings, `counted`, are those of the checkpoint."""
    saved = {"opt_steps": step, "env_steps": facts.get("env_steps")}
    if counted != saved:
        raise SettingsError(
            f"checkpoint {checkpoint} was made after {saved}, which under these settings would be {counted}; "
            "keep num_envs, opt_interval, updates and warmup, or of rollouts num_envs, rollout, epochs and minibatches"
        )

"""What the host knows of a run: where it is, how good it was, and where the time went."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxrl.training.sanity import Extremes, extremes, support_missed, values_beyond
from jaxrl.training.schedule import Schedule

PARTS = ("compile", "init", "train", "evaluate", "confirm", "record", "save")
ACTIVITIES = {
    "compile": "the compilation",
    "init": "the initialisation",
    "evaluate": "the evaluation",
    "confirm": "the evaluation",
    "save": "the save",
}
"""Those that may take long, for a person to read."""


@dataclass
class Ledger:
    """Exact counters, scores and seconds; saved with every checkpoint."""

    t: int = 0
    """Iterations done."""
    best_score: float | None = None
    best_opt_steps: int | None = None
    last_score: float | None = None
    evals_without_best: int = 0
    rollbacks: int = 0
    """Times that the run went back to a checkpoint."""
    tries: int = 0
    """Of those, times since it last got further."""
    changed_at: int = 0
    """Optimisation step at which settings or versions last changed that decide the training; 0: never."""
    interval_start: int = 0
    """Iteration at which the running interval of metrics began."""
    interval_s: float = 0.0
    """Seconds of training in it."""
    wall_s: float = 0.0
    """Seconds of the run before this process took it up."""
    seen_reward: float = 0.0
    """The largest size of a reward so far, as are those below; see `sanity.Extremes`."""
    seen_discount: float = 0.0
    seen_bonus: float = 0.0
    told_values: bool = False
    """Whether values beyond all returns were reported."""
    told_support: bool = False
    """Whether a support too narrow was reported."""
    unsaved_s = 0.0  # seconds of training since the last save in this process; no field, for no checkpoint needs it
    doing = ""  # a part in which time is spent now; no field, for no checkpoint needs it
    told_greedy: bool = False
    """Whether it was reported that greedy actions return far less than sampled ones."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _begun: float = field(default_factory=lambda: time.perf_counter())

    def __post_init__(self) -> None:
        self.told_values, self.told_support = bool(self.told_values), bool(self.told_support)

    @property
    def wall(self) -> float:
        """Seconds of the run in all."""
        return self.wall_s + time.perf_counter() - self._begun

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to `part`."""
        # Parts may be nested: the outer one is what is done again afterwards.
        begun, before, self.doing = time.perf_counter(), self.doing, part
        try:
            yield
        finally:
            self.doing = before
            self.seconds[part] += time.perf_counter() - begun

    @property
    def activity(self) -> str:
        """What a run that is to stop finishes first, for a person to read."""
        return ACTIVITIES.get(self.doing, "this part of the training")

    def trained(self, t: int, seconds: float) -> None:
        """Take note that training reached iteration `t` in `seconds`."""
        self.t = t
        self.seconds["train"] += seconds
        self.interval_s += seconds
        self.unsaved_s += seconds

    def is_better(self, score: float) -> bool:
        """Say whether `score` is better than the best: strictly greater, NaN and infinity never."""
        return math.isfinite(score) and (self.best_score is None or score > self.best_score)

    def record_score(self, score: float, opt_steps: int, again: float | None = None) -> bool:
        """Take note of an evaluation; say whether it is the best.

        Where a candidate was evaluated `again`, that score must be better than the best too, and is the one kept.
        """
        kept = score if again is None else again
        is_best = self.is_better(score) and self.is_better(kept)
        self.last_score = score if math.isfinite(score) else None
        self.evals_without_best = 0 if is_best else self.evals_without_best + 1
        if is_best:
            self.best_score, self.best_opt_steps = kept, opt_steps
        return is_best

    def watch(self, row: Mapping[str, Any], agent: Mapping[str, Any]) -> dict[str, str]:
        """Take note of a row of metrics; return what is wrong with it, by the name of the event, each once in a run."""
        allowed = extremes(row, agent, Extremes(self.seen_reward, self.seen_discount, self.seen_bonus))
        self.seen_reward, self.seen_discount, self.seen_bonus = allowed
        said: dict[str, str] = {}
        if not self.told_values and (message := values_beyond(row, agent, allowed)):
            self.told_values, said["values"] = True, message
        if not self.told_support and (message := support_missed(row, agent)):
            self.told_support, said["support"] = True, message
        return said

    def forget_scores(self) -> None:
        """Begin anew to look for the best: scores from now on mean something else."""
        self.best_score, self.best_opt_steps, self.evals_without_best = None, None, 0

    @property
    def has_scores(self) -> bool:
        """Whether anything has been evaluated."""
        return self.best_score is not None or self.evals_without_best > 0

    def counters(self, schedule: Schedule) -> dict[str, int]:
        """Return the exact counts that every row begins with."""
        return {"opt_steps": schedule.opt_steps(self.t), "env_steps": schedule.env_steps(self.t)}

    def rates(self, schedule: Schedule, iterations: int, seconds: float) -> dict[str, float | None]:
        """Return steps per second of training, compile, evaluation and saving left out."""
        rate = iterations / seconds if seconds and iterations else None
        return {
            "opt_steps_per_sec": rate and rate * schedule.opt_steps_per_step,
            "env_steps_per_sec": rate and rate * schedule.env_steps_per_step,
        }

    def taken_up(self, wall: float) -> "Ledger":
        """Return this ledger for a run that goes on in the same process, after `wall` seconds of its own."""
        return replace(self, wall_s=wall, _begun=time.perf_counter())

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the ledger."""
        facts = {**asdict(self), "wall_s": self.wall}
        del facts["_begun"]
        return facts

    def restored(self, facts: dict[str, Any]) -> "Ledger":
        """Return the ledger of a run that goes on from `facts`, with the seconds that this process has spent.

        Raises:
          ValueError: `facts` are not what `facts()` returns.
        """
        _check(facts)
        seconds = {part: facts["seconds"].get(part, 0.0) + self.seconds[part] for part in PARTS}
        return Ledger(**{**facts, "seconds": seconds, "_begun": self._begun})

    def rolled_back(self, facts: dict[str, Any]) -> "Ledger":
        """Return the ledger of this run once it is back where `facts` were written; time and best are not undone."""
        back = Ledger(**{**facts, "seconds": self.seconds, "wall_s": self.wall_s, "_begun": self._begun})
        back.best_score, back.best_opt_steps = self.best_score, self.best_opt_steps
        # Time, the best score and tries are not undone, or a run could go back for ever.
        back.rollbacks, back.tries = self.rollbacks + 1, self.tries + 1
        return back

    def summary(self, schedule: Schedule) -> dict[str, Any]:
        """Return counters, speeds, scores, and seconds by part and in all."""
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
    """Raise `ValueError` unless `facts` have the names and types that `Ledger.facts` gives them."""
    like = Ledger().facts()
    if not isinstance(facts, dict) or facts.keys() != like.keys() or not isinstance(facts["seconds"], dict):
        raise ValueError(f"expected counters named {', '.join(like)}")
    for name, value in [*facts.items(), *facts["seconds"].items()]:
        if type(like.get(name)) is bool:
            if type(value) is not bool:
                raise ValueError(f"{name} is {value!r}; expected true or false")
            continue
        count = type(like.get(name)) is int
        if count and (type(value) is not int or value < 0):
            raise ValueError(f"{name} is {value!r}; expected a count")
        if value is None and type(like.get(name)) is float:
            raise ValueError(f"{name} is None; expected a number")
        if not count and name != "seconds" and value is not None and type(value) not in (int, float):
            raise ValueError(f"{name} is {value!r}; expected a number")

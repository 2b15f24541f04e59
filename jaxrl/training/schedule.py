"""The schedule of a run: a pure function from settings to the next boundary, in exact integers."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxrl.errors import SettingsError, check_count

MAX_COUNT = 2**32 - 1
"""Maximum of the uint32 counters of iterations and optimisation steps on the device."""


@dataclass(frozen=True)
class Schedule:
    """Length, intervals and limits of a run, in optimisation steps unless named otherwise; an interval of 0 is off."""

    max_opts: int
    opt_steps_per_step: int = 1
    env_steps_per_step: int = 1
    """0 for a strategy that learns from data only."""
    warmup_env_steps: int = 0
    eval_interval: int = 0
    record_interval: int = 0
    save_interval: int | None = 0
    """`None`: saves are timed by the clock, so only the last boundary saves."""
    max_env_steps: int = 0
    """Limit of environment steps, warm-up included; 0: none."""

    def __post_init__(self) -> None:
        for name in ("max_opts", "opt_steps_per_step"):
            check_count(name, getattr(self, name))
        intervals = ("eval_interval", "record_interval", "save_interval")
        for name in ("env_steps_per_step", "warmup_env_steps", "max_env_steps", *intervals):
            if name != "save_interval" or self.save_interval is not None:
                check_count(name, getattr(self, name), least=0)
        if self.max_env_steps and not self.env_steps_per_step:
            raise SettingsError(
                f"max_env_steps is {self.max_env_steps}, but training takes no environment steps; set max_opts instead"
            )
        if self.max_opts > MAX_COUNT:
            raise SettingsError(f"max_opts is {self.max_opts}; at most {MAX_COUNT} optimisation steps can be counted")
        iterations = self.last + self.warmup_env_steps // max(1, self.env_steps_per_step) + 1
        if iterations > MAX_COUNT:
            raise SettingsError(f"the run takes {iterations} iterations; at most {MAX_COUNT} can be counted")
        over = self.max_opts % self.opt_steps_per_step
        if over:
            below = self.max_opts - over
            fits = [n for n in (below, below + self.opt_steps_per_step) if n > 0]
            raise SettingsError(
                f"max_opts {self.max_opts} is not a multiple of the {self.opt_steps_per_step} optimisation steps of an "
                f"iteration; the nearest that is: {' or '.join(map(str, fits))}"
            )

    def opt_steps(self, t: int) -> int:
        """Return the number of optimisation steps after `t` iterations."""
        return t * self.opt_steps_per_step

    def env_steps(self, t: int) -> int:
        """Return the number of environment steps after `t` iterations, warm-up included."""
        return self.warmup_env_steps + t * self.env_steps_per_step

    def limit(self, t: int) -> str:
        """Return the name of the limit that a run which ends after `t` iterations has reached."""
        return "max_opts" if self.opt_steps(t) >= self.max_opts else "max_env_steps"

    def nothing_left(self, t: int) -> str:
        """Return the message for continuing a finished run, after `t` iterations."""
        limit = self.limit(t)
        how = "as in train(max_opts=...)" if limit == "max_opts" else "in another Trainer"
        return f"nothing is left to train: {limit} {getattr(self, limit)} is reached; give a larger one, {how}"

    def is_regular_save(self, opt_steps: int) -> bool:
        """Return whether a save after `opt_steps` is due by its interval, rather than because of an interrupt."""
        return self.save_interval is None or self.is_due(self.save_interval, opt_steps)

    def is_due(self, interval: int, opt_steps: int) -> bool:
        """Return whether what happens at an interval is due after `opt_steps`, the end of an iteration."""
        # At or past a multiple by less than one iteration, and never at 0.
        return bool(interval) and opt_steps % interval < min(opt_steps, self.opt_steps_per_step)

    @property
    def last(self) -> int:
        """The last iteration of the run."""
        last = self.max_opts // self.opt_steps_per_step
        if self.max_env_steps:
            # The warm-up counts as environment steps, but at least one iteration is run.
            left = max(self.max_env_steps - self.warmup_env_steps, 1)
            last = min(last, -(-left // self.env_steps_per_step))
        return last


def round_to_iterations(max_opts: int, opt_steps_per_step: int) -> int:
    """Round `max_opts` up to whole iterations; return an invalid value unchanged."""
    if not isinstance(max_opts, int) or max_opts < 1:
        return max_opts
    rounded = -(-max_opts // opt_steps_per_step) * opt_steps_per_step
    return rounded if rounded <= MAX_COUNT else max_opts


class Boundary(NamedTuple):
    """A point between two iterations, with the actions due there, in order."""

    t: int
    evaluate: bool
    record: bool
    save: bool
    last: bool


def next_boundary(schedule: Schedule, t: int) -> Boundary:
    """Return the first boundary after iteration `t`.

    An interval is due at the first iteration boundary at or past each of its multiples; at the end, all three are.
    """
    intervals = (schedule.eval_interval, schedule.record_interval, schedule.save_interval or 0)
    turns = [_next_turn(schedule, interval, t) for interval in intervals]
    at = min([schedule.last, *(turn for turn in turns if turn is not None)])
    last = at == schedule.last
    evaluate, record, save = (last or turn == at for turn in turns)
    return Boundary(at, evaluate, record, save, last)


def _next_turn(schedule: Schedule, interval: int, t: int) -> int | None:
    if not interval:
        return None
    # The next multiple of the interval, and the iteration that reaches it.
    multiple = (schedule.opt_steps(t) // interval + 1) * interval
    return -(-multiple // schedule.opt_steps_per_step)

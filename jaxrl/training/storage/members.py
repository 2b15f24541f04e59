"""Members of a population, their part in a checkpoint, and which runs a user means."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import JaxrlError, NoCheckpointError, SettingsError, check_count
from jaxrl.paths import local
from jaxrl.training.storage.population_files import MemberFiles
from jaxrl.training.storage.run_dir import (
    member_dir,
    number_of,
    population_dir,
    read_members,
    read_settings,
    require_run,
)

POPULATION = "population"
"""The entry of a population's `config.yaml` that defines its members."""


class Membership:
    """A run's membership in a population, by default none.

    It is saved in a member's checkpoints: the member's number, and the scores from which a search repeats its earlier
    decisions. So resuming needs no log, and members cannot be confused.
    """

    def __init__(self, number: int | None = None) -> None:
        """Create the membership of the member `number`."""
        self.number = number
        self.reports_before_training = False
        """Whether to report before any training, so that a search may hold the member there."""
        self.defers_best = False
        """Whether a best policy is written with the next checkpoint, and not at once."""
        self.gates: Sequence[int] = ()
        """Optimisation steps at which a search decides, in ascending order."""
        self.files: MemberFiles | None = None
        """Its files among the population's, if these are stored."""
        self.scores: dict[int, float] = {}
        """Scores of the first evaluation at or past each gate and of the newest one, by optimisation steps."""
        self.adopted_at = 0
        """Optimisation steps at which it last copied another member; 0: never."""

    def record_score(self, opt_steps: int, score: float) -> None:
        """Record a score; of two at the same step the first counts, as in the search."""
        self.scores.setdefault(opt_steps, score)
        # Retain the first score at or past each gate, by which a search decides, and the newest: a score decides if
        # there are more gates up to it than up to the one before.
        steps = sorted(self.scores)
        gates = [0, *(bisect_right(self.gates, step) for step in steps)]
        deciding = {step for step, before, now in zip(steps, gates, gates[1:], strict=False) if before < now}
        self.scores = {step: x for step, x in self.scores.items() if step in deciding or step == opt_steps}

    def facts(self) -> dict[str, Any]:
        """Return the membership as facts of a checkpoint."""
        if self.number is None:
            return {}
        # JSON has no NaN.
        scores = [[step, score if math.isfinite(score) else None] for step, score in self.scores.items()]
        return {"member": {"number": self.number, "scores": scores, "adopted_at": self.adopted_at}}

    def restore(self, facts: Mapping[str, Any], path: Path | None) -> None:
        """Restore the membership from the facts of a checkpoint of the run in `path`.

        Raises:
          SettingsError: the checkpoint is of another member or of a single run.
          NoCheckpointError: the facts are not of the form that `facts()` returns.
        """
        if self.number is None:
            return
        try:
            saved = facts.get("member") or {"number": None, "scores": (), "adopted_at": 0}
            number, at = saved["number"], int(saved["adopted_at"])
            scores = {int(step): math.nan if score is None else float(score) for step, score in saved["scores"]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise NoCheckpointError(f"what {path} has saved of its place in the population is damaged") from error
        if number != self.number:
            found = "a run of its own" if number is None else f"member {str(number)[:20]}"
            raise SettingsError(
                f"{path} holds {found}, not member {self.number} of the population; give it back its name"
            )
        self.scores, self.adopted_at = scores, at


def require_no_member(run_dir: str | Path) -> None:
    """Raise `SettingsError` if `run_dir` is among the members of a population."""
    path = Path(run_dir).resolve()
    if (population := population_dir(path)) is None:
        return
    try:
        if population_of(population) is None:
            return
    except JaxrlError:
        return  # its settings are damaged, so it cannot be resumed anyway
    raise SettingsError(
        f"{run_dir} is among the members of the population {population}, which go on together; resume that, or "
        f"go on with a copy of one member, by jaxrl.extract({str(population)!r}, {max(number_of(path), 0)}, ...)"
    )


def population_of(path: str | Path) -> dict[str, Any] | None:
    """Return the definition of the population in the directory `path`, or `None` if it holds a single run."""
    found = read_settings(Path(path)).get(POPULATION)
    return found if isinstance(found, dict) else None


def resolve(run_dir: str | Path, member: int | None = None) -> Path:
    """Return the path of a run: `run_dir` itself or, of a population, that of `member` (default: the best).

    The best member has the highest best score, of equal ones the lowest number.

    Raises:
      SettingsError: `member` is no number, none of the members, or given for a single run.
    """
    path = Path(local(run_dir))
    require_run(path)
    if population_of(path) is None:
        if member is not None:
            raise SettingsError(f"{run_dir} is a run of its own, and has no member {member}; leave the member out")
        return path
    members = read_members(path)
    if not (there := list(members)):
        raise SettingsError(f"{run_dir} has no members yet")
    if member is None:
        scores = {number: one.metadata.get("best_score") for number, one in members.items()}
        known = {number: score for number, score in scores.items() if isinstance(score, int | float)}
        return member_dir(path, max(known, key=lambda number: known[number]) if known else there[0])
    if (member := check_count("member", member, least=0)) not in there:
        raise SettingsError(f"{run_dir} has no member {member}; expected {there[0]} to {there[-1]}")
    return member_dir(path, member)


def runs_of(run_dir: str | Path, member: int | None = None) -> list[Path]:
    """Return the path of a single run, or those of all members of a population, or of `member` only."""
    run_dir = Path(local(run_dir))
    if member is not None or population_of(run_dir) is None:
        return [resolve(run_dir, member)]
    return [member_dir(run_dir, number) for number in read_members(run_dir)]

"""Where the members of a population are."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import JaxrlError, NoCheckpointError, SettingsError
from jaxrl.paths import local
from jaxrl.training.storage.run_dir import CONFIG, read_metadata, read_yaml, require_run

MEMBERS, POPULATION = "members", "population"
"""The folder of a population's members, and the entry of its `config.yaml` that says what they are."""


class Membership:
    """The place of a run in a population, by default in none.

    A member's checkpoints hold it: which member they are of, and what a search must know to decide again what it
    decided. So no log is needed to go on, and no member can be taken for another.
    """

    def __init__(self, number: int | None = None) -> None:
        """Take the place of this number."""
        self.number = number
        self.announces = self.saves_best_late = False
        """Whether to report before any training; whether to write a best policy with the next checkpoint."""
        self.gates: Sequence[int] = ()
        """Optimisation steps at which a search decides."""
        self.stores: Callable[[str], Any] | None = None
        """What it keeps, by name, as a part of what all members keep."""
        self.scores: dict[int, float] = {}
        """By optimisation steps: of the first evaluation at or past each gate, and of the newest."""
        self.adopted_at = 0
        """Optimisation steps after which it last took over from another member; 0: never."""

    def evaluated(self, opt_steps: int, score: float) -> None:
        """Keep a score; of two at the same place the first counts, as in the search."""
        self.scores.setdefault(opt_steps, score)
        # Of each gate, the first score at or past it, which is what a search decides by; the rest but the newest is let
        # go.
        deciding = {min((step for step in self.scores if step >= gate), default=opt_steps) for gate in self.gates}
        self.scores = {step: x for step, x in self.scores.items() if step in deciding or step == opt_steps}

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        if self.number is None:
            return {}
        # JSON has no NaN.
        scores = [[step, score if math.isfinite(score) else None] for step, score in self.scores.items()]
        return {"member": {"number": self.number, "scores": scores, "adopted_at": self.adopted_at}}

    def restore(self, facts: Mapping[str, Any], path: Path | None) -> None:
        """Take up what a checkpoint of the run in `path` holds.

        Raises:
          SettingsError: that is another member's, or that of a run of its own.
          NoCheckpointError: it is not what `facts()` returns.
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


def member_dir(population: str | Path, number: int) -> Path:
    """Return the directory of a member."""
    return Path(population) / MEMBERS / f"{number:05d}"


def group_of(run_dir: Path) -> Path | None:
    """Return the directory of the population that the run in `run_dir` is a member of, or `None`."""
    group = run_dir.parent.parent
    return group if run_dir.parent.name == MEMBERS and (group / CONFIG).is_file() else None


def require_no_member(run_dir: str | Path | None) -> None:
    """Raise `SettingsError` if a run in `run_dir` would be among the members of a population."""
    path = Path(run_dir or ".").resolve()
    group = None if run_dir is None else group_of(path)
    if group is None:
        return
    try:
        if population_of(group) is None:
            return
    except JaxrlError:
        return  # its settings are damaged, so that nobody goes on with it
    raise SettingsError(
        f"{run_dir} is among the members of the population {group}, which go on together; resume that, or go on with "
        f"a copy of one member, by jaxrl.extract({str(group)!r}, {int(path.name) if path.name.isdecimal() else 0}, ...)"
    )


def population_of(path: str | Path) -> dict[str, Any] | None:
    """Return what makes the population in the directory `path`, or `None` if a run of its own is there."""
    found = read_yaml(Path(path) / CONFIG).get(POPULATION)
    return found if isinstance(found, dict) else None


def resolve(run_dir: str | Path, member: int | None = None) -> Path:
    """Return the directory of a run: itself, or of a population that of `member`, by default of the best.

    The best is that of the highest best score; of equal ones the first.

    Raises:
      SettingsError: there is no such member, or this is no population.
    """
    path = Path(local(run_dir))
    require_run(path)
    if population_of(path) is None:
        if member is not None:
            raise SettingsError(f"{run_dir} is a run of its own, and has no member {member}; leave the member out")
        return path
    there = [int(found.name) for found in runs_of(path)]
    if not there:
        raise SettingsError(f"{run_dir} has no members yet")
    if member is None:
        scores = {number: read_metadata(member_dir(path, number)).get("best_score") for number in there}
        known = {number: score for number, score in scores.items() if isinstance(score, int | float)}
        return member_dir(path, max(known, key=lambda number: known[number]) if known else there[0])
    if member not in there:
        raise SettingsError(f"{run_dir} has no member {member}; expected {there[0]} to {there[-1]}")
    return member_dir(path, member)


def runs_of(run_dir: str | Path, member: int | None = None) -> list[Path]:
    """Return the run in a directory, or of a population all its members, or `member` alone."""
    run_dir = Path(local(run_dir))
    if member is not None or population_of(run_dir) is None:
        return [resolve(run_dir, member)]
    folders = (path for path in (run_dir / MEMBERS).glob("*") if path.name.isascii() and path.name.isdecimal())
    return sorted(path for path in folders if path == member_dir(run_dir, int(path.name)))

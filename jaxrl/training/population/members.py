"""Members of a population in training: starting and continuing them, a search's gates, scheduling, and checks."""

import heapq
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrl import streams
from jaxrl.errors import DivergedError, NoCheckpointError, SettingsError
from jaxrl.parsing import flatten_settings
from jaxrl.strategies.population import Member, Population, set_values, with_values
from jaxrl.strategies.search import Copy, Halving, Search, Verdict
from jaxrl.training import mesh
from jaxrl.training.devices import copy_state
from jaxrl.training.loop import Trainer
from jaxrl.training.mesh import MeshShape
from jaxrl.training.population.scores import format_swept
from jaxrl.training.population.teams import split_teams
from jaxrl.training.processes import require_alone
from jaxrl.training.report import Report
from jaxrl.training.schedule import Schedule
from jaxrl.training.settings import TrainerConfig, extend, round_length
from jaxrl.training.stops import EARLY, EARLY_ENDS, LIMITS
from jaxrl.training.storage.checkpoints import OtherVersionError, Store
from jaxrl.training.storage.files import plain, read_yaml
from jaxrl.training.storage.members import Membership, population_of
from jaxrl.training.storage.population_files import PopulationFiles
from jaxrl.training.storage.population_saves import has_valid_save
from jaxrl.training.storage.run_dir import CONFIG, MEMBERS_FILE


def copied_settings(checkpoints: Store, member: Member) -> dict[str, Any]:
    """Return the swept settings whose saved values differ from the member's own, because it copied another."""
    try:
        saved = flatten_settings(checkpoints.newest_facts()[1]["settings"])
    except (NoCheckpointError, KeyError, AttributeError):
        return {}  # it starts afresh, or its trainer raises the specific error
    return {name: saved[name] for name, value in member.swept.items() if saved.get(name, value) != value}


@contextmanager
def explain_damage(files: PopulationFiles | None, member: Member) -> Iterator[None]:
    """Add the member's number and a remedy to errors about damaged files raised inside.

    Retraining a member gives the same bits, unless it copied another, whose state then no longer exists.
    """
    try:
        yield
    # Intact but of another version: retraining is not the remedy.
    except OtherVersionError as error:
        raise NoCheckpointError(f"member {member.number}: {error}") from error
    except NoCheckpointError as error:
        # The advice after the semicolon is for single runs.
        reason = str(error).partition(";")[0]
        raise NoCheckpointError(f"member {member.number}: {reason}; {_remedy(files, member)}") from error


def _remedy(files: PopulationFiles | None, member: Member) -> str:
    """Return the advice for a member whose checkpoints are damaged."""
    assert files is not None
    if not has_valid_save(files.directory):
        return "no save of the population is whole: begin it again with --start-over"
    settings = flatten_settings(files.settings(member.number))
    if any(settings.get(name, value) != value for name, value in member.swept.items()):
        return (
            "it had taken over from another member, so it cannot be trained anew; extract the members that you want, "
            "and go on with these"
        )
    return (
        f"remove its line from {files.directory / MEMBERS_FILE}, and resume again: this member alone is trained anew, "
        "to the same bits"
    )


class MemberRun:
    """A member and the state of its training."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.membership = Membership(member.number)
        self.status = "running"
        self.trainer: Trainer | None = None
        self.scores: tuple[float | None, float | None] = (None, None)
        """Best and last score of a member that diverged in an earlier process."""
        self.reports: Generator[Report, None, None] | None = None
        self.trained_to = -1
        """In a search: optimisation steps of its last evaluation in this process."""

    @property
    def ended_at(self) -> float:
        """Optimisation steps after which a rule of its own ended it; infinity if none has."""
        trainer = self.trainer
        if trainer is None or trainer.stop_reason not in EARLY:
            return math.inf
        return trainer.schedule.opt_steps(trainer.ledger.t)

    def for_next_call(self) -> "MemberRun":
        """Return the member for another call of `train`, continuing from its trainer's state."""
        again = MemberRun(self.member)
        again.trainer, again.scores, again.membership = self.trainer, self.scores, self.membership
        again.status = self.status if self.status in (*EARLY_ENDS, "diverged") else "running"
        return again

    def continue_to(self, max_opts: int) -> None:
        """Continue in memory up to `max_opts` optimisation steps; a member that ended early makes no more.

        Raises:
          DivergedError: it has diverged.
          SettingsError: it has already made more optimisation steps.
        """
        trainer = self.trainer
        assert trainer is not None
        if self.status == "diverged":
            raise DivergedError(f"member {self.member.number} diverged")
        if self.status in EARLY_ENDS:
            self.reports = (report for report in list[Report]())
            return
        trainer.config, trainer.schedule = self.extended(max_opts)

    def extended(self, max_opts: int) -> tuple[TrainerConfig, Schedule]:
        """Return its settings and schedule up to `max_opts`; raise `SettingsError` if it has made more steps."""
        trainer = self.trainer
        assert trainer is not None
        done = trainer.schedule.opt_steps(trainer.ledger.t)
        return extend(trainer.strategy, trainer.config, max_opts, done)[:2]


def copy_parent(own: MemberRun, other: MemberRun, copy: Copy, opt_steps: int, device: Any) -> Trainer | None:
    """Replace a member's state by its parent's after `opt_steps` optimisation steps, with the settings of `copy`.

    Return the trainer to save before the member continues, or `None` if there is nothing to do.

    Repeated after a crash, it must give the same result. So the new key depends only on the seed, the step and the
    member's number: members may share a seed, and copies of one parent must develop differently.
    """
    trainer, parent = own.trainer, other.trainer
    if own.membership.adopted_at == opt_steps:
        return None  # done before a crash: the copy was loaded
    if trainer is None or parent is None or trainer.state is None or parent.state is None:
        return None  # one of them has ended
    key = jax.random.key(trainer.config.seed, impl=str(jax.random.key_impl(trainer.state.key)))
    for part in (streams.COPY, opt_steps, copy.member):
        key = jax.random.fold_in(key, part)
    # Copy: the parent donates its buffers as soon as it continues.
    state = copy_state(trainer.strategy, parent.state, device)
    # Updates that the parent skipped are not the member's: its rollbacks lead here, where it is in good health.
    if (reseed := trainer.strategy.state_fns.reseed) is not None:
        state = reseed(state, 0)
    state = state._replace(key=key)
    line = (
        f"goes on as member {copy.parent} stood after {opt_steps} optimisation steps, with {format_swept(copy.values)}"
    )
    # Set before `adopt` saves, so that the checkpoint records it.
    own.membership.adopted_at = opt_steps
    trainer.adopt(set_values(own.member, state, copy.values), with_values(own.member.strategy, copy.values), line)
    return trainer


# --- the gates of a search ----------------------------------------------------------------------------------------


class Gates:
    """The gates of a search: collects scores at each, holds members that wait, and decides once all have arrived."""

    def __init__(self, search: Search, members: Sequence[Member], config: TrainerConfig) -> None:
        """Compute the gates of `search`.

        Raises:
          SettingsError: there are no evaluations, only one member, or no gate before the end.
        """
        if not config.eval_interval or not config.eval_episodes:
            raise SettingsError(f"{search.name} goes by evaluations; set eval_interval and eval_episodes")
        if len(members) < 2:
            raise SettingsError(f"{search.name} chooses among members, and there is one; sweep a setting, or set seeds")
        self._search = search
        self._strides = {member.number: member.strategy.opt_steps_per_step for member in members}
        end = min(config.max_opts, *(_last_opt_step(member, config) for member in members))
        self.steps = search.gates(len(members), end, config.eval_interval)
        if not self.steps:
            raise SettingsError(
                f"{search.name} has no evaluation to decide at before the end at {end}; "
                f"lower eval_interval, which is {config.eval_interval}"
            )
        self.passed = 0
        """Number of gates decided."""
        self.alive = {member.number for member in members}
        """Members that no verdict has ended."""
        self.values: dict[int, Mapping[str, Any]] = {member.number: dict(member.swept) for member in members}
        """Current values of the swept settings."""
        self.parents: dict[int, int] = {}
        """The member that each member last copied."""
        self._scores: list[dict[int, float]] = [{} for _ in self.steps]
        self._farthest = dict.fromkeys(self._strides, 0)
        self._gone: dict[int, float] = {}

    def record_score(self, number: int, opt_steps: int, score: float | None) -> None:
        """Record the score of an evaluation; each gate uses the first one at or past it."""
        for step, scores in zip(self.steps, self._scores, strict=True):
            if step <= opt_steps and number not in scores:
                scores[number] = math.nan if score is None else float(score)
        self.record_progress(number, opt_steps)

    def record_progress(self, number: int, opt_steps: int) -> None:
        """Record the progress of a member."""
        self._farthest[number] = max(self._farthest[number], opt_steps)

    def eval_step(self, gate: int, number: int) -> int:
        """Return the optimisation steps of a member's first evaluation at or past a gate, in its whole iterations."""
        return -(-self.steps[gate] // self._strides[number]) * self._strides[number]

    def is_behind(self, gate: int) -> bool:
        """Return whether any member is past a gate, whose verdict has then been carried out by an earlier process."""
        return any(farthest > self.eval_step(gate, number) for number, farthest in self._farthest.items())

    def must_wait(self, opt_steps: int) -> bool:
        """Return whether a member at `opt_steps` has to wait at the next gate."""
        return self.passed < len(self.steps) and opt_steps >= self.steps[self.passed]

    def remove(self, number: int, ended_at: float) -> None:
        """Stop waiting for a member that has ended; `ended_at` as in `MemberRun`."""
        self._gone[number] = ended_at

    def verdict(self, held: Mapping[int, int]) -> Verdict | None:
        """Decide at the next gate and move on to the one after; `None` until all members have arrived.

        A member that ended by a rule of its own at this gate is ranked and may be copied, but stays as it is.
        """
        # No gate is left, or no member is at the next one or past it.
        if self.passed == len(self.steps) or not (held or self.is_behind(self.passed)):
            return None
        if any(held.get(number, -1) < self.steps[self.passed] for number in self.alive - self._gone.keys()):
            return None
        scores = self._scores[self.passed]
        known = {n: scores.get(n, math.nan) for n in sorted(self.alive) if n in held or n in scores}
        decided = self._search.decide(self.passed, known, self.values)
        self.alive -= set(decided.ended)
        # One that ended at a later gate was in training at this one, whose decision a resumed search repeats.
        over = {number for number, ended_at in self._gone.items() if ended_at <= self.eval_step(self.passed, number)}
        verdict = Verdict(
            ended=tuple(number for number in decided.ended if number not in over),
            copies=tuple(copy for copy in decided.copies if copy.member not in over),
        )
        self.passed += 1
        for copy in verdict.copies:
            self.values[copy.member], self.parents[copy.member] = copy.values, copy.parent
        return verdict


def _last_opt_step(member: Member, config: TrainerConfig) -> int:
    """Return the optimisation steps at which a member ends by `max_opts`, in whole iterations, or `max_env_steps`."""
    strategy = member.strategy
    schedule = round_length(config, strategy.opt_steps_per_step)[0].schedule(strategy)
    return schedule.opt_steps(schedule.last)


# --- scheduling ---------------------------------------------------------------------------------------------------


class Queue:
    """Members ready to train, in a queue: the next is the least advanced one with free devices."""

    def __init__(self, runs: Sequence[MemberRun]) -> None:
        # Members of one program start in a row: the cache does not hold many programs.
        programs = [*dict.fromkeys(id(run.member.strategy.step) for run in runs)]
        self._runs = sorted(runs, key=lambda run: (programs.index(id(run.member.strategy.step)), run.member.number))
        self._positions = {run.member.number: i for i, run in enumerate(self._runs)}
        self._waiting = [(0, position) for position in range(len(runs))]

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, number: int, opt_steps: int) -> None:
        """Enqueue a member that has made `opt_steps` optimisation steps."""
        heapq.heappush(self._waiting, (opt_steps, self._positions[number]))

    def take(self, is_free: Callable[[int], bool]) -> MemberRun | None:
        """Remove and return the next member whose number `is_free`; `None` if there is none."""
        passed_over: list[tuple[int, int]] = []
        found = None
        while self._waiting and found is None:
            entry = heapq.heappop(self._waiting)
            # Members with busy devices keep their positions.
            run = self._runs[entry[1]]
            if is_free(run.member.number):
                found = run
            else:
                passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._waiting, entry)
        return found


# --- checks -------------------------------------------------------------------------------------------------------


def check_members(population: Population, config: TrainerConfig) -> None:
    """Raise `SettingsError` if the members cannot be trained as a population under `config`."""
    config.check()
    require_alone("a population")
    members = population.members
    if config.seed + max(m.seed for m in members) > 2**32 - 1:
        raise SettingsError(f"seed is {config.seed}; seeds of members end at {2**32 - 1}")
    if any(member.strategy.host_env is not None for member in members):
        raise SettingsError(
            "members of a population train in environments written in JAX; train with one seed at a time"
        )
    if config.mesh is None:
        check_devices(population, config.devices)
    else:
        check_mesh(population, mesh.shape_of(config.mesh, config.devices, of_members=True), config.devices)


def check_mesh(population: Population, shape: MeshShape, devices: int) -> None:
    """Raise `SettingsError`, naming the nearest mesh, unless members and their shards can be divided over `shape`.

    `devices` is the number of devices requested; 1 means all available ones.
    """
    count, shards = len(population.members), {member.strategy.placement.shards for member in population.members}
    there = mesh.check_there(devices) if devices > 1 else len(jax.devices())
    if population.layout.name == "together" and shape.envs > 1:
        raise SettingsError(
            f"mesh {shape} has {shape.envs} devices for each member, but members that train together have one for all "
            "of a program; set layout to spread, or leave envs out"
        )
    for one in sorted(shards):
        mesh.require_even(one, shape.envs, "mesh envs")
    fits = lambda fit: fit.members <= count and all(one % fit.envs == 0 for one in shards)
    if devices == 1:
        mesh.require_all_used(shape, there, fits)
    if population.layout.name == "together":
        check_devices(population, shape.members)
    elif shape.members > count:
        near = mesh.near_shape(shape, shape.devices, fits)
        raise SettingsError(
            f"mesh {shape} has {shape.members} groups, but there are {count} members; set mesh to {near}"
        )


def check_devices(population: Population, devices: int) -> None:
    """Raise `SettingsError` unless `devices` are available, and each has members to train."""
    mesh.check_there(devices)
    count = len(population.members)
    if population.layout.name == "spread":
        if devices > count:
            raise SettingsError(f"devices is {devices}, but there are {count} members; set devices to {count} at most")
    elif devices > (teams := len(split_teams(population))):
        at_most = max(count // devices, 1)
        raise SettingsError(
            f"devices is {devices}, but members train together in {teams} program{'s' * (teams > 1)}, each on one "
            f"device; set width to {at_most}, so that there is one for each, or devices to {teams}"
        )


def require_same(population: Population, config: TrainerConfig, path: Path) -> None:
    """Raise `SettingsError` unless `path` holds this population, and it can be trained as long as `config` says."""
    found, own = population_of(path), plain(population.settings)
    if found != own:
        raise SettingsError(
            f"{path} holds {f'the population {found}' if found else 'a run of its own'}, not {own}; "
            "go on with what is there, or choose another run directory"
        )
    require_same_decisions(population, read_yaml(path / CONFIG), config, path)


def require_same_decisions(
    population: Population, before: Mapping[str, Any], config: TrainerConfig, what: object
) -> None:
    """Raise `SettingsError` if a search would decide differently than under the settings `before`.

    The rungs of halving follow from the length and the interval. For any search, a member that has ended by itself is
    neither halved nor replaced.
    """
    advice = "keep it, or go on with the best members as runs of their own (jaxrl.extract)"
    for name in (*LIMITS, "eval_interval") if isinstance(population.search, Halving) else ():
        was, now = before.get(name, 0), getattr(config, name)
        if was != now:
            raise SettingsError(f"{name} is {now}, but the rungs of {what} follow from {was}; {advice}")
    for name in ("stop_reward", "patience") if population.search is not None else ():
        was, now = before.get(name), getattr(config, name)
        if was != now:
            raise SettingsError(
                f"{name} is {now}, but {population.search.name} in {what} has decided with {was}; {advice}"
            )

"""Population training: the members' runs take turns on the cores of the machine.

Every member is an ordinary run; all of them share the compiled programs and one directory. A program does not depend on
other members, so a member is bitwise equal to the same run trained alone with its seed and settings.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, NamedTuple

import jax

from jaxrl.env_process import exit_if_importing
from jaxrl.errors import DivergedError, SettingsError, StorageError, check_count
from jaxrl.parsing import flatten_settings, format_repr
from jaxrl.paths import reason_of_path, writing
from jaxrl.strategies.base import Strategy
from jaxrl.strategies.population import Population, require_compatible, require_movable, require_stream, with_values
from jaxrl.strategies.search import PBT, Verdict
from jaxrl.training.episodes import reports_episodes
from jaxrl.training.evaluator import EvaluateFn, ScoreFn, mean_return
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.logbook import algo_and_env
from jaxrl.training.loop import Trainer
from jaxrl.training.memory import Plan, plan_of_strategy, require_members_fit
from jaxrl.training.mesh import shape_of
from jaxrl.training.population.members import (
    Gates,
    MemberRun,
    Queue,
    check_members,
    copied_settings,
    copy_parent,
    explain_damage,
    require_same,
    require_same_decisions,
)
from jaxrl.training.population.rows import PopulationRows, Position, position_of
from jaxrl.training.population.scores import MemberResult, PopulationResult
from jaxrl.training.population.teams import describe, place_members
from jaxrl.training.program import compile_all, state_shapes
from jaxrl.training.recorders import Row, RunInfo, recorders_of
from jaxrl.training.report import (
    Hooks,
    Report,
    check_callbacks,
    leave_by_signal,
    print_table,
    require_idle,
    run_dir_part,
)
from jaxrl.training.settings import TrainerConfig, config_for, plan_run, settings_of_run
from jaxrl.training.stops import EARLY_ENDS, HALVED, LIMITS, can_go_on
from jaxrl.training.storage.logs import RowLog
from jaxrl.training.storage.members import POPULATION, require_no_member
from jaxrl.training.storage.population_files import MemberDir, MemberFiles, PopulationFiles
from jaxrl.training.storage.population_saves import SaveBatcher
from jaxrl.training.storage.run import resolve_resume
from jaxrl.training.storage.run_dir import (
    CHECKPOINTS,
    DIR_FORMAT,
    MEMBERS_FILE,
    METRICS,
    RunDir,
    holds_run,
    member_dir,
    timestamp,
)
from jaxrl.training.storage.weights import require_same_start
from jaxrl.trees import make_key
from jaxrl.xla.contexts import bind_context
from jaxrl.xla.options import parallel_calls

MOST_ENDS = 256
"""Maximum members that end at the same time, each in a thread."""


class MemberReport(NamedTuple):
    """The report of one member at a boundary."""

    member: int
    report: Report


class PopulationTrainer:
    """Trainer of a population: `train()` runs to the end, `for number, report in trainer:` yields at boundaries."""

    def __init__(
        self,
        population: Population,
        config: TrainerConfig | None = None,
        *,
        evaluator: EvaluateFn | None = None,
        score: ScoreFn = mean_return,
        stop: Callable[[Report], bool] | None = None,
        hooks: Hooks | None = None,
        resume: bool | str | os.PathLike[str] = False,
        from_step: int | str | None = None,
        allow_changes: bool = False,
        start_over: bool = False,
        interrupt: Interrupt | None = None,
        max_chunk: int | None = None,
        workers: int | None = None,
        raise_on_signal: bool = True,
        **settings: Any,
    ) -> None:
        """Validate all arguments before anything compiles or is written.

        Arguments are those of `Trainer` and apply to each member; `stop` and `hooks` are called from several threads.

        Args:
          workers: members that train at the same time, each in a thread (default: the number of cores, or one on an
            accelerator). It does not affect the results.

        Raises:
          SettingsError: an argument is invalid, or arguments contradict each other.
        """
        if not population.members:
            raise SettingsError("a population without members; expected one or more")
        check_callbacks(hooks, interrupt, evaluator=evaluator, score=score, stop=stop)
        if from_step is not None:
            raise SettingsError(
                "from_step begins a run, not a population; branch off from a member, as of runs/lr/members"
            )
        self.config = config_for(population.members[0].strategy, evaluator, config, settings)
        run_dir, how = resolve_resume(resume, None, self.config.run_dir, allow_changes, start_over)
        if run_dir is not None and how.enabled and not start_over:
            require_same_start(run_dir, self.config)
        self.config = self.config.changed(run_dir=run_dir)
        check_members(population, self.config)
        if workers is not None:
            check_count("workers", workers)
        self.population, self.interrupt = population, Interrupt() if interrupt is None else interrupt
        self._mesh = shape_of(self.config.mesh, self.config.devices, of_members=True)
        at_once = parallel_calls() if self._mesh.envs == 1 else 1
        self.workers = min(workers or max(at_once, self._mesh.members), len(population.members))
        self._resume, self._start_over, self.raise_on_signal = bool(resume), start_over, raise_on_signal
        self._quiet = self.config.quiet or "console" not in self.config.recorders
        self._rows = PopulationRows(population, self._quiet, self._position_of)
        self._dir: RunDir | None = None
        self._files: PopulationFiles | None = None
        self._saves: SaveBatcher | None = None
        self._runs = [MemberRun(member) for member in population.members]
        self._failure: StorageError | None = None
        self._gates = self._new_gates(self.config)
        self._described = self._begun = self._is_training = False
        self._make: dict[str, Any] = {
            "evaluator": evaluator,
            "score": score,
            "stop": stop,
            "hooks": hooks,
            "allow_changes": allow_changes,
            "interrupt": self.interrupt,
            "max_chunk": max_chunk,
            "raise_on_signal": False,
        }
        # By program: making a trainer of it, which never trains, also checks the settings.
        self._evaluators = {id(made.step): self._trainer_without_storage(made).evaluator for made in self._strategies()}
        self._assign_devices()

    def __repr__(self) -> str:
        most = f"max_opts={self.config.max_opts}"
        return format_repr("PopulationTrainer", self.population, most, run_dir_part(self.config.run_dir))

    def train(self, max_opts: int | None = None) -> PopulationResult:
        """Train to the end and return the members' results.

        Called again, members continue from their latest state: on disk, or in memory if there is no directory.

        Args:
          max_opts: new total of optimisation steps for each run.

        Raises:
          KeyboardInterrupt, SystemExit: on SIGINT or SIGTERM, as in `Trainer`; all members are saved.
          SettingsError: `max_opts` is below the steps already made, or changes the rungs of halving.
          StorageError: the last checkpoint of a member could not be written; everything else completed.
          DivergedError: all members diverged.
        """
        require_idle(self._is_training)
        if max_opts is not None:
            self.config = self._extended(max_opts)
        for _ in self:
            pass
        self.require_any()
        result = self.result()
        if not self._quiet:
            self._print_table(result)
        return result

    def _extended(self, max_opts: int) -> TrainerConfig:
        """Return the settings of runs of `max_opts` optimisation steps; raise `SettingsError` unless all can go on."""
        config = self.config.changed(max_opts=max_opts)
        config.check()
        if self._begun:
            require_same_decisions(self.population, vars(self.config), config, "this population")
        for run in self._runs:
            if run.trainer is not None and run.status not in (*EARLY_ENDS, "diverged"):
                run.extended(max_opts)
        self._new_gates(config)
        return config

    def __iter__(self) -> Iterator[MemberReport]:
        """Train, yielding at each boundary of each member; leaving the loop early saves all members."""
        exit_if_importing()
        require_idle(self._is_training)
        self._is_training = True
        try:
            yield from self._train_members()
        finally:
            self._is_training = False

    def _train_members(self) -> Iterator[MemberReport]:
        if self._begun:
            # Called again: with a directory, the members are resumed from it, however they began.
            self._resume, self._start_over = self.config.run_dir is not None, False
            self._described = False
            self.interrupt.clear()
        if self._begun and not self._resume:
            self._runs = [run.for_next_call() for run in self._runs]
            self._rows.expect_all()
        else:
            self._runs = [MemberRun(member) for member in self.population.members]
            self._rows = PopulationRows(self.population, self._quiet, self._position_of)
        self._gates = self._new_gates(self.config)
        self._assign_devices()
        self._require_fit()
        schedules = {id(made.step): plan_run(made, self.config)[1] for made in self._strategies()}
        self._schedules = {member.number: schedules[id(member.strategy.step)] for member in self.population.members}
        self._activity = "the compilation"
        activity = None if self.config.quiet else lambda: self._activity
        with self.interrupt.signals(activity), self._opened(), ThreadPoolExecutor(self._threads()) as pool:
            self._begun = True
            with self._rows.compiling():
                self._compile()
            self._activity = "the present part of each member"
            # Import recorders' packages in one thread: circular imports fail in several at once.
            recorders_of(self.config.recorders, None if self._dir is None else RowLog(self._dir / METRICS))
            self._rows.print_line(describe(self.population, self._mesh, self.workers, len(self._strategies())))
            self._rows.begin(self._schedules[self.population.members[0].number])
            yield from self._take_turns(pool)
        if self._failure is not None:
            raise self._failure
        if self.raise_on_signal and (signalled := self.interrupt.signal) is not None:
            leave_by_signal(signalled, "", "Trainer(population", self.config)

    def _print_table(self, result: PopulationResult) -> None:
        """Print the results, and how to go on with them in Python."""
        run_dir, lines = self.config.run_dir, {}
        if run_dir is not None:
            best = result.best_member().number
            lines = {"run": run_dir, "load": f"policy = jaxrl.load_policy({run_dir!r}, member={best})"}
        if any(can_go_on(member.status) for member in result.members):
            lines["go on"] = "trainer.train()"
        print_table(result.table(), lines)

    def require_any(self) -> None:
        """Raise `DivergedError` if all members diverged."""
        if all(run.status == "diverged" for run in self._runs):
            raise DivergedError(
                f"all {len(self._runs)} members diverged; lower the learning rate, or look at the rewards"
            )

    def result(self) -> PopulationResult:
        """Return the results so far."""
        return PopulationResult(tuple(self._result_of(run) for run in self._runs), self.interrupt.reason)

    def settings(self) -> dict[str, Any]:
        """Return all settings as in `config.yaml`: those of member 0, and the definition of the population."""
        first = settings_of_run(self.population.members[0].strategy, self.config)
        return {**first, POPULATION: dict(self.population.settings)}

    # --- turns ---

    def _take_turns(self, pool: ThreadPoolExecutor) -> Iterator[MemberReport]:
        """Keep advancing the least advanced member to its next boundary, on as many threads as there are workers."""
        queue = Queue(self._runs)
        going: dict[Future[Report | None], MemberRun] = {}
        arrived: SimpleQueue[Future[Report | None]] = SimpleQueue()
        is_free = lambda number: self._placement.is_free(number, (run.member.number for run in going.values()))
        held: dict[int, int] = {}
        ends: list[MemberRun] = []
        try:
            while queue or going or held or ends:
                # Close finished members together once no member is left to train, so that one save holds them all.
                if ends and not (queue or going):
                    self._end_together({run.member.number: partial(self._advance_here, run) for run in ends})
                    ends.clear()
                # All members that a search releases join their teams before any of them starts: team-mates must wait
                # for them.
                for number, opt_steps in self._release(held, idle=not (queue or going)):
                    self._join(number)
                    queue.put(number, opt_steps)
                while len(going) < self._threads() and (run := queue.take(is_free)) is not None:
                    if run.reports is not None or not self.interrupt:  # start no more members after an interrupt
                        going[future := pool.submit(bind_context(self._advance), run)] = run
                        future.add_done_callback(arrived.put)
                    else:
                        self._leave(run.member.number)
                if not going:
                    continue
                for future in sorted(_take_all(arrived), key=lambda future: going[future].member.number):
                    run = going.pop(future)
                    report = future.result()
                    self._describe(run)
                    if report is None:
                        self._remove(run)
                        continue
                    if report.train is not None:
                        self._rows.take(run.member.number, report.train)
                    if report.eval is not None:
                        falls_short = run.trainer is not None and run.trainer.ledger.warned_greedy
                        self._rows.take(run.member.number, report.eval, falls_short)
                    if self._waits(run, report):
                        held[run.member.number] = report.opt_steps
                        self._leave(run.member.number)
                    elif report.stop is not None:
                        ends.append(run)
                        self._remove(run)
                    else:
                        queue.put(run.member.number, report.opt_steps)
                    yield MemberReport(run.member.number, report)
            self._release(held, idle=True)  # repeat earlier decisions if all members had ended before this call
        finally:
            # First dissolve the teams, so that no thread waits for members that never come; save after all have ended.
            self._placement.dissolve()
            wait(going)
            self._close()

    def _describe(self, run: MemberRun) -> None:
        """Write all settings once, now that a member has begun or been resumed under them."""
        if run.trainer is None:
            return  # it diverged in an earlier process
        if self._dir is not None and not self._described:
            with writing(f"the run directory {self._dir.path}", StorageError):
                if self._resume:
                    self._write_settings()
                self._write_members()
        self._described = True

    def _join(self, number: int) -> None:
        """Have others wait for a member in calls and saves."""
        self._placement.join(number)
        if self._saves is not None:
            self._saves.join(number)

    def _leave(self, number: int) -> None:
        """Have others no longer wait for a member in calls and saves."""
        self._placement.leave(number)
        if self._saves is not None:
            self._saves.leave(number)

    def _remove(self, run: MemberRun) -> None:
        """Remove a finished member from teams, saves, rows and gates."""
        self._leave(run.member.number)
        self._rows.remove(run.member.number)
        if self._gates:
            self._restore_scores(run)
            self._gates.remove(run.member.number, run.ended_at)

    def _end_together(self, ends: Mapping[int, Callable[[], object]]) -> None:
        """End members (by number) concurrently, so that one save holds them all; then raise the first error."""

        def end(number: int) -> object:
            try:
                with self._placement.default_device(number):
                    return ends[number]()
            finally:
                self._leave(number)

        failed = []
        for first in range(0, len(ends), MOST_ENDS):
            part = list(ends)[first : first + MOST_ENDS]
            together = nullcontext() if self._saves is None else self._saves.ending(part)
            with together, ThreadPoolExecutor(len(part)) as pool:
                jobs = [pool.submit(bind_context(end), number) for number in part]
            failed += [error for job in jobs if (error := job.exception()) is not None]
        if failed:
            raise failed[0]

    # --- searching ---

    def _new_gates(self, config: TrainerConfig) -> Gates | None:
        """Return the gates of the population's search under `config`, or `None` without one.

        Raises:
          SettingsError: the settings do not suit a search, or for PBT the members have different programs or a swept
            setting cannot change.
        """
        search, members = self.population.search, self.population.members
        if search is None:
            return None
        if config.eval_at_return is not None:
            raise SettingsError("a search compares members at the same evaluations; leave eval_at_return out")
        if isinstance(search, PBT):
            if len(self._strategies()) > 1:
                raise SettingsError("pbt: the members have different programs, so none can take another's place")
            require_stream(members[0].strategy)
            require_movable(members[0].strategy, members[0].swept)
            require_compatible(members[0].strategy, search.sweep)
        return Gates(search, members, config)

    def _waits(self, run: MemberRun, report: Report) -> bool:
        """Pass a member's report to the gates; return whether it has to wait at one."""
        if self._gates is None:
            return False
        self._gates.record_progress(run.member.number, report.opt_steps)
        if report.eval is None:
            self._restore_scores(run)
        else:
            self._gates.record_score(run.member.number, report.opt_steps, report.eval["score"])
            run.trained_to = report.opt_steps
        # A member that is stopping does not wait: of those loaded from disk, `_begin` stops those that had ended.
        stops = report.stop is not None or (run.trainer is not None and bool(run.trainer.interrupt))
        return not stops and self._gates.must_wait(report.opt_steps)

    def _restore_scores(self, run: MemberRun) -> None:
        """Pass a member's earlier scores to the gates: those in its checkpoint first, then those in its log."""
        assert self._gates is not None
        number = run.member.number
        for opt_steps, score in (*run.membership.scores.items(), *self._rows.scores_of(number)):
            self._gates.record_score(number, opt_steps, score)

    def _release(self, held: dict[int, int], idle: bool) -> list[tuple[int, int]]:
        """Remove from `held` the members that may continue; return them with their optimisation steps."""
        if self._gates is None or not (idle or self.interrupt):
            return []
        # Decide only while no member trains: states in training must not be copied.
        while not self.interrupt and (verdict := self._gates.verdict(held)) is not None:
            self._apply_verdict(verdict, self._gates.passed - 1, held)
        free = [n for n in sorted(held) if self.interrupt or not self._gates.must_wait(held[n])]
        return [(number, held.pop(number)) for number in free]

    def _apply_verdict(self, verdict: Verdict, gate: int, held: dict[int, int]) -> None:
        """End members and copy others as decided; copies are on disk before any member continues."""
        assert self._gates is not None
        # Members that copy each other have one program, so this is the step of them all.
        opt_steps, behind = self._gates.eval_step(gate, self._runs[0].member.number), self._gates.is_behind(gate)
        # An earlier process that passed this gate has carried out the verdict, which is only logged again.
        changed = []
        for copy in verdict.copies:
            if not behind:
                own, parent = self._runs[copy.member], self._runs[copy.parent]
                changed.append(copy_parent(own, parent, copy, opt_steps, self._placement.devices[copy.member]))
            elif self._runs[copy.member].trained_to == opt_steps:
                raise StorageError(
                    f"member {copy.member} took over from member {copy.parent} after {opt_steps} optimisation steps, "
                    "but no checkpoint of that is left; extract the members that you want, and go on with these"
                )
        for trainer in changed:
            if trainer is not None:
                trainer.require_saved()
        self._rows.log_decision(opt_steps, verdict, not behind)
        ends: dict[int, Callable[[], object]] = {}
        for number in verdict.ended:
            run = self._runs[number]
            held.pop(number, None)
            trainer = run.trainer
            # One that has reached a limit, in whole iterations of its own program, keeps its status.
            if trainer is not None and run.reports is not None and trainer.stop_reason not in LIMITS:
                trainer.stop_reason = run.status = HALVED
                ends[number] = run.reports.close
            self._rows.remove(number)
        self._end_together(ends)

    def _strategies(self) -> list[Strategy]:
        """Return one strategy per shared program."""
        return list({id(member.strategy.step): member.strategy for member in self.population.members}.values())

    def _close(self) -> None:
        """End all members, saving the unfinished ones; then raise the first error."""
        self._end_together({run.member.number: run.reports.close for run in self._runs if run.reports is not None})

    def _advance(self, run: MemberRun) -> Report | None:
        """Train a member to its next boundary and return its report; `None` if it has ended."""
        # In a team, a member waiting for others releases `_host` meanwhile.
        with self._host, self._placement.default_device(run.member.number):
            return self._advance_here(run)

    def _advance_here(self, run: MemberRun) -> Report | None:
        try:
            with explain_damage(self._files, run.member):
                if run.reports is None:
                    self._begin(run)
                assert run.reports is not None
                report = next(run.reports, None)
        # A diverged member ends; the others continue.
        except DivergedError as error:
            run.status = "diverged"
            if run.trainer is not None:  # otherwise in an earlier process
                opt_steps = run.trainer.schedule.opt_steps(run.trainer.ledger.t)
                self._rows.print_about(run.member.number, opt_steps, str(error))
            return None
        except StorageError as error:
            # This member ends and the others continue; the first such error is raised once all are done.
            self._failure = self._failure or error
            report = None
        if report is None and run.trainer is not None:
            run.status = run.trainer.stop_reason or "running"
        return report

    def _begin(self, run: MemberRun) -> None:
        if run.trainer is None:
            run.trainer = self._trainer_of(run)
        else:
            run.continue_to(self.config.max_opts)
        if (lane := self._placement.lanes.get(run.member.number)) is not None:
            run.trainer.lane, run.trainer.evaluator = lane, lane if lane.team.evaluates else run.trainer.evaluator
        membership = run.trainer.membership = run.membership
        if self._files is not None and self._saves is not None:
            store = partial(self._saves.store, member=run.member.number)
            membership.files = MemberFiles(MemberDir(self._files, run.member.number), store)
        membership.reports_before_training = self._gates is not None
        membership.gates = self._gates.steps if self._gates else ()
        # Safe against kills: resumed from a checkpoint with its replay buffer, the member finds the same policy again.
        membership.defers_best = self.config.save_interval != 0 and self.config.save_replay
        run.reports = run.reports or run.trainer.reports()

    def _trainer_of(self, run: MemberRun) -> Trainer:
        number, files = run.member.number, self._files
        again = files is not None and number in files
        before = {} if files is None else files.metadata(number)
        if before.get("status") == "diverged":
            run.scores = before.get("best_score"), before.get("last_score")
            if files is not None and "member" in before:
                run.membership.restore(before, member_dir(files.directory, number))
            raise DivergedError(f"member {number} diverged")
        config = self.config.changed(
            seed=self.config.seed + run.member.seed,
            run_dir=None if files is None else str(member_dir(files.directory, number)),
            devices=self._mesh.envs,
            mesh=None,
        )
        made = {**self._make, "allow_changes": self._make["allow_changes"] and again}
        if (
            files is not None
            and again
            and self._has_ended(before, number)
            and all(files.settings(number).get(name) == getattr(config, name) for name in ("stop_reward", "patience"))
        ):
            # Load it without training any further.
            made["interrupt"] = Interrupt()
            made["interrupt"].stop(before["status"])
        strategy = self._placement.on(number, run.member.strategy)
        if again and self._saves is not None and isinstance(self.population.search, PBT):
            checkpoints = self._saves.store(CHECKPOINTS, number)
            strategy = with_values(strategy, copied_settings(checkpoints, run.member))
        return Trainer(strategy, config, resume=again, console=False, **made)

    def _has_ended(self, before: Mapping[str, Any], number: int) -> bool:
        """Return whether a member with the metadata `before` ended early, and the checkpoint of that end is on disk.

        After a kill it may not be: the member then makes its last steps again, and ends as it did.
        """
        if self._saves is None or before.get("status") not in EARLY_ENDS:
            return False
        return self._saves.checkpoints.newest_steps([number])[number] == before.get("opt_steps")

    def _assign_devices(self) -> None:
        """Assign devices to members, and team-mates to their teams."""
        self._host = Semaphore(self.workers)
        evaluator = lambda strategy: self._evaluators[id(strategy.step)]
        self._placement = place_members(
            self.population, self._mesh, self._with_episodes, evaluator, self._host, self.workers
        )

    def _require_fit(self) -> None:
        """Raise `SettingsError` unless the states of all members fit into memory at once."""
        members = {id(member.strategy.step): member for member in self.population.members}
        plan_of = lambda own: plan_of_strategy(
            self._placement.on(own.number, own.strategy), state_shapes(own.strategy)[0]
        )
        plans = {step: plan_of(own) for step, own in members.items()}
        on_devices: dict[Any, list[Plan]] = {}
        for member in self.population.members:
            on_devices.setdefault(self._placement.devices[member.number], []).append(plans[id(member.strategy.step)])
        require_members_fit(list(on_devices.values()))

    def _position_of(self, number: int, row: Row) -> Position:
        """Return where the row of a member is in its run."""
        return position_of(self._schedules[number], self.config.max_opts, row)

    def _threads(self) -> int:
        """Return the number of threads: `workers`, or in teams, which wait for every member, one for each member."""
        return len(self._runs) if self._placement.teams else self.workers

    def _with_episodes(self, strategy: Strategy) -> bool:
        return reports_episodes(strategy, self.config, self._make["hooks"] or Hooks())

    def _compile(self) -> None:
        """Compile the shared programs before members start, for every device and strategy in turn."""
        shared = {(self._placement.devices[m.number], id(m.strategy.step)): m for m in self.population.members}
        for member in shared.values():
            strategy = member.strategy
            if not strategy.env_steps_per_step:
                continue  # programs that embed a data set are not cached
            runs = not self._placement.teams
            params = strategy.policy.params if strategy.policy is not None else lambda state: state
            key = make_key(self.config.seed)
            with self._placement.default_device(member.number):
                evaluator = self._evaluators[id(strategy.step)] if runs else None
                strategy = self._placement.on(member.number, strategy)
                compile_all(strategy, key, evaluator, params, False, self._with_episodes(strategy), runs)
        for team in self._placement.teams:
            with jax.default_device(team.device):
                team.compile()

    def _trainer_without_storage(self, strategy: Strategy) -> Trainer:
        """Return a trainer like the members', but without output."""
        config = self.config.changed(quiet=True, recorders=(), devices=1, mesh=None)
        return Trainer(strategy, config, evaluator=self._make["evaluator"], hooks=self._make["hooks"])

    # --- the directory ---

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Hold the lock on the population's directory while its members train."""
        if self.config.run_dir is None:
            yield
            return
        require_no_member(self.config.run_dir)
        replaces = self._start_over and holds_run(self.config.run_dir)
        self._dir, is_open = RunDir(self.config.run_dir, self._resume or replaces), False
        try:
            if self._resume:
                require_same(self.population, self.config, self._dir.path)
            # Move the old population aside only under the lock.
            if replaces:
                self._dir.discard()
            self._dir.write_owner()
            if not self._resume:
                self._write_settings(created=timestamp())
            self._open_files(self._dir.path)
            is_open = True
            yield
            done = all(run.status != "running" for run in self._runs)
            self._end(self.interrupt.reason or ("done" if done else "running"))
        except GeneratorExit:  # the loop over it was left, and all members are saved
            self._end(self.interrupt.reason or "left")
            raise
        except BaseException as error:
            if is_open or not isinstance(error, OSError):
                self._end(self.interrupt.reason or "failed")
            # Once it is open, such an error is one of a user's function: those of the files here have other names.
            if isinstance(error, OSError) and not is_open:
                reason = f"cannot write the run directory {self._dir.path}: {reason_of_path(error)}"
                raise StorageError(reason) from error
            raise
        finally:
            if self._saves is not None:
                self._saves.close()
            self._dir.release()

    def _open_files(self, directory: Path) -> None:
        """Open the files that members share, for a resume at their newest checkpoints.

        Raises:
          SettingsError: they cannot be read, or are gone while the checkpoints are there.
        """
        numbers = [run.member.number for run in self._runs]
        saves = self._saves = SaveBatcher(
            directory, self.config.keep, numbers, first=self._write_members, report=self._rows.print_line
        )
        self._files = PopulationFiles(directory, saves.checkpoints.newest_steps if self._resume else None)
        if self._resume and saves.checkpoints.steps() and not (directory / MEMBERS_FILE).exists():
            raise SettingsError(
                f"{directory} has checkpoints, but no {MEMBERS_FILE}, which says whose they are; bring it back, or "
                "begin again with --start-over"
            )
        self._rows.open(self._files, self._about() if "tensorboard" in self.config.recorders else None)

    def _about(self) -> RunInfo:
        """Return the description of the population for recorders."""
        assert self._dir is not None
        settings = flatten_settings(self.settings())
        tags, notes = (*algo_and_env(settings), *self.config.tags), str(settings.get("notes") or "")
        return RunInfo(self._dir.path.name, self._dir.path, settings, tags, opt_steps=0, notes=notes)

    def _write_settings(self, **created: str) -> None:
        """Write the settings, and that the population is running; a resumed one keeps when it was `created`."""
        assert self._dir is not None
        self._dir.write_config(self.settings())
        self._dir.write_metadata(format=DIR_FORMAT, **created, status="running", members=len(self._runs))

    def _write_members(self) -> None:
        """Write what has changed of members' settings and metadata; raise `OSError` on failure."""
        if self._files is not None:
            self._files.flush()

    def _end(self, status: str) -> None:
        """Write the final status and the table of members, unless a resume has come to none of them."""
        assert self._dir is not None
        try:
            self._rows.close()
            if self._files is not None:
                self._files.close()
            if self._described or not self._resume:
                self._dir.write_metadata(status=status, table=[self._outcome_of(run)._asdict() for run in self._runs])
        except OSError as error:
            reason = f"cannot write the run directory {self._dir.path}: {reason_of_path(error)}"
            self._failure = self._failure or StorageError(reason)

    def _result_of(self, run: MemberRun) -> MemberResult:
        """Return the result of a member, with its state and policy if it has trained and not diverged."""
        trainer, outcome = run.trainer, self._outcome_of(run)
        if trainer is None or trainer.state is None or run.status == "diverged":
            return outcome
        return outcome._replace(result=trainer.result())

    def _outcome_of(self, run: MemberRun) -> MemberResult:
        """Return the result of a member without its state and policy, which take time to read."""
        member, trainer = run.member, run.trainer
        return MemberResult(
            number=member.number,
            seed=self.config.seed + member.seed,
            swept=member.swept,
            status=run.status,
            best_score=trainer.ledger.best_score if trainer is not None else run.scores[0],
            last_score=trainer.ledger.last_score if trainer is not None else run.scores[1],
            values=self._gates.values[member.number] if self._gates else {},
            parent=self._gates.parents.get(member.number) if self._gates else None,
            result=None,
        )


def _take_all(queue: "SimpleQueue[Future[Report | None]]") -> list[Future[Report | None]]:
    """Wait until there is something in `queue`, and take out all of it."""
    found = [queue.get()]
    while not queue.empty():
        found.append(queue.get())
    return found

"""`python -m jaxrl.train [ALGO] [flags]`: train an agent, or resume a run."""

from jaxrl.cli.main import (  # first: it installs signal handlers
    cache_compilations,
    divide_cpu,
    require_devices,
    run_main,
)

# isort: split
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.cli.opening import greet, print_note, stage

if __name__ == "__main__":
    greet(sys.argv[1:])  # before what is slow to import

from jaxrl.cli.algos import build, part_of
from jaxrl.cli.arguments import command, normalise, quote, refuse_repeats, value_of
from jaxrl.cli.config import Request, algorithm_named, from_plain, parse
from jaxrl.cli.joining import join, report_failures, split_process_flags
from jaxrl.cli.leaving import set_exit_note
from jaxrl.cli.outside import admit, admit_algorithm
from jaxrl.cli.sweeps import PopulationConfig, build_population, read_sweep
from jaxrl.envs.registry import module_to_import
from jaxrl.errors import RunDirInUseError, RunDirTakenError, SettingsError, one_line, print_line
from jaxrl.loading import teacher_of
from jaxrl.paths import require_new
from jaxrl.training import Result, Trainer, TrainerConfig
from jaxrl.training.mesh import shape_of
from jaxrl.training.population.scores import PopulationResult, format_swept
from jaxrl.training.population.trainer import PopulationTrainer
from jaxrl.training.processes import number
from jaxrl.training.report import print_summary, print_table
from jaxrl.training.stops import EARLY_ENDS, HALVED, LIMITS, can_go_on
from jaxrl.training.storage.checkpoints import CheckpointError
from jaxrl.training.storage.logs import damage
from jaxrl.training.storage.members import population_of, runs_of
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.population_saves import PopulationStore
from jaxrl.training.storage.run import PENDING_BOUNDARY, find_missing_best
from jaxrl.training.storage.run_dir import BEST, CHECKPOINTS, open_log, population_dir, read_metadata, read_settings
from jaxrl.xla.contexts import product_precision


def main(args: Sequence[str]) -> int:
    """Parse, build, run; return the exit code."""
    args = normalise(args)
    refuse_repeats(args)
    args, how = split_process_flags(args)
    admit_algorithm(algorithm_named(args))
    request = parse(args)
    request = with_envs(request)
    config = request.config
    if config.run_dir is None:
        env = (config.env or "data").replace(":", "-").replace("/", "-")
        config = replace(config, run_dir=new_run_dir(f"{env}-{request.algo.replace(':', '-')}-s{config.seed}"))
    config.check()
    if how is None and (line := nothing_left(args, request)) is not None:
        stage.clear()
        if not config.quiet:
            print_line(line)
        return 0
    if how is None and not request.resume and request.config.run_dir is not None:
        # Before the environment is built and traced; a name of our own may change yet.
        require_new(config.run_dir, request.start_over)
    if how is not None:
        join(how, requested_devices(config, request.population is not None))
    with report_failures(how is not None):
        return run(args, request, config, how is not None)


def with_envs(request: Request) -> Request:
    """Import the environments that were typed; return the request with their names in the run to resume, if any."""
    typed = {field: name for field, name in request.typed_envs.items() if name is not None}
    if not typed:
        return request
    run = request.from_run or (request.config.run_dir if request.resume else None)
    saved = read_settings(Path(run)) if run is not None else {}
    names = {field: admit(name, saved.get(field)) for field, name in typed.items()}
    return request._replace(config=replace(request.config, **names))


def nothing_left(args: Sequence[str], request: Request) -> str | None:
    """Return the message for resuming a finished run; `None` if there is anything to train or repair."""
    if not request.resume or request.from_run or request.start_over:
        return None
    run = Path(request.config.run_dir)
    if population_dir(run) is not None:
        return None  # it is refused: members go on together
    flags = {word for word in args if word.startswith("--")} - {"--resume", "--quiet"}
    settings, is_population = read_settings(run), population_of(run) is not None
    longer = flags & LONGER if is_population else set()
    flags -= longer
    own = {"--algo": "algo", "--env": "env", "--eval-env": "eval_env"}  # code of the user's own must be named again
    if flags - {flag for flag, name in own.items() if value_of(args, flag) == settings.get(name)}:
        return None
    runs = [run]
    if is_population:
        runs, told = runs_of(run), read_metadata(run)
        # Otherwise it was killed: its last rows are still to be made, or changed limits to be obeyed.
        if not runs or len(runs) != told.get("members") or told.get("status") != "done":
            return None
    opened: dict[Path, PopulationStore] = {}
    ends = Counter(end_of(path, request.config, opened, is_population) for path in runs)
    if None in ends or {*ends} == {"diverged"} or (longer and {*ends} & {*LIMITS}):
        return None
    limit = next((name for name in (*LIMITS, "patience") if name in ends), None)
    if len(ends) == 1 and limit in LIMITS:
        why = f"{limit} {getattr(request.config, limit)} is reached"
    else:
        each = [f"{count} {end if end in (HALVED, 'diverged') else f'by {end}'}" for end, count in ends.items()]
        why = f"all members have ended ({', '.join(each)})"
    if limit is None or HALVED in ends:  # a search that has decided cannot go on
        return f"nothing is left to train: {why}"
    flag, value = f"--{limit.replace('_', '-')}", getattr(request.config, limit)
    more = [f"{flag} {2 * value}", *(f"{one} {value_of(args, one)}" for one in sorted(longer))]
    return (
        f"nothing is left to train: {why}; prolong it by "
        f"{command('train')} --resume {quote(str(run))}{_own_code(request, training=True)} {' '.join(more)}"
    )


LONGER = {"--max-opts", "--max-env-steps"}
"""Flags with which members that have not reached these limits, but ended early, stay ended."""


def end_of(run: Path, config: Any, opened: dict[Path, PopulationStore], is_member: bool) -> str | None:
    """Return the limit that a run has reached, or why a member has ended for good.

    `None`: it can go on, or is damaged.
    """
    metadata = read_metadata(run)
    store, best = open_store(run, CHECKPOINTS, opened), open_store(run, BEST, opened)
    if not (steps := store.steps()):
        return None
    try:
        facts = store.manifest(steps[-1])["facts"]
        whole = not damage(partial(open_log, run), facts)
        scores = [best.manifest(step)["facts"].get("score") for step in best.steps()]
    except CheckpointError:
        return None
    has_lost_best = find_missing_best(metadata, scores) or (metadata.get("best_score") is not None and not scores)
    if not whole or facts.get(PENDING_BOUNDARY) or has_lost_best:
        return None
    if 0 < config.max_opts <= steps[-1]:
        return "max_opts"
    taken = facts.get("env_steps")
    if isinstance(taken, int) and 0 < config.max_env_steps <= taken:
        return "max_env_steps"
    # A run that ended early by itself trains on; a member does not, if its last checkpoint is that of its end.
    is_at_end = metadata.get("status") in EARLY_ENDS and metadata.get("opt_steps") == steps[-1]
    return str(metadata["status"]) if is_member and (is_at_end or metadata.get("status") == "diverged") else None


def run(args: Sequence[str], request: Request, config: Any, joined: bool) -> int:
    """Train by `config`, with other processes if `joined`; return the exit code."""
    if not joined:
        divide_cpu(requested_devices(config, request.population is not None))
    devices = require_devices()
    if joined and value_of(args, "--devices") is None:
        config = replace(config, devices=len(devices))
    quiet = config.quiet or number() > 0
    if not quiet:
        print_note(one_line(title(request)))
        print_note(f"device {devices[0].device_kind}, run directory {one_line(config.run_dir)}")
        products = product_precision(devices[0])
        if products != "float32":
            print_note(f"products of matrices in {products}; JAX_DEFAULT_MATMUL_PRECISION=highest for float32")
        for note in request.notes:
            print_note(one_line(note))
        stage.show("building the environment")
    members = population_config(request.population)
    teacher = teacher_of(config)
    if members is None:
        strategy: Any = build(request.algo, config, teacher)
    else:
        strategy = build_population(request.algo, config, members, teacher)
    cache_compilations()
    trainer = Trainer(
        strategy,
        trainer_config(config),
        resume=request.from_run or request.resume,
        from_step=request.from_step,
        allow_changes=request.allow_changes,
        start_over=request.start_over,
        raise_on_signal=False,
    )
    stage.clear()
    set_exit_note("")  # from here on something may be written
    try:
        result = train(trainer)
    except (RunDirInUseError, RunDirTakenError) as error:
        if request.config.run_dir is None and not joined:
            return main(args)  # another process has just taken that directory, so the next try gets another name
        if isinstance(error, RunDirTakenError):
            require_new(config.run_dir)  # in the words of the command line
        raise
    set_exit_note(" after the training; all of it is saved")
    if not quiet and isinstance(result, Result):
        show(result, config.run_dir, config.env is not None, _own_code(request, training=True), _own_code(request))
    elif not quiet and isinstance(result, PopulationResult):
        show_population(result, config.run_dir, _own_code(request, training=True), _own_code(request))
    stopped = trainer.interrupt.signal
    return 0 if stopped is None else 128 + stopped


def title(request: Request) -> str:
    """Return what is trained: the algorithm, the environment and the seed, and the run that goes on."""
    config = request.config
    parts = [f"{request.algo} {f'on {config.env}' if config.env else 'from data'}", f"seed {config.seed}"]
    if request.from_run:
        parts.append(f"from step {request.from_step} of {request.from_run}")
    elif request.resume:
        parts.append(f"going on in {config.run_dir}")
    return ", ".join(parts)


def train(trainer: Trainer | PopulationTrainer) -> Result | PopulationResult:
    """Run to the end; return the result. Unlike `trainer.train()`, this prints no summary in the words of Python."""
    for _ in trainer:
        pass
    if isinstance(trainer, PopulationTrainer):
        trainer.require_any()
    return trainer.result()


def requested_devices(config: Any, of_members: bool) -> int:
    """Return how many devices the settings of a run, or `of_members`, ask for.

    Raises:
      SettingsError: the mesh is invalid.
    """
    return shape_of(config.mesh, config.devices, of_members).devices


def population_config(given: Mapping[str, Any] | None) -> PopulationConfig | None:
    """Parse the settings `population`; `None` for a single run.

    Raises:
      SettingsError: an entry is unknown, or a value has the wrong type.
    """
    if given is None:
        return None
    asked = from_plain(PopulationConfig(), given, prefix="population.")
    sweep = asked.sweep or {}
    words = isinstance(sweep, list) and all(isinstance(word, str) for word in sweep)
    if not words and not (isinstance(sweep, Mapping) and all(isinstance(name, str) for name in sweep)):
        raise SettingsError(f"population.sweep is {sweep!r}; expected settings, as in agent.lr: [1e-4, 1e-3]")
    return replace(asked, sweep=read_sweep(sweep) if isinstance(sweep, list) else sweep)


def _own_code(request: Request, training: bool = False) -> str:
    """Return the flags that name a user's own algorithm and environments: commands import no others.

    The environment of evaluations is needed for `training` alone.
    """
    typed = request.typed_envs
    named = {"--algo": request.algo, "--env": typed["env"], "--eval-env": typed["eval_env"] if training else None}
    return "".join(f" {flag} {quote(name)}" for flag, name in named.items() if name and module_to_import(name))


def show_population(result: PopulationResult, run_dir: str, to_train: str = "", to_read: str = "") -> None:
    """Print the results of a population, the commands that come next, and the best member.

    `to_train` and `to_read` are flags for commands that resume the run, and for those that read it.
    """
    best, where = result.best_member(), f" {quote(run_dir)}"
    lines = {"run": one_line(run_dir)}
    if any(can_go_on(member.status) for member in result.members):
        lines["go on"] = f"{command('train')} --resume{where}{to_train}"
    lines["evaluate"] = f"{command('evaluate')}{where} --member {best.number}{to_read}"
    swept = f", {format_swept(best.now)}" if best.now else ""
    score = "" if best.best_score is None else f", score {best.best_score:.6g}"
    lines["best"] = f"member {best.number}{score}, seed {best.seed}{swept}"
    print_table(result.table(), lines)


def trainer_config(config: TrainerConfig) -> TrainerConfig:
    """Return the trainer's part of a run's settings."""
    return part_of(config, TrainerConfig)


def new_run_dir(name: str) -> str:
    """Return a directory under `runs/` that does not exist yet."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 2
    while Path(path).exists():
        path, number = f"{stem}-{number}", number + 1
    return path


def show(result: Result, run_dir: str, playable: bool = True, to_train: str = "", to_read: str = "") -> None:
    """Print the summary of a run, each part on one line, and the commands that come next.

    `playable`: whether there is an environment to evaluate and to play in. `to_train` and `to_read` are flags for
    commands that resume the run, and for those that read it.
    """
    run, lines = f" {quote(run_dir)}", {}
    if (more := _to_go_on(result.summary)) is not None:
        lines["go on"] = f"{command('train')} --resume{run}{to_train}{more}"
    if result.summary["best_score"] is not None and playable:
        lines["evaluate"] = f"{command('evaluate')}{run}{to_read}"
        lines["watch"] = f"{command('play')}{run}{to_read} --out episode.gif"
    print_summary(result, one_line(run_dir), lines)


def _to_go_on(summary: Mapping[str, Any]) -> str | None:
    """Return the flags that, with `--resume`, continue a stopped run; `None` if none can."""
    stop = summary["stop"]
    if stop in LIMITS:
        return f" --{stop.replace('_', '-')} {2 * summary[LIMITS[stop]]}"
    return "" if can_go_on(stop) else None


if __name__ == "__main__":
    run_main(main)

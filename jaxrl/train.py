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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.cli.opening import greet, print_note, stage

if __name__ == "__main__":
    greet(sys.argv[1:])  # before what is slow to import

from jaxrl.cli.algos import build, part_of
from jaxrl.cli.arguments import command, normalise, quote, refuse_repeats, value_of
from jaxrl.cli.config import Request, algorithm_named, parse
from jaxrl.cli.finished import nothing_left
from jaxrl.cli.joining import join, joining, together
from jaxrl.cli.leaving import set_exit_note
from jaxrl.cli.outside import admit, admit_algorithm
from jaxrl.cli.sweeps import PopulationConfig, build_population, read_sweep
from jaxrl.envs.registry import module_to_import
from jaxrl.errors import RunDirInUseError, RunDirTakenError, SettingsError, one_line, print_line, suggest
from jaxrl.loading import teacher_of
from jaxrl.paths import require_new
from jaxrl.strategies import Strategy
from jaxrl.strategies.population import Population
from jaxrl.training import Result, Trainer, TrainerConfig
from jaxrl.training.closing import LIMITS, print_summary, print_table
from jaxrl.training.mesh import shape_of
from jaxrl.training.population.scores import PopulationResult, format_swept
from jaxrl.training.population.trainer import PopulationTrainer
from jaxrl.training.processes import number
from jaxrl.xla.contexts import product_precision


def main(args: Sequence[str]) -> int:
    """Parse, build, run; return the exit code."""
    args = normalise(args)
    refuse_repeats(args)
    args, how = joining(args)
    admit_algorithm(algorithm_named(args))
    request = parse(args)
    admit(value_of(args, flag) for flag in ("--env", "--eval-env"))
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
    if how is None and not (request.resume or request.start_over) and request.config.run_dir is not None:
        require_new(config.run_dir)  # before the environment is built and traced; a name of our own may change yet
    if how is not None:
        join(how, requested_devices(config, request.population is not None))
    with together(how is not None):
        return run(args, request, config, how is not None)


def run(args: Sequence[str], request: Request, config: Any, joined: bool) -> int:
    """Train by `config`, with other processes if `joined`; return the exit code."""
    if not joined:
        divide_cpu(requested_devices(config, request.population is not None))
    devices = require_devices()
    if joined and value_of(args, "--devices") is None:
        config = replace(config, devices=len(devices))
    quiet = config.quiet or number() > 0
    if not quiet:
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
        strategy: Strategy | Population = build(request.algo, config, teacher)
    else:
        strategy = build_population(request.algo, config, members, teacher)
    cache_compilations()
    trainer = trainer_of(
        strategy,
        trainer_config(config),
        resume=request.from_run or request.resume,
        **({"from_step": request.from_step} if request.from_step else {}),
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
        show(result, config.run_dir, playable=config.env is not None, again=_import_flags(request.algo, config.env))
    elif not quiet and isinstance(result, PopulationResult):
        show_population(result, config.run_dir, _import_flags(request.algo, config.env))
    stopped = trainer.interrupt.signal
    return 0 if stopped is None else 128 + stopped


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
      SettingsError: its mesh cannot be.
    """
    return shape_of(config.mesh, config.devices, of_members).devices


def trainer_of(trained: Strategy | Population, config: TrainerConfig, **how: Any) -> Trainer | PopulationTrainer:
    """Return what trains a strategy, or a population."""
    if isinstance(trained, Population):
        return PopulationTrainer(trained, config, **how)
    return Trainer(trained, config, **how)


def population_config(given: Mapping[str, Any] | None) -> PopulationConfig | None:
    """Return the members asked for, or `None` for a run like any other.

    Raises:
      SettingsError: an entry that there is none of.
    """
    if given is None:
        return None
    known = PopulationConfig.__dataclass_fields__
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise SettingsError(f"unknown setting population.{name}; {suggest(str(name), known)}")
    sweep = given.get("sweep") or {}
    words = isinstance(sweep, list) and all(isinstance(word, str) for word in sweep)
    if not words and not (isinstance(sweep, Mapping) and all(isinstance(name, str) for name in sweep)):
        raise SettingsError(f"population.sweep is {sweep!r}; expected settings, as in agent.lr: [1e-4, 1e-3]")
    return PopulationConfig(**{**given, "sweep": read_sweep(sweep) if isinstance(sweep, list) else sweep})


def _import_flags(algo: str, env: str | None) -> str:
    """Return the flags without which no command would import a user's own algorithm and environment."""
    algorithm = f" --algo {quote(algo)}" if module_to_import(algo) else ""
    return algorithm + (f" --env {quote(env)}" if env is not None and module_to_import(env) else "")


def show_population(result: PopulationResult, run_dir: str, again: str = "") -> None:
    """Print what the settings of a population came to, what to do next, and which member is the best.

    `again` is a flag that the commands need.
    """
    best, where = result.best_member(), f" {quote(run_dir)}"
    lines = {"run": one_line(run_dir)}
    if any(member.status == "running" or member.status.startswith("SIG") for member in result.members):
        lines["go on"] = f"{command('train')} --resume{where}{again}"
    lines["evaluate"] = f"{command('evaluate')}{where} --member {best.number}{again}"
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


def show(result: Result, run_dir: str, playable: bool = True, again: str = "") -> None:
    """Print the summary of a run, each part on one line, and what to do next if there is an environment.

    `again` is a flag that these commands need.
    """
    run, lines = f" {quote(run_dir)}{again}", {}
    if (more := _to_go_on(result.summary)) is not None:
        lines["go on"] = f"{command('train')} --resume{run}{more}"
    if result.summary["best_score"] is not None and playable:
        lines["evaluate"] = f"{command('evaluate')}{run}"
        lines["watch"] = f"{command('play')}{run} --out episode.gif"
    print_summary(result, one_line(run_dir), lines)


def _to_go_on(summary: Mapping[str, Any]) -> str | None:
    """Return the flags that, with `--resume`, continue a stopped run; `None` if none can."""
    stop = summary["stop"]
    if stop in LIMITS:
        return f" --{stop.replace('_', '-')} {2 * summary[LIMITS[stop]]}"
    return "" if stop in ("SIGINT", "SIGTERM") else None


if __name__ == "__main__":
    run_main(main)

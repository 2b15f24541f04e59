"""`python -m jaxrl.train [ALGO] [flags]`: train an agent, or resume a run."""

from jaxrl.cli import cache_compilations, divide_cpu, require_devices, run_main  # first, for it takes the signals

# isort: split
import contextlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl.opening import greet, stage, tell, value_of

if __name__ == "__main__":
    greet(sys.argv[1:])  # before what is slow to import

from jaxrl.algos import build, part_of
from jaxrl.config import Request, joining, parse
from jaxrl.envs.registry import module_in
from jaxrl.errors import RunDirInUseError, RunDirTakenError, SettingsError, nearest
from jaxrl.joining import join, together
from jaxrl.leaving import say_how_far
from jaxrl.own_envs import admit
from jaxrl.strategies import Strategy
from jaxrl.strategies.population import Population
from jaxrl.sweeps import PopulationConfig, build_population, read_sweep
from jaxrl.terminal import print_folded
from jaxrl.training import Result, Trainer, TrainerConfig
from jaxrl.training.mesh import shape_of
from jaxrl.training.population.scores import PopulationResult, named
from jaxrl.training.population.trainer import PopulationTrainer
from jaxrl.training.processes import number

COPIED = ("run", "go on", "evaluate", "watch")
"""Lines of the summary that are for copying, and stay whole however narrow the terminal is."""


def main(args: Sequence[str]) -> int:
    """Parse, build, run; return the exit code."""
    args, how = joining(args)
    request = parse(args)
    admit(value_of(args, flag) for flag in ("--env", "--eval-env"))
    config = request.config
    if config.run_dir is None:
        env = (config.env or "data").replace(":", "-").replace("/", "-")
        config = replace(config, run_dir=new_run_dir(f"{env}-{request.algo}-s{config.seed}"))
    config.check()
    if how is not None:
        join(how, asked_devices(config, request.population is not None))
    with together(how is not None):
        return run(args, request, config, how is not None)


def run(args: Sequence[str], request: Request, config: Any, joined: bool) -> int:
    """Train by `config`, with other processes if `joined`; return the exit code."""
    if not joined:
        divide_cpu(asked_devices(config, request.population is not None))
    devices = require_devices()
    if joined and value_of(args, "--devices") is None:
        config = replace(config, devices=len(devices))
    quiet = config.quiet or number() > 0
    if not quiet:
        tell(f"device {devices[0].device_kind}, run directory {config.run_dir}")
        stage.show("building the environment")
    members = population_config(request.population)
    strategy = build(request.algo, config) if members is None else build_population(request.algo, config, members)
    cache_compilations()
    trainer = trainer_of(
        strategy,
        trainer_config(config),
        resume=request.from_run or request.resume,
        **({"from_step": request.from_step} if request.from_step else {}),
        allow_changes=request.allow_changes,
        start_over=request.start_over,
    )
    stage.clear()
    say_how_far("")  # from here on something may be written
    try:
        result = trainer.train()
    except (RunDirInUseError, RunDirTakenError):
        if request.config.run_dir is None and not joined:
            return main(args)  # another process has just taken that directory, so the next try gets another name
        raise
    say_how_far(" after the training; all of it is saved")
    if not quiet and isinstance(result, Result):
        show(result, config.run_dir, playable=config.env is not None, named=_named_again(config.env))
    elif not quiet and isinstance(result, PopulationResult):
        show_population(result, config.run_dir, _named_again(config.env))
    stopped = trainer.interrupt.signal
    return 0 if stopped is None else 128 + stopped


def asked_devices(config: Any, of_members: bool) -> int:
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
            raise SettingsError(f"unknown setting population.{name}; {nearest(str(name), known)}")
    sweep = given.get("sweep") or {}
    words = isinstance(sweep, list) and all(isinstance(word, str) for word in sweep)
    if not words and not (isinstance(sweep, Mapping) and all(isinstance(name, str) for name in sweep)):
        raise SettingsError(f"population.sweep is {sweep!r}; expected settings, as in agent.lr: [1e-4, 1e-3]")
    return PopulationConfig(**{**given, "sweep": read_sweep(sweep) if isinstance(sweep, list) else sweep})


def _named_again(env: str | None) -> str:
    """Return the flag without which no command would import a user's own environment."""
    return f" --env {shlex.quote(env)}" if env is not None and module_in(env) else ""


def show_population(result: PopulationResult, run_dir: str, again: str = "") -> None:
    """Print what the settings of a population came to, what to do next, and which member is the best.

    `again` is a flag that the commands need.
    """
    quoted, best = shlex.quote(run_dir), result.best_member()
    stopped = any(member.status == "running" or member.status.startswith("SIG") for member in result.members)
    lines = [f"  run         {run_dir}"]
    lines += [f"  go on       python -m jaxrl.train --resume {quoted}{again}"] if stopped else []
    lines += [f"  evaluate    python -m jaxrl.evaluate {quoted} --member {best.number}{again}"]
    swept = f", {named(best.now)}" if best.now else ""
    score = "" if best.best_score is None else f", score {best.best_score:.6g}"
    lines += [f"  best        member {best.number}{score}, seed {best.seed}{swept}"]
    with contextlib.suppress(OSError):  # the reader may be gone
        print("\n".join([result.table(), *lines]), flush=True)


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


def show(result: Result, run_dir: str, playable: bool = True, named: str = "") -> None:
    """Print the summary of a run, each part on one line, and what to do next if there is an environment.

    `named` is a flag that these commands need.
    """
    summary = result.summary
    seconds = "  ".join(f"{part}\N{NO-BREAK SPACE}{value:.1f}" for part, value in summary["seconds"].items())
    lines = {
        "stopped by": summary["stop"],
        "steps": f"{summary['opt_steps']:,} optimisation, {summary['env_steps']:,} environment",
    }
    if summary["opt_steps_per_sec"]:
        lines["speed"] = f"{summary['opt_steps_per_sec']:,.0f} optimisation steps/s while training"
    if summary["best_score"] is not None:
        lines["best"] = f"{summary['best_score']:.6g} at {summary['best_opt_steps']:,}"
    if summary["last_score"] is not None:
        lines["last"] = f"{summary['last_score']:.6g}"
    if summary.get("staleness") is not None:
        lines["staleness"] = f"{summary['staleness']:.4g} optimisation steps, at most {summary['staleness_max']:.4g}"
        lines["learner"] = f"waited {summary['learner_waited_s']:.1f} s"
    for i, actor in enumerate(summary.get("actors", [])):
        mean = "" if actor["mean_return"] is None else f", mean return {actor['mean_return']:.4g}"
        steps = f"{actor['env_steps']:,} steps, {actor['episodes']:,} episodes{mean}"
        lines[f"actor {i}"] = f"{steps}; waited {actor['waited_s']:.1f} s"
    lines["seconds"] = f"{summary['wall_s']:.1f}: {seconds}"
    lines["run"] = run_dir
    quoted = shlex.quote(run_dir)
    if (more := _to_go_on(summary)) is not None:
        lines["go on"] = f"python -m jaxrl.train --resume {quoted}{named}{more}"
    if summary["best_score"] is not None and playable:
        lines["evaluate"] = f"python -m jaxrl.evaluate {quoted}{named}"
        lines["watch"] = f"python -m jaxrl.play {quoted}{named} --out episode.gif"
    for name, text in lines.items():
        if name not in COPIED:
            print_folded(f"  {name:<12}{text}", indent=14)
            continue
        with contextlib.suppress(OSError):  # the reader may be gone
            print(f"  {name:<12}{text}", flush=True)


def _to_go_on(summary: Mapping[str, Any]) -> str | None:
    """Return the flags that, with `--resume`, continue a stopped run; `None` if none can."""
    limits = {"max_opts": "opt_steps", "max_env_steps": "env_steps"}
    stop = summary["stop"]
    if stop in limits:
        return f" --{stop.replace('_', '-')} {2 * summary[limits[stop]]}"
    return "" if stop in ("SIGINT", "SIGTERM") else None


if __name__ == "__main__":
    run_main(main)

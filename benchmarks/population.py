"""`python -m benchmarks.population [--parts P ...] [--repeats R] [--quick] [--json FILE]`.

It says what many members cost, beside few.

DQN on CartPole-v1 with 10 environments, as in `benchmarks.peers`. Rows of `case`:

- `members`: populations of 1, 8 and 32, from warm-up to result, in turn; and 32 in a process that is kept to one core.
- `compiling`: processor seconds that a process takes longer for its first run of a few steps than for its second.
- `host`: 32 members with evaluations, best policies, rows and checkpoints as often as the preset has them, against the
  same without; `longer`: 8, five times as long and as seldom. `evaluated` are the evaluations alone, in memory, with
  the second looks at what may be best. `share` is how much longer they take, `processor_share` how much more of the
  cores.
- `together`: the same for 256 members of PPO with 4 environments each in one program, two evaluations long.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jaxrl
from benchmarks import harness
from benchmarks.cases.shapes import DQN, replaying
from benchmarks.harness import Row
from benchmarks.search import kept
from jaxrl.cli.algos import build
from jaxrl.cli.config import preset
from jaxrl.training.population.scores import PopulationResult

MANY = 32
PARTS = ("members", "compiling", "host", "longer", "together")
NEVER = dict.fromkeys(("eval_interval", "eval_episodes", "record_interval", "save_interval"), 0)


def train(strategy: jaxrl.Strategy, members: int, opts: int, layout: str = "auto", **settings: Any) -> PopulationResult:
    """Train so many seeds, without anything beside the training unless `settings` say so."""
    population = jaxrl.population(strategy, seeds=members, layout=layout)
    trainer = jaxrl.PopulationTrainer(population, max_opts=opts, quiet=True, **{**NEVER, **settings})
    return trainer.train()


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def child(asked: dict[str, Any]) -> float:
    """Measure in a process of its own, see `apart`."""
    if asked["cores"]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked["cores"]])  # before JAX makes its threads
    strategy = replaying(DQN())
    run = lambda: train(strategy, asked["members"], asked["opts"], asked["layout"])
    begun = time.process_time()
    run()
    again = time.process_time()
    took = seconds(run)
    if asked["compiling"]:
        return (again - begun) - (time.process_time() - again)
    return took / (asked["members"] * asked["opts"]) * 1e6


def apart(members: int, opts: int, cores: int = 0, layout: str = "auto", compiling: bool = False) -> float:
    """Return microseconds per optimisation step of so many members, or what compiling takes, in another process."""
    asked = {"members": members, "opts": opts, "cores": cores, "layout": layout, "compiling": compiling}
    command = [sys.executable, "-m", "benchmarks.population", "--child", json.dumps(asked)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(told.splitlines()[-1])


def members(repeats: int, opts: int, few: int, many: int) -> list[Row]:
    """Time populations of several sizes in turn."""
    samples = harness.interleave(
        {
            "1": lambda: apart(1, opts),
            str(few): lambda: apart(few, opts),
            str(many): lambda: apart(many, opts),
            f"{many} on one core": lambda: apart(many, opts, cores=1),
        },
        repeats,
    )
    return [
        harness.row("members", own, samples[str(many)], DQN().opt_interval, name=f"members {name}")
        for name, own in samples.items()
    ]


def compiling(repeats: int, many: int) -> list[Row]:
    """Time what one and many members compile, in turn."""
    cases = {(count, layout): (count, layout) for layout in ("spread", "together") for count in (1, many)}
    samples = harness.interleave(
        {
            f"{count} {layout}": lambda count=count, layout=layout: apart(count, 10, layout=layout, compiling=True)
            for count, layout in cases
        },
        repeats,
    )
    return [
        {
            "case": "compiling",
            "name": f"compiling {name}",
            "seconds": harness.spread(own),
            "ratio_to_one": harness.ratio_spread(own, samples[f"1 {name.partition(' ')[2]}"]),
        }
        for name, own in samples.items()
    ]


def host(
    part: str,
    repeats: int,
    count: int,
    times: float,
    *,
    algo: str = "dqn",
    evaluated: int = 6,
    layout: str = "auto",
    workers: int | None = None,
) -> list[Row]:
    """Time members with all that a run does beside its training, and without, of `times` the preset's intervals.

    They train until the evaluation number `evaluated`.
    """
    strategy = replaying(DQN()) if algo == "dqn" else four_environments()
    config = preset(algo)
    length = {name: max(1, int(times * getattr(config, name))) for name in ("eval_interval", "record_interval")}
    opts = evaluated * length["eval_interval"]
    evaluations = {"eval_interval": length["eval_interval"], "eval_episodes": config.eval_episodes}
    run = partial(train, strategy, count, opts, layout, workers=workers)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run(**{**length, **evaluations}, run_dir=f"{folder}/run", save_interval=config.save_interval)

    calls = {"whole": whole, "bare": run, "evaluated": lambda: run(**evaluations)}
    spent: dict[str, list[float]] = {part: [] for part in calls}

    def measured(part: str) -> float:
        begun = time.process_time()
        wall = seconds(calls[part])
        spent[part].append(time.process_time() - begun)
        return wall

    samples = harness.interleave({part: partial(measured, part) for part in calls}, repeats)
    spent = {part: own[1:] for part, own in spent.items()}  # the first round is not counted there either
    row = {
        "case": part,
        "name": f"{part} {count}",
        "seconds": {name: harness.spread(own) for name, own in samples.items()},
        "processor_seconds": {name: harness.spread(own) for name, own in spent.items()},
        "share": shares(samples),
        "processor_share": shares(spent),
        "settings": {
            **length,
            **evaluations,
            "algo": algo,
            "layout": layout,
            "members": count,
            "max_opts": opts,
            "workers": workers,
        },
    }
    return [row]


def four_environments() -> jaxrl.Strategy:
    """Return the training of PPO on CartPole-v1 with 4 environments, by the preset of the command line."""
    return build("ppo", preset("ppo").changed(num_envs=4))


def shares(spent: dict[str, list[float]]) -> dict[str, Any]:
    """Return how much more of the bare time each takes."""
    return {
        part: harness.spread([a / b - 1 for a, b in zip(own, spent["bare"], strict=True)])
        for part, own in spent.items()
        if part != "bare"
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.population", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--opt-steps", type=int, default=1_000, help="optimisation steps of each member")
    parser.add_argument(
        "--workers", type=int, help="members at a time, where `host` and `longer` do all (default: cores)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of them (default: all)")
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--json", type=Path, help="file to write, which keeps its rows of other parts")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(child(options.child))
        return
    few, many, times = (2, 3, 0.01) if options.quick else (8, MANY, 1)
    repeats, opts = (1, 10) if options.quick else (options.repeats, options.opt_steps)
    parts = {
        "members": lambda: members(repeats, opts, few, many),
        "compiling": lambda: compiling(repeats, many),
        "host": lambda: host("host", repeats, many, times, workers=options.workers),
        "longer": lambda: host("longer", repeats, few, 5 * times, workers=options.workers),
        "together": lambda: host(
            "together", repeats, few if options.quick else 256, times, algo="ppo", evaluated=2, layout="together"
        ),
    }
    rows = [row for row in kept(options.json) if row["case"] not in options.parts]
    for part in options.parts:
        rows += parts[part]()
        if options.json:
            harness.write(options.json, rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()

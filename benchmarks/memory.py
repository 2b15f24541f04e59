"""`python -m benchmarks.memory [--algo A ...] [--core C ...] [--task T ...] [--seeds S ...] [--costs] [--json FILE]`.

It says how soon each recurrent core remembers what a task needs, and what that costs. An agent with equal settings but
for its core trains until an evaluation of `EPISODES` episodes reaches 0.95 of the task's best return; a row says after
how many environment steps that was, or that it did not come to that. The core `none` has no memory. The longer mazes
are learnt by way of shorter ones, and `parity-10-by-4` by way of shorter words, whose steps count too.

`--costs` says instead what an optimisation step takes with each core, all in turn in one process, and how many times as
long as without one. `--json` keeps the rows of others that the file has.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jaxrl
from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.loops import Training
from jaxrl.cli.main import cache_compilations
from jaxrl.nn import CORES

EPISODES = 100
REACHED = 0.95
"""Share of the best return, which is 1 in all of these tasks."""
NUM_ENVS = 64
WIDTH = 64
"""Of the torso's one layer, and of the core."""


class Task(NamedTuple):
    """A task, and how long to try."""

    env: str
    args: Mapping[str, Any]
    rollout: int
    """Steps, no fewer than an episode has: no gradient goes back further."""
    most: int
    """Environment steps."""
    lr: float = 1e-3
    after: str | None = None
    """The task that is trained on before, from whose run this training begins."""


TASKS = {
    "recall-20": Task("memory:Recall", {"length": 20}, 64, 1_000_000),
    "chain-20": Task("MemoryChain-bsuite", {"memory_length": 20}, 64, 1_000_000),
    "copy-5": Task("memory:Copy", {}, 64, 4_000_000),
    "parity-10": Task("memory:Parity", {"length": 10}, 64, 2_000_000),
    "parity-2": Task("memory:Parity", {"length": 2}, 64, 500_000),
    "parity-3": Task("memory:Parity", {"length": 3}, 64, 500_000, after="parity-2"),
    "parity-4": Task("memory:Parity", {"length": 4}, 64, 500_000, after="parity-3"),
    "parity-10-by-4": Task("memory:Parity", {"length": 10}, 64, 2_000_000, after="parity-4"),
    "tmaze-100": Task("memory:TMaze", {"length": 100}, 128, 4_000_000),
    "tmaze-200": Task("memory:TMaze", {"length": 200}, 256, 2_048_000, 3e-4, "tmaze-100"),
    "tmaze-500": Task("memory:TMaze", {"length": 500}, 512, 8_000_000, 3e-4, "tmaze-200"),
}


def strategy_of(algo: str, core: str, task: str) -> jaxrl.Strategy:
    """Return the training of an agent with `core`."""
    of = TASKS[task]
    maker = {"ppo": jaxrl.ppo, "pqn": jaxrl.pqn}[algo](core=core, core_features=WIDTH, features=(WIDTH,), lr=of.lr)
    return jaxrl.on_policy(
        jaxrl.make_env(of.env, **of.args), maker, num_envs=NUM_ENVS, rollout=of.rollout, epochs=4, minibatches=4
    )


def learn(algo: str, core: str, task: str, seed: int, most: int | None = None) -> Row:
    """Train until an evaluation reaches what the task can give, on the tasks before it first."""
    tasks = [task]
    while (before := TASKS[tasks[0]].after) is not None:
        tasks.insert(0, before)
    summaries: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(tasks):
            own = {"run_dir": f"{folder}/{name}"} if len(tasks) > 1 else {}
            begun = {"init_from": f"{folder}/{tasks[i - 1]}"} if i else {}
            summaries.append(train(strategy_of(algo, core, name), TASKS[name], seed, most, **own, **begun))
    tried = sum(summary["env_steps"] for summary in summaries)
    return {
        "algo": algo,
        "core": core,
        "task": task,
        "seed": seed,
        "env_steps": tried if summaries[-1]["stop"] == "stop_reward" else None,
        "tried": tried,
        "by_way_of": {name: summary["env_steps"] for name, summary in zip(tasks[:-1], summaries, strict=False)},
        "last_score": summaries[-1]["last_score"],
    }


def train(strategy: jaxrl.Strategy, task: Task, seed: int, most: int | None, **settings: Any) -> Mapping[str, Any]:
    """Train on one task, and return the summary."""
    # The same places for all cores: an evaluation after every two rollouts of 128 steps, or one of more.
    rollouts = max(1, 256 // task.rollout)
    trainer = jaxrl.Trainer(
        strategy,
        max_opts=max(1, (most or task.most) // strategy.env_steps_per_step) * strategy.opt_steps_per_step,
        eval_interval=rollouts * strategy.opt_steps_per_step,
        eval_episodes=EPISODES,
        confirm_best=False,
        stop_reward=REACHED,
        seed=seed,
        quiet=True,
        **settings,
    )
    return trainer.train().summary


def costs(algo: str, cores: Sequence[str], task: str, repeats: int) -> list[Row]:
    """Time an optimisation step with each of the cores, `none` among them, in turn."""
    loops = {core: Training(strategy_of(algo, core, task)) for core in cores}
    samples = harness.interleave({core: partial(loop.us, 1) for core, loop in loops.items()}, repeats)
    return [
        {
            "algo": algo,
            "core": core,
            "task": task,
            "seed": None,
            "us_per_opt_step": harness.spread(us)[1],
            "spread": harness.spread(us),
            "ratio_to_none": harness.median_ratio(us, samples["none"]),
        }
        for core, us in samples.items()
    ]


def main() -> None:
    """Parse, train, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__, allow_abbrev=False)
    parser.add_argument("--algo", nargs="+", choices=["ppo", "pqn"], default=["ppo"], help="agents (default: ppo)")
    parser.add_argument("--core", nargs="+", choices=["none", *CORES], default=[*CORES], help="cores (default: all)")
    parser.add_argument("--task", nargs="+", choices=[*TASKS], default=["recall-20"], help="tasks (default: recall-20)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--costs", action="store_true", help="what an optimisation step takes, and nothing learnt")
    parser.add_argument("--quick", action="store_true", help="one rollout of one core, to see that it runs")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    cache_compilations()
    cores, seeds, most = (["mingru"], [0], 1) if options.quick else (options.core, options.seeds, None)
    if options.costs:
        cores, seeds = [*dict.fromkeys(["none", *cores])], [None]
    asked = [(a, c, t, s) for t in options.task for a in options.algo for c in cores for s in seeds]
    # Rows of the file that are not asked for stay in it, so that cores can be measured one after another.
    name_of = lambda row: (row["algo"], row["core"], row["task"], row["seed"])
    there = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    rows = [row for row in there if name_of(row) not in asked]
    if options.costs:
        for algo, task in itertools.product(options.algo, options.task):
            made = costs(algo, cores, task, 1 if options.quick else 7)
            rows += made
            for row in made:
                told = f"{row['us_per_opt_step']:,.0f} us, {row['ratio_to_none']:.2f} times as long as without a core"
                print(algo, row["core"], task, told, file=sys.stderr, flush=True)
    for one in () if options.costs else asked:
        rows.append(learn(*one, most=most))
        steps, tried = rows[-1]["env_steps"], rows[-1]["tried"]
        told = f"after {steps:,} steps" if steps else f"not in {tried:,} steps"
        print(*one, told, file=sys.stderr, flush=True)
        if options.json:
            harness.write(options.json, rows)
    if options.json:
        harness.write(options.json, rows)


if __name__ == "__main__":
    main()

"""`python -m benchmarks.search [--task T ...] [--repeats R ...] [--how H ...] [--quick] [--json FILE]`.

It says what a search finds.

A task is trained by 16 members whose learning rates are drawn from 1e-5 to 1e-1, uniformly in their logarithm: all to
the end (`grid`), by halving, and by PBT. A repeat draws the same members for all three. The winner is the member with
the best last evaluation of those that came to the end; its last policy, not its best, plays fresh episodes, the same
ones for all. Steps are optimisation steps, summed over members. `--json` keeps the rows of other repeats, tasks and
searches that the file has.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jaxrl
from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.learning import FRESH
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.cli.main import cache_compilations
from jaxrl.strategies.base import Strategy
from jaxrl.train import trainer_config
from jaxrl.training.evaluator import EvaluateFn, evaluator_of
from jaxrl.training.population.scores import MemberResult, PopulationResult

MEMBERS = 16
RANGE = (1e-5, 1e-1)
EPISODES = 400
"""Fresh ones, by which a winner is judged."""
RESAMPLES = 10_000
"""Of the bootstrap over repeats."""


class Task(NamedTuple):
    """What is trained, and how often the searches may look."""

    algo: str
    env: str
    flags: tuple[str, ...]
    """Of `jaxrl.train`, beside its preset."""
    interval: int
    """Of PBT, in optimisation steps."""


SHORT = ("--max-opts", "1952", "--agent.lr-decay", "1952", "--eval-interval", "122", "--eval-episodes", "100")
"""A quarter of the preset's steps, at the end of which a tenfold range of rates would come to the same."""
TASKS = {
    "ppo-acrobot": Task("ppo", "Acrobot-v1", ("--eval-interval", "976"), 1_952),
    "ppo-pendulum": Task("ppo", "Pendulum-v1", SHORT, 244),
}
EARLY = jaxrl.Halving(first=0)
"""Not run, but told of the grid's curves."""
HOW = ("grid", "halving", "pbt")


def _smallest(task: Task) -> Task:
    """Return a task that takes seconds: four optimisations a rollout, ten evaluations of two episodes."""
    small = ("--rollout", "8", "--epochs", "1", "--minibatches", "1", "--agent.features", "4", "--agent.lr-decay", "40")
    length = ("--max-opts", "40", "--eval-interval", "10", "--eval-episodes", "2")
    return task._replace(flags=(*small, *length), interval=20)


def searched(name: str, how: str, repeat: int, quick: bool = False) -> Row:
    """Train the members of a repeat, in one of the ways of `HOW`, and judge the winner."""
    task, count = (_smallest(TASKS[name]), 4) if quick else (TASKS[name], MEMBERS)
    config = parse([task.algo, "--env", task.env, "--seed", str(repeat), "--quiet", *task.flags]).config
    strategy = build(task.algo, config)
    search = {"grid": None, "halving": jaxrl.Halving(), "pbt": jaxrl.PBT(task.interval)}[how]
    sweep = {"agent.lr": jaxrl.log_uniform(*RANGE)}
    population = jaxrl.population(strategy, members=count, sweep=sweep, draw_seed=repeat, search=search)
    begun, busy = time.perf_counter(), time.process_time()
    trainer = jaxrl.PopulationTrainer(population, trainer_config(config), recorders=[])
    curves: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for number, report in trainer:
        if report.eval:
            curves[number].append((report.opt_steps, report.eval["score"]))
    result = trainer.result()
    if result.stop:  # half a search is no result
        raise SystemExit(f"stopped by {result.stop} in {name} {how} {repeat}; earlier rows are kept")
    spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - busy}
    best, judge = winner(result), evaluator_of(strategy, EPISODES)
    returns = [fresh_return(strategy, judge, member) for member in result.members]
    return {
        "task": name,
        "how": how,
        "repeat": repeat,
        "algo": task.algo,
        "env": task.env,
        "flags": list(task.flags),
        "search": population.search and population.search.settings(),
        "winner": best.number,
        "lr": rate(best),
        "score_at_choice": best.last_score,
        "fresh": returns[best.number],
        "opt_steps": sum(member.result.summary["opt_steps"] for member in result.members if member.result),
        "members": [told(*one) for one in zip(result.members, returns, curves, strict=True)],
        **spent,
    }


def fresh_return(strategy: Strategy, judge: EvaluateFn, member: MemberResult) -> float | None:
    """Return the mean return of a member's last policy over fresh episodes, if it has one."""
    if member.result is None or strategy.policy is None:
        return None
    return float(judge(strategy.policy.params(member.result.state), jax.random.key(FRESH)).returns.astype(float).mean())


def told(member: MemberResult, fresh: float | None, curve: Sequence[tuple[int, float]]) -> Row:
    """Return what there is to say of a member."""
    opt_steps = member.result and member.result.summary["opt_steps"]
    return {"lr": rate(member), "status": member.status, "opt_steps": opt_steps, "fresh": fresh, "curve": curve}


def rate(member: MemberResult) -> float:
    """Return the learning rate that a member has now."""
    return float({**member.swept, **member.values}["agent.lr"])


def winner(result: PopulationResult) -> MemberResult:
    """Return the member with the best last evaluation of those that came to the end, of equals the first."""
    ends = [member for member in result.members if member.status == "max_opts" and member.last_score is not None]
    return max(ends, key=lambda member: (member.last_score, -member.number))


def foretold(grid: Row, halving: jaxrl.Halving) -> Row:
    """Return what halving comes to of the members of a grid: no member depends on another, so its curve tells it."""
    curves = [[(step, score) for step, score in member["curve"]] for member in grid["members"]]
    end = max(curve[-1][0] for curve in curves)
    made, there = dict.fromkeys(range(len(curves)), end), set(range(len(curves)))
    for number, gate in enumerate(halving.gates(len(curves), end, 1)):
        scores = {n: next((step, score) for step, score in curves[n] if step >= gate) for n in sorted(there)}
        ended = halving.decide(number, {n: score for n, (_, score) in scores.items()}, {}).ended
        made.update({n: scores[n][0] for n in ended})
        there -= set(ended)
    best = max(there, key=lambda n: (curves[n][-1][1], -n))
    found = {"how": f"halving first={halving.first:g}", "opt_steps": sum(made.values()), "winner": best}
    return {**grid, **found, "fresh": grid["members"][best]["fresh"]}


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `values`, by a bootstrap."""
    own = np.asarray(values)
    drawn = own[np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))].mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def documented(rows: Sequence[Row]) -> str:
    """Return the table of the documentation, of what the result file holds."""
    lines = []
    for name in dict.fromkeys(row["task"] for row in rows):
        by_how = {how: {r["repeat"]: r for r in rows if (r["task"], r["how"]) == (name, how)} for how in HOW}
        early = {repeat: foretold(row, EARLY) for repeat, row in by_how["grid"].items()}
        told = {**by_how, f"halving, `first={EARLY.first:g}`": early}
        lines += [_cells(name, how, own, by_how["grid"]) for how, own in told.items() if own]
    fresh = ["winner's fresh return", "less the grid's", "median member"]
    return harness.markdown(["task", "search", "repeats", "steps of the grid's", *fresh], lines)


def _cells(name: str, how: str, own: Mapping[int, Row], grid: Mapping[int, Row]) -> list[str]:
    both = sorted(own.keys() & grid.keys())
    share = f"{statistics.mean(own[r]['opt_steps'] / grid[r]['opt_steps'] for r in both):.2f}" if both else ""
    beside = _interval([own[r]["fresh"] - grid[r]["fresh"] for r in both]) if both and how != "grid" else ""
    median = statistics.mean(median_member(row) for row in own.values()) if how == "grid" else None
    cells = [name, how, str(len(own)), share, _interval([r["fresh"] for r in own.values()]), beside]
    return [*cells, "" if median is None else f"{median:.1f}"]


def median_member(row: Row) -> float:
    """Return the median of what the members' last policies come to over fresh episodes."""
    return statistics.median(member["fresh"] for member in row["members"] if member["fresh"] is not None)


def _interval(values: Sequence[float]) -> str:
    low, high = bounds(values)
    return f"{statistics.mean(values):.1f} [{low:.1f}, {high:.1f}]"


def slim(row: Row) -> Row:
    """Return a row as it is written: with curves for a grid alone, of which `foretold` tells."""
    if row["how"] == "grid":
        return row
    return {**row, "members": [{k: v for k, v in member.items() if k != "curve"} for member in row["members"]]}


def kept(path: Path | None) -> list[Row]:
    """Return the rows that a result file has already."""
    return json.loads(path.read_text())["rows"] if path and path.exists() else []


def main() -> None:
    """Parse, search, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.search", description=__doc__, allow_abbrev=False)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks (default: all)")
    parser.add_argument("--repeats", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="repeats (default: 0 to 4)")
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW), help="searches (default: all)")
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--json", type=Path, help="file to write, or to add to")
    options = parser.parse_args()
    cache_compilations()
    repeats = options.repeats[: 1 if options.quick else None]
    rows = [row for row in kept(options.json) if row["task"] in TASKS]
    for name, how, repeat in [(n, h, r) for n in options.task for r in repeats for h in options.how]:
        row = searched(name, how, repeat, options.quick)
        rows = [r for r in rows if (r["task"], r["how"], r["repeat"]) != (name, how, repeat)] + [row]
        rows.sort(key=lambda r: (list(TASKS).index(r["task"]), HOW.index(r["how"]), r["repeat"]))
        told = (
            f"{row['fresh']:.1f} after {row['opt_steps']:,} steps, lr {row['lr']:.2g}, {row['cpu_seconds']:.0f} CPU s"
        )
        print(f"{name} {how} {repeat}: {told}", file=sys.stderr, flush=True)
        if options.json:  # after each: the next takes minutes
            harness.write(options.json, [slim(row) for row in rows])
    print(documented(rows))


if __name__ == "__main__":
    main()

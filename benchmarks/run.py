"""`python -m benchmarks.run [CASE ...] [--quick] [--json FILE]`: measure, print a table, and keep a JSON.

Each case compares a subject with its reference, interleaved, so that a machine that slows down slows both. Compile
time and warm-up are left out; every call is blocked on.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxrl
from jaxrl.config import build, preset
from jaxrl.strategies import Strategy
from jaxrl.training.program import compile_all

Row = dict[str, Any]


def interleave(subjects: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each subject in turn, `repeats` times after one that is not counted; return the numbers of each."""
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(repeats + 1):
        for name, subject in subjects.items():
            value = subject()
            if repeat:
                samples[name].append(value)
    return samples


def spread(samples: list[float]) -> list[float]:
    """Return smallest, median and largest."""
    return [min(samples), statistics.median(samples), max(samples)]


class Bare:
    """The compiled loop of a strategy called by itself: no trainer, record or evaluation."""

    def __init__(self, strategy: Strategy) -> None:
        key = jax.random.key(0)
        begun = time.perf_counter()
        compiled = compile_all(strategy, key, None, lambda state: state, resume=False)
        self.compile_s = time.perf_counter() - begun
        self.strategy, self.run = strategy, compiled.run
        self.state, self.sums = compiled.init(key)
        self.t = 0
        self.temp_bytes = compiled.run.memory_analysis().temp_size_in_bytes

    def us_per_opt_step(self, iterations: int) -> float:
        """Run `iterations` in one call; return microseconds per optimisation step."""
        begun = time.perf_counter()
        stop = np.uint32(self.t + iterations)
        self.state, self.sums = self.run(self.state, self.sums, np.uint32(self.t), stop)
        jax.block_until_ready((self.state, self.sums))
        self.t += iterations
        return (time.perf_counter() - begun) / (iterations * self.strategy.opt_steps_per_step) * 1e6


def host(repeats: int, iterations: int) -> list[Row]:
    """Training by `Trainer` at the default settings against the same iterations in one bare call.

    The run has its default length but for `--quick`: what each fresh run pays once belongs to it.
    """
    config = preset("dqn")
    iterations = config.max_opts if iterations >= 5_000 else iterations
    strategy = build("dqn", config)
    bare = Bare(strategy)
    opts = iterations * strategy.opt_steps_per_step
    learnt: list[float] = []

    def trainer() -> float:
        result = jaxrl.Trainer(
            strategy,
            max_opts=opts,
            eval_interval=config.eval_interval,
            eval_episodes=config.eval_episodes,
            record_interval=config.record_interval,
            recorders=[],
        ).train()
        learnt.append(float(result.best_score or 0.0))
        return result.summary["seconds"]["train"] / opts * 1e6

    samples = interleave({"trainer": trainer, "bare": lambda: bare.us_per_opt_step(iterations)}, repeats)
    ratios = [a / b for a, b in zip(samples["trainer"], samples["bare"], strict=True)]
    row = _row("host", strategy, samples["trainer"], samples["bare"], bare.compile_s)
    return [{**row, "ratios": ratios, "ratio_to_ceiling": statistics.median(ratios), "best_return": max(learnt)}]


def capacity(repeats: int, iterations: int) -> list[Row]:
    """Iterations with buffers of 10^4, 10^5 and 10^6 items, the last two against the first."""
    bares = {}
    for size in (10**4, 10**5, 10**6):
        bares[size] = Bare(
            jaxrl.off_policy(
                jaxrl.make_env("CartPole-v1"),
                jaxrl.dqn(),
                buffer=jaxrl.uniform(size, batch_size=128),
                num_envs=10,
                opt_interval=10,
                warmup=size,
            )
        )
    calls = {str(size): (lambda bare=bare: bare.us_per_opt_step(iterations)) for size, bare in bares.items()}
    samples = interleave(calls, repeats)
    rows = []
    for size, bare in bares.items():
        row = _row("capacity", bare.strategy, samples[str(size)], samples["10000"], bare.compile_s)
        rows.append({**row, "capacity": size, "temp_bytes": bare.temp_bytes})
    return rows


def _row(case: str, strategy: Strategy, subject: list[float], reference: list[float], compile_s: float) -> Row:
    us, ceiling = statistics.median(subject), statistics.median(reference)
    return {
        "case": case,
        "us_per_opt_step": us,
        "spread": spread(subject),
        "opt_steps_per_sec": 1e6 / us,
        "env_steps_per_sec": 1e6 / us * strategy.env_steps_per_step / strategy.opt_steps_per_step,
        "ceiling_us": ceiling,
        "ratio_to_ceiling": us / ceiling,
        "compile_s": compile_s,
        "settings": dict(strategy.settings or {}),
    }


CASES: dict[str, Callable[[int, int], list[Row]]] = {"host": host, "capacity": capacity}


def header() -> Row:
    """Say on what the numbers were measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxrl": jaxrl.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
        "command": "python -m benchmarks.run " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats, to see that it works")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown case {sorted(unknown)[0]}; known: {', '.join(CASES)}")
    repeats, iterations = (2, 500) if options.quick else (7, 5_000)
    rows = [row for name in options.cases or CASES for row in CASES[name](repeats, iterations)]
    print(f"{'case':<12}{'capacity':>10}{'us/opt':>10}{'min':>9}{'max':>9}{'reference':>11}{'ratio':>8}{'temp MB':>9}")
    for row in rows:
        low, median, high = row["spread"]
        print(
            f"{row['case']:<12}{row.get('capacity', ''):>10}{median:>10.1f}{low:>9.1f}{high:>9.1f}"
            f"{row['ceiling_us']:>11.1f}{row['ratio_to_ceiling']:>8.3f}{row.get('temp_bytes', 0) / 1e6:>9.2f}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"header": header(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

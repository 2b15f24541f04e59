"""`python -m benchmarks.learning [--algo A ...] [--env E ...] [--seeds S ...] [--json FILE] [--FLAG ...]`: learning.

Each preset asked for is trained as `python -m jaxrl.train ALGO --env E --seed S` would, for each seed, without a run
directory. Then the best and the last policy play 100 fresh episodes, with greedy actions, or sampled ones where the
run is evaluated so. Flags that are not the script's own go to `jaxrl.train`, as in `--agent.lr 1e-3`. An environment
without a preset runs on generic settings, and its rows say so.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks import harness
from benchmarks.harness import Row
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.cli.main import cache_compilations
from jaxrl.cli.outside import admit
from jaxrl.cli.presets import PRESETS
from jaxrl.errors import JaxrlError
from jaxrl.registry import algorithm_names, matching_presets, split_suite
from jaxrl.strategies.base import Strategy
from jaxrl.train import trainer_config
from jaxrl.training import Result, Trainer
from jaxrl.training.evaluator import Evaluation, evaluator_of

EPISODES = 100
"""Fresh episodes by which a policy is judged."""
FRESH = 1_000_000
"""Seed of these episodes, as in `jaxrl.evaluate`; no run evaluates with it."""

GOOD = {
    "CartPole-v1": 475.0,
    "Acrobot-v1": -100.0,
    "MountainCar-v0": -110.0,
    "MountainCarContinuous-v0": 90.0,
    "Pendulum-v1": -200.0,
}
"""Mean return from which an evaluation is good: Gymnasium's `reward_threshold`, and -200 for Pendulum."""

ZOO: dict[str, dict[str, tuple[float, int]]] = {
    "ppo": {
        "CartPole-v1": (500.0, 100_000),
        "Acrobot-v1": (-73.5, 1_000_000),
        "MountainCar-v0": (-110.4, 1_000_000),
        "Pendulum-v1": (-172.2, 100_000),
        "MountainCarContinuous-v0": (88.3, 20_000),
    },
    "a2c": {
        "CartPole-v1": (500.0, 500_000),
        "Acrobot-v1": (-83.4, 500_000),
        "MountainCar-v0": (-111.3, 1_000_000),
        "Pendulum-v1": (-163.0, 1_000_000),
        "MountainCarContinuous-v0": (91.2, 100_000),
    },
    "dqn": {
        "CartPole-v1": (500.0, 50_000),
        "Acrobot-v1": (-76.6, 100_000),
        "MountainCar-v0": (-100.8, 120_000),
    },
    "sac": {"Pendulum-v1": (-157.0, 20_000), "MountainCarContinuous-v0": (94.7, 50_000)},
    "td3": {"Pendulum-v1": (-151.9, 20_000), "MountainCarContinuous-v0": (93.5, 300_000)},
    "ddpg": {"Pendulum-v1": (-152.1, 20_000), "MountainCarContinuous-v0": (93.5, 300_000)},
}
"""Mean return and environment steps that RL Baselines3 Zoo publishes in its `benchmark.md`."""
BLINES = {
    "Breakout-MinAtar": (22.9, 9_920_000),
    "Asterix-MinAtar": (15.0, 9_920_000),
    "SpaceInvaders-MinAtar": (131.6, 9_920_000),
    "Freeway-MinAtar": (58.8, 9_920_000),
}
"""The same of gymnax-blines, of PPO, out of its stored logs."""


def main() -> None:
    """Parse, train, judge, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.learning", description=__doc__, allow_abbrev=False)
    known = algorithm_names("off_policy", "on_policy")
    parser.add_argument("--algo", nargs="+", choices=known, default=known, help="algorithms (default: all)")
    parser.add_argument("--env", nargs="+", help="environments (default: those that have a preset by name)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--generic", action="store_true", help="settings of an environment without a preset")
    options, flags = parser.parse_known_args()
    if options.generic:
        for presets in PRESETS.values():
            presets.clear()
    for env in options.env or []:
        admit(env)
    cache_compilations()
    rows: list[Row] = []
    for algo, env in tasks(options.algo, options.env):
        for seed in options.seeds:
            rows.append(learn(algo, env, seed, flags))
            print(told(rows[-1]), file=sys.stderr, flush=True)
            if options.json:  # after each run: the next may take minutes, and may fail
                harness.write(options.json, rows)
    print(table(rows))


def tasks(algos: Sequence[str], envs: Sequence[str] | None) -> list[tuple[str, str]]:
    """Pair each algorithm with the environments; if none are given, with those that it has a preset for by name."""
    named = {algo: [name for name in PRESETS[algo] if "*" not in name] for algo in algos}
    return [(algo, env) for algo in algos for env in (named[algo] if envs is None else envs)]


def learn(algo: str, env: str, seed: int, flags: Sequence[str] = ()) -> Row:
    """Train once and judge what came of it; a run that ends in an error gives a row that tells it."""
    config = parse([algo, "--env", env, "--seed", str(seed), "--quiet", *flags]).config
    about = {
        "algo": algo,
        "env": env,
        "seed": seed,
        "preset": bool(matching_presets(PRESETS[algo], env)),
        "flags": list(flags),
        "reference": reference(algo, env),
    }
    curve: list[tuple[int, float]] = []
    begun, busy = time.perf_counter(), time.process_time()
    try:
        strategy = build(algo, config)
        trainer = Trainer(strategy, trainer_config(config), recorders=[], raise_on_signal=False)
        curve += [(report.env_steps, report.eval["eval_reward"]) for report in trainer if report.eval]
        result = trainer.result()
    except JaxrlError as error:
        return {**about, "failed": str(error), "curve": curve, "seconds": time.perf_counter() - begun}
    if trainer.interrupt:  # half a run is no result
        raise SystemExit(f"stopped by {trainer.interrupt.reason} in {algo} {env} seed {seed}; earlier rows are kept")
    return {
        **about,
        **judged(strategy, result, sampled=config.eval_actions == "sampled"),
        **steadiness([score for _, score in curve], GOOD.get(split_suite(env)[1])),
        "curve": curve,
        "env_steps": result.summary["env_steps"],
        "opt_steps": result.summary["opt_steps"],
        "seconds": result.summary["wall_s"],
        "cpu_seconds": time.process_time() - busy,
        "settings": _plain(asdict(config)),
    }


def judged(strategy: Strategy, result: Result, sampled: bool = False) -> Row:
    """Return mean and deviation over fresh episodes of the best policy and of the last one, and the best's score."""
    assert strategy.policy is not None
    assert result.policy is not None
    evaluate, key = evaluator_of(strategy, EPISODES, sampled), jax.random.key(FRESH)
    best = evaluate(result.policy.params, key)
    last = evaluate(strategy.policy.params(result.state), key)
    return {"score_at_choice": result.best_score, **_spread("best", best), **_spread("last", last)}


def _spread(name: str, evaluation: Evaluation) -> Row:
    returns = evaluation.returns.astype(float)
    return {name: float(returns.mean()), f"{name}_std": float(returns.std())}


def steadiness(scores: Sequence[float], good: float | None) -> Row:
    """Tell how the evaluations after the first good one fared.

    Returns:
      `good`: the score from which an evaluation is good, or None where that is not known; `good_from`: number of the
      first good one, from 0, or None; `later`: how many came after it; `steady`: the share of these that are good too,
      or None where there are none; `last_good`: whether the last evaluation of all is good.
    """
    if good is None:
        return {"good": None, "good_from": None, "later": 0, "steady": None, "last_good": None}
    first = next((i for i, score in enumerate(scores) if score >= good), None)
    later = [] if first is None else scores[first + 1 :]
    steady = sum(score >= good for score in later) / len(later) if later else None
    last_good = bool(scores) and scores[-1] >= good
    return {"good": good, "good_from": first, "later": len(later), "steady": steady, "last_good": last_good}


def reference(algo: str, env: str) -> tuple[float, int] | None:
    """Return mean return and environment steps that others have published for this algorithm, if known."""
    name = split_suite(env)[1]
    return BLINES.get(name) if algo == "ppo" and name in BLINES else ZOO.get(algo, {}).get(name)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) if isinstance(v, dict) else v for k, v in settings.items() if k not in ("run_dir", "quiet")}


def told(row: Row) -> str:
    """Return a row as one line."""
    name = f"{row['algo']} {row['env']} seed {row['seed']}: "
    if "failed" in row:
        return name + row["failed"]
    steady = "" if row["steady"] is None else f", {row['steady']:.0%} of {row['later']} later evaluations good"
    return f"{name}best {row['best']:.1f}, last {row['last']:.1f}{steady}, {row['cpu_seconds']:.0f} CPU s"


COLUMNS = (
    "seeds",
    "env steps",
    "best",
    "+-",
    "worst",
    "last",
    "+-",
    "worst",
    "steady",
    "ends good",
    "CPU s",
    "reference",
)


def table(rows: Sequence[Row]) -> str:
    """Return means and deviations over the seeds of each task, beside the published reference."""
    lines = [f"{'':<34}" + "".join(f"{name:>10}" for name in COLUMNS[:-1]) + f"{COLUMNS[-1]:>20}"]
    for algo, env in dict.fromkeys((row["algo"], row["env"]) for row in rows):
        of_task = [row for row in rows if (row["algo"], row["env"]) == (algo, env)]
        done = [row for row in of_task if "failed" not in row]
        texts = _summary(done) if done else []
        seeds = f"{len(done)}/{len(of_task)}"
        known = of_task[0]["reference"]
        texts = [seeds, *texts] + ["-"] * (len(COLUMNS) - 2 - len(texts))
        published = f"{known[0]:g} @ {known[1]:,}" if known else "-"
        lines.append(f"{algo + ' ' + env:<34}" + "".join(f"{text:>10}" for text in texts) + f"{published:>20}")
    return "\n".join(lines)


def _summary(rows: Sequence[Row]) -> list[str]:
    texts = [f"{statistics.mean(row['env_steps'] for row in rows):,.0f}"]
    for name in ("best", "last"):
        values = [row[name] for row in rows]
        mean = statistics.mean(values)
        texts += [f"{x:.{_digits(mean)}f}" for x in (mean, statistics.pstdev(values), min(values))]
    shares = [row["steady"] for row in rows if row["steady"] is not None]
    texts.append(f"{min(shares):.0%}" if shares else "-")
    known = rows[0]["good"] is not None
    texts.append(f"{sum(row['last_good'] for row in rows)}/{len(rows)}" if known else "-")
    return [*texts, f"{statistics.mean(row['cpu_seconds'] for row in rows):.0f}"]


def documented(rows: Sequence[Row]) -> str:
    """Return a table of what presets reach, of `rows` as result files hold them, each with its version as `jaxrl`."""
    lines = []
    plain = [row for row in rows if row["preset"] and not row["flags"] and "failed" not in row]
    for env, algo in sorted({(row["env"], row["algo"]) for row in plain}):
        of_task = {row["seed"]: row for row in plain if (row["env"], row["algo"]) == (env, algo)}.values()
        steps = statistics.mean(row["env_steps"] for row in of_task)
        cells = [env, f"`{algo}`", harness.spaced(steps), str(len(of_task))]
        cells += [mean_and_deviation([row[name] for row in of_task]) for name in ("best", "last")]
        known = reference(algo, env)
        cells += [
            f"{known[0]:g} at {harness.spaced(known[1])}" if known else "",
            harness.versions(r["jaxrl"] for r in of_task),
        ]
        lines.append(cells)
    counts, policies = ["environment steps", "seeds"], ["best policy", "last policy"]
    return harness.markdown(["environment", "agent", *counts, *policies, "published", "jaxrl"], lines)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return the mean of `values`, and their standard deviation where they differ."""
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    digits = _digits(mean)
    told = f"{mean:.{digits}f}"
    return f"{told} ± {deviation:.{digits}f}" if deviation else told.rstrip("0").rstrip(".")


def _digits(mean: float) -> int:
    """Return how many decimal places a return is given with: more where it is at most 1."""
    return 3 if abs(mean) <= 1 else 1


if __name__ == "__main__":
    main()

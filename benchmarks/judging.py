"""`python -m benchmarks.judging [--algo A ...] [--env E ...] [--seeds S ...] [--env-steps N] [--json FILE]`: judging.

Evaluation of on-policy agents with greedy actions against evaluation with sampled ones. Each preset is trained as in
`benchmarks.learning`, but for at most `--env-steps` environment steps, its decay of the learning rate shortened with
it. At eight evaluations of a run the policy is judged both ways, and a best policy is chosen by each. Training does
not depend on evaluation, so that both choices are made among the same policies. Early, midway and at the end the last
policy and both best ones play 100 fresh episodes, greedy and sampled.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.learning import EPISODES, FRESH
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.cli.main import cache_compilations
from jaxrl.cli.outside import admit
from jaxrl.cli.presets import PRESETS
from jaxrl.registry import matching_presets
from jaxrl.strategies.base import Strategy
from jaxrl.train import trainer_config
from jaxrl.training import Trainer
from jaxrl.training.evaluator import EvalRules, eval_key, evaluate_and_confirm, evaluator_of, mean_return
from jaxrl.training.ledger import Ledger
from jaxrl.trees import PyTree

ALGOS = ("ppo", "a2c", "reinforce", "impala")
"""On-policy agents with a stochastic policy."""
ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "Breakout-MinAtar")
ENV_STEPS = 200_000
EVALUATIONS = 8
MOMENTS = {"early": 2, "midway": 4, "end": EVALUATIONS}
"""After how many evaluations the policies play fresh episodes."""
MODES = ("greedy", "sampled")


def main() -> None:
    """Parse, train, judge, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.judging", description=__doc__, allow_abbrev=False)
    parser.add_argument("--algo", nargs="+", choices=ALGOS, default=ALGOS, help="algorithms (default: all)")
    parser.add_argument("--env", nargs="+", default=ENVS, help=f"environments (default: {', '.join(ENVS)})")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument("--env-steps", type=int, default=ENV_STEPS, help="environment steps of a run, at most")
    parser.add_argument("--json", type=Path, help="file to write")
    options, flags = parser.parse_known_args()
    admit(options.env)
    cache_compilations()
    rows: list[Row] = []
    for env in options.env:
        for algo in options.algo:
            task = task_of(algo, env, options.env_steps, flags)
            for seed in options.seeds:
                rows.append(run(task, seed))
                print(line_of(rows[-1]), file=sys.stderr, flush=True)
                if options.json:
                    harness.write(options.json, rows)
    print(documented(rows))


class Task(NamedTuple):
    """What is trained, with each seed."""

    algo: str
    env: str
    flags: list[str]
    config: Any
    strategy: Strategy
    episodes: int
    """Of an evaluation."""


class Choice:
    """The best policy of a run by one way of judging."""

    def __init__(self, strategy: Strategy, mode: str, seed: int, episodes: int) -> None:
        evaluator = evaluator_of(strategy, episodes, mode == "sampled")
        self._judge = EvalRules(evaluator, mean_return, eval_key(seed), fixed=False, confirms=True)
        self._ledger = Ledger()
        self.params: PyTree = None

    def look(self, params: PyTree, opt_steps: int) -> float:
        """Evaluate, keep what is best, and return the mean return."""
        found = evaluate_and_confirm(self._judge, params, opt_steps, self._ledger, self._ledger.best_score)
        if found.is_best or self.params is None:
            self.params = jax.tree.map(jnp.copy, params)  # the state that they are of goes on
        return found.score

    @property
    def opt_steps(self) -> int | None:
        """When the best policy was found."""
        return self._ledger.best_opt_steps


def task_of(algo: str, env: str, env_steps: int, flags: Sequence[str] = ()) -> Task:
    """Return the preset of a task for at most `env_steps`; the trainer itself does not evaluate."""
    own = ["--env", env, "--quiet", *flags]
    episodes = parse([algo, *own]).config.eval_episodes
    shorter = [*own, *shortened(algo, own, env_steps), "--eval-interval", "0", "--eval-episodes", "0"]
    config = parse([algo, *shorter]).config
    return Task(algo, env, shorter, config, build(algo, config), episodes)


def run(task: Task, seed: int) -> Row:
    """Train once and judge on the way."""
    begun, busy = time.perf_counter(), time.process_time()
    algo, env, strategy = task.algo, task.env, task.strategy
    assert strategy.policy is not None
    choices = {mode: Choice(strategy, mode, seed, task.episodes) for mode in MODES}
    curve: list[Row] = []
    moments: dict[str, Row] = {}
    trainer = Trainer(strategy, trainer_config(replace(task.config, seed=seed)), recorders=[])
    for report in trainer:
        if report.train is None:
            continue
        params = strategy.policy.params(trainer.state)
        scores = {mode: choice.look(params, report.opt_steps) for mode, choice in choices.items()}
        curve.append({"env_steps": report.env_steps, "training": report.train["episode_return"], **scores})
        name = next((name for name, count in MOMENTS.items() if count == len(curve)), None)
        if name or report.stop:
            policies = {"last": params, **{f"best_by_{mode}": choice.params for mode, choice in choices.items()}}
            moments[name or "end"] = {
                **curve[-1],
                **{f"chosen_by_{mode}": choice.opt_steps for mode, choice in choices.items()},
                **{of: fresh(strategy, params) for of, params in policies.items()},
            }
    if trainer.interrupt:
        raise SystemExit(f"stopped by {trainer.interrupt.reason} in {algo} {env} seed {seed}; earlier rows are kept")
    return {
        "algo": algo,
        "env": env,
        "seed": seed,
        "preset": bool(matching_presets(PRESETS[algo], env)),
        "flags": task.flags,
        "eval_episodes": task.episodes,
        "env_steps": report.env_steps,
        "opt_steps": report.opt_steps,
        "moments": moments,
        "curve": curve,
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - busy,
    }


def fresh(strategy: Strategy, params: PyTree) -> dict[str, float]:
    """Return the mean return over fresh episodes by how actions are chosen."""
    key = jax.random.key(FRESH)
    return {mode: mean_return(evaluator_of(strategy, EPISODES, mode == "sampled")(params, key)) for mode in MODES}


def shortened(algo: str, own: Sequence[str], env_steps: int) -> list[str]:
    """Return the flags that end a run after `env_steps` and cut it into as many records as there are evaluations."""
    config = parse([algo, *own]).config
    schedule = Trainer(build(algo, config), trainer_config(config), recorders=[]).schedule
    total = schedule.env_steps(schedule.last)
    iteration = schedule.opt_steps_per_step
    share = min(1.0, env_steps / total)
    part = max(1, round(schedule.last * share / EVALUATIONS)) * iteration
    decay = ["--agent.lr-decay", str(part * EVALUATIONS)] if config.agent.lr_decay else []
    return ["--max-opts", str(part * EVALUATIONS), "--record-interval", str(part), "--save-interval", "0", *decay]


def line_of(row: Row) -> str:
    """Return a row as one line."""
    end = row["moments"]["end"]
    last = ", ".join(f"{mode} {end['last'][mode]:.1f}" for mode in MODES)
    name = f"{row['algo']} {row['env']} seed {row['seed']}"
    return f"{name}: training {end['training']:.1f}, last {last}, {row['cpu_seconds']:.0f} CPU s"


def documented(rows: Sequence[Row]) -> str:
    """Return a table of runs: means over the seeds, the worst seed in brackets."""
    lines = [
        "| environment | agent | environment steps | training | last, greedy | last, sampled | best by greedy, played "
        "greedily | best by sampled, played greedily | sampled | distance of greedy | of sampled |",
        "|---" * 11 + "|",
    ]
    for env, algo in dict.fromkeys((row["env"], row["algo"]) for row in rows):
        of_task = [row for row in rows if (row["env"], row["algo"]) == (env, algo)]
        ends = [row["moments"]["end"] for row in of_task]
        cells = [env, f"`{algo}`", f"{statistics.mean(row['env_steps'] for row in of_task):,.0f}".replace(",", " ")]
        cells += [_mean_and_worst([end["training"] for end in ends])]
        for of, mode in (
            ("last", "greedy"),
            ("last", "sampled"),
            ("best_by_greedy", "greedy"),
            ("best_by_sampled", "greedy"),
            ("best_by_sampled", "sampled"),
        ):
            cells.append(_mean_and_worst([end[of][mode] for end in ends]))
        cells += [f"{distance(of_task, mode):.1f}" for mode in MODES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def distance(rows: Sequence[Mapping[str, Any]], mode: str) -> float:
    """Return how far evaluations lie from the training return of their interval, in the mean over all of `rows`."""
    pairs = [(point[mode], point["training"]) for row in rows for point in row["curve"]]
    return statistics.mean(abs(score - training) for score, training in pairs if training is not None)


def _mean_and_worst(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f})"


if __name__ == "__main__":
    main()

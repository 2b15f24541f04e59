"""`python -m benchmarks.distil [--env E ...] [--seeds S ...] [--opt-steps N] [--json FILE]`: what a student learns.

A teacher, PPO by its preset, learns a task of which it sees everything. Its student sees a part, has a memory, and
learns to act as the teacher would in the states to which it comes itself; rewards teach its value alone
(`policy_coef=0`). Beside it, the same agent learns the same number of steps from the rewards, without a teacher. A row
has the mean returns of 100 fresh episodes of the teacher's and the student's last policies, of the agent alone, and of
random actions.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jaxrl
from benchmarks import harness, hidden, learning, masks
from benchmarks.harness import Row
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.cli.main import cache_compilations
from jaxrl.train import trainer_config

SEEN = {"CartPole-v1": (0, 2), "Pendulum-v1": (0, 1)}
"""Entries of the observation that a student sees: where cart and pole are, and the angle, but no velocity."""
OPTS = 3_200
"""Optimisation steps of a student, with 128 environment steps each."""


def learn(env: str, seed: int, opts: int) -> Row:
    """Train a teacher, its student, and the student's agent alone; return what they come to."""
    begun = time.perf_counter()
    config = parse(["ppo", "--env", env, "--seed", str(seed), "--quiet"]).config
    strategy = build("ppo", config)
    result = jaxrl.Trainer(strategy, trainer_config(config), recorders=[]).train()
    made: dict[str, dict[str, Any]] = {
        "student": {"teacher_coef": 1.0, "policy_coef": 0.0},
        "alone": {},
    }
    returns = {"teacher": learning.judged(strategy, result)["best"]}
    for name, settings in made.items():
        agent = jaxrl.ppo(core="gru", lr=1e-3, lr_decay=opts, **settings)
        teacher = result.policy if name == "student" else None
        task = hidden.in_part(env, SEEN[env])
        student = jaxrl.on_policy(task, agent, teacher=teacher, num_envs=32, rollout=64)
        limits: dict[str, Any] = {"max_opts": opts, "eval_interval": 0, "eval_episodes": 1}
        trained = jaxrl.Trainer(student, recorders=[], seed=seed, quiet=True, **limits).train()
        returns[name] = learning.judged(student, trained)["last"]
    return {"env": env, "seed": seed, **returns, "env_steps": 128 * opts, "seconds": time.perf_counter() - begun}


def share(row: Row) -> float:
    """Return how much of the way from random actions to its teacher a student has come."""
    return (row["student"] - row["random"]) / (row["teacher"] - row["random"])


def main() -> None:
    """Parse, train, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.distil", description=__doc__, allow_abbrev=False)
    parser.add_argument("--env", nargs="+", choices=[*SEEN], default=[*SEEN], help="tasks (default: both)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument(
        "--opt-steps", type=int, default=OPTS, help=f"optimisation steps of a student (default: {OPTS})"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    cache_compilations()
    rows: list[Row] = []
    for env in options.env:
        of_chance = masks.chance(jaxrl.make_env(env), learning.EPISODES, learning.FRESH).report().returns["mean"]
        for seed in options.seeds:
            rows.append(row := {**learn(env, seed, options.opt_steps), "random": of_chance})
            told = ", ".join(f"{name} {row[name]:.1f}" for name in ("teacher", "student", "alone", "random"))
            print(f"{env}, seed {seed}: {told}; {share(row):.1%} of the way", file=sys.stderr, flush=True)
            if options.json:
                harness.write(options.json, rows)


if __name__ == "__main__":
    main()

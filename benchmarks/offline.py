"""`python -m benchmarks.offline [--algo A ...] [--env E ...] [--seeds S ...] [--peer] [--quick] [--json FILE]`.

It says what is learnt from data alone.

For each environment a pilot trains half-way. Half of the data are its episodes, with some random actions among them,
the other half is random altogether. Each agent then learns from these data as `python -m jaxrl.train ALGO --data FILE
--env E --seed S --max-opts N` would, and its last policy plays 100 fresh greedy episodes: none is chosen by its score,
which who has nothing but data could not do either.

With `--peer` JAX-CORL learns from the same data too, by its own scripts and settings, for as many optimisation steps;
and so do our agents with its settings instead of their presets.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jaxrl
from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.learning import EPISODES, FRESH, mean_and_deviation
from benchmarks.peers.__main__ import HERE, Peer, install, said
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse
from jaxrl.cli.main import cache_compilations
from jaxrl.train import trainer_config
from jaxrl.training import Trainer
from jaxrl.training.evaluator import evaluator_of

STEPS = 10_000
"""Of each half of the data."""


class Task(NamedTuple):
    """An environment, who gathers data in it, and who learns from them."""

    pilot: str
    pilot_opts: int
    """For how long the pilot trains."""
    random: float
    """Share of random actions beside the pilot's."""
    opts: int
    """Optimisation steps of each agent."""
    algos: tuple[str, ...]


TASKS = {
    "CartPole-v1": Task("ppo", 160, 0.2, 10_000, ("bc", "awac", "iql", "cql", "cql_dqn", "sac_n")),
    "Pendulum-v1": Task("sac", 2_400, 0.2, 10_000, ("bc", "awac", "iql", "cql", "td3_bc", "rebrac", "sac_n", "edac")),
}

PEER = Peer(
    ("jax<0.10", "flax", "optax", "distrax", "omegaconf", "pydantic", "gymnasium"),
    ("with_jaxcorl.py",),
    source=("https://github.com/nissymori/JAX-CORL", "d747dd8ad4fcc088ff9f1ade49a6be43a60f6556"),
)


class Script(NamedTuple):
    """A script of JAX-CORL, and the flags that give an agent of jaxrl its settings."""

    name: str
    flags: str


SAME = "--processor.reward-scale 1 --agent.tau 0.005"
LAYERS = "--agent.features 256 256"
SCRIPTS = {
    ("Pendulum-v1", "awac"): Script(
        "awac",
        f"{SAME} --agent.lr 3e-4 --agent.policy-lr 3e-4 --agent.beta 1 --agent.max-weight 1e30 --agent.layer-norm "
        "--agent.features 256 256 256 256 --agent.critic-features 256 256",
    ),
    ("Pendulum-v1", "iql"): Script(
        "iql",
        f"{SAME} {LAYERS} --agent.lr 3e-4 --scale-rewards-by range --agent.schedules policy_lr=cosine(3e-4,0,10000)",
    ),
    ("Pendulum-v1", "cql"): Script("cql", f"{SAME} {LAYERS} --agent.lr 3e-4 --agent.policy-lr 3e-4"),
    ("Pendulum-v1", "td3_bc"): Script(
        "td3bc", f"{SAME} {LAYERS} --agent.lr 1e-3 --agent.policy-lr 1e-3 --agent.bc-alpha 2.5 --agent.layer-norm"
    ),
}
"""By environment and agent."""


def returns_of(data: jaxrl.Dataset) -> np.ndarray:
    """Return the returns of the whole episodes in the data."""
    ends = np.flatnonzero(np.asarray(data.terminated) | np.asarray(data.truncated))
    totals = np.concatenate([[0.0], np.cumsum(data.reward, dtype=np.float64)[ends]])
    return np.diff(totals)


def files_of(env: str) -> list[str]:
    """Return the names of the files that hold the two halves of the data."""
    return [f"{env}-pilot.npz", f"{env}-random.npz"]


def gathered(name: str, task: Task, steps: int) -> Row:
    """Train the pilot, gather `steps` of each half of the data into their files, and return what they are."""
    config = parse([task.pilot, "--env", name, "--seed", "0", "--max-opts", str(task.pilot_opts), "--quiet"]).config
    strategy = build(task.pilot, config)
    result = Trainer(strategy, trainer_config(config), recorders=[]).train()
    assert strategy.policy is not None
    params, env = strategy.policy.params(result.state), jaxrl.make_env(name)
    pilot = evaluator_of(strategy, EPISODES)(params, jax.random.key(FRESH)).returns
    halves = [
        jaxrl.gather(env, strategy.policy, params, jax.random.key(seed), steps, random=share)
        for seed, share in ((1, task.random), (2, 1.0))
    ]
    for file, half in zip(files_of(name), halves, strict=True):
        jaxrl.save_dataset(file, half)
    means = [float(returns_of(half).mean()) for half in halves]
    return {**task._asdict(), "pilot_return": float(pilot.mean()), "data_returns": means, "transitions": 2 * steps}


def learn(algo: str, env: str, seed: int, opts: int, flags: str = "") -> Row:
    """Learn once from the data, and judge the last policy."""
    length = ["--max-opts", str(opts), "--eval-interval", str(opts // 5), *flags.split()]
    config = parse([algo, "--data", *files_of(env), "--env", env, "--seed", str(seed), "--quiet", *length]).config
    busy, strategy = time.process_time(), build(algo, config)
    trainer = Trainer(strategy, trainer_config(config), recorders=[], raise_on_signal=False)
    curve = [(report.opt_steps, report.eval["eval_reward"]) for report in trainer if report.eval]
    if trainer.interrupt:  # half a run is no result
        raise SystemExit(f"stopped by {trainer.interrupt.reason} in {algo} {env} seed {seed}; earlier rows are kept")
    assert strategy.policy is not None
    params = strategy.policy.params(trainer.result().state)
    last = evaluator_of(strategy, EPISODES)(params, jax.random.key(FRESH)).returns.astype(float)
    told = {"algo": algo, "env": env, "seed": seed, "last": float(last.mean()), "last_std": float(last.std())}
    return {"library": "jaxrl", **told, "flags": flags, "curve": curve, "cpu_seconds": time.process_time() - busy}


def learn_with_peer(python: Path, algo: str, env: str, seed: int, opts: int) -> Row:
    """Have JAX-CORL learn once from the same data, and judge its last policy."""
    command = [
        python,
        HERE / PEER.command[0],
        SCRIPTS[env, algo].name,
        str(opts),
        str(seed),
        str(EPISODES),
        *files_of(env),
    ]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=outside)
    if ended.returncode:
        raise SystemExit(
            f"JAX-CORL failed in {algo} {env} seed {seed}, with its last lines above; earlier rows are kept"
        )
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    return {"library": "JAX-CORL", "algo": algo, "env": env, "seed": seed, **told}


def documented(rows: Sequence[Row]) -> str:
    """Return the table of `docs/offline.md`, of what the result file holds."""
    lines = []
    for env, algo in dict.fromkeys((row["env"], row["algo"]) for row in rows):
        last = [row["last"] for row in rows if (row["env"], row["algo"]) == (env, algo)]
        lines.append([env, f"`{algo}`", str(len(last)), mean_and_deviation(last), f"{min(last):.1f}"])
    return harness.markdown(["environment", "agent", "seeds", "last policy", "worst seed"], lines)


def documented_beside(rows: Sequence[Row]) -> str:
    """Return the table of agents that both libraries have."""
    lines = []
    for (env, algo), script in SCRIPTS.items():
        own = [row for row in rows if (row["env"], row["algo"]) == (env, algo)]
        ways = [("jaxrl", ""), ("jaxrl", script.flags), ("JAX-CORL", None)]
        last = [[row["last"] for row in own if (row["library"], row.get("flags")) == way] for way in ways]
        if all(last):
            lines.append([env, f"`{algo}`", str(len(last[0])), *map(mean_and_deviation, last)])
    head = ["environment", "agent", "seeds", "jaxrl, its preset", "jaxrl, JAX-CORL's settings", "JAX-CORL"]
    return harness.markdown(head, lines)


def main() -> None:
    """Parse, gather, learn, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.offline", description=__doc__, allow_abbrev=False)
    parser.add_argument("--algo", nargs="+", help="agents (default: all)")
    parser.add_argument("--env", nargs="+", choices=list(TASKS), default=list(TASKS), help="environments")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument("--peer", action="store_true", help="JAX-CORL too")
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    cache_compilations()
    rows: list[Row] = []
    data: Row = {}
    path = options.json and options.json.absolute()
    try:
        peer = install("jax-corl", PEER) if options.peer else None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"JAX-CORL cannot be installed: {said(error)}") from None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for env in options.env:
            task, steps = TASKS[env], STEPS
            if options.quick:
                task, steps = task._replace(pilot_opts=16, opts=10), 500
            data[env] = gathered(env, task, steps)
            for algo in [algo for algo in task.algos if algo in (options.algo or task.algos)]:
                for seed in options.seeds[: 1 if options.quick else None]:
                    made = [learn(algo, env, seed, task.opts)]
                    if peer and (env, algo) in SCRIPTS:
                        made.append(learn(algo, env, seed, task.opts, SCRIPTS[env, algo].flags))
                        made.append(learn_with_peer(peer, algo, env, seed, task.opts))
                    for row in made:
                        print(
                            f"{row['library']} {algo} {env} seed {seed}: {row['last']:.1f}", file=sys.stderr, flush=True
                        )
                    rows += made
                    if path:  # after each run: the next takes a while
                        harness.write(path, rows, data=data)
    print(documented([row for row in rows if row.get("flags") == ""]))
    if peer:
        print(documented_beside(rows))
    for env, about in data.items():
        means = " and ".join(f"{mean:.1f}" for mean in about["data_returns"])
        print(f"{env}: episodes of the data return {means}, greedy ones of the pilot {about['pilot_return']:.1f}")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.recorders [--algo A ...] [--repeats R] [--quick] [--json FILE]`: what recorders cost.

Each of them in turn, in runs as the command trains them by its own settings, but `TIMES` as long, intervals unchanged.
`share` is of the run's seconds, compiling left out, those in which its loop makes rows and hands them to recorders;
`own` is what of it the recorders take, for rows are made without any as well. Weights & Biases and MLflow, where they
are installed, work without a network, in threads of their own: hold their `cpu_s`, the processor time of the whole
process beside its compiling, against that of `jsonl`, which has a run directory and saves as well.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import jaxrl
from benchmarks import harness
from jaxrl.cli.algos import build
from jaxrl.cli.config import preset

TIMES = 3
SETS: dict[str, list[str]] = {
    "none": [],
    "jsonl": ["jsonl"],
    "jsonl tensorboard": ["jsonl", "tensorboard"],
    "jsonl csv": ["jsonl", "csv"],
    "jsonl wandb": ["jsonl", "wandb"],
    "jsonl mlflow": ["jsonl", "mlflow"],
}
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}


def seconds(strategy: Any, recorders: Sequence[str], length: dict[str, int]) -> dict[str, float]:
    """Train a run with `recorders`, and return where its seconds went."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        place = {"run_dir": path} if recorders else {}  # where there is one, `jsonl` is written in any case
        trainer = jaxrl.Trainer(strategy, recorders=list(recorders), quiet=True, **place, **length)
        begun = process_time()
        return {**trainer.train().summary["seconds"], "cpu": process_time() - begun}


def measured(algo: str, repeats: int, quick: bool = False) -> dict[str, Any]:
    """Return for one algorithm by its preset what each set of recorders costs, of `repeats` runs each in turn."""
    config = preset(algo)
    names = ("max_opts", "eval_interval", "record_interval", "eval_episodes")
    length = {name: getattr(config, name) for name in names}
    length["max_opts"] *= TIMES
    if quick:
        length = {name: min(value, 64) for name, value in length.items()}
    strategy = build(algo, config)
    sets = {name: own for name, own in SETS.items() if not {"wandb", "mlflow"} & {*own} or find_spec(own[-1])}
    told: dict[str, list[dict[str, float]]] = {name: [] for name in sets}
    for repeat in range(repeats + 1):
        for name, own in sets.items():
            found = seconds(strategy, own, length)
            if repeat:  # the first run compiles, and imports what recorders need
                told[name].append(found)
    costs = {name: _costs(runs, told["none"]) for name, runs in told.items()}
    return {"algo": algo, **length, "recorders": costs}


def _costs(runs: Sequence[dict[str, float]], without: Sequence[dict[str, float]]) -> dict[str, Any]:
    whole = [sum(run.values()) - run["compile"] - run["init"] - run["cpu"] for run in runs]
    spreads = {f"{part}_s": harness.spread([run[part] for run in runs]) for part in ("train", "record", "cpu")}
    share = [run["record"] / seconds for run, seconds in zip(runs, whole, strict=True)]
    own = [(a["record"] - b["record"]) / seconds for a, b, seconds in zip(runs, without, whole, strict=True)]
    return {**spreads, "share": harness.spread(share), "own": harness.spread(own)}


def main(args: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each set of recorders."""
    parser = argparse.ArgumentParser("python -m benchmarks.recorders")
    parser.add_argument("--algo", nargs="+", default=["ppo", "dqn"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=harness.SMALLEST)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    os.environ.update(OFFLINE)
    found = []
    for algo in options.algo:
        found.append(measured(algo, 1 if options.quick else options.repeats, options.quick))
        print(f"{algo}: {found[-1]['max_opts']:,} optimisation steps, a row every {found[-1]['record_interval']:,}")
        for name, costs in found[-1]["recorders"].items():
            train, record, cpu = (costs[f"{part}_s"][1] for part in ("train", "record", "cpu"))
            shares = f"{100 * costs['share'][1]:5.2f} %, of recorders {100 * costs['own'][1]:5.2f} %"
            print(f"  {name:<18} train {train:6.2f} s  cpu {cpu:6.2f} s  record {record:6.3f} s  {shares}")
        sys.stdout.flush()
        if options.json:
            harness.write(options.json, found)


if __name__ == "__main__":
    main()

"""Time a report on ten long runs: `python -m benchmarks.reports [ROWS] [RUNS]`."""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import yaml

from jaxrl.reports.groups import grouped, remarks
from jaxrl.reports.page import page
from jaxrl.reports.read import read_runs

METRICS = ("approx_kl", "clip_fraction", "entropy", "episode_length", "episode_return", "grad_norm", "loss", "value")
"""Each with its least and largest value in a row, which makes it some 1.2 kB, as a row of PPO is."""


def write(path: Path, seed: int, rows: int) -> None:
    """Write a run of `rows` rows of metrics and a tenth as many evaluations."""
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"algo": "ppo", "env": "CartPole-v1", "seed": seed}))
    (path / "metadata.json").write_text(json.dumps({"format": 1, "status": "running"}))
    columns = {f"{name}{part}": 0.5426123456789 for name in METRICS for part in ("", "_min", "_max")}
    with (path / "metrics.jsonl").open("w") as file:
        for i in range(1, rows + 1):
            place = {"opt_steps": 10 * i, "env_steps": 320 * i, "wall_s": round(0.01 * i, 3)}
            columns["episode_return"] = (i * (seed + 7)) % 501
            row = {"kind": "train", **place, "opt_steps_per_sec": 2194.485, **columns, "skipped_updates": 0}
            file.write(json.dumps(row) + "\n")
            if i % 10 == 0:
                file.write(json.dumps({"kind": "eval", **place, "episodes": 20, "score": 500 * i / rows}) + "\n")


def main(rows: int = 100_000, runs: int = 10) -> None:
    """Write runs, read them, make a page; print the seconds of each, by the wall and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"run{i}" for i in range(runs)]
        for seed, path in enumerate(paths):
            write(path, seed, rows)
        size = sum(file.stat().st_size for path in paths for file in path.iterdir())
        begun = time.perf_counter(), time.process_time()
        found = grouped(read_runs(map(str, paths)))
        read = time.perf_counter(), time.process_time()
        text = page(found, remarks(found), "")
        done = time.perf_counter(), time.process_time()
    for what, start, end in (("read", begun, read), ("page", read, done), ("both", begun, done)):
        print(f"{what}: {end[0] - start[0]:.2f} s, of the processor {end[1] - start[1]:.2f} s")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{runs} runs of {rows} rows, {size / 2**20:.0f} MiB; page {len(text) / 2**20:.1f} MiB; memory {most:.0f} MiB"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

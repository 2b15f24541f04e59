"""`python -m benchmarks.curves RUN... --out FILE.svg`: draw evaluation returns over environment steps, a line a run.

Needs matplotlib. The numbers are those of each run's `metrics.jsonl`.
"""

import argparse
import json
from pathlib import Path


def evaluations(run: Path) -> tuple[list[int], list[float]]:
    """Return environment steps and mean returns of the evaluations of `run`."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [row for row in rows if row["kind"] == "eval"]
    return [row["env_steps"] for row in seen], [row["eval_reward"] for row in seen]


def draw(runs: list[Path], title: str, out: Path) -> None:
    """Write a picture of the curves of `runs`."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = title  # the same numbers make the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        axes.plot(*evaluations(run), marker=".", linewidth=1.2, label=f"seed {number}")
    axes.set(title=title, xlabel="environment steps", ylabel="mean return of an evaluation")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small", ncols=len(runs))
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Parse and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, in the order of their seeds")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw(options.runs, options.title, options.out)


if __name__ == "__main__":
    main()

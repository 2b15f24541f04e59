"""`python -m benchmarks.learnt ALGO... --out FILE.svg [--results FILE ...]`: draw the curves that result files hold.

A panel an environment, with the evaluations of each agent's preset: the mean over seeds, and in a band all of them.
They are what `python -m benchmarks.learning` and `python -m benchmarks.offline` have written. Needs matplotlib.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Row
from jaxrl.reports.picture import COLOURS, DASHES

RESULTS = Path(__file__).parent / "results"


class Learnt(NamedTuple):
    """Evaluations of several seeds at the same steps."""

    steps: np.ndarray
    """`[N]`, of environments, or of optimisation where there are no others."""
    returns: np.ndarray
    """`[seeds, N]`."""


def stored(files: Iterable[Path]) -> list[Row]:
    """Return the rows of result files that are of presets as they are, a later file's in place of an earlier one's."""
    rows = [row for file in sorted(files) for row in json.loads(file.read_text())["rows"]]
    plain = [row for row in rows if row.get("curve") and row.get("preset", True) and not row.get("flags")]
    return list({(row["algo"], row["env"], row["seed"]): row for row in plain}.values())


def learnt(rows: Sequence[Row], algo: str, env: str) -> Learnt | None:
    """Return what an agent's seeds came to, up to where all were evaluated at the same steps; None if none was."""
    curves = [row["curve"] for row in rows if (row["algo"], row["env"]) == (algo, env)]
    same = [points for points in zip(*curves, strict=False) if len({step for step, _ in points}) == 1]
    if not same:
        return None
    return Learnt(np.array([points[0][0] for points in same]), np.array([[y for _, y in points] for points in same]).T)


def draw(rows: Sequence[Row], algos: Sequence[str], out: Path, over: str) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": out.name, "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    envs = sorted({row["env"] for row in rows if row["algo"] in algos})
    columns = min(len(envs), 3)
    lines = math.ceil(len(envs) / columns)
    figure, places = plt.subplots(lines, columns, figsize=(9, 2.5 * lines + 0.4), layout="constrained", squeeze=False)
    for place in places.flat[len(envs) :]:
        place.remove()
    for env, axes in zip(envs, places.flat, strict=False):
        # Colours come again after the last one, each with another dash.
        styles = ((COLOURS[i % len(COLOURS)], DASHES[(i + i // len(COLOURS)) % len(DASHES)]) for i in range(len(algos)))
        for algo, (colour, dash) in zip(algos, styles, strict=True):
            if (found := learnt(rows, algo, env)) is not None:
                axes.plot(found.steps, found.returns.mean(axis=0), color=colour, linestyle=dash, label=algo)
                ends = found.returns.min(axis=0), found.returns.max(axis=0)
                axes.fill_between(found.steps, *ends, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=env, xlabel=over)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4), useMathText=True)
        axes.grid(alpha=0.3)
    shown = {text: line for axes in figure.axes for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=min(len(shown), 6))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Parse, read, draw."""
    parser = argparse.ArgumentParser("python -m benchmarks.learnt", description=__doc__, allow_abbrev=False)
    parser.add_argument("algos", nargs="+", metavar="ALGO")
    parser.add_argument("--results", nargs="+", type=Path, help="result files (default: all of what presets learn)")
    parser.add_argument("--env", nargs="+", help="environments (default: those without pixels)")
    parser.add_argument("--over", default="environment steps", help="what the steps in the files are")
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    options = parser.parse_args()
    rows = stored(options.results or RESULTS.glob("*learning*.json"))
    rows = [row for row in rows if (row["env"] in options.env if options.env else "MinAtar" not in row["env"])]
    draw(rows, options.algos, options.out, options.over)


if __name__ == "__main__":
    main()

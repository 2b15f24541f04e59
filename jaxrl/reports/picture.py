"""Learning curves as a PNG image."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.errors import require_extra
from jaxrl.paths import writing
from jaxrl.reports.curves import band, thin
from jaxrl.reports.groups import Group
from jaxrl.reports.rows import AXES, NAMES, Curve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1a1a1a")
DASHES = ("-", "--", ":", "-.", (0, (8, 3)), (0, (8, 3, 2, 3)))
"""Same as on the page."""
WIDTH = 10.0
"""Width of the image in inches."""


def write_png(groups: Sequence[Group], path: Path, x: str = "env_steps") -> None:
    """Plot scores and returns over `x`, one of `AXES`: IQM and its interval for groups, the curve for a single run.

    Raises:
      SettingsError: matplotlib is not installed, or the file cannot be written.
    """
    figures = require_extra("matplotlib.figure", "pictures", "report")
    columns, height = _legend([group.name for group in groups])
    figure = figures.Figure(figsize=(WIDTH, 4.2 + height), layout="constrained")
    for place, what in enumerate(("evaluation score", "training return")):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.set(xlabel=NAMES[x], ylabel=what)
        axes.grid(alpha=0.3)
        for i, group in enumerate(groups):
            curves = [run.log.score if place == 0 else run.log.returns for run in group.runs]
            _draw(axes, curves, x, i, group.name)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", fontsize="small", ncols=columns, handlelength=3.5)
    with writing(path):
        figure.savefig(path, format="png", dpi=150)


def _legend(names: Sequence[str]) -> tuple[int, float]:
    """Return the number of columns of the legend, and its height in inches."""
    columns = int(np.clip(WIDTH / (0.8 + 0.08 * max(map(len, names), default=1)), 1, 4))
    return columns, max(0.3, 0.2 * -(-len(names) // columns))


def _draw(axes: object, curves: Sequence[Curve], x: str, i: int, name: str) -> None:
    style = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)], "label": name}
    line, fill = axes.plot, axes.fill_between  # type: ignore[attr-defined]
    drawn = band(curves, x)
    if drawn is not None:
        line(drawn.x, drawn.iqm, **style)
        fill(
            drawn.x, drawn.low, drawn.high, color=style["color"], alpha=0.18, linewidth=0, where=np.isfinite(drawn.low)
        )
        return
    # A single curve is drawn instead of a band.
    for curve in [thin(curve, 1_000) for curve in curves if len(curve.y)][:1]:
        line(curve.x[AXES.index(x)], curve.y, marker="." if len(curve.y) < 3 else None, **style)

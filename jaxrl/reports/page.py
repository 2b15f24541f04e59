"""The report page: one self-contained HTML file that needs no network."""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from jaxrl.errors import require_extra
from jaxrl.reports import tables
from jaxrl.reports.curves import band, thin
from jaxrl.reports.groups import Group, count
from jaxrl.reports.populations import lineages, populations
from jaxrl.reports.rows import AXES, NAMES, Curve
from jaxrl.reports.tables import Table

POINTS = 40_000
"""Approximate number of points drawn for all runs, for scores and returns each; at most `MOST_POINTS` per run."""
MOST_POINTS = 1_000
MOST_EPISODES = 200
"""Maximum number of returns per run in the plot of their distribution."""
LONG = 25
"""Number of rows above which a table is collapsed."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; media-src data:; connect-src 'self'"
)
"""Content security policy: only inline content, and requests to the page's own server if it is served."""


def plotly() -> str:
    """Return the source of Plotly's JavaScript library; raise `SettingsError` if it is not installed."""
    return str(require_extra("plotly.offline", "pages", "report").get_plotlyjs())


def page(groups: Sequence[Group], remarks: Sequence[str], library: str, stamp: str = "", x: str = "env_steps") -> str:
    """Return the report as HTML, plotted by the JavaScript in `library`, with curves initially over `x`.

    With a `stamp`, the page polls its server for the current one, and reloads if it has changed.
    """
    runs = [run for group in groups for run in group.runs]
    parts = [
        f"<h1>{count(groups)}</h1>",
        _remarks(remarks),
        _curves(x),
        _table("Scores by settings", tables.group_table(groups)),
        _table("What differs in the settings", tables.setting_table(groups)),
        _plot("population", "Swept settings and last scores") if (swept := populations(runs)) else "",
        _plot("lineage", "Lineage of members") if (descent := lineages(runs)) else "",
        _table("Runs", tables.run_table(groups)),
        _plot("episodes", "Returns of the episodes of the last evaluation") if (episodes := _episodes(groups)) else "",
        _films(groups),
        _table("Seconds", tables.time_table(groups)),
        _table("Events", tables.event_table(groups)),
    ]
    data = {
        "groups": [group.name for group in groups],
        "curves": {
            "score": _plot_data(groups, [[run.log.score for run in group.runs] for group in groups]),
            "return": _plot_data(groups, [[run.log.returns for run in group.runs] for group in groups]),
        },
        "episodes": episodes,
        "populations": swept,
        "lineages": descent,
        "stamp": stamp,
    }
    return _document("\n".join(parts), data, library)


def _document(body: str, data: object, library: str) -> str:
    style, script = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    # A name with `</script>` in it must not end the element.
    held = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>jaxrl report</title>
<style>
{style}</style>
</head>
<body>
{body}
<script id="data" type="application/json">{held}</script>
<script>{library}</script>
<script>
{script}</script>
</body>
</html>
"""


def _remarks(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<section id="remarks"><h2>Remarks</h2><ul>{items}</ul></section>' if items else ""


def _choice(name: str, what: str, options: dict[str, str], first: str = "") -> str:
    chosen = lambda value: " selected" if value == first else ""
    items = "".join(f'<option value="{value}"{chosen(value)}>{shown}</option>' for value, shown in options.items())
    return f'<label>{what} <select id="{name}">{items}</select></label>'


def _curves(x: str) -> str:
    shown = {"iqm": "IQM and 95 % interval", "mean": "mean and 95 % interval of the IQM", "runs": "every run"}
    choices = [
        _choice("metric", "of", {"score": "evaluation score", "return": "training return"}),
        _choice("axis", "over", NAMES, x),
        _choice("shown", "as", shown),
    ]
    return f'<section><h2>Learning curves</h2><p>{" ".join(choices)}</p><div class="plot" id="curves"></div></section>'


def _plot(name: str, title: str) -> str:
    return f'<section><h2>{title}</h2><div id="{name}"></div></section>'


def _table(title: str, table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    inside = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    if len(table.rows) > LONG:
        inside = f"<details><summary>{len(table.rows)} rows</summary>{inside}</details>"
    return f"<section><h2>{title}</h2>{inside}</section>"


def _films(groups: Iterable[Group]) -> str:
    figures = "".join(_film(run.name, run.film) for group in groups for run in group.runs if run.film is not None)
    return f'<section><h2>Episodes</h2><div class="films">{figures}</div></section>' if figures else ""


def _film(name: str, path: Any) -> str:
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:  # removed meanwhile
        return ""
    said = html.escape(f"{name}: {path.name}", quote=True)
    if path.suffix == ".mp4":
        source = f'src="data:video/mp4;base64,{data}"'
        picture = f'<video aria-label="{said}" {source} autoplay loop muted playsinline controls></video>'
    else:
        picture = f'<img alt="{said}" src="data:image/gif;base64,{data}">'
    return f"<figure>{picture}<figcaption>{said}</figcaption></figure>"


def _plot_data(groups: Sequence[Group], curves: Sequence[Sequence[Curve]]) -> dict[str, Any]:
    """Return the plot data of the curves `[groups][runs]`."""
    count = sum(len(own) for own in curves)
    points = int(np.clip(POINTS // max(count, 1), 50, MOST_POINTS))
    runs = [
        {"group": i, "name": run.name, "x": [_short(x) for x in thinned.x], "y": _short(thinned.y)}
        for i, (group, own) in enumerate(zip(groups, curves, strict=True))
        for run, thinned in zip(group.runs, (thin(curve, points) for curve in own), strict=True)
        if len(thinned.y)
    ]
    bands = [[band(own, axis) for own in curves] for axis in AXES]
    return {
        "runs": runs,
        "bands": [
            [
                None if one is None else {name: _short(x) for name, x in one._asdict().items() if name != "runs"}
                for one in axis
            ]
            for axis in bands
        ],
    }


def _short(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON, rounded to six digits; integers are exact."""
    return [_round(x) for x in values.tolist()]


def _round(x: float) -> float | None:
    if not np.isfinite(x):
        return None
    return int(x) if x.is_integer() and abs(x) < 2**53 else float(f"{x:.6g}")


def _episodes(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Return the returns of every run's last evaluation, or `MOST_EPISODES` quantiles of more."""
    found: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        for run in group.runs:
            for step, returns in run.episodes().items():
                few = np.quantile(returns, np.linspace(0, 1, min(len(returns), MOST_EPISODES)))
                found.append({"group": i, "name": run.name, "step": step, "returns": _short(few)})
    return found

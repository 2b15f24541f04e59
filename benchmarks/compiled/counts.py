"""What committed programs are made of, as the table of `docs/performance.md`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
TARGETS = ("h200", "v5e")
Row = Mapping[str, Any]


def newest() -> dict[str, list[Row]]:
    """Return the rows of the newest committed result of each target."""
    files = {target: sorted(RESULTS.glob(f"*-compiled-{target}.json"))[-1] for target in TARGETS}
    return {target: json.loads(file.read_text())["rows"] for target, file in files.items()}


def table(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of what programs are made of; `rows` of each target."""
    lines = [
        "| case | H200: kernels | serial terms | launches | waits | MB moved | v5e: instructions | thousand cycles |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = {row["case"]: row for row in rows["v5e"]}
    for row in rows["h200"]:
        beside = others.get(row["case"])
        told = [f"{row['kernels_per_opt_step']:,.0f}", f"{row['serial_terms']:,.0f}"]
        told += [row["host_launches_per_call"], row["host_waits_per_call"], f"{row['bytes'] / 1e6:,.1f}"]
        if beside:
            told += [f"{beside['kernels_per_opt_step']:,.0f}", f"{beside['estimated_cycles_per_opt_step'] / 1e3:,.0f}"]
        else:
            told += ["", ""]
        lines.append(f"| `{row['case']}` | " + " | ".join(map(str, told)) + " |")
    return "\n".join(lines)

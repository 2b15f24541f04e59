"""Print what committed programs are made of, and the least that targets allow, as the tables of the documentation.

python -m benchmarks.compiled.limits

It is a model and no measurement. An optimisation step takes at least as long as one kernel, as its bytes from memory
and as its products of matrices at the highest rate, whichever is longest. The program, by its own counts, takes as
long as its kernels one after the other, none shorter than the shortest, and beside that its bytes and products; on a
TPU as many cycles as XLA estimates. Where the host launches more than one graph a call, its launches may bind instead.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "results"
Row = Mapping[str, Any]


class Constants(NamedTuple):
    """What a target is taken to allow."""

    launch_us: float
    """Of what the host launches, beyond the one graph of a call."""
    kernel_us: float
    """Of the shortest kernel within it."""
    bytes_per_us: float
    flops_per_us: float
    """Products of the precision that training has there."""
    cycles_per_us: float = 0.0
    """Of the clock, where XLA estimates cycles."""


CONSTANTS = {
    # 2.5 us to launch, and about 1 us from one node of a graph to the next, as it is commonly measured. 4.8 TB/s and
    # 494 TFLOP/s of TF32, which float32 products are by default: the data sheet of the H200 (989 with sparsity).
    "h200": Constants(2.5, 1.0, 4.8e6, 494e6),
    # 819 GB/s and 197 TFLOP/s of bfloat16, which float32 products are by default: the data sheet of the v5e. From the
    # latter follows the clock, for four units of 128 x 128 multiplications and additions. 1 830 cycles: the fewest that
    # XLA estimates of an instruction that is not free.
    "v5e": Constants(0.0, 1_830 / 1_503, 0.819e6, 197e6, 1_503.0),
}


class Model(NamedTuple):
    """Microseconds of an optimisation step."""

    kernels: float
    """Its kernels, none shorter than the shortest."""
    bytes: float
    products: float | None
    """`None` if the result does not tell."""
    least: float
    """What the target allows."""
    program: float
    """What the program comes to."""


def model(row: Row) -> Model:
    """Return the model of a case from its counts."""
    of = CONSTANTS[row["target"]]
    kernels, moved = row["kernels_per_opt_step"] * of.kernel_us, row["bytes"] / of.bytes_per_us
    products = row["flops"] / of.flops_per_us if row.get("flops") is not None else None
    cycles = row.get("estimated_cycles_per_opt_step")
    launches = row.get("host_launches_per_call", 1)
    launching = launches / row["opt_steps_per_iteration"] * of.launch_us if launches > 1 else 0.0
    program = cycles / of.cycles_per_us if cycles else max(kernels, launching) + moved + (products or 0.0)
    return Model(kernels, moved, products, max(of.kernel_us, moved, products or 0.0), program)


def counts(rows: Mapping[str, Sequence[Row]]) -> list[str]:
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
    return lines


def limits(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the table of limits; `rows` of each target."""
    columns = ("kernels", "bytes", "products", "least", "program", "times")
    lines = [
        "| case | " + " | ".join(f"{target}: {name}" for target in ("H200", "v5e") for name in columns) + " |",
        "|---" * (1 + 2 * len(columns)) + "|",
    ]
    models = {target: {row["case"]: model(row) for row in found} for target, found in rows.items()}
    for case in dict.fromkeys([*models["h200"], *models["v5e"]]):
        told = [cell for target in ("h200", "v5e") for cell in _cells(models[target].get(case))]
        lines.append(f"| `{case}` | " + " | ".join(told) + " |")
    return lines


def _cells(found: Model | None) -> list[str]:
    if found is None:
        return [""] * 6
    times = [found.kernels, found.bytes, found.products, found.least, found.program]
    told = ["" if us is None else f"{us:,.2f}" if us < 10 else f"{us:,.0f}" for us in times]
    return [*told, f"{found.program / found.least:,.0f}"]


def newest() -> dict[str, list[Row]]:
    """Return the rows of the newest committed result of each target."""
    files = {target: sorted(RESULTS.glob(f"*-compiled-{target}.json"))[-1] for target in CONSTANTS}
    return {target: json.loads(file.read_text())["rows"] for target, file in files.items()}


def tables(rows: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Return both tables by the names of their places in the documentation."""
    return {"counts": "\n".join(counts(rows)), "limits": "\n".join(limits(rows))}


def main() -> int:
    """Print both; return the exit code."""
    for name, table in tables(newest()).items():
        print(f"<!-- {name} -->\n{table}\n<!-- /{name} -->\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

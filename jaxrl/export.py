"""`python -m jaxrl.export RUN_DIR`: write a run's policy for others to run, without jaxrl."""

from jaxrl.cli import Parser, require_devices, run_main  # first, for it takes the signals

# isort: split
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxrl.errors import print_line
from jaxrl.evaluate import add_which, load_named
from jaxrl.exporting import as_numpy, onnx, stablehlo
from jaxrl.exporting.function import Function, described, function_of
from jaxrl.exporting.writing import MARK, require_room, write
from jaxrl.reports.exports import require_outside

FORMATS: Mapping[str, Callable[[Function], dict[str, bytes]]] = {
    "stablehlo": stablehlo.files,
    "onnx": onnx.files,
    "numpy": as_numpy.files,
}


def main(args: Sequence[str]) -> int:
    """Parse, load, write; return the exit code."""
    parser = Parser(
        "python -m jaxrl.export",
        description="Write the best policy of a run, or another, as a program that needs no jaxrl: as StableHLO for "
        "CPU, CUDA and TPU, as ONNX, or as arrays with a page of NumPy.",
        epilog="Example: python -m jaxrl.export runs/cartpole --format numpy --out policy",
    )
    add_which(parser)
    parser.add_argument("--format", choices=tuple(FORMATS), default="stablehlo", help="(default: stablehlo)")
    parser.add_argument("--out", help="directory to write (default: policy-FORMAT)")
    parser.add_argument("--overwrite", action="store_true", help="replace that directory if an export made it")
    options = parser.parse_args(args)
    out = Path(options.out or f"policy-{options.format}")
    require_outside(out, [options.run_dir])
    require_room(out, options.overwrite)
    require_devices()
    policy = load_named(options)
    function = function_of(policy)
    told = json.dumps({"format": options.format, **described(function, policy.facts)}, indent=2) + "\n"
    write({**FORMATS[options.format](function), MARK: told.encode()}, out)
    print_line(f"{out}: the policy as {options.format}, after {policy.facts['opt_steps']} optimisation steps")
    return 0


if __name__ == "__main__":
    run_main(main)

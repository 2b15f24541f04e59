"""`python -m jaxrl.export RUN_DIR`: export a run's policy as a program that needs no jaxrl."""

from jaxrl.cli.main import Parser, path_arg, run_main  # first: it installs signal handlers

# isort: split
from collections.abc import Sequence
from pathlib import Path

from jaxrl.errors import print_line
from jaxrl.evaluate import add_which, load_named
from jaxrl.exporting.formats import FORMATS, files_of, require_room, write


def main(args: Sequence[str]) -> int:
    """Parse, load, write; return the exit code."""
    parser = Parser(
        "export",
        "runs/cartpole --format numpy --out policy",
        description="Write the best policy of a run, or another, as a program that needs no jaxrl: as StableHLO for "
        "CPU, CUDA and TPU, as ONNX, as arrays with a page of NumPy, or as C99.",
    )
    add_which(parser)
    parser.add_argument("--format", choices=tuple(FORMATS), default="stablehlo", help="(default: stablehlo)")
    parser.add_argument("--out", type=path_arg, help="directory to write (default: policy-FORMAT)")
    parser.add_argument("--overwrite", action="store_true", help="replace that directory if an export made it")
    options = parser.parse(args)
    out = Path(options.out or f"policy-{options.format}")
    require_room(out, options.run_dir, options.overwrite)
    policy = load_named(options)
    write(files_of(policy, options.format), out)
    print_line(f"{out}: the policy as {options.format}, after {policy.facts['opt_steps']} optimisation steps")
    return 0


if __name__ == "__main__":
    run_main(main)

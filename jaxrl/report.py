"""`python -m jaxrl.report RUN...`: report on runs, finished or in progress, as a page, a picture or a table."""

from jaxrl.cli.main import Parser, path_arg, run_main  # first: it installs signal handlers

# isort: split
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.errors import SettingsError, print_line, print_stderr
from jaxrl.reports.exports import require_outside, to_aggregate_csv, to_csv, to_marl_eval, write
from jaxrl.reports.groups import Group, count, group_runs, remarks
from jaxrl.reports.page import page, plotly
from jaxrl.reports.picture import write_png
from jaxrl.reports.read import read_runs
from jaxrl.reports.rows import AXES, NAMES
from jaxrl.reports.serve import Pages, serve
from jaxrl.training.storage.run_dir import require_run

PORT = 8765


def main(args: Sequence[str]) -> int:
    """Parse, read, write; return the exit code."""
    parser = Parser(
        "report",
        "runs/* --out page.html",
        description="Report on runs and populations. They are read only, also while they go on.",
    )
    parser.add_argument("runs", nargs="+", type=path_arg, metavar="RUN", help="directory of a run or a population")
    parser.add_argument(
        "--out", type=path_arg, help="page to write (default: report.html, unless another file is asked for)"
    )
    parser.add_argument("--png", type=path_arg, help="picture of the learning curves to write")
    parser.add_argument("--csv", type=path_arg, help="table of all scores and returns of all runs to write")
    parser.add_argument(
        "--aggregate", type=path_arg, help="table of mean, IQM and its 95 %% interval of each setting to write"
    )
    parser.add_argument("--json", type=path_arg, help="evaluations in the layout of marl-eval to write")
    about = "what the curves of --png and --aggregate, and at first of the page, are over (default: %(default)s)"
    parser.add_argument("--x", choices=AXES, default="env_steps", help=about)
    about = f"serve the page on this machine alone, made anew as runs go on (default port: {PORT})"
    parser.add_argument("--serve", nargs="?", type=int, const=PORT, metavar="PORT", help=about)
    options = parser.parse(args)
    files = [options.out, options.png, options.csv, options.aggregate, options.json]
    if options.serve is None and not any(files):
        options.out = files[0] = "report.html"
    if options.png and not options.png.lower().endswith(".png"):
        raise SettingsError(f"--png is {options.png!r}; expected a name that ends with .png")
    for run in options.runs:
        require_run(Path(run))
    if len(given := [os.path.realpath(file) for file in files if file]) > len(set(given)):
        raise SettingsError("two of --out, --png, --csv, --aggregate and --json name the same file; give each its own")
    for file in filter(None, files):
        require_outside(Path(file), options.runs)
    library = plotly() if options.out or options.serve is not None else ""
    remarked: set[str] = set()
    if any(files):
        groups, lines = read(options.runs, remarked)
        counted, over = count(groups), f", over {NAMES[options.x]}"
        kinds: list[tuple[str | None, Callable[[Path], object], str]] = [
            (options.out, lambda path: write(path, page(groups, lines, library, x=options.x)), ""),
            (options.png, lambda path: write_png(groups, path, options.x), over),
            (options.csv, lambda path: write(path, to_csv(groups)), ""),
            (options.aggregate, lambda path: write(path, to_aggregate_csv(groups, options.x)), over),
            (options.json, lambda path: write(path, to_marl_eval(groups)), ""),
        ]
        for name, make, more in kinds:
            if name:
                make(Path(name))
                print_line(f"{name}: {counted}{more}")
    if options.serve is not None:
        pages = Pages(options.runs, lambda stamp: page(*read(options.runs, remarked), library, stamp, options.x))
        serve(options.serve, pages, lambda url: print_line(f"{url} shows the report; Ctrl+C ends it"))
    return 0


def read(paths: Sequence[str], remarked: set[str]) -> tuple[list[Group], list[str]]:
    """Return the runs at `paths` in groups, and remarks on them; print those that are not in `remarked` yet."""
    groups = group_runs(read_runs(paths))
    lines = remarks(groups)
    for line in lines:
        if line not in remarked:
            print_stderr(f"warning: {line}")
    remarked |= set(lines)
    return groups, lines


if __name__ == "__main__":
    run_main(main)

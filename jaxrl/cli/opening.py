"""What `jaxrl train` prints and refuses before slow imports."""

from collections.abc import Sequence

import jaxrl
from jaxrl.cli.arguments import normalise, refuse_repeats, value_of
from jaxrl.cli.leaving import set_exit_note
from jaxrl.errors import JaxrlError, print_stderr
from jaxrl.paths import local, require_new
from jaxrl.terminal import Stage, print_folded

stage = Stage()
"""Display of a command's activity, until the trainer takes over."""


def greet(args: Sequence[str]) -> None:
    """Print the version, and show that imports have begun; with `--help`, `--list-envs` or `--quiet`, print nothing.

    `--version`, and errors that can be detected before slow imports, end the process here.
    """
    set_exit_note(" before training began; nothing was written")
    if {"--version", "-v"} & set(args):
        from jaxrl.cli.main import run_main  # late: it imports this module

        run_main(print_version, args)
    args = normalise(args)
    if {"--help", "-h", "--list-envs"} & set(args):
        return
    try:
        _refuse_at_once(args)
    except JaxrlError as error:
        print_stderr(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    if "--quiet" not in args and value_of(args, "--process-id") in (None, "0"):  # of several processes, 0 prints
        print_folded(f"jaxrl {jaxrl.__version__}")
        stage.show("importing")


def _refuse_at_once(args: Sequence[str]) -> None:
    """Raise an error for a repeated flag, or a directory in which no run can begin."""
    refuse_repeats(args)
    for flag in ("--run-dir", "--resume"):
        if path := value_of(args, flag):
            local(path)
    # With several processes, another one may have made the directory already.
    if (path := value_of(args, "--run-dir")) and not {"--resume", "--distributed"} & set(args):
        require_new(path, "--start-over" in args)


def print_version(args: Sequence[str]) -> int:
    """Print the version, whatever the arguments; return the exit code."""
    del args
    print(f"jaxrl {jaxrl.__version__}")
    return 0


def print_note(line: str) -> None:
    """Print a line in place of the current activity."""
    stage.clear()
    print_folded(f"  {line}", indent=4)

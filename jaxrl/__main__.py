"""`python -m jaxrl COMMAND` and the command `jaxrl`: the entry point to all commands."""

from jaxrl.cli.leaving import leave_on_signals  # first: it installs signal handlers

# isort: split
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train an agent, or go on with a run",
    "evaluate": "evaluate the best policy of a run in fresh episodes",
    "play": "film one episode of it",
    "collect": "gather a data set with it",
    "report": "show runs as a page, a picture or a table",
    "export": "write its policy as a program that needs no jaxrl",
    "publish": "write a folder for a model hub; upload nothing",
    "verify": "check all that a run has saved",
    "doctor": "check this machine; print what a bug report needs",
    "completion": "print what completes commands in bash or zsh",
}
HELP = """usage: jaxrl COMMAND ...

{commands}

jaxrl COMMAND --help says more; jaxrl train --list-envs names the environments.
Begin with: jaxrl train ppo --env CartPole-v1"""


def main() -> None:
    """Run the command that the first argument names, and exit with its code."""
    leave_on_signals()
    from jaxrl.cli.main import prepare_command, run_main  # late: it takes 0.1 s
    from jaxrl.cli.opening import greet, print_version

    prepare_command()
    name, args = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("--help", "-h", "help"):
        run_main(_print_help, args)
    elif name in ("--version", "-v"):
        run_main(print_version, args)
    elif name not in COMMANDS:
        run_main(_refuse, [name])
    else:
        if name == "train":
            greet(args)  # before slow imports
        run_main(importlib.import_module(f"jaxrl.{name}").main, args)


def _print_help(args: Sequence[str]) -> int:
    del args
    print(HELP.format(commands="\n".join(f"  {name:<12}{what}" for name, what in COMMANDS.items())))
    return 0


def _refuse(args: Sequence[str]) -> int:
    from jaxrl.errors import SettingsError, suggest

    raise SettingsError(f"unknown command {args[0]!r}; {suggest(args[0], COMMANDS)}")


if __name__ == "__main__":
    main()

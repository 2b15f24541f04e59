"""`python -m jaxrl.completion bash|zsh`: print a script that completes commands, algorithms, flags and names.

The script contains all words, so completing starts no Python. Print it again after an update.
"""

from jaxrl.cli.main import Parser, run_main  # first: it installs signal handlers

# isort: split
import contextlib
import importlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from jaxrl.__main__ import COMMANDS
from jaxrl.agents.fields import CoreName, OneOf, rules_of
from jaxrl.cli.algos import general
from jaxrl.cli.config import flags_of
from jaxrl.envs.registry import env_names
from jaxrl.registry import ALGORITHMS, RECORDERS

BASH = """# jaxrl in bash: {command} bash > ~/.local/share/bash-completion/completions/jaxrl
{words}
_jaxrl() {{
    local IFS=$' \\t\\n' current="${{COMP_WORDS[COMP_CWORD]}}"
    COMPREPLY=($(compgen -W "$(_jaxrl_words "$COMP_CWORD" "${{COMP_WORDS[@]:0:COMP_CWORD}}")" -- "$current"))
}}
complete -o default -F _jaxrl jaxrl
"""
ZSH = """#compdef jaxrl
# jaxrl in zsh: {command} zsh > ~/.zfunc/_jaxrl, where fpath has ~/.zfunc
{words}
_jaxrl() {{
    local found="$(_jaxrl_words $((CURRENT - 1)) "${{(@)words[1,CURRENT-1]}}")"
    compadd -- ${{=found}}
    if [[ -z $found || $CURRENT -gt 2 && $PREFIX != -* ]]; then _files; fi
}}
if [[ $funcstack[1] == _jaxrl ]]; then _jaxrl "$@"; else compdef _jaxrl jaxrl; fi
"""
WORDS = """_jaxrl_words() {{  # PLACE WORD ...: the words that may follow; nothing where a file may
    local place="$1" command="$3" algorithm="$4" last
    shift; for last in "$@"; do :; done
    if [ "$place" = 1 ]; then echo '{commands}'; return; fi
    case "$last" in
{choices}
    esac
    case "$command" in
        train) ;;
{others}
        *) return;;
    esac
    if [ "$place" = 2 ]; then echo '{algorithms} --resume --config --help'; return; fi
    case "$algorithm" in
{flags}
        *) echo '{default}';;
    esac
}}"""
"""Function in the common syntax of both shells; its arguments are the words before the cursor."""


def main(args: Sequence[str]) -> int:
    """Parse, print; return the exit code."""
    parser = Parser(
        "completion",
        "bash > ~/.local/share/bash-completion/completions/jaxrl",
        description="Print a script that completes jaxrl's commands, algorithms, flags and names.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="bash or zsh")
    print(script(parser.parse(args).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the script for `bash` or `zsh`."""
    configs = {name: general(name) for name in ALGORITHMS}
    choices: dict[str, list[str]] = {}
    for config in configs.values():
        choices |= choices_of(config)
    others = {name: flags_in_help(name) for name in COMMANDS if name not in ("train", "completion")}
    words = WORDS.format(
        commands=" ".join([*COMMANDS, "--help", "--version"]),
        choices=_cases(choices, "; return"),
        others=_cases({**others, "completion": ["bash", "zsh"]}, "; return"),
        algorithms=" ".join(ALGORITHMS),
        flags=_cases({name: flags_of(config) for name, config in configs.items()}),
        default=" ".join(flags_of(configs["dqn"])),
    )
    return {"bash": BASH, "zsh": ZSH}[shell].format(words=words, command="jaxrl completion")


def choices_of(config: Any) -> dict[str, list[str]]:
    """Return the possible values of flags that take one of a few words."""
    envs = [name for name in env_names() if ":" not in name]  # in bash, a colon ends a word
    found = {"--env": envs, "--eval-env": envs, "--recorders": [*RECORDERS]}
    parts = {f.name: getattr(config, f.name) for f in fields(config)}
    kinds: dict[str, Any] = {part: type(value) for part, value in parts.items() if is_dataclass(value)}
    for part, kind in kinds.items():
        rules = {name: rule for name, (rule, _) in rules_of(kind).items()}
        words = {name: rule.names for name, rule in rules.items() if isinstance(rule, OneOf | CoreName)}
        found |= {f"--{part}.{name}".replace("_", "-"): [*names] for name, names in words.items()}
    return found


def flags_in_help(command: str) -> list[str]:
    """Return the flags of a command, parsed from its `--help`."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        importlib.import_module(f"jaxrl.{command}").main(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown.getvalue())))


def _cases(words: Mapping[str, Sequence[str]], then: str = "") -> str:
    """Return the clauses of a shell's `case`, each of which prints words."""
    return "\n".join(f"        {name}) echo '{' '.join(given)}'{then};;" for name, given in words.items())


if __name__ == "__main__":
    run_main(main)

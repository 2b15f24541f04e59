"""The first line that `jaxrl train` prints, before slow imports: the algorithm, the environment and the seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxrl
from jaxrl.cli.arguments import normalise, refuse_repeats, value_of
from jaxrl.cli.leaving import set_exit_note
from jaxrl.cli.presets import PRESETS
from jaxrl.errors import JaxrlError, one_line, print_stderr
from jaxrl.paths import local, require_new
from jaxrl.registry import ALGORITHMS, matching_presets
from jaxrl.terminal import Stage, print_folded

SILENT = {"--quiet", "--help", "-h", "--list-envs"}

stage = Stage()
"""Display of a front door's activity, until the trainer takes over."""


def greet(args: Sequence[str]) -> None:
    """Print the first line of a run, and show that imports have begun; print nothing if the arguments are invalid.

    `--version`, and errors that can be detected before slow imports, end the process here.
    """
    set_exit_note(" before training began; nothing was written")
    if {"--version", "-v"} & set(args):
        print(f"jaxrl {jaxrl.__version__}")
        raise SystemExit(0)
    args = normalise(args)
    try:
        _refuse_at_once(args)
    except JaxrlError as error:
        print_stderr(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    other = value_of(args, "--process-id") not in (None, "0")  # only process 0 prints
    line = None if other or SILENT & set(args) else first_line(args)
    if not line:
        return
    print_folded(one_line(line), indent=2)  # a closed output is reported by later code
    stage.show("importing")


def _refuse_at_once(args: Sequence[str]) -> None:
    """Raise an error for a repeated flag, or a directory in which no run can begin."""
    if {"--help", "-h", "--list-envs"} & set(args):
        return
    refuse_repeats(args)
    for flag in ("--run-dir", "--resume"):
        if path := value_of(args, flag):
            local(path)
    # With several processes, another one may have made the directory already.
    if (path := value_of(args, "--run-dir")) and not {"--resume", "--distributed"} & set(args):
        require_new(path, "--start-over" in args)


def first_line(args: Sequence[str]) -> str | None:
    """Return the first line, or `None` if these arguments will be rejected later."""
    resume, config = value_of(args, "--resume"), value_of(args, "--config")
    try:
        file = f"{resume}/config.yaml" if resume else config
        settings = _settings(local(file)) if file else {}
    except (OSError, ValueError):
        return None
    first = args[0] if args and not args[0].startswith("-") else value_of(args, "--algo")
    named = first or settings.get("algo", "dqn")
    if named not in ALGORITHMS or not (settings or not resume):
        return None
    env = value_of(args, "--env") or value_of(args, "--env-id") or settings.get("env") or ALGORITHMS[named].env
    seed = value_of(args, "--seed") or settings.get("seed", 0)
    where = f"on {env}" if env else "from data"
    run_dir = value_of(args, "--run-dir")
    parts = [f"jaxrl {jaxrl.__version__}: {named} {where}", f"seed {seed}"]
    parts += [_branching(resume, args)] if resume else [f"run directory {run_dir}"] if run_dir else []
    parts += ["generic settings (no preset for this environment)"] if _generic(named, env, settings) else []
    return ", ".join(parts)


def _branching(resume: str, args: Sequence[str]) -> str:
    """Describe which run is resumed, or from which step a new one branches off."""
    step = value_of(args, "--from-step")
    return f"from step {step} of {resume}" if step else f"going on in {resume}"


def print_note(line: str) -> None:
    """Print a line in place of the current activity."""
    stage.clear()
    print_folded(f"  {line}", indent=4)


def _generic(algo: str, env: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether `algo` runs with its generic settings, without a preset or a settings file."""
    return not settings and isinstance(env, str) and not matching_presets(PRESETS.get(algo, {}), env)


def _settings(path: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(path) from error
    return found if isinstance(found, dict) else {}

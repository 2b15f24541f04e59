"""Resuming a finished run without changes: detected before anything compiles."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.cli.arguments import command, quote, value_of
from jaxrl.cli.config import Request
from jaxrl.training.storage.checkpoints import CheckpointError
from jaxrl.training.storage.group import BEST, CHECKPOINTS, Saves, open_store
from jaxrl.training.storage.logs import damage
from jaxrl.training.storage.members import population_of, runs_of
from jaxrl.training.storage.run_dir import group_of, open_log, read_metadata, read_settings


def nothing_left(args: Sequence[str], request: Request) -> str | None:
    """Return the message for resuming a finished run; `None` if there is anything to train or repair."""
    if not request.resume or request.from_run or request.start_over:
        return None
    run = Path(request.config.run_dir)
    if group_of(run) is not None:
        return None  # it is refused: members go on together
    flags = {word for word in args if word.startswith("--")} - {"--resume", "--quiet"}
    same_env = value_of(args, "--env") == read_settings(run).get("env")  # custom environments must be named again
    if flags - ({"--env"} if same_env else set()):
        return None
    runs = [run]
    if population_of(run) is not None:
        runs = runs_of(run)
        if not runs or len(runs) != read_metadata(run).get("members"):
            return None
    opened: dict[Path, Saves] = {}
    limits = {limit_of(path, request.config, opened) for path in runs}
    if None in limits or len(limits) != 1:
        return None
    (limit,) = limits
    flag, value = f"--{str(limit).replace('_', '-')}", getattr(request.config, str(limit))
    env = f" --env {quote(request.config.env)}" if "--env" in flags else ""
    return (
        f"nothing is left to train: {limit} {value} is reached; prolong it by "
        f"{command('train')} --resume {quote(str(run))}{env} {flag} {2 * value}"
    )


def limit_of(run: Path, config: Any, opened: dict[Path, Saves]) -> str | None:
    """Return the setting whose limit a run has reached; `None` if it has reached none or is damaged."""
    store, best = open_store(run, CHECKPOINTS, opened), open_store(run, BEST, opened)
    if not (steps := store.steps()):
        return None
    try:
        facts = store.manifest(steps[-1])["facts"]
        whole = not damage(partial(open_log, run), facts)
    except CheckpointError:
        return None
    if not whole or (read_metadata(run).get("best_score") is not None and not best.steps()):
        return None
    if steps[-1] >= config.max_opts:
        return "max_opts"
    taken = facts.get("env_steps")
    return "max_env_steps" if isinstance(taken, int) and 0 < config.max_env_steps <= taken else None

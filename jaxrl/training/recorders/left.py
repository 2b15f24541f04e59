"""What a run has left in its directory when it ends, for services that keep files."""

from pathlib import Path
from typing import Any

from jaxrl.training.recorders.base import Row, RunInfo
from jaxrl.training.recorders.jsonl import rows_of
from jaxrl.training.reel import films_in
from jaxrl.training.storage.run_dir import CONFIG, METADATA, METRICS, VIDEOS, read_metadata

BEST = "best"
SCORES = ("best_score", "best_opt_steps", "last_score")


def best_files(run: RunInfo) -> dict[str, Path]:
    """Return the files of the best policy by their names in a directory that `load_policy` takes; none without one."""
    if run.directory is None:
        return {}
    best = sorted(path for path in (run.directory / BEST).glob("[0-9]*/**/*") if path.is_file())
    about = [run.directory / name for name in (CONFIG, METADATA)]
    files = [path for path in (*about, *best) if path.is_file()] if best else []
    return {path.relative_to(run.directory).as_posix(): path for path in files}


def films(run: RunInfo) -> list[Path]:
    """Return the pictures that move in the directory of the run."""
    return [] if run.directory is None else films_in(run.directory)


def videos(run: RunInfo) -> dict[str, Path]:
    """Return the episodes filmed on the way, by their names in the directory of the run."""
    found = [] if run.directory is None else films_in(run.directory / VIDEOS)
    return {f"{VIDEOS}/{path.name}": path for path in found}


def events_of(run: RunInfo) -> list[Row]:
    """Return the events of the run, in their order."""
    log = () if run.directory is None else rows_of(run.directory / METRICS, ("event",))
    # A path in a message may have bytes that are no text, which services cannot write.
    said = lambda row: str(row.get("message", "")).encode(errors="replace").decode()
    return [{**row, "event": str(row.get("event", "")), "message": said(row)} for row in log]


def summary_of(run: RunInfo) -> tuple[dict[str, Any], bool]:
    """Return the scores of a run that has ended, and whether it failed."""
    facts = {} if run.directory is None else read_metadata(run.directory)
    status = str(facts.get("status", ""))
    scores = {name: facts[name] for name in SCORES if isinstance(facts.get(name), int | float)}
    return {**scores, "status": status}, status.startswith(("failed", "diverged"))

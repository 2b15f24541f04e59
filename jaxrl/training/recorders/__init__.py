"""Recorders: the destinations of a run's rows. `jaxrl.registry.RECORDERS` lists those available by name."""

from collections.abc import Sequence

from jaxrl.errors import SettingsError
from jaxrl.registry import RECORDERS, import_name
from jaxrl.training.recorders.base import (
    Histogram,
    MemoryRecorder,
    Progress,
    Recorder,
    Recorders,
    Row,
    RunInfo,
    Video,
    check_unwritten,
    histograms,
)
from jaxrl.training.recorders.console import ConsoleRecorder
from jaxrl.training.recorders.csv_file import CSVRecorder
from jaxrl.training.recorders.jsonl import JSONLRecorder
from jaxrl.training.recorders.service import Service, ServiceRecorder
from jaxrl.training.recorders.tensorboard import TensorBoardRecorder
from jaxrl.training.storage.population_files import Log


def require_recorders(given: Sequence[object]) -> None:
    """Raise `SettingsError` unless all are names or `Recorder` objects."""
    for recorder in given:
        if not isinstance(recorder, str | Recorder):
            raise SettingsError(
                f"recorders holds {recorder!r}; expected names, or objects of a class derived from jaxrl.Recorder"
            )


def console_of(given: Sequence[Recorder | str], quiet: bool) -> ConsoleRecorder | None:
    """Return the console recorder of a run, given as an object or by name; `None` if there is none."""
    named_one = ConsoleRecorder() if "console" in given and not quiet else None
    return next((recorder for recorder in given if isinstance(recorder, ConsoleRecorder)), named_one)


def recorders_of(
    given: Sequence[Recorder | str], log: Log | None, console: ConsoleRecorder | None = None
) -> list[Recorder]:
    """Return the recorders of a run: always its own `log`, first, then those `given` by name or as objects.

    `console` is the recorder of that name. Without a log, and so a directory, all other names are ignored.
    """
    found: list[Recorder] = own_recorder(log)
    names = dict.fromkeys(name for name in given if isinstance(name, str) and name not in ("console", "jsonl"))
    if console is not None and console not in given:
        found.append(console)
    if log is not None:
        found += [import_name(RECORDERS[name].module, RECORDERS[name].maker)() for name in names]
    return [*found, *(recorder for recorder in given if not isinstance(recorder, str))]


def own_recorder(log: Log | None) -> list[Recorder]:
    """Return the recorder of a log of the run, which creates its file with the first row."""
    return [] if log is None else [JSONLRecorder(log.path, log)]

"""TensorBoard of a population: the means over the members of each setting, under the tags that a single run has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.training.population.scores import iqm
from jaxrl.training.recorders import Recorders, Row, RunInfo, TensorBoardRecorder
from jaxrl.training.recorders.base import NUMBER


class Boards:
    """The event files of a population, in a directory for each of several groups of members."""

    def __init__(self, directory: Path, groups: Mapping[str, Sequence[int]], about: RunInfo, resumed: bool) -> None:
        """Write for each of `groups`, members by name, into a directory of that name; of one group into `directory`.

        `about` describes the population; if it is `resumed`, rows follow after its `opt_steps`. A resume that is
        refused hides nothing: the files are rewound with the first row.
        """
        names = {name: directory if len(groups) == 1 else directory / _as_name(name) for name in groups}
        self._groups = {name: (groups[name], Recorders([TensorBoardRecorder(path)])) for name, path in names.items()}
        for _, recorder in self._groups.values():
            recorder.begin(about)
        self._rewind_to = about.opt_steps if resumed else None

    def write(self, rows: Mapping[int, Row]) -> None:
        """Write the means of the members' rows of one kind at the same optimisation steps.

        The score of a group is the interquartile mean of its members' scores, as everywhere.
        """
        if self._rewind_to is not None:
            for _, recorder in self._groups.values():
                recorder.rewind(self._rewind_to)
            self._rewind_to = None
        for members, recorder in self._groups.values():
            own = [rows[number] for number in members if number in rows]
            if own:
                recorder.write(_mean(own))

    def close(self) -> None:
        """Close the files."""
        for _, recorder in self._groups.values():
            recorder.close()


def _mean(rows: Sequence[Row]) -> Row:
    found: dict[str, Any] = {"kind": rows[0]["kind"], "opt_steps": rows[0]["opt_steps"]}
    for name in dict.fromkeys(name for row in rows for name in row if name not in found):
        values = np.asarray([row[name] for row in rows if type(row.get(name)) in NUMBER], np.float64)
        finite = values[np.isfinite(values)]
        if len(finite):
            found[name] = float(iqm(finite) if name == "score" else finite.mean())
    return found


def _as_name(setting: str) -> str:
    """Return a setting as the name of a directory."""
    return setting.replace("/", "_")

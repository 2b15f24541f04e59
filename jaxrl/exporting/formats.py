"""Export formats, the description that exports of all formats include, and writing their directory."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import SettingsError
from jaxrl.exporting import as_c, as_numpy, onnx, stablehlo
from jaxrl.exporting.function import Function, Part, describe, function_of, signature
from jaxrl.paths import writing
from jaxrl.reports.exports import require_outside
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.files import new_directory

MARK = "policy.json"
"""File in every export, by which its directory is recognised."""


class Format(NamedTuple):
    """A way to export policies."""

    files: Callable[[Function], dict[str, bytes]]
    """Returns the files of an export by name."""
    signature: Callable[[Function], tuple[list[Part], list[Part]]] = signature
    """Returns the inputs and outputs of the exported policy."""


FORMATS: Mapping[str, Format] = {
    "stablehlo": Format(stablehlo.files),
    "onnx": Format(onnx.files),
    "numpy": Format(as_numpy.files, as_numpy.signature),
    "c": Format(as_c.files, as_c.signature),
}


def files_of(policy: GreedyPolicy, form: str) -> dict[str, bytes]:
    """Return the files of an export in the format `form`, by name; `policy.json` describes inputs and outputs.

    Raises:
      SettingsError: the policy cannot be exported in this format.
    """
    function, (files, list_parts) = function_of(policy), FORMATS[form]
    described_as = describe(function, policy.facts, *list_parts(function))
    return {**files(function), MARK: (json.dumps({"format": form, **described_as}, indent=2) + "\n").encode()}


def require_room(out: Path, run: str, overwrite: bool, mark: str = MARK) -> None:
    """Raise `SettingsError` if `out` exists, or is inside the run that is read.

    With `overwrite`, an existing directory that contains a file `mark` may be replaced.
    """
    require_outside(out, [run])
    if not out.exists() and not out.is_symlink():
        return
    is_ours = (out / mark).is_file() and not out.is_symlink()
    if not (overwrite and is_ours):
        hint = "give --overwrite to replace what was written there" if is_ours else "name another directory by --out"
        raise SettingsError(f"{out} exists; {hint}")


def write(files: Mapping[str, bytes], out: Path) -> None:
    """Write a directory with these files atomically, replacing an existing one; names may include a folder.

    Raises:
      SettingsError: it cannot be written.
    """
    with writing(out), new_directory(out) as made:
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(content)

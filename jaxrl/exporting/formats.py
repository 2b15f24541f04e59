"""Export formats, and the description that exports of all formats include."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl.exporting import as_c, as_numpy, onnx, stablehlo
from jaxrl.exporting.function import Function, Part, describe, function_of, signature
from jaxrl.exporting.writing import MARK
from jaxrl.training.policy import GreedyPolicy


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
    function, (write, list_parts) = function_of(policy), FORMATS[form]
    described_as = describe(function, policy.facts, *list_parts(function))
    return {**write(function), MARK: (json.dumps({"format": form, **described_as}, indent=2) + "\n").encode()}

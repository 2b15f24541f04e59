"""All formats of an export, and what their files have in common."""

import json
from collections.abc import Callable, Mapping

from jaxrl.exporting import as_numpy, onnx, stablehlo
from jaxrl.exporting.function import Function, described, function_of
from jaxrl.exporting.writing import MARK
from jaxrl.training.policy import GreedyPolicy

FORMATS: Mapping[str, Callable[[Function], dict[str, bytes]]] = {
    "stablehlo": stablehlo.files,
    "onnx": onnx.files,
    "numpy": as_numpy.files,
}


def files_of(policy: GreedyPolicy, form: str) -> dict[str, bytes]:
    """Return the files of an export in the format `form`, by name; one of them says how to call the others.

    Raises:
      SettingsError: this policy cannot be exported so.
    """
    function = function_of(policy)
    text = json.dumps({"format": form, **described(function, policy.facts, form != "numpy")}, indent=2) + "\n"
    return {**FORMATS[form](function), MARK: text.encode()}

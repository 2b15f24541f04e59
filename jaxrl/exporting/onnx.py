"""A policy as ONNX, converted by jax2onnx."""

import contextlib
import logging
from functools import partial
from typing import Any

from jaxrl.errors import SettingsError
from jaxrl.exporting.function import Function
from jaxrl.xla import forms

INSTALL = "pip install onnx onnx-ir && pip install --no-deps jax2onnx"
"""Its own list of dependencies asks for an older Orbax than ours; to convert it needs none of them but these."""


def files(function: Function) -> dict[str, bytes]:
    """Return the files of an export by name.

    Raises:
      SettingsError: the converter is missing, or does not know something that the policy computes.
    """
    try:
        import jax2onnx
    except ImportError as error:
        raise SettingsError(f"the format onnx needs jax2onnx ({error}); install it by: {INSTALL}") from None
    with forms("plain"), _quiet():
        try:
            model = jax2onnx.to_onnx(
                partial(function.call, function.params),
                function.inputs("B"),
                model_name="policy",
                input_names=function.names,
                output_names=function.results,
            )
        except Exception as error:  # whatever a converter raises of what it does not know
            raise SettingsError(f"jax2onnx cannot convert this policy: {' '.join(str(error).split())[:300]}") from error
    return {"policy.onnx": model.SerializeToString()}


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the converter's remarks about its own inside off the terminal."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

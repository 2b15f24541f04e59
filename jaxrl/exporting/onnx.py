"""A policy as ONNX, converted by jax2onnx."""

import contextlib
import logging
import warnings
from functools import partial
from typing import Any

from jaxrl.errors import SettingsError, error_text
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
            raise SettingsError(f"jax2onnx cannot convert this policy: {error_text(error)[:300]}") from error
    return {"policy.onnx": model.SerializeToString()}


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep off the terminal what the converter says of its own inside, and of packages that it can do without."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "jax2onnx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

"""Export to ONNX by jax2onnx."""

import contextlib
import logging
import warnings
from functools import partial
from typing import Any

from jaxrl.errors import SettingsError, error_text
from jaxrl.exporting.function import Function
from jaxrl.xla import forms

INSTALL = "pip install onnx onnx-ir && pip install --no-deps jax2onnx"
"""Without dependencies, because jax2onnx declares an older Orbax than ours; for converting it needs only these."""


def files(function: Function) -> dict[str, bytes]:
    """Return the files of an export by name.

    Raises:
      SettingsError: the converter is not installed, or does not support an operation of the policy.
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
        except Exception as error:  # the converter may raise anything for unsupported operations
            raise SettingsError(f"jax2onnx cannot convert this policy: {error_text(error)[:300]}") from error
    return {"policy.onnx": model.SerializeToString()}


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppress the converter's messages about its internals and about optional packages."""
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

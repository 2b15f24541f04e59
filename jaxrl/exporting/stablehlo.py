"""Export to StableHLO by `jax.export`: one program for CPU, CUDA and TPU, for batches of any size."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxrl.errors import SettingsError
from jaxrl.exporting.function import Function
from jaxrl.trees import Array
from jaxrl.xla import PLATFORMS, forms

README = """# A policy as StableHLO

`policy.jax` is for Python with JAX alone:

```python
import pathlib

from jax import export

policy = export.deserialize(bytearray(pathlib.Path("policy.jax").read_bytes()))
{call}
```

`policy.stablehlo` is the same program as portable StableHLO, for compilers that read it (XLA, IREE); its function is
`main`, and its first argument tells the platform ({platforms}, from 0). `policy.json` names inputs and outputs.
"""


def export_program(function: Function) -> Any:
    """Export the policy with its parameters as constants of the program."""
    (rows,) = jax.export.symbolic_shape("B")

    @jax.jit
    def call(*inputs: Array) -> tuple[Array, ...]:
        # Without the barrier, XLA would fold constants when compiling, which may round differently than at run time.
        return function.call(jax.lax.optimization_barrier(function.params), *inputs)

    with forms("plain"), _without_locations():  # one program for all platforms and batch sizes
        return jax.export.export(call, platforms=PLATFORMS)(*function.inputs(rows))


@contextmanager
def _without_locations() -> Iterator[None]:
    """Keep JAX from writing, for each operation, the paths of the source files on this machine that it comes from."""
    wanted = {"jax_include_full_tracebacks_in_locations": True, "jax_traceback_in_locations_limit": 0}
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def files(function: Function) -> dict[str, bytes]:
    """Return the files of an export by name.

    Raises:
      SettingsError: flatbuffers, which `jax.export` needs, is not installed.
    """
    made = export_program(function)
    try:
        serialised = bytes(made.serialize())
    except ImportError as error:
        raise SettingsError(f"the format stablehlo needs flatbuffers ({error}); pip install 'jaxrl[export]'") from error
    readme = README.format(call=_call(function), platforms=", ".join(PLATFORMS))
    return {
        "policy.jax": serialised,
        "policy.stablehlo": made.mlir_module_serialized,
        "README.md": readme.encode(),
    }


def _call(function: Function) -> str:
    """Return lines of Python that call the policy."""
    given, made = ", ".join(function.names), ", ".join(function.results)
    comma = "," if len(function.results) == 1 else ""
    lines = [f"{made}{comma} = policy.call({given})  # each [B, ...], see policy.json"]
    if function.memory:
        lines.append("# `first`, bool [B], says where an episode begins; there, memory may be zeros.")
    return "\n".join(lines)

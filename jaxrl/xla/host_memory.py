"""Arrays in the host's memory that compiled programs read and write: a few rows cross, the array itself never.

JAX's types say where an array lies (`jax.memory.Space`), and XLA keeps an array of the host there through a loop. On
CUDA a gather of such an array is a kernel that reads the rows over the bus; on a TPU the host gathers them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxrl.errors import SettingsError
from jaxrl.trees import Array
from jaxrl.xla import shaped_for
from jaxrl.xla.attempts import with_fallback

KIND = "pinned_host"
"""JAX's name of the memory: of the host, where the device can reach it."""


def to_host(x: Any) -> Any:
    """Return an array in the host's memory; it is not copied if it is there."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Any) -> Any:
    """Return an array in the memory of the device."""
    return jax.device_put(x, jax.memory.Space.Device)


def write(held: Array, block: Array, start: Array) -> Array:
    """Return `held` `[R, ...]` with `block` `[rows, ...]` at row `start`; `held` is in the host's memory."""
    held, block = to_host(held), to_host(block)
    place = [to_host(start), *[to_host(jnp.int32(0))] * (held.ndim - 1)]
    written: Array = jax.lax.dynamic_update_slice(held, block, place)
    return written


def scatter(held: Array, place: Array, rows: Array) -> Array:
    """Return `held` with `rows` at the unique indices `place`; those out of bounds are dropped."""
    written: Array = to_host(held).at[to_host(place)].set(to_host(rows), mode="drop", unique_indices=True)
    return written


def gather(gather: Callable[[Array, Array], Array], held: Array, index: Array) -> Array:
    """Return `gather(held, index)` in the memory of the device, for `held` in that of the host."""
    held, index = to_host(held), to_host(index)
    here = lambda: to_device(gather(held, index))
    if not shaped_for("tpu"):
        return here()
    return with_fallback("computing on the host", lambda: to_device(_on_host(gather)(held, index)), here)


def _on_host(function: Callable[..., Array]) -> Callable[..., Array]:
    from jax.experimental.compute_on import compute_on

    made: Callable[..., Array] = compute_on(
        function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host
    )
    return made


def sharding() -> SingleDeviceSharding:
    """Return where such arrays lie: in the host's memory, beside the default device.

    Raises:
      SettingsError: the platform has no memory of that kind.
    """
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if KIND not in kinds:
        raise SettingsError(
            f"buffer.memory is host, but {device.device_kind} has no memory of the kind {KIND}, only {', '.join(kinds)}; "
            "leave it at device"
        )
    return SingleDeviceSharding(device, memory_kind=KIND)

"""Arrays in the host's memory that compiled programs read and write: a few rows cross, the array itself never.

JAX's types say where an array lies (`jax.memory.Space`), and XLA keeps an array of the host there through a loop. On
CUDA a gather of it is a kernel that reads the rows over the bus: compiled for an H200, DQN with a million transitions
needs 0.4 MB of the device beside its state, and 40 kernels an iteration; with replay there 48.4 MB and 32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxrl.errors import SettingsError
from jaxrl.trees import Array
from jaxrl.xla.contexts import options_of

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
    index = [to_host(start), *[to_host(jnp.int32(0))] * (held.ndim - 1)]
    return jax.lax.dynamic_update_slice(held, block, index)


def scatter(held: Array, indices: Array, rows: Array) -> Array:
    """Return `held` with `rows` at the unique `indices`; those out of bounds are dropped."""
    return to_host(held).at[to_host(indices)].set(to_host(rows), mode="drop", unique_indices=True)


def gather(take: Callable[[Array, Array], Array], held: Array, index: Array) -> Array:
    """Return `take(held, index)` in the memory of the device, for `held` in that of the host."""
    return to_device(take(to_host(held), to_host(index)))


def is_usable() -> bool:
    """Return whether compiled programs can keep arrays there, beside the default device.

    They cannot on TPUs (libtpu 0.0.52: rows of fewer than 128 words cannot be written, and no gather compiles).
    """
    device = _default_device()
    return device.platform != "tpu" and KIND in [memory.kind for memory in device.addressable_memories()]


def sharding(device: Any = None) -> SingleDeviceSharding:
    """Return where such arrays lie: in the host's memory, beside `device`, the default one if it is `None`.

    Raises:
      SettingsError: the platform has no such memory.
    """
    if not is_usable():
        raise SettingsError(
            "buffer.memory is host, but compiled programs cannot write rows into the host's memory on "
            f"{_default_device().device_kind}; leave it at device, and set buffer.compact or a smaller buffer.capacity"
        )
    return SingleDeviceSharding(device or _default_device(), memory_kind=KIND)


def _default_device() -> Any:
    # JAX also takes the name of a platform as its default device, which names the first of them.
    chosen = options_of(("default_device",))["default_device"] or jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen

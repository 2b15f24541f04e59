"""Multi-process runs: process 0 runs the loop and broadcasts the programs that all processes run together.

All processes must start every program over their devices, in the same order. So process 0 runs the trainer's loop as
usual, and before each such program puts an order into the key-value store of JAX's distributed runtime, for the others
to read. They need not know when to evaluate, write or stop.
"""

import ctypes
import itertools
import json
import os
import signal as signals
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.errors import JaxrlError, ProcessError, SettingsError, error_text, print_stderr
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.settings import changes
from jaxrl.trees import PyTree, is_key, key_impl

PIECE = 1 << 24
"""Chunk size in bytes for broadcasts of a state."""
POLL_MS = 200
"""Timeout of a poll for an order, and so the latency of a signal."""
MAX_ORDERS = 64
"""Number of orders retained; older ones precede a program that all processes have run."""
END, READY, SIGNAL = "end", "jaxrl/ready/", "jaxrl/signal/"
GONE = "another process of the run is gone; start all again with --resume, which goes on from the last save"
_count, _met = itertools.count(), itertools.count()
"""Counters of orders and barriers; equal in all processes."""
_handlers: list[Any] = []
"""C callbacks registered as signal handlers, kept alive."""


class LostError(ProcessError):
    """Raised if another process of the run is gone."""


def several() -> bool:
    """Return whether this process is one of several in JAX's distributed runtime."""
    return jax.distributed.is_initialized() and processes() > 1


def number() -> int:
    """Return the index of this process; 0 for the leader, and for a single process."""
    return int(_runtime().process_id) if several() else 0


def processes() -> int:
    """Return the number of processes."""
    return int(_runtime().num_processes) if jax.distributed.is_initialized() else 1


def require_alone(what: str) -> None:
    """Raise `SettingsError` if this process is one of several, which `what` does not support."""
    if several():
        raise SettingsError(
            f"{what} takes one process, and this is one of {processes()}; leave --distributed out (in Python, "
            "jax.distributed.initialize)"
        )


def _runtime() -> Any:
    """Return the state of JAX's distributed runtime, a private API: there is no public access to its key-value store,
    and the public process counts initialise JAX's devices, too early while these are being chosen."""
    from jax._src import distributed

    return distributed.global_state


def _store() -> Any:
    return _runtime().client


# --- orders -----------------------------------------------------------------------------------------------------


def broadcast(order: str, *given: Any) -> None:
    """Broadcast an order from process 0 to the others; do nothing in the others, or in a single process."""
    if not several() or number():
        return
    n = next(_count)
    with reported():
        _store().key_value_set(f"jaxrl/order/{n}", json.dumps([order, *given], default=str))
        if n >= MAX_ORDERS:
            _store().key_value_delete(f"jaxrl/order/{n - MAX_ORDERS}")


def orders(interrupt: Interrupt) -> Iterator[list[Any]]:
    """Yield the orders of process 0 up to the last; forward a signal in this process to it.

    Raises:
      ProcessError: process 0 has failed.
    """
    passed = False
    while True:
        name, found = f"jaxrl/order/{next(_count)}", None
        while found is None:
            if interrupt.signal is not None and not passed:
                # Forward a signal once; process 0 decides what to do.
                passed = True
                _store().key_value_set(f"{SIGNAL}{number()}", str(interrupt.signal), allow_overwrite=True)
            found = _look(name)
        order = json.loads(found)
        yield order
        if order[0] == END:
            return


def _look(name: str) -> str | None:
    """Return the value of the key `name`, or `None` after a timeout."""
    with reported():
        try:
            return str(_store().blocking_key_value_get(name, POLL_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def stops(interrupt: Interrupt) -> bool:
    """Return whether a stop was requested; process 0 also checks for signals forwarded by the others."""
    if several() and not number() and not interrupt:
        for signal in _take_signals():
            interrupt.receive(signal)
    return bool(interrupt)


def _take_signals() -> Iterator[int]:
    """Yield the signals that the other processes have forwarded, each once."""
    with reported():
        for name, signal in _store().key_value_dir_get(SIGNAL):
            _store().key_value_delete(name)
            yield int(signal)


def agree(settings: Mapping[str, Any]) -> None:
    """Wait for all processes, and check that they have the same `settings`.

    Raises:
      SettingsError: a process has different settings, or failed to start.
    """
    if number():
        _agree_with_first(settings)
        return
    # Signals left by an earlier run; in this one, none is forwarded before its first order.
    for _ in _take_signals():
        pass
    broadcast("settings", settings)
    # Read all answers before checking any: one left in the store would be read by the next run.
    said = list(answers())
    for i, answered in enumerate(said, 1):
        if answered != "yes":
            raise SettingsError(f"process {i}: {answered}")


def _agree_with_first(settings: Mapping[str, Any]) -> None:
    order, wanted = next(orders(Interrupt()))
    if order == END:
        raise ProcessError(f"process 0 could not begin: {wanted['failed']}")
    # Convert this process's settings through JSON, like those received.
    found = changes(wanted, json.loads(json.dumps(settings, default=str)))
    said = f"has other settings or versions than process 0 ({'; '.join(map(str, found))}); start all by one command"
    if found:
        answer(said)
        for _ in orders(Interrupt()):  # up to the end of this run, so that the next one begins in step
            pass
        raise SettingsError(said)
    answer("yes")


def answers() -> Iterator[str]:
    """Yield the answers of the other processes in order, waiting for each; called by process 0."""
    # A fixed order costs nothing, as all of them must answer.
    for i in range(1, processes()):
        name, said = f"{READY}{i}", None
        while said is None:
            said = _look(name)
        with reported():
            _store().key_value_delete(name)
        yield said


def answer(said: str) -> None:
    """Send process 0 the answer to an order: a result, or why this process is not ready."""
    with reported():
        _store().key_value_set(f"{READY}{number()}", said, allow_overwrite=True)


def meet_compiled() -> None:
    """Wait until all processes have compiled, which may take longer than the timeout of a program."""
    if several():
        with reported():
            _store().wait_at_barrier(f"jaxrl/compiled/{next(_met)}", 3_600_000)


@contextmanager
def reported() -> Iterator[None]:
    """Convert errors of JAX to `LostError` if another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, JaxrlError) or not several() or not _is_loss(str(error)):
            raise
        reason = error_text(error)[:200]
        raise LostError(f"{GONE} ({reason})") from error


def _is_loss(said: str) -> bool:
    """Return whether an error of JAX is due to the loss of a process, rather than to a program."""
    signs = ("Gloo", "NCCL", "Connection", "UNAVAILABLE", "heartbeat", "Barrier", "CoordinationService", "CANCELLED")
    return any(sign in said for sign in signs)


def exit_when_lost(line: str = GONE) -> None:
    """Print a message and set the exit code when JAX aborts this process because another one is gone.

    Such an abort bypasses Python; only a C handler of SIGABRT still runs.
    """

    def aborted(signal: int) -> None:
        del signal
        print_stderr(f"error: {line}")
        os._exit(ProcessError.exit_code)

    # `signal` of libc: a Python handler would wait for the interpreter, but the abort does not.
    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted))
    ctypes.CDLL(None).signal(int(signals.SIGABRT), _handlers[-1])


# --- arrays over all devices --------------------------------------------------------------------------------------


def is_spread(tree: PyTree) -> bool:
    """Return whether any array is also on devices of other processes."""
    if not several():
        return False
    real = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    return any(not x.is_fully_addressable for x in real)


def is_to_be_spread(like: PyTree) -> bool:
    """Return whether any of these shapes has a sharding with devices of other processes."""
    placed = (x.sharding for x in jax.tree.leaves(like) if isinstance(x, jax.ShapeDtypeStruct))
    return several() and any(where is not None and not where.is_fully_addressable for where in placed)


def whole(tree: PyTree) -> PyTree:
    """Gather complete arrays in this process; a collective operation of all processes if any array is spread."""
    if not is_spread(tree):
        return tree
    with reported():
        return jax.block_until_ready(jax.tree.map(_whole, tree))


def _whole(leaf: Any) -> Any:
    if not is_spread(leaf):
        return leaf
    if not leaf.is_fully_replicated:
        # The identity with a replicated output makes XLA all-gather the shards.
        leaf = jax.jit(_same, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)
    return leaf.addressable_data(0)


def _same(x: Any) -> Any:
    return x


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of an array; each process copies its shards."""
    if not is_spread(leaf):
        return jax.device_put(leaf, may_alias=False)
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    # A process can only copy shards on its own devices: assemble the array of the copies.
    own = [jax.device_put(shard.data, may_alias=False) for shard in data.addressable_shards]
    return as_keys(leaf, jax.make_array_from_single_device_arrays(data.shape, data.sharding, own))


def distribute(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shard the arrays of process 0 over the devices of all processes; the others pass shapes."""
    leaves, form = jax.tree.flatten(tree)
    with reported():
        arrays = _broadcast_leaves(leaves)
        each = zip(leaves, arrays, jax.tree.leaves(shardings), strict=True)
        placed = [as_keys(leaf, place_array(array, sharding)) for leaf, array, sharding in each]
        return jax.block_until_ready(jax.tree.unflatten(form, placed))


def _broadcast_leaves(leaves: list[Any]) -> list[np.ndarray]:
    """Broadcast the leaves of process 0 as bytes, in chunks: JAX broadcasts by a sum, which would lose signed zeros."""
    like = [_numbers(leaf) for leaf in leaves]
    sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in like]
    flat = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum([0, *sizes])
    if not number():
        for x, start in zip(like, ends, strict=False):
            # As bytes, which work for every dtype.
            raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            flat[start : start + raw.size] = raw
    from jax.experimental import multihost_utils

    # All processes take part in each broadcast; only process 0 has filled `flat`.
    for start in range(0, flat.size, PIECE):
        flat[start : start + PIECE] = multihost_utils.broadcast_one_to_all(flat[start : start + PIECE])
    parts = (flat[a:b] for a, b in itertools.pairwise(ends))
    return [part.view(np.dtype(x.dtype)).reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def _numbers(leaf: Any) -> Any:
    """Return a leaf as an array or shape, with keys converted to their data."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def plain_shape(leaf: Any) -> Any:
    """Return the shape and sharding of a leaf on disk; for a key, those of its data."""
    if not is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def place_array(array: np.ndarray, sharding: Any) -> jax.Array:
    """Return `array`, which every process has, with `sharding`: each puts its own shards on its devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def as_keys(leaf: Any, array: jax.Array) -> jax.Array:
    """Return `array` as keys, if `leaf` is one."""
    return jax.random.wrap_key_data(array, impl=key_impl(leaf)) if is_key(leaf) else array

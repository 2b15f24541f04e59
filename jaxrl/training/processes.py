"""One run by several processes: the first decides, and tells the others which programs to run with it.

Every program over the devices of several processes must be started by all of them, in the same order. So the first
process runs the trainer's loop as ever, and before each such program writes an order where the others read it: in the
key-value store of JAX's distributed runtime. When something is evaluated, written or stopped they need not know.
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
from jaxrl.training.changes import changes
from jaxrl.training.interrupt import Interrupt
from jaxrl.trees import PyTree, is_key, key_impl

PIECE = 1 << 24
"""Bytes of a state that are sent to the other processes at once."""
POLL_MS = 200
"""How long one look for an order takes at most: a signal waits as long."""
KEPT = 64
"""Orders that stay readable; none of them is older than a program that all have run."""
END, READY, SIGNAL = "end", "jaxrl/ready/", "jaxrl/signal/"
GONE = "another process of the run is gone; start all again with --resume, which goes on from the last save"
_count, _met = itertools.count(), itertools.count()
"""Numbers of the orders given, or taken, and of the meetings; the same in all processes."""
_handlers: list[Any] = []
"""What the system has been told to call at a signal, which must never be freed."""


class LostError(ProcessError):
    """Report that another process of the run is gone, so that nothing can be told to it."""


def several() -> bool:
    """Say whether JAX's distributed runtime has made this process one of several."""
    return jax.distributed.is_initialized() and processes() > 1


def number() -> int:
    """Return the number of this process; 0 of the one that decides, and of one that is alone."""
    return int(_runtime().process_id) if several() else 0


def processes() -> int:
    """Return how many processes there are."""
    return int(_runtime().num_processes) if jax.distributed.is_initialized() else 1


def require_alone(what: str) -> None:
    """Raise `SettingsError` if this process is one of several, among which `what` cannot be spread."""
    if several():
        raise SettingsError(
            f"{what} takes one process, and this is one of {processes()}; leave --distributed out (in Python, "
            "jax.distributed.initialize)"
        )


def _runtime() -> Any:
    """Return what JAX's distributed runtime knows: no public name leads to its key-value store, and the public names of
    the number of processes make JAX look for devices, which is too early while these are being chosen."""
    from jax._src import distributed

    return distributed.global_state


def _store() -> Any:
    return _runtime().client


# --- orders -----------------------------------------------------------------------------------------------------


def tell(order: str, *given: Any) -> None:
    """Have the other processes do something at the same time; nothing if there are none, or this is one of them."""
    if not several() or number():
        return
    n = next(_count)
    with reported():
        _store().key_value_set(f"jaxrl/order/{n}", json.dumps([order, *given], default=str))
        if n >= KEPT:
            _store().key_value_delete(f"jaxrl/order/{n - KEPT}")


def orders(interrupt: Interrupt) -> Iterator[list[Any]]:
    """Yield what the first process tells this one to do, to its end; a signal to this process is passed on to it.

    Raises:
      ProcessError: the first process has failed.
    """
    passed = False
    while True:
        name, found = f"jaxrl/order/{next(_count)}", None
        while found is None:
            if interrupt.signal is not None and not passed:
                # Once: the first process decides what becomes of it.
                passed = True
                _store().key_value_set(f"{SIGNAL}{number()}", str(interrupt.signal), allow_overwrite=True)
            found = _look(name)
        order = json.loads(found)
        yield order
        if order[0] == END:
            return


def _look(name: str) -> str | None:
    """Return what stands under `name`, or `None` if nothing has for a while."""
    with reported():
        try:
            return str(_store().blocking_key_value_get(name, POLL_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def stops(interrupt: Interrupt) -> bool:
    """Say whether someone has asked to stop the run; the first process also looks for signals that came to another."""
    if several() and not number() and not interrupt:
        with reported():
            for name, signal in _store().key_value_dir_get(SIGNAL):
                # Deleted before it is obeyed, so that each signal counts once.
                _store().key_value_delete(name)
                interrupt.receive(int(signal))
    return bool(interrupt)


def agree(settings: Mapping[str, Any]) -> None:
    """Wait until all processes have come, and have the `settings` of the first.

    Raises:
      SettingsError: one has others, or could not begin.
    """
    if number():
        _agree_with_first(settings)
        return
    tell("settings", settings)
    for i, said in enumerate(answers(), 1):
        if said != "yes":
            raise SettingsError(f"process {i}: {said}")


def _agree_with_first(settings: Mapping[str, Any]) -> None:
    order, wanted = next(orders(Interrupt()))
    if order == END:
        raise ProcessError(f"process 0 could not begin: {wanted['failed']}")
    # The own settings take the same way through JSON as those that they are compared with.
    found = changes(wanted, json.loads(json.dumps(settings, default=str)))
    said = f"has other settings or versions than process 0 ({'; '.join(map(str, found))}); start all by one command"
    if found:
        raise SettingsError(said)
    answer("yes")


def answers() -> Iterator[str]:
    """Yield what each of the other processes answers, in their order; the first process waits for them."""
    # In a fixed order, since all of them must have answered anyway.
    for i in range(1, processes()):
        name, said = f"{READY}{i}", None
        while said is None:
            said = _look(name)
        with reported():
            _store().key_value_delete(name)
        yield said


def answer(said: str) -> None:
    """Tell the first process that this one is ready, or why it is not, or what it has done."""
    with reported():
        _store().key_value_set(f"{READY}{number()}", said, allow_overwrite=True)


def meet(where: str) -> None:
    """Wait until all processes are here; compiling may take them long, and a program waits less for the others."""
    if several():
        with reported():
            _store().wait_at_barrier(f"jaxrl/{where}/{next(_met)}", 3_600_000)


@contextmanager
def reported() -> Iterator[None]:
    """Raise `LostError` for what JAX raises inside where a process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, JaxrlError) or not several() or not _is_loss(str(error)):
            raise
        reason = error_text(error)[:200]
        raise LostError(f"{GONE} ({reason})") from error


def _is_loss(said: str) -> bool:
    """Say whether an error of JAX is one of those that the loss of a process makes; those of a program are not."""
    signs = ("Gloo", "NCCL", "Connection", "UNAVAILABLE", "heartbeat", "Barrier", "CoordinationService", "CANCELLED")
    return any(sign in said for sign in signs)


def leave_when_lost(line: str = GONE) -> None:
    """End with one line and an exit code where JAX itself ends this process, because it has not heard of another.

    JAX aborts then, whatever Python does meanwhile; what the system calls on that is all that can still speak.
    """

    def aborted(signal: int) -> None:
        del signal
        print_stderr(f"error: {line}")
        os._exit(ProcessError.exit_code)

    # C's own `signal`: a handler of Python's would wait for the interpreter, and the abort does not.
    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted))
    ctypes.CDLL(None).signal(int(signals.SIGABRT), _handlers[-1])


# --- arrays over all devices --------------------------------------------------------------------------------------


def is_spread(tree: PyTree) -> bool:
    """Say whether any of the arrays is on devices of other processes as well."""
    if not several():
        return False
    real = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    return any(not x.is_fully_addressable for x in real)


def is_to_be_spread(like: PyTree) -> bool:
    """Say whether any of these shapes has its place on devices of other processes as well."""
    placed = (x.sharding for x in jax.tree.leaves(like) if isinstance(x, jax.ShapeDtypeStruct))
    return several() and any(where is not None and not where.is_fully_addressable for where in placed)


def whole(tree: PyTree) -> PyTree:
    """Return `tree` with all of each array in this process; if some are spread, all processes take part."""
    if not is_spread(tree):
        return tree
    with reported():
        return jax.block_until_ready(jax.tree.map(_whole, tree))


def _whole(leaf: Any) -> Any:
    if not is_spread(leaf):
        return leaf
    if not leaf.is_fully_replicated:
        # The identity with a replicated result: XLA gathers the parts on every device.
        leaf = jax.jit(_same, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)
    return leaf.addressable_data(0)


def _same(x: Any) -> Any:
    return x


def copied(leaf: Any) -> Any:
    """Return a copy of an array, of which each process copies its part."""
    if not is_spread(leaf):
        return jax.device_put(leaf, may_alias=False)
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    # Each process can only copy what is on its own devices; the copies together are the array.
    own = [jax.device_put(shard.data, may_alias=False) for shard in data.addressable_shards]
    return as_keys(leaf, jax.make_array_from_single_device_arrays(data.shape, data.sharding, own))


def handed_out(tree: PyTree, shardings: PyTree) -> PyTree:
    """Spread what the first process has over the devices of all; the others give the shapes of it."""
    leaves, form = jax.tree.flatten(tree)
    with reported():
        arrays = _sent(leaves)
        placed = [_placed(*each) for each in zip(leaves, arrays, jax.tree.leaves(shardings), strict=True)]
        return jax.block_until_ready(jax.tree.unflatten(form, placed))


def _sent(leaves: list[Any]) -> list[np.ndarray]:
    """Return the numbers of each leaf in the first process, piece by piece of their bytes: a sum would lose signs."""
    like = [_numbers(leaf) for leaf in leaves]
    sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in like]
    flat = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum([0, *sizes])
    if not number():
        for x, start in zip(like, ends, strict=False):
            # Bytes, so that every dtype takes the same way.
            raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            flat[start : start + raw.size] = raw
    from jax.experimental import multihost_utils

    # All processes take part in each broadcast; only the first has put anything into `flat`.
    for start in range(0, flat.size, PIECE):
        flat[start : start + PIECE] = multihost_utils.broadcast_one_to_all(flat[start : start + PIECE])
    parts = (flat[a:b] for a, b in itertools.pairwise(ends))
    return [part.view(np.dtype(x.dtype)).reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def _numbers(leaf: Any) -> Any:
    """Return a leaf as numbers, or the shape of these; a key as its data."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _placed(leaf: Any, array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # Every process has all numbers, and puts those parts on its devices that belong there.
    made = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if not is_key(leaf):
        return made
    wrap = lambda data: jax.random.wrap_key_data(data, impl=key_impl(leaf))
    return jax.jit(wrap, out_shardings=sharding)(made)


def plain_shape(leaf: Any) -> Any:
    """Return the shape that a leaf has on disk, with its place: that of a key is of its data."""
    if not is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def placed(shape: Any, array: np.ndarray) -> jax.Array:
    """Return `array`, which every process has, in the place of `shape`."""
    return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: array[index])


def as_keys(leaf: Any, array: jax.Array) -> jax.Array:
    """Return `array` as keys, if `leaf` is."""
    return jax.random.wrap_key_data(array, impl=key_impl(leaf)) if is_key(leaf) else array

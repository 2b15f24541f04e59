"""Multi-process runs: start and end of the leader's loop, and the followers, which execute its orders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import jaxrl.training.processes as processes
from jaxrl.errors import ProcessError, describe_error
from jaxrl.training import devices
from jaxrl.training.processes import END
from jaxrl.training.program import Saved, compile_all, zero_sums
from jaxrl.training.storage.arrays import read_part, write_part
from jaxrl.training.storage.run import VERSIONS, versions
from jaxrl.training.storage.weights import within
from jaxrl.trees import make_key


@contextmanager
def led(trainer: Any) -> Iterator[None]:
    """Synchronise the other processes with the start and end of the leader's loop in the block.

    Raises:
      SettingsError: one of them has different settings or versions, or failed to start.
    """
    if processes.several():
        processes.agree(_must_agree(trainer))
    try:
        yield
    # A loop that the caller left has ended like any other.
    except GeneratorExit:
        _end(trainer)
        raise
    # The followers must not wait for orders that never come.
    except BaseException as error:
        processes.broadcast(END, {"failed": describe_error(error)})
        raise
    _end(trainer)


def _end(trainer: Any) -> None:
    """Gather the parameters of the policy in each process, and send the last order."""
    if processes.several():
        trainer.state, trainer._sums = devices.shard_local(trainer.strategy, trainer.state, trainer._sums)
        trainer.latest = devices.params_of(trainer.strategy, trainer.state) if trainer.strategy.policy else None
        how = {"stop": trainer.stop_reason, "signal": trainer.interrupt.signal, "ledger": trainer.ledger.facts()}
        processes.broadcast(END, how)


def _must_agree(trainer: Any) -> dict[str, Any]:
    return {**trainer.settings(), "versions": versions(VERSIONS)}


def follow(trainer: Any) -> bool:
    """Execute the orders of process 0 until the run ends; return `False` at once in process 0 or a single process.

    Raises:
      SettingsError: process 0 has different settings or versions.
      ProcessError: process 0 has failed, or is gone.
    """
    if not processes.number():
        return False
    processes.agree(_must_agree(trainer))
    with trainer.interrupt.signals():
        _obey(trainer)
    return True


def _obey(trainer: Any) -> None:
    strategy, key = trainer.strategy, make_key(trainer.config.seed)
    compiled, state, sums, latest = None, trainer._state, trainer._sums, None  # type: Any, Any, Any, Any
    trainer._state = trainer._sums = None
    for order, *given in processes.orders(trainer.interrupt):
        if order == "compile":
            compiled = compile_all(strategy, key, None, trainer._params, *given)
        elif order == "init":
            state, sums = compiled.init(key)
        elif order == "weights":
            state, sums = within(Saved(state, sums), *given)
        elif order == "place":
            state, sums = devices.distribute(strategy, *compiled.like)
        elif order == "load":
            state, sums = None, None  # free memory before loading
            (state, sums), said = _load_part(compiled.like, *given)
            processes.answer(said)
        elif order == "alter":
            state = devices.apply_in_all(strategy, given[0], state, *given[1:])
        elif order == "run":
            start, stop, fresh = given
            sums = zero_sums(len(compiled.metrics)) if fresh else sums
            state, sums = compiled.run(state, sums, np.uint32(start), np.uint32(stop))
        elif order == "params":
            latest = devices.params_of(strategy, state)
        elif order == "save":
            processes.answer(write_part(Path(*given), Saved(state, sums)))
        elif order == "gather":
            # A collective: all processes take part, and process 0 keeps the result.
            processes.whole((state, sums))
        elif order == END:
            _adopt_end(trainer, state, sums, latest, *given)


def _load_part(like: Any, path: str, checksums: list[int]) -> tuple[Any, str]:
    """Read this process's part of a checkpoint; return the state and its sums, or `None` twice, and the answer."""
    found, said = read_part(Path(path), like, checksums)
    return found or (None, None), said


def _adopt_end(trainer: Any, state: Any, sums: Any, latest: Any, how: dict[str, Any]) -> None:
    """Adopt the outcome of the run from process 0."""
    if "failed" in how:
        raise ProcessError(f"process 0 has ended the run: {how['failed']}")
    trainer.state, trainer._sums, trainer.latest, trainer.stop_reason = state, sums, latest, how["stop"]
    trainer.ledger = trainer.ledger.restore(how["ledger"])
    if how["signal"] is not None:
        trainer.interrupt.receive(how["signal"])

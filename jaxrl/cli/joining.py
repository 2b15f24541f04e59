"""Multi-process runs: joining the other processes, and handling errors before the run begins."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

import jaxrl.training.processes as processes
from jaxrl.cli.config import TOGETHER, typed_flags
from jaxrl.cli.main import divide_cpu
from jaxrl.cli.opening import stage
from jaxrl.errors import JaxrlError, SettingsError, error_text, print_stderr

HEARTBEAT_S = 50
"""Seconds without a heartbeat after which a process counts as lost, and the others exit."""
SHUTDOWN_S = 60
"""Seconds that a finished process waits for the others to finish."""


def split_process_flags(args: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Split `args` into the arguments of the run and those of `join`, `None` for a single process.

    Raises:
      SettingsError: a value is invalid, or `--distributed` is missing.
    """
    given, rest = typed_flags(args, TOGETHER)
    if not given.pop("distributed", False):
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise SettingsError(f"{named}: this is how a process joins others; give --distributed as well")
        return rest, None
    _check_joining(**given)
    return rest, given


def _check_joining(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    host, _, port = (coordinator_address or "host:1").rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(f"--coordinator-address is {coordinator_address!r}; expected HOST:PORT of process 0")
    if num_processes is not None and num_processes < 1:
        raise SettingsError(f"--num-processes is {num_processes}; expected 1 or more")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        most = "N - 1" if num_processes is None else num_processes - 1
        raise SettingsError(f"--process-id is {process_id}; expected 0 to {most}, another one in each process")


def join(how: Mapping[str, Any], devices: int) -> None:
    """Join the processes of a run, before JAX is initialised; `how` are arguments of `jax.distributed.initialize`.

    On CPUs, each process gets an equal share of `devices`.

    Raises:
      SettingsError: the process cannot join the others, for instance because JAX does not find them by itself.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # other platforms need no setting
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, on which a run saves and stops
    processes.exit_when_lost(
        "the other processes of the run have not come for minutes; start all of them, with one --coordinator-address "
        "that all reach, and one --num-processes"
    )
    try:
        jax.distributed.initialize(**how, heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=SHUTDOWN_S)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = error_text(error)[:200]
        raise SettingsError(
            f"--distributed: this process cannot join the others ({reason}); where JAX does not find them by itself, "
            "give --coordinator-address HOST:PORT of process 0, --num-processes N, and --process-id 0 to N - 1"
        ) from error
    processes.exit_when_lost()
    divide_cpu(devices // processes.processes())


@contextmanager
def report_failures(joined: bool) -> Iterator[None]:
    """Report an error inside to the other processes, if this one has `joined` them and the run has not begun.

    After the loss of another process or an unexpected error, exit at once: JAX would wait for the others, which wait
    for this one.
    """
    try:
        yield
    except processes.LostError as error:
        _leave(error.exit_code, f"error: {error}")
    except JaxrlError as error:
        if joined and processes.several():
            _report(error)
        raise
    except Exception:
        if not (joined and processes.several()):
            raise
        traceback.print_exc()
        _leave(1)


def _leave(code: int, line: str = "") -> NoReturn:
    """Exit without waiting for the other processes."""
    stage.clear()
    if line:
        print_stderr(line)
    sys.stdout.flush()
    os._exit(code)


def _report(error: JaxrlError) -> None:
    """Report to the other processes why this one could not begin."""
    with contextlib.suppress(jax.errors.JaxRuntimeError, processes.LostError):  # they may have ended already
        if processes.number():
            processes.answer(str(error))
        else:
            processes.broadcast(processes.END, {"failed": str(error)})

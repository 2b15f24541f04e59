"""Begin one process of a run, as `python -m jaxrl.train` does, for `test_processes`.

`python processes_run.py WHAT ARGS...` trains by `ARGS`. `WHAT` is `-`; or `jax=VERSION`, to be of another version; or
what is to happen to processes, `WHEN:PID:HOW` (PID 0: this one), several with commas. `WHEN` is `AT`, as soon as the
checkpoint after so many optimisation steps is known to be whole; `by AT`, before it is written; or `AT+S`, so many
seconds after as many steps or more are reported. `HOW` is a signal; `full` or `room`, that its disk is or has; `slow`,
to stand still for three seconds.
"""

import os
import resource
import signal
import sys
from functools import partial
from threading import Timer
from typing import Any

import jaxrl.train
import jaxrl.training.loop as loop
from jaxrl.cli.leaving import leave_on_signals
from jaxrl.cli.main import run_main
from jaxrl.training import Hooks, Trainer


def disturb(pid: int, how: str) -> None:
    pid = pid or os.getpid()
    if how in ("full", "room"):
        size = 0 if how == "full" else resource.RLIM_INFINITY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    elif how == "slow":
        os.kill(pid, signal.SIGSTOP)
        Timer(3, os.kill, (pid, signal.SIGCONT)).start()
    else:
        os.kill(pid, int(how))


def disturbances(what: str) -> Hooks:
    events = [(when, int(pid), how) for when, pid, how in (event.split(":") for event in what.split(","))]
    delayed = [(*map(float, when.split("+")), pid, how) for when, pid, how in events if "+" in when]

    def at(when: str) -> None:
        for own, pid, how in events:
            if own == when:
                disturb(pid, how)

    def chunk(trainer: Any, progress: Any) -> None:
        steps = trainer.schedule.opt_steps(trainer.ledger.t)
        at(f"by {steps}")
        while delayed and delayed[0][0] <= steps:
            _, seconds, pid, how = delayed.pop(0)
            timer = Timer(seconds, disturb, (pid, how))
            timer.daemon = True
            timer.start()

    return Hooks(save=lambda trainer, opt_steps: at(str(opt_steps)), chunk=chunk)


if __name__ == "__main__":
    what, args = sys.argv[1], sys.argv[2:]
    leave_on_signals()
    if ":" in what:
        jaxrl.train.Trainer = partial(Trainer, hooks=disturbances(what), max_chunk=4)  # type: ignore[misc]
    elif "=" in what:
        installed = loop.versions
        loop.versions = lambda names: {**installed(names), **dict([what.split("=")])}
    run_main(jaxrl.train.main, args)

"""Begin one process of a run, as `python -m jaxrl.train` does, for `test_processes`.

`python processes_run.py WHAT ARGS...` trains by `ARGS`. `WHAT` is `-`; or `AT:PID:SIGNAL`, to signal a process (0: this
one) as soon as the checkpoint after `AT` optimisation steps is whole; or `jax=VERSION`, to be of another version.
"""

import os
import sys
from functools import partial
from typing import Any

import jaxrl.train
import jaxrl.training.following as following
from jaxrl.cli import leave_quietly_on_signals, run_main
from jaxrl.training import Hooks, Trainer


def disturb(at: int, pid: int, signal: int, trainer: Any, opt_steps: int) -> None:
    if opt_steps == at:
        os.kill(pid or os.getpid(), signal)


if __name__ == "__main__":
    what, args = sys.argv[1], sys.argv[2:]
    leave_quietly_on_signals()
    if ":" in what:
        hooks = Hooks(save=partial(disturb, *map(int, what.split(":"))))
        jaxrl.train.Trainer = partial(Trainer, hooks=hooks, max_chunk=4)  # type: ignore[misc]
    elif "=" in what:
        installed = following.versions
        following.versions = lambda names: {**installed(names), **dict([what.split("=")])}
    run_main(jaxrl.train.main, args)

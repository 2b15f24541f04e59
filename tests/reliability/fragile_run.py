"""A small real run that sends itself a signal at a chosen point: `python fragile_run.py RUN_DIR [POINT SIGNAL TIMES]`.

It resumes whatever is in RUN_DIR, or begins; ends with the exit code of the command line; and prints the digest of its
final state.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxrl
from jaxrl.cli import main as cli
from jaxrl.training import loop
from jaxrl.training.recorders import jsonl
from jaxrl.training.storage import checkpoints, logs, run as storage
from jaxrl.training.storage.leaves import state_digest

sys.path.insert(0, str(Path(__file__).parents[1]))
from toys_trainer import small_dqn

SETTINGS = {
    "max_opts": 120, "save_interval": 10, "eval_interval": 30, "eval_episodes": 4, "record_interval": 15, "keep": 2,
    "quiet": True, "max_chunk": 4,
}  # fmt: skip
AFTER = {
    "compile": 1, "warm-up": 1, "training": 7, "evaluation": 2, "save begins": 3, "arrays are written": 3,
    "files are summed": 3, "prune": 2, "half pruned": 2, "best is written": 1, "row": 4, "metadata": 5,
    "log is mended": 1, "end": 1,
}  # fmt: skip
"""The points, and at which passing of each the signal is sent."""


def main(run_dir: str, point: str | None = None, number: int = 0, times: int = 1) -> int:
    """Train; return the exit code."""
    cli.cache_compilations()
    passings = iter(range(1, 1_000_000))

    def passing(where: str) -> None:
        if where == point and next(passings) == AFTER[where]:
            for _ in range(times):
                os.kill(os.getpid(), number)

    watch(passing)
    resume = Path(run_dir, "config.yaml").exists()
    hooks = jaxrl.Hooks(chunk=lambda trainer, progress: meanwhile(passing, "training"))
    how: Any = {"run_dir": run_dir, "resume": resume, "hooks": hooks, "raise_on_signal": False}
    run = loop.Trainer(small_dqn(), **how, **SETTINGS)
    print(state_digest(run.train().state), flush=True)
    return 128 + run.interrupt.signal if run.interrupt.signal else 0


def meanwhile(passing: Callable[[str], None], point: str) -> None:
    """Tell of a point from another thread, while this one goes on into a compiled program."""
    threading.Thread(target=passing, args=(point,)).start()


def watch(passing: Callable[[str], None]) -> None:
    """Tell when the host passes its points."""

    def before(home: Any, name: str, point: str) -> None:
        inner = getattr(home, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            passing(point)
            return inner(*args, **kwargs)

        setattr(home, name, wrapped)

    def beside(home: Any, name: str, point: str) -> None:
        inner = getattr(home, name)

        def made(*args: Any) -> Any:
            compiled = inner(*args)

            def init(key: jax.Array) -> Any:
                meanwhile(passing, point)
                return compiled.init(key)

            return compiled._replace(init=init)

        setattr(home, name, made)

    def after(home: Any, name: str, point: str) -> None:
        inner = getattr(home, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            passing(point)
            return result

        setattr(home, name, wrapped)

    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: passing("compile") if event.endswith("jaxpr_to_mlir_module_duration") else None
    )
    beside(loop, "compile_all", "warm-up")
    before(loop.Trainer, "_evaluate", "evaluation")
    before(checkpoints.Store, "write", "save begins")
    before(checkpoints, "file_sums", "arrays are written")
    after(checkpoints, "file_sums", "files are summed")
    before(checkpoints.Store, "_remove", "prune")
    before(checkpoints.shutil, "rmtree", "half pruned")
    before(storage.Storage, "keep_best", "best is written")
    before(jsonl.JSONLRecorder, "write", "row")
    before(storage.RunDir, "write_metadata", "metadata")
    before(logs.RowLog, "rewind", "log is mended")
    before(storage.Storage, "finish", "end")


if __name__ == "__main__":
    # As a command does it.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    arguments = sys.argv[1:]
    sys.exit(main(*arguments[:2], *map(int, arguments[2:])))

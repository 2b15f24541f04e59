"""`python agent_run.py NAME DIR [KILL_AT [SETTINGS]]`: train one of `COMBINATIONS`, or go on with it; print its digest.

`SETTINGS` are further ones of the trainer, as JSON. With `KILL_AT` the process kills itself, as `kill -9` does, in
mid-training once it has made so many optimisation steps.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agents import COMBINATIONS

import jaxrl
from jaxrl.training import Progress, Trainer
from jaxrl.training.storage.leaves import state_digest


def main(name: str, directory: str, kill_at: str = "1000", settings: str = "{}") -> None:
    def kill(trainer: Trainer, progress: Progress) -> None:
        if progress.opt_steps >= int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(
        COMBINATIONS[name](),
        max_opts=96,
        eval_interval=30,
        eval_episodes=2,
        record_interval=24,
        save_interval=24,
        run_dir=directory,
        resume=(Path(directory) / "config.yaml").exists(),
        quiet=True,
        max_chunk=1,
        hooks=jaxrl.Hooks(chunk=kill),
        **json.loads(settings),
    )
    print(state_digest(trainer.train().state))


if __name__ == "__main__":
    main(*sys.argv[1:])

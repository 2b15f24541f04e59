"""`python x64_run.py train NAME ...` trains some of `COMBINATIONS` and prints which numbers of their agents are wider
than 32 bits; `python x64_run.py act RUN` prints what the policy of a run does."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from agents import COMBINATIONS

import jaxrl


def wide_after(name: str) -> list[str]:
    trainer = jaxrl.Trainer(
        COMBINATIONS[name](), max_opts=8, eval_interval=4, eval_episodes=2, record_interval=4, quiet=True
    )
    leaves = jax.tree_util.tree_leaves_with_path(trainer.train().state.agent)
    return [jax.tree_util.keystr(path) for path, x in leaves if x.dtype.name in ("float64", "int64")]


def acted(run: str) -> list[float]:
    policy = jaxrl.load_policy(run)
    return np.asarray(policy(np.array([[0.6, -0.8, 0.3]], np.float32)), np.float32).ravel().tolist()


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    print(json.dumps(acted(*names) if what == "act" else {name: wide_after(name) for name in names}))

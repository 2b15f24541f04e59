"""JAX-CORL: `python with_jaxcorl.py SCRIPT OPT_STEPS SEED EPISODES FILE ...` learns Pendulum-v1 from data.

Its sources lie beside the environment that this runs in. Each of its algorithms is a script, which runs here as it
stands, with its own settings; only what it trains on and plays in is given by the modules that it imports for D4RL.
Actions are given to it between -1 and 1, as D4RL's are. The mean return of the last policy is told as JSON.
"""

import importlib.metadata
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np

ENV, LARGEST = "Pendulum-v1", 2.0


class Env:
    """Pendulum-v1 in the interface of the old gym, its scores being returns."""

    def __init__(self, seed: int) -> None:
        """Begin the episodes with `seed`."""
        self._env, self._seed = gymnasium.make(ENV), seed
        self.action_space = self._env.action_space

    def reset(self) -> np.ndarray:
        """Begin the next episode."""
        obs, _ = self._env.reset(seed=self._seed)
        self._seed += 1
        return np.asarray(obs)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        """Take a step; an episode ends at its limit alone."""
        obs, reward, terminated, truncated, info = self._env.step(np.asarray(action) * LARGEST)
        return obs, float(reward), terminated or truncated, info

    def get_normalized_score(self, mean_return: float) -> float:
        """Return what the scripts multiply by 100."""
        return float(mean_return) / 100


def transitions(files: list[str]) -> dict[str, np.ndarray]:
    """Return the steps of data sets of jaxrl as D4RL's `qlearning_dataset` has them."""
    parts = [np.load(file) for file in files]
    joined = lambda name: np.concatenate([part[name] for part in parts])
    return {
        "observations": joined("obs"),
        "actions": joined("action") / LARGEST,
        "rewards": joined("reward"),
        "next_observations": joined("next_obs"),
        "terminals": joined("terminated"),
    }


def main(script: str, opt_steps: int, seed: int, episodes: int, files: list[str]) -> None:
    """Run the script in modules that give it the data and the environment, and tell the score that it logs last."""
    logged: dict[str, float] = {}
    given = {
        "d4rl": {"qlearning_dataset": lambda env: transitions(files)},
        "gym": {"make": lambda name: Env(1_000_000), "Env": Env},
        "wandb": {"init": lambda **about: None, "log": lambda row, step=None: logged.update(row), "finish": list},
        "tqdm": {"tqdm": lambda steps, **about: steps},
    }
    for name, content in given.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    flags = {
        "env_name": ENV,
        "seed": seed,
        "max_steps": opt_steps,
        "eval_interval": opt_steps,
        "eval_episodes": episodes,
    }
    sys.argv = [script, *(f"{name}={value}" for name, value in flags.items())]
    runpy.run_path(str(Path(sys.prefix) / "source" / "algos" / f"{script}.py"), run_name="__main__")
    (score,) = [value for name, value in logged.items() if "final_" in name or "finel_" in name]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "gymnasium")}
    print(json.dumps({"last": float(score), "versions": versions}))


script, steps, seed, episodes, *files = sys.argv[1:]
main(script, int(steps), int(seed), int(episodes), files)

"""Small strategies of two actors, which play in other threads, processes or machines."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys_gymnasium import Counting

import jaxrl
from jaxrl.envs.host import HostEnv, gymnasium_spec

QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "recorders": []}


def counter(**kwargs: int) -> HostEnv:
    return jaxrl.gymnasium_envs(gymnasium_spec(Counting()), partial(Counting, **kwargs))


def replaying(env: Any, engine: str, processor: Any = None, **actors: Any) -> jaxrl.Strategy:
    config = jaxrl.ActorsConfig(**{"actors": 2, "send": 2, "actor_engine": engine, **actors})
    agent, buffer = jaxrl.dqn(features=(8,)), jaxrl.uniform(128, batch_size=8)
    sizes = {"num_envs": 2, "opt_interval": 4, "warmup": 32}
    return jaxrl.off_policy(env, agent, processor=processor, buffer=buffer, actors=config, **sizes)


def learning(env: Any, engine: str, **actors: Any) -> jaxrl.Strategy:
    """Actors that share the statistics of observations, and explore by a schedule."""
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.n_step(2, discount=0.9))
    schedule = {"exploration": (0.2, 0.9), "exploration_schedule": "linear(1,0.1,20)"}
    return replaying(env, engine, processor=processor, **schedule, **actors)


def rollouts(env: Any, engine: str, **actors: Any) -> jaxrl.Strategy:
    config = jaxrl.ActorsConfig(**{"actors": 2, "actor_engine": engine, **actors})
    return jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), num_envs=2, rollout=8, epochs=2, minibatches=2, actors=config)


def train(strategy: jaxrl.Strategy, max_opts: int, **settings: Any) -> Any:
    return jaxrl.Trainer(strategy, max_opts=max_opts, **{**QUIET, **settings}).train()


def train_until_restart(strategy: jaxrl.Strategy, run: Path, hooks: jaxrl.Hooks) -> str:
    """Train until an actor has been started again; return what the log says of it."""
    done = lambda report: bool((run / "metrics.jsonl").exists() and events(run, "actor_restart"))
    settings = {"run_dir": str(run), "hooks": hooks, "max_chunk": 8, "record_interval": 400}
    result = train(strategy, 1_000_000, stop=done, **settings)
    assert result.summary["stop"] == "stop"
    (event,) = events(run, "actor_restart")
    return str(event["message"])


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") == kind]


MINE = """
import gymnasium

def make():
    return gymnasium.make("CartPole-v1")
"""


def begun(tmp_path: Path, *how: str, mine: str = MINE, **others: Any) -> subprocess.Popen[str]:
    """Begin a run of an environment of one's own from the command line; return once it trains."""
    (tmp_path / "mine.py").write_text(mine)
    command = [sys.executable, "-m", "jaxrl.train", "dqn", "--env", "mine:make", "--actors", "2", "--run-dir", "run"]
    flags = ["--agent.features", "8", "--eval-interval", "0", "--eval-episodes", "2", "--record-interval", "8"]
    where = [*how, "--max-opts", "8000000", "--quiet"]
    process = subprocess.Popen([*command, *flags, *where], cwd=tmp_path, stderr=subprocess.PIPE, text=True, **others)
    log = tmp_path / "run" / "metrics.jsonl"
    while not (log.exists() and '"kind": "train"' in log.read_text()):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    return process

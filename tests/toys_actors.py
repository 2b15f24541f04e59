"""Small strategies of two actors, which play in other threads, processes or machines."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from toys_gymnasium import Counting, Starting
from toys_runs import rows_in

import jaxrl
from jaxrl.envs.host import HostEnv, gymnasium_spec

QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "recorders": []}


def counter(**kwargs: int) -> HostEnv:
    return jaxrl.gymnasium_envs(gymnasium_spec(Counting()), partial(Counting, **kwargs))


def replaying(
    env: Any, engine: str = "threads", processor: Any = None, agent: Any = None, **actors: Any
) -> jaxrl.Strategy:
    config = jaxrl.ActorsConfig(**{"actors": 2, "send": 2, "actor_engine": engine, **actors})
    agent, buffer = agent or jaxrl.dqn(features=(8,)), jaxrl.uniform(128, batch_size=8)
    processor = processor or jaxrl.n_step(1, discount=0.5)
    sizes = {"num_envs": 2, "opt_interval": 4, "warmup": 32}
    return jaxrl.off_policy(env, agent, processor=processor, buffer=buffer, actors=config, **sizes)


class Keyed(NamedTuple):
    """The state of an agent beside a key of its own."""

    agent: Any
    key: jax.Array


def keyed(spec: jaxrl.EnvSpec) -> jaxrl.Agent:
    """Return DQN that holds a typed key, which each update replaces."""
    one = jaxrl.dqn(features=(8,))(spec)

    def update(state: Keyed, *args: Any) -> tuple[Any, ...]:
        new, *others = one.update(state.agent, *args)
        return Keyed(new, jax.random.split(state.key)[0]), *others

    return jaxrl.Agent(
        "keyed",
        init=lambda key: Keyed(one.init(key), jax.random.key(7)),
        act=lambda state, *args: one.act(state.agent, *args),
        update=update,
        strip=lambda state: state._replace(agent=one.strip(state.agent)),
    )


def with_settings(strategy: jaxrl.Strategy, **actors: Any) -> jaxrl.Strategy:
    """Return a strategy whose actors have other settings, of which no program knows: both are compiled once."""
    fns = strategy.actor_fns
    assert fns is not None
    return strategy._replace(actor_fns=fns._replace(config=replace(fns.config, **actors)))


MAKE: dict[str, Callable[[], Any]] = {}
"""What makes environments of `made`, where a test asks for other than those that count."""
STARTED = "JAXRL_TEST_STARTED"
"""Names the file to which environments of `made` in other processes write what they have started, if they are to."""


def made() -> Any:
    if "make" in MAKE:
        return MAKE["make"]()
    return Starting(os.environ[STARTED]) if STARTED in os.environ else Counting()


@cache
def counted() -> jaxrl.Strategy:
    """Return two actors in environments that each test makes as it needs them: compiled once for all."""
    return replaying(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), made), max_lag=2)


DISCOUNT = 0.5


def learning(env: Any, engine: str = "threads", n: int = 2, actors: int = 2, **settings: Any) -> jaxrl.Strategy:
    """Actors that share the statistics of observations and rewards, and explore by a schedule."""
    by = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(DISCOUNT), jaxrl.n_step(n, discount=DISCOUNT))
    schedule = {"exploration": (0.2, 0.9)[:actors], "exploration_schedule": "linear(1,0.1,20)"}
    return replaying(env, engine, processor=by, actors=actors, **schedule, **settings)


@cache
def shared(n: int, actors: int = 2) -> jaxrl.Strategy:
    """Return `learning` in environments that a test makes as it needs them: compiled once for all."""
    return learning(jaxrl.gymnasium_envs(gymnasium_spec(Counting()), made), n=n, actors=actors)


@cache
def shared_state(actors: int, max_lag: int, sync_interval: int, n: int) -> tuple[jaxrl.Strategy, Any, int]:
    """Train `shared` for 24 steps; return the strategy, its state, and the steps of each environment."""
    strategy = with_settings(shared(n, actors), max_lag=max_lag, sync_interval=sync_interval)
    rounds = 24 // strategy.opt_steps_per_step
    steps = (strategy.warmup_env_steps + rounds * strategy.env_steps_per_step) // (2 * actors)
    return strategy, train(strategy, 24).state, steps


def rollouts(
    env: Any, engine: str = "threads", processor: Any = None, agent: Any = None, **actors: Any
) -> jaxrl.Strategy:
    config = jaxrl.ActorsConfig(**{"actors": 2, "actor_engine": engine, **actors})
    sizes = {"num_envs": 2, "rollout": 8, "epochs": 2, "minibatches": 2}
    agent = agent or jaxrl.ppo(features=(8,))
    return jaxrl.on_policy(env, agent, processor=processor, actors=config, **sizes)


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


def workers(of: int | str = "self") -> set[int]:
    """Return the workers that a process has begun and that have not ended, below the supervisor of each."""
    found: set[int] = set()
    for task in Path(f"/proc/{of}/task").glob("*/children"):
        found |= {int(word) for word in task.read_text().split()}
    named = lambda pid: Path(f"/proc/{pid}/cmdline").read_text() if Path(f"/proc/{pid}").exists() else ""
    ours = {pid for pid in found if "actors.in_processes" in named(pid)}
    return {worker for pid in ours for worker in workers(pid) or {pid}}


def wait_for_ends(file: Path, learner: int) -> int:
    """Return when all has ended that was started by others than the learner; how many processes that were."""
    started = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    pids = [child for parent, child in started if parent != learner]
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            assert select.select([handle], [], [], 60)[0] == [handle]  # readable once the process has ended
            os.close(handle)
    for parent, child in started:
        if parent == learner:
            os.kill(child, 9)
    return len(pids)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows_in(run) if row.get("event") == kind]


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

"""Actors in workers of a real Ray cluster of two machines, played by two nodes here: the same bits, and clear ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys_envs import counting
from toys_gymnasium import Counting

import jaxrl
from jaxrl.envs.host import HostEnv, gymnasium_spec
from jaxrl.errors import ActorError, SettingsError
from jaxrl.training.on_ray import Order, Worker, connect
from jaxrl.training.storage.leaves import state_digest

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
from ray.cluster_utils import Cluster  # noqa: E402

TESTS = Path(__file__).parents[1]
QUIET: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "recorders": []}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes of one CPU each; this process, the learner's, belongs to the first."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))  # as if installed on both
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)  # for the processes that a test begins
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def counter(**kwargs: int) -> HostEnv:
    return jaxrl.gymnasium_envs(gymnasium_spec(Counting()), partial(Counting, **kwargs))


def replaying(env: Any, processor: Any = None, **actors: Any) -> jaxrl.Strategy:
    config = jaxrl.ActorsConfig(**{"actors": 2, "send": 2, "actor_engine": "ray", **actors})
    agent, buffer = jaxrl.dqn(features=(8,)), jaxrl.uniform(128, batch_size=8)
    sizes = {"num_envs": 2, "opt_interval": 4, "warmup": 32}
    return jaxrl.off_policy(env, agent, processor=processor, buffer=buffer, actors=config, **sizes)


def learning(env: Any, **actors: Any) -> jaxrl.Strategy:
    """Actors that share the statistics of observations, and explore by a schedule."""
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.n_step(2, discount=0.9))
    schedule = {"exploration": (0.2, 0.9), "exploration_schedule": "linear(1,0.1,20)"}
    return replaying(env, processor=processor, **schedule, **actors)


def rollouts(env: Any, **actors: Any) -> jaxrl.Strategy:
    config = jaxrl.ActorsConfig(**{"actors": 2, "actor_engine": "ray", **actors})
    return jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), num_envs=2, rollout=8, epochs=2, minibatches=2, actors=config)


def train(strategy: jaxrl.Strategy, max_opts: int, **settings: Any) -> Any:
    return jaxrl.Trainer(strategy, max_opts=max_opts, **{**QUIET, **settings}).train()


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") == kind]


def nodes_of_actors() -> set[str]:
    """Return the nodes on which workers are alive."""
    table = ray._private.state.actors().values()
    return {actor["Address"]["NodeID"] for actor in table if actor["State"] == "ALIVE"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [replaying, rollouts, learning])
def test_workers_on_two_nodes_make_the_bits_that_threads_make(make: Any, cluster: Cluster):
    env = jaxrl.make_env("gymnasium:CartPole-v1")
    here = train(make(env, actor_engine="threads"), 24)
    there = train(make(env), 24)
    assert state_digest(there.state) == state_digest(here.state)
    for told in there.summary["actors"]:
        assert told["env_steps"] >= 24 // 4 * 16 if make is rollouts else 16 + 24 * 2


@pytest.mark.slow
def test_environments_in_jax_and_exploration_go_to_workers_too(cluster: Cluster):
    make = partial(replaying, counting(length=4), exploration=(0.1, 0.9))
    here, there = train(make(actor_engine="threads"), 16), train(make(), 16)
    assert state_digest(there.state) == state_digest(here.state)


@pytest.mark.slow
def test_a_run_resumes_with_either_engine_to_the_same_bits(cluster: Cluster, tmp_path: Path):
    train(replaying(counter()), 16, run_dir=str(tmp_path / "run"))
    digests = []
    for engine in ("threads", "ray"):
        shutil.copytree(tmp_path / "run", tmp_path / engine)
        result = train(replaying(counter(), actor_engine=engine), 32, run_dir=str(tmp_path / engine), resume=True)
        digests.append(state_digest(result.state))
    assert digests[0] == digests[1]
    (event,) = events(tmp_path / "ray", "resume")
    assert event["message"].startswith("resumed at 16 optimisation steps with environments that start anew")


@pytest.mark.slow
def test_what_a_worker_raises_or_hangs_in_ends_the_run_in_one_line(cluster: Cluster, tmp_path: Path):
    before = set(threading.enumerate())
    with pytest.raises(ActorError, match=r"^actor [01] failed: RuntimeError: the motor is on fire$"):
        train(replaying(counter(raise_step=40)), 4_000, run_dir=str(tmp_path / "raised"))
    (event,) = events(tmp_path / "raised", "actor")
    assert "raise RuntimeError" in event["traceback"]
    assert list((tmp_path / "raised" / "checkpoints").glob("*/manifest.json"))
    said = r"^actor [01]: a call of gymnasium:Counting takes more than 1 s; it hangs, or raise actor_timeout$"
    with pytest.raises(ActorError, match=said):
        train(replaying(counter(hang_step=40), actor_timeout=1.0), 4_000, run_dir=str(tmp_path / "hung"))
    (event,) = events(tmp_path / "hung", "actor")
    assert "time.sleep" in event["traceback"]
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"actor 0", "actor 1"}
    assert nodes_of_actors() == set()


def on_death_of_a_node(cluster: Cluster, more: int = 0) -> jaxrl.Hooks:
    """Once training is under way, add `more` nodes, and kill the one that the learner does not belong to."""
    first = list(cluster.worker_nodes)

    def kill(trainer: Any, progress: Any) -> None:
        if trainer.ledger.t >= 8 and first:
            for _ in range(more):
                cluster.add_node(num_cpus=1)
            cluster.remove_node(first.pop(), allow_graceful=False)

    return jaxrl.Hooks(chunk=kill)


@pytest.mark.slow
def test_a_node_that_dies_ends_the_run_in_one_line_with_a_checkpoint(cluster: Cluster, tmp_path: Path):
    run, hooks = tmp_path / "run", on_death_of_a_node(cluster)
    said = r"^actor [01] failed: its Ray worker is gone, with its process or machine: [^\n]+$"
    with pytest.raises(ActorError, match=said):
        train(replaying(counter()), 1_000_000, run_dir=str(run), hooks=hooks, max_chunk=8)
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["status"] == "actor"
    assert (run / "checkpoints" / str(metadata["opt_steps"]) / "manifest.json").exists()
    assert metadata["opt_steps"] >= 16


@pytest.mark.slow
def test_with_restarts_an_actor_of_a_dead_node_goes_on_elsewhere_and_that_is_told(cluster: Cluster, tmp_path: Path):
    run, hooks = tmp_path / "run", on_death_of_a_node(cluster, more=1)
    done = lambda report: bool((run / "metrics.jsonl").exists() and events(run, "actor_restart"))
    strategy = learning(counter(), actor_restarts=2)
    result = jaxrl.Trainer(
        strategy,
        max_opts=1_000_000,
        stop=done,
        run_dir=str(run),
        hooks=hooks,
        max_chunk=8,
        record_interval=400,
        **QUIET,
    ).train()
    assert result.summary["stop"] == "stop"
    (event,) = events(run, "actor_restart")
    assert event["message"].startswith(("actor 0 starts again from its seed, 1 more", "actor 1 starts again"))


@pytest.mark.slow
def test_a_cluster_that_is_too_small_or_an_environment_that_cannot_be_sent_is_refused(cluster: Cluster):
    with pytest.raises(SettingsError, match="actors is 4, but the Ray cluster has 2 CPUs, of which each actor takes"):
        train(replaying(counter(), actors=4), 8)
    lock = threading.Lock()
    unsendable = jaxrl.gymnasium_envs(gymnasium_spec(Counting()), lambda: (lock, Counting())[1])
    with pytest.raises(SettingsError, match=r"gymnasium:Counting cannot be sent .*; make it by a function of a module"):
        train(replaying(unsendable), 8)


def test_a_cluster_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(SettingsError, match=r"no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:\d+: Connection"):
            connect(2)


def test_a_machine_with_other_versions_is_named_in_one_line():
    order = Order({"jaxrl": "0.1.0", "jax": "0.2.0"}, {}, "auto", b"", b"")
    line, _ = Worker().open(order, [0, 0, 0.0, 0.0]).failure or ("", "")
    assert line.startswith(": its machine has jaxrl ")
    assert line.endswith(", and the learner's has jaxrl 0.1.0, jax 0.2.0; install the same")


MINE = """
import gymnasium

def make():
    return gymnasium.make("CartPole-v1")
"""


@pytest.mark.slow
def test_the_command_line_trains_an_environment_of_ones_own_in_workers_and_ends_by_a_signal(
    cluster: Cluster, tmp_path: Path
):
    (tmp_path / "mine.py").write_text(MINE)
    command = [sys.executable, "-m", "jaxrl.train", "dqn", "--env", "mine:make", "--actors", "2", "--run-dir", "run"]
    flags = ["--agent.features", "8", "--eval-interval", "0", "--eval-episodes", "2", "--record-interval", "8"]
    engine = ["--actor-engine", "ray", "--max-opts", "8000000", "--quiet"]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])}
    process = subprocess.Popen([*command, *flags, *engine], cwd=tmp_path, env=path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    while not (log.exists() and '"kind": "train"' in log.read_text()):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert nodes_of_actors() == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (143, "")
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["status"] == "SIGTERM"

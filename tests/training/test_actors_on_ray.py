"""Actors in workers of a real Ray cluster of two machines, played by two nodes here: what is of Ray alone."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from toys_actors import begun, counter, learning, replaying, train, train_until_restart

import jaxrl
from jaxrl.errors import ActorError, SettingsError
from jaxrl.training.actors.on_ray import connect

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
from ray.cluster_utils import Cluster  # noqa: E402


def nodes_of_actors() -> set[str]:
    """Return the nodes on which workers are alive."""
    table = ray._private.state.actors().values()
    return {actor["Address"]["NodeID"] for actor in table if actor["State"] == "ALIVE"}


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
        train(replaying(counter(), "ray"), 1_000_000, run_dir=str(run), hooks=hooks, max_chunk=8)
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["status"] == "actor"
    assert (run / "checkpoints" / str(metadata["opt_steps"]) / "manifest.json").exists()
    assert metadata["opt_steps"] >= 16


@pytest.mark.slow
def test_with_restarts_an_actor_of_a_dead_node_goes_on_elsewhere_and_that_is_told(cluster: Cluster, tmp_path: Path):
    strategy = learning(counter(), "ray", actor_restarts=2)
    message = train_until_restart(strategy, tmp_path / "run", on_death_of_a_node(cluster, more=1))
    assert message.startswith(("actor 0 starts again from its seed, 1 more", "actor 1 starts again"))


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused(cluster: Cluster):
    with pytest.raises(SettingsError, match="actors is 4, but the Ray cluster has 2 CPUs, of which each actor takes"):
        train(replaying(counter(), "ray", actors=4), 8)


def test_a_cluster_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(SettingsError, match=r"no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:\d+: Connection"):
            connect(2)


@pytest.mark.slow
def test_the_command_line_trains_an_environment_of_ones_own_in_workers_and_ends_by_a_signal(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)]))
    process = begun(tmp_path, "--actor-engine", "ray")
    assert nodes_of_actors() == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (143, "")
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["status"] == "SIGTERM"

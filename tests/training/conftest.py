"""What processes of tests import, and a Ray cluster of two machines, played by two nodes here."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find what tests import, as if it were installed."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))


@pytest.fixture
def cluster(path: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each; this process, the learner's, belongs to the first."""
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)  # for the processes that a test begins
    yield nodes
    ray.shutdown()
    nodes.shutdown()

"""What processes of tests import, a Ray cluster of two machines, played by two nodes here, and a population."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toys_population import BEGUN, two

from jaxrl.training.loop import Trainer


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


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where two members were trained for 20 steps; do not write there."""
    run = tmp_path_factory.mktemp("short") / "run"
    Trainer(two(), **BEGUN, run_dir=run).train()
    return run


@pytest.fixture
def run(short: Path, tmp_path: Path) -> Path:
    """Return a directory of a test's own, in which two members were trained for 20 steps."""
    return Path(shutil.copytree(short, tmp_path / "run"))

"""What a run has saved, read by somebody who has Orbax and NumPy but not jaxrl."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl.trees import PyTree

READER = """
import sys

sys.modules["jaxrl"] = None  # whoever imports it fails

import numpy as np
import orbax.checkpoint as ocp

run, obs = sys.argv[1], np.load(sys.argv[2])
network = ocp.PyTreeCheckpointer().restore(f"{run}/best/{sys.argv[3]}/arrays")["agent"]["params"]["params"]
layer = network["MLP_0"]["Dense_0"]
hidden = np.maximum(obs @ layer["kernel"] + layer["bias"], 0)
values = hidden @ network["Dense_0"]["kernel"] + network["Dense_0"]["bias"]
print(*values.argmax(-1))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "dqn"
    settings = {"max_opts": 20, "eval_interval": 10, "eval_episodes": 3, "save_interval": 10, "quiet": True}
    jaxrl.Trainer(small_dqn(), run_dir=str(path), **settings).train()
    return path


def test_a_process_with_orbax_and_numpy_alone_acts_as_the_policy_does(run: Path, tmp_path: Path) -> None:
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.save(tmp_path / "obs.npy", obs)
    (best,) = (run / "best").iterdir()
    args = [sys.executable, "-c", READER, run, tmp_path / "obs.npy", best.name]
    told = subprocess.run(list(map(str, args)), capture_output=True, text=True, check=True).stdout
    assert [int(word) for word in told.split()] == jaxrl.load_policy(run)(obs).tolist()


def test_orbaxs_manager_finds_the_checkpoints_and_restores_the_training_state(run: Path) -> None:
    with ocp.CheckpointManager(run / "checkpoints", item_names=("arrays",)) as manager:
        assert list(manager.all_steps()) == [10, 20]
        found = manager.restore(20, args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore()))["arrays"]
    assert found.keys() == {"state", "sums"}
    agent = found["state"]["agent"]
    assert agent["params"]["params"]["Dense_0"]["kernel"].shape == (16, 2)
    assert shapes(agent["opt_state"]["0"]["mu"]) == shapes(agent["opt_state"]["0"]["nu"]) == shapes(agent["params"])


def shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(np.shape, tree)

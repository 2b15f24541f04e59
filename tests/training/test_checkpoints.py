"""Checkpoints: the same bits back, or a clear word; real files, real damage."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl.errors import StorageError
from jaxrl.training import processes
from jaxrl.training.storage import arrays, checkpoints
from jaxrl.training.storage.checkpoints import CheckpointError, Store, seal
from jaxrl.training.storage.leaves import state_digest as digest
from jaxrl.trees import PyTree


class Tree(NamedTuple):
    key: jax.Array
    weights: jax.Array
    flags: jax.Array
    parts: tuple


def tree(scale: float = 1.0) -> Tree:
    return Tree(
        key=jax.random.split(jax.random.key(7), 3),
        weights=scale * jnp.linspace(-1, 1, 1000).reshape(10, 100),
        flags=jnp.arange(5) % 2 == 0,
        parts=(
            jnp.float32(scale), {"a": jnp.arange(4, dtype=jnp.int8), "b": jnp.ones(3, jnp.bfloat16)},
            jnp.zeros((0, 4)), jnp.array([jnp.nan, jnp.inf, -0.0]),
        ),
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", keep=2)


def fill(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(step, tree(step), {"step": step})
    store.close()


def test_the_same_bits_come_back_into_the_same_types(store: Store) -> None:
    fill(store, 3)
    step, loaded, facts = store.load_newest(jax.eval_shape(lambda: tree()))
    assert (step, facts) == (3, {"step": 3})
    assert jax.tree.structure(loaded) == jax.tree.structure(tree())
    assert digest(loaded) == digest(tree(3))
    assert jax.random.bits(loaded.key[0]) == jax.random.bits(tree().key[0])


def test_orbax_alone_restores_what_was_saved_by_the_names_in_the_tree(store: Store) -> None:
    fill(store, 3)
    found = ocp.PyTreeCheckpointer().restore(store.directory / "3" / "arrays")
    assert found.keys() == {"key<threefry2x32>", "weights", "flags", "parts"}
    assert found["parts"].keys() == {"0", "1", "3"}  # the third is empty
    assert (found["parts"]["1"]["a"] == np.arange(4)).all()
    assert found["parts"]["1"]["b"].dtype == jnp.bfloat16
    assert (found["weights"] == tree(3).weights).all()


def test_names_with_dots_and_slashes_do_not_meet(store: Store) -> None:
    names = {"a.b": 1, "a/b": 2, "a": {"b": 3, "": 4, "b%2F": 5}, "a%2Fb": 6, "mlp/~/linear.0": {"w": 7}}
    odd = jax.tree.map(jnp.float32, names)
    store.save(1, odd, {})
    store.close()
    assert digest(store.load(1, odd)[0]) == digest(odd)
    assert {path: float(leaf) for path, leaf in store.read(1)[0].items()} == {
        "a%2Eb": 1, "a%2Fb": 2, "a/b": 3, "a/%": 4, "a/b%252F": 5, "a%252Fb": 6, "mlp%2F~%2Flinear%2E0/w": 7,
    }  # fmt: skip


def test_names_may_be_longer_than_those_of_files(store: Store) -> None:
    deep = {"layer" * 30: {"kernel" * 30: jnp.arange(3)}}
    store.save(1, deep, {})
    store.close()
    assert digest(store.load(1, deep)[0]) == digest(deep)
    found = ocp.PyTreeCheckpointer().restore(store.directory / "1" / "arrays")
    assert (found["layer" * 30]["kernel" * 30] == np.arange(3)).all()


@pytest.mark.parametrize("odd", [{}, (), {"a": np.zeros((0, 3))}, np.arange(3)], ids=str)
def test_what_has_no_numbers_is_saved_too_and_a_single_array_is_a_tree(store: Store, odd: Any) -> None:
    """As the parameters of a policy that has none."""
    store.save(1, odd, {"score": 1.0})
    store.close()
    found, facts = store.load(1, odd)
    assert jax.tree.structure(found) == jax.tree.structure(odd)
    jax.tree.map(np.testing.assert_array_equal, found, odd)
    assert facts == {"score": 1.0}


def test_digest_tells_dtypes_shapes_and_signs_apart() -> None:
    variants = [np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32), -np.zeros(4, np.float32)]
    assert len({digest({"x": x}) for x in variants}) == 4


def test_an_error_of_a_program_is_not_taken_for_one_of_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", 2)
    store.save(1, {"a": np.zeros(3)}, {"fact": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.close()
    assert store.steps() == []


def test_an_error_of_a_program_is_not_taken_for_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 1, 2)

    def broken(*args: Any) -> None:
        raise TypeError("another JAX")

    monkeypatch.setattr(checkpoints, "read_arrays", broken)
    with pytest.raises(TypeError, match="another JAX"):
        store.load_newest(jax.eval_shape(lambda: tree()))


@pytest.mark.parametrize(
    ("sums", "missing", "raised"), [(None, False, RuntimeError), ([0], True, StorageError)], ids=["program", "disk"]
)
def test_nor_is_one_in_another_process(
    sums: Any, missing: bool, raised: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    path, like = tmp_path / "arrays", {"a": jax.ShapeDtypeStruct((3,), np.float32, sharding=device)}
    found, _ = arrays.write_all(path, {"a": np.ones(3, np.float32)})
    _, said = arrays.read_part(tmp_path / "nowhere" if missing else path, like, sums)
    monkeypatch.setattr(processes, "answers", lambda: iter([said]))
    with pytest.raises(raised, match="process 1: "):
        arrays.read_sharded(path, like, list(found.values()))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("../../outside", "no path"),
        ("/etc/passwd", "no path"),
        ("a//b", "no path"),
        ("a\x00b", "no path"),
        ("\ud800", "no path"),
        ("line\nline", "no path"),
        ("a" * 5_000, "no path"),
        ("/".join("a" * 100), "nested too deeply"),
        ("flags", "more than once"),
        ("flags/below", "conflicts"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_strangers_path_leads_nowhere(store: Store, path: str, said: str) -> None:
    fill(store, 1)
    file = store.directory / "1" / "manifest.json"
    manifest = json.loads(file.read_text())
    next(leaf for leaf in manifest["leaves"] if leaf["path"] == "weights")["path"] = path
    file.write_text(json.dumps(seal(manifest)))
    (store.directory / "1" / "files.json").unlink()
    with pytest.raises(CheckpointError, match=said):
        store.read(1)


# --- a run, read by somebody who has Orbax and NumPy but not jaxrl ----------------------------------------------------

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

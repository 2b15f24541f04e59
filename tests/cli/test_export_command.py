"""`python -m jaxrl.export`: what it writes does what the policy does, in a process that has no jaxrl."""

import json
import logging
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import yaml
from commands import Cli, Finished, one_error_line, snapshot
from PIL import Image

import jaxrl
from jaxrl import export, load_policy
from jaxrl.errors import SettingsError
from jaxrl.training.storage.leaves import state_digest

ALONE = "import sys; sys.modules['jaxrl'] = None  # importing it fails\nimport numpy as np\nobs = np.load('obs.npy')\n"
USE = {
    "stablehlo": "from jax import export\npolicy = export.deserialize(bytearray(open('out/policy.jax', 'rb').read()))\n"
    "actions, = policy.call(obs)\none, = policy.call(obs[:1])\nassert one[0] == actions[0]",
    "numpy": "sys.modules['jax'] = None\nsys.path.insert(0, 'out')\nimport policy\n"
    "actions = np.array([policy.act(x) for x in obs])\nassert actions[0].shape == ()",
    "c": "import subprocess\nsubprocess.run(['cc', '-std=c99', '-Iout', 'main.c', 'out/policy.c', '-lm'], check=True)\n"
    "told = subprocess.run('./a.out', input=obs.tobytes(), capture_output=True).stdout\n"
    "actions = np.array(told.split(), int)",
    "onnx": "import onnxruntime\nmodel = onnxruntime.InferenceSession('out/policy.onnx')\n"
    "actions, = model.run(['action'], {'obs': obs})",
}

MAIN = """
#include <stdio.h>
#include "policy.h"
int main(void)
{
    static policy_state state;
    static float obs[POLICY_OBSERVATION_SIZE];
    int32_t action[POLICY_ACTION_SIZE];
    policy_init(&state);
    for (; fread(obs, sizeof obs, 1, stdin); printf("%d ", (int)action[0]))
        policy_act(&state, obs, action);
    return 0;
}
"""


@pytest.mark.every_day("numpy", "c")
@pytest.mark.parametrize("form", USE)
def test_it_does_the_same_without_jaxrl(form: str, cli: Cli, finished: Finished) -> None:
    if form == "onnx":
        pytest.importorskip("jax2onnx")
        pytest.importorskip("onnxruntime")
    if form == "c" and shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc")
    (cli.cwd / "main.c").write_text(MAIN)
    before = snapshot(finished.path)
    done = cli.here("export", finished.path, "--format", form, "--out", "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"out: the policy as {form}, after ")
    policy = load_policy(finished.path)
    (given,) = json.loads((cli.cwd / "out/policy.json").read_text())["inputs"]
    shape = [size for size in given["shape"] if size != "B"]
    assert (len(given["shape"]) > len(shape)) is (form not in ("numpy", "c"))  # which take one observation
    obs = np.random.default_rng(0).random((1_000, *shape), np.float32)
    np.save(cli.cwd / "obs.npy", obs)
    use = f"{ALONE}{USE[form]}\nnp.save('actions.npy', actions)"
    subprocess.run([sys.executable, "-c", use], cwd=cli.cwd, check=True)
    np.testing.assert_array_equal(np.load(cli.cwd / "actions.npy"), policy(obs))
    assert len(set(np.asarray(policy(obs)).tolist())) > 1
    assert snapshot(finished.path) == before


def test_what_is_there_is_not_lost(tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    asked = [str(finished.path), "--format", "numpy", "--out"]

    def refused(*words: str) -> str:
        with pytest.raises(SettingsError) as refusal:
            export.main([*asked, *words])
        return str(refusal.value)

    for more in ((), ("--overwrite",)):
        assert "mine exists; name another directory by --out" in refused("mine", *more)
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]
    assert "which is only read" in refused(str(finished.path / "policy"))
    assert export.main([*asked, "new"]) == 0
    assert "new exists; give --overwrite to replace" in refused("new")
    Path("new/policy.py").unlink()
    assert export.main([*asked, "new", "--overwrite"]) == 0
    assert {path.name for path in Path("new").iterdir()} == {"policy.py", "policy.npz", "policy.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "new"}


def test_a_converter_that_is_missing_is_named(
    tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(SettingsError, match="pip install --no-deps jax2onnx"):
        export.main([str(finished.path), "--format", "onnx"])
    assert list(tmp_path.iterdir()) == []


class Talkative:
    """A converter that says in a log and in a warning what it can do without."""

    @staticmethod
    def to_onnx(*args: object, **settings: object) -> "Talkative":
        logging.getLogger("jax2onnx.plugins").warning("no module of that name")
        warnings.warn("a dtype is truncated", UserWarning, stacklevel=2)
        return Talkative()

    @staticmethod
    def SerializeToString() -> bytes:
        return b"model"


def test_what_a_converter_says_of_its_own_inside_is_left_out(
    cli: Cli, finished: Finished, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "jax2onnx", Talkative)
    done = cli.here("export", finished.path, "--format", "onnx", "--out", "out")
    assert (done.returncode, done.stderr, caplog.messages) == (0, "", [])
    assert (cli.cwd / "out" / "policy.onnx").read_bytes() == b"model"


@pytest.mark.slow
def test_a_folder_for_a_hub_has_all_that_it_speaks_of(cli: Cli, finished: Finished) -> None:
    before = snapshot(finished.path)
    asked = ("publish", finished.path, "--episodes", "5", "--out", "hub")
    done = cli.run(*asked)  # a real process, since JAX's settings in tests hide paths
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" over 5 episodes; nothing was uploaded\n")
    hub = cli.cwd / "hub"
    names = {"README.md", "results.json", "weights.npz", "config.yaml", "episode.gif", "policy"}
    assert {path.name for path in hub.iterdir()} == names
    own = [str(path).encode() for path in (Path(jaxrl.__file__).parent, sys.prefix, cli.cwd, finished.path)]
    written = {path: path.read_bytes() for path in hub.rglob("*") if path.is_file()}
    assert [path.name for path, content in written.items() if any(place in content for place in own)] == []
    _, front, text = (hub / "README.md").read_text().split("---\n", 2)
    (model,) = yaml.safe_load(front)["model-index"]
    told = json.loads((hub / "results.json").read_text())
    judged = cli.here("evaluate", finished.path, "--episodes", "5", "--json").stdout
    assert told["evaluation"] == {"env": "Catch-bsuite", "seed": 1_000_000, **json.loads(judged)}
    mean = told["evaluation"]["returns"]["mean"]
    assert model["results"][0]["metrics"][0]["value"].startswith(f"{mean:.6g} +/- ")
    assert f"**{mean:.6g} ± " in text
    assert told["versions"]["jaxrl"] == jaxrl.__version__
    assert (hub / "config.yaml").read_bytes() == (finished.path / "config.yaml").read_bytes()
    policy = load_policy(finished.path)
    with np.load(hub / "weights.npz") as held:
        for array, leaf in zip(held.values(), jax.tree.leaves(policy.params), strict=True):
            np.testing.assert_array_equal(array, leaf)
    call = jax.export.deserialize(bytearray((hub / "policy/policy.jax").read_bytes())).call
    obs = np.random.default_rng(0).random((50, 10, 5), np.float32)
    np.testing.assert_array_equal(call(obs)[0], policy(obs))
    with Image.open(hub / "episode.gif") as picture:
        assert picture.size[0] > 0
    assert "hub exists; give --overwrite" in one_error_line(cli.here(*asked))
    assert snapshot(finished.path) == before


def commands(card: str) -> list[list[str]]:
    """Return the module and the arguments of each command under `Repeat` on a card."""
    block = card.partition("## Repeat")[2].split("```")[1].removeprefix("sh\n")
    return [shlex.split(line.removeprefix("python -m jaxrl.")) for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("which", [[], ["--step", "40"]])
def test_what_a_card_says_makes_the_same_bits_again(which: list[str], cli: Cli, finished: Finished) -> None:
    assert cli.here("publish", finished.path, *which, "--episodes", "5", "--out", "hub").returncode == 0
    hub = cli.cwd / "hub"
    card, told = (hub / "README.md").read_text(), json.loads((hub / "results.json").read_text())
    train, judge = commands(card)
    assert "this makes the same bits" in card
    assert Cli(hub, cli.cache).here(*train).returncode == 0
    digest = state_digest(load_policy(hub / "again", step="latest").params)
    assert digest == told["digest"] == state_digest(load_policy(finished.path, step=(which or [0, None])[1]).params)
    judged = json.loads(Cli(hub, cli.cache).here(*judge, "--json").stdout)
    assert judged == {name: told["evaluation"][name] for name in judged}


@pytest.mark.slow
def test_a_card_makes_no_promises_for_what_was_made_in_python(cli: Cli) -> None:
    agent = jaxrl.dqn(features=(4,), make_optimizer=optax.sgd)
    strategy = jaxrl.off_policy(jaxrl.make_env("Catch-bsuite"), agent, buffer=jaxrl.uniform(200, batch_size=8))
    run = cli.cwd / "mine"
    jaxrl.Trainer(strategy, max_opts=4, eval_interval=4, eval_episodes=2, run_dir=str(run), quiet=True).train()
    done = cli.here("publish", run, "--episodes", "5", "--out", "hub")
    assert (done.returncode, done.stderr) == (0, "")
    card = (cli.cwd / "hub/README.md").read_text()
    assert "Parts of its training were made in Python (" in card
    assert "so no command trains it again." in card
    assert "same bits" not in card
    assert str(cli.cwd) not in card
    ((name, told, *how),) = commands(card)
    assert (name, told) == ("evaluate", "RUN")
    judged = json.loads(cli.here(name, run, *how, "--json").stdout)
    assert judged["returns"] == json.loads((cli.cwd / "hub/results.json").read_text())["evaluation"]["returns"]

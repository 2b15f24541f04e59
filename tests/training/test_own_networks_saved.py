"""Runs whose agents had parts made in Python: what acts needs only the networks that act."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrl
from jaxrl import evaluate, play, train
from jaxrl.nn import from_nnx

OBS = np.zeros((3, 10, 5), np.float32)
OBS[0, 2, 1] = OBS[1, 4, 4] = OBS[2, 7, 0] = 1.0


class Values(nnx.Module):
    """Values of the three actions of Catch."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(50, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)])

    def __call__(self, obs: jax.Array) -> jax.Array:
        return self.layers[1](nnx.relu(self.layers[0](obs.reshape(obs.shape[0], -1))))


class Flattened(nn.Module):
    """One layer."""

    outputs: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        return nn.Dense(self.outputs)(obs.reshape(obs.shape[0], -1))


NETWORK = {"make_network": lambda spec: from_nnx(lambda rngs: Values(6, rngs))}
POLICY = {"make_policy": lambda spec, head: from_nnx(lambda rngs: Values(6, rngs))}
AGENTS: dict[str, Any] = {
    "optimizer": lambda: jaxrl.dqn(features=(8,), make_optimizer=optax.sgd),
    "network": lambda: jaxrl.dqn(**NETWORK),
    "policy": lambda: jaxrl.sac(**POLICY, make_critic=lambda spec: Flattened(3)),
}


def trainer(name: str, run: Path, max_opts: int = 20, **resume: bool) -> jaxrl.Trainer:
    sizes = {"buffer": jaxrl.uniform(200, batch_size=8), "num_envs": 4, "opt_interval": 4, "warmup": 16}
    strategy = jaxrl.off_policy(jaxrl.make_env("Catch-bsuite"), AGENTS[name](), **sizes)
    judged = (
        {"eval_interval": 10, "eval_episodes": 3} if name == "optimizer" else {"eval_interval": 0, "eval_episodes": 0}
    )
    settings = {**judged, "save_interval": 10, "quiet": True}
    return jaxrl.Trainer(strategy, max_opts=max_opts, run_dir=str(run), **settings, **resume)


class Runs(dict[str, tuple[Path, Any]]):
    """Where each run is, and its policy; one is trained when it is first asked for."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __missing__(self, name: str) -> tuple[Path, Any]:
        self[name] = (self.at / name, trainer(name, self.at / name).train().policy)
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_with_an_optimizer_of_ones_own_a_run_is_loaded_judged_and_played(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, policy = runs["optimizer"]
    assert jaxrl.load_policy(run)(OBS).tolist() == policy(OBS).tolist()
    assert evaluate.main([str(run), "--episodes", "3"]) == 0
    assert play.main([str(run), "--out", str(tmp_path / "episode.gif")]) == 0
    assert "over 3 episodes" in capsys.readouterr().out
    assert (tmp_path / "episode.gif").exists()


@pytest.mark.slow
def test_the_settings_name_what_they_do_not_tell(runs: Runs) -> None:
    said = {name: (runs[name][0] / "config.yaml").read_text() for name in AGENTS}
    assert "custom:\n- make_optimizer\n" in said["optimizer"]
    assert "custom:\n- make_policy\n- make_critic\n" in said["policy"]
    assert "features:\n  - 8\n" in said["optimizer"]


@pytest.mark.every_day("policy")
@pytest.mark.parametrize(("name", "given"), [("network", NETWORK), ("policy", POLICY)], ids=["network", "policy"])
def test_a_network_of_ones_own_is_passed_to_load_its_policy(runs: Runs, name: str, given: dict[str, Any]) -> None:
    """Critics, which do not act, need not be passed."""
    run, policy = runs[name]
    assert jaxrl.load_policy(run, **given)(OBS).tolist() == policy(OBS).tolist()


OTHER = lambda spec, head: from_nnx(lambda rngs: Values(7, rngs))


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("policy", {}, "was made in Python; pass what made it: load_policy(run_dir, make_policy=...)"),
        ("policy", NETWORK, "load_policy(run_dir, make_policy=...)"),
        ("policy", {"make_policy": OTHER}, "make_policy is not what trained"),
        ("policy", {"make_critic": OTHER}, "load_policy has no argument 'make_critic'; expected strategy, make_net"),
        pytest.param("optimizer", NETWORK, "was not made by make_network; leave that out", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_make_the_policy_is_refused_in_one_line(
    runs: Runs, name: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(jaxrl.SettingsError) as refused:
        jaxrl.load_policy(runs[name][0], **given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_commands_say_how_to_go_on_in_python(runs: Runs) -> None:
    run = str(runs["policy"][0])
    calls = {evaluate.main: "load_policy(run_dir, make_policy=...)", train.main: "Trainer(strategy, resume="}
    for main, said in calls.items():
        with pytest.raises(jaxrl.SettingsError, match="made in Python") as refused:
            main([run] if main is evaluate.main else ["--resume", run])
        assert said in str(refused.value)


@pytest.mark.slow
def test_in_python_it_is_resumed_as_any_other(runs: Runs) -> None:
    result = trainer("policy", runs["policy"][0], max_opts=30, resume=True).train()
    assert result.summary["opt_steps"] == 30

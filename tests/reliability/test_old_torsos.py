"""Runs saved before there were several convolutional torsos, on images for which another is chosen today."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from jaxrl import train
from jaxrl.training.changes import renewed

SIDE = 36


def env() -> jaxrl.Env:
    """A square that is lit or dark, and says which action is right."""
    space = jaxrl.Box(0, 255, (SIDE, SIDE, 1), "uint8")
    seen = lambda lit: jnp.full((SIDE, SIDE, 1), 200 * lit, jnp.uint8)
    spec = jaxrl.EnvSpec("Lamp", space, jaxrl.Discrete(2), time_limit=4)
    return jaxrl.Env(
        spec,
        lambda key: (jnp.int32(0), seen(0)),
        lambda lit, action, key: (1 - lit, jaxrl.TimeStep(seen(1 - lit), (action == lit) * 1.0, False)),
    )


def trainer(run: Path, max_opts: int, agent: dict[str, Any], **resume: bool) -> jaxrl.Trainer:
    strategy = jaxrl.off_policy(
        jaxrl.make_env("Lamp"),
        jaxrl.dqn(features=(4,), **agent),
        buffer=jaxrl.uniform(64, batch_size=4),
        num_envs=2,
        opt_interval=2,
        warmup=8,
    )
    settings = {"eval_interval": 2, "eval_episodes": 2, "save_interval": 2, "quiet": True}
    return jaxrl.Trainer(strategy, max_opts=max_opts, run_dir=str(run), **settings, **resume)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run as version 0.4 wrote it: its torso was `auto`, and a convolution of 16 channels."""
    jaxrl.register_env("Lamp", env)
    run = tmp_path_factory.mktemp("old") / "run"
    begun = trainer(run, 4, {"torso": "minatar"})
    settings = begun.strategy.settings
    agent = {name: x for name, x in settings["agent"].items() if name not in ("channels", "dtype")}
    begun.strategy = begun.strategy._replace(settings={**settings, "agent": {**agent, "torso": "auto"}})
    policy = begun.train().policy
    assert "channels" not in (run / "config.yaml").read_text()
    return run, policy


@pytest.mark.slow
def test_its_policy_is_loaded_with_the_network_that_it_had(old: tuple[Path, Any]) -> None:
    run, policy = old
    obs = np.arange(2 * SIDE * SIDE, dtype=np.uint8).reshape(2, SIDE, SIDE, 1)
    assert jaxrl.load_policy(run)(obs).tolist() == policy(obs).tolist()


@pytest.mark.slow
def test_in_python_it_is_refused_in_one_line_unless_the_torso_is_named(old: tuple[Path, Any]) -> None:
    run, _ = old
    with pytest.raises(jaxrl.SettingsError) as refused:
        trainer(run, 6, {}, resume=True).train()
    assert re.search(r"does not fit this program.*channels=\(16,\)", str(refused.value))
    assert "\n" not in str(refused.value)
    assert trainer(run, 6, {"channels": (16,)}, resume=True).train().summary["opt_steps"] == 6


@pytest.mark.slow
def test_the_command_line_resumes_it(old: tuple[Path, Any]) -> None:
    run, _ = old
    train.main(["--resume", str(run), "--max-opts", "8"])
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir())[-1] == 8


def test_settings_that_know_of_channels_are_left_alone() -> None:
    new = {"agent": {"torso": "auto", "channels": []}}
    assert renewed(new) == new
    assert renewed({"agent": {"torso": "auto"}})["agent"]["channels"] == [16]
    assert renewed({"agent": {}}) == {"agent": {}}
    assert renewed({"agent": 3}) == {"agent": 3}

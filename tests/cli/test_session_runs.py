"""Runs that a session has made in an environment of Gymnasium, before the commands."""

import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import Cli, one_error_line
from PIL import Image

import jaxrl
from jaxrl.training.storage.checkpoints import FILES, file_sums, seal

gymnasium = pytest.importorskip("gymnasium")

LIMIT = 6
"""Steps after which an episode is cut: too few for the pole to fall."""


def drive(env: Any, run: Path, max_opts: int = 8, **settings: Any) -> None:
    """Make a run of a few optimisation steps, judged once."""
    parts = {"buffer": jaxrl.uniform(100, 8), "opt_interval": 1, "warmup": 10, "max_opts": max_opts, **settings}
    with jaxrl.Session(env, jaxrl.dqn(features=(8,)), run_dir=str(run), **parts) as session:
        obs, _ = env.reset(seed=0)
        while not session.is_done:
            obs, reward, terminated, truncated, _ = env.step(session.act(obs))
            session.observe(reward, obs, terminated, truncated)
            obs = env.reset()[0] if terminated or truncated else obs
        session.evaluate_score(1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in an environment with a parameter of its own."""
    path = tmp_path_factory.mktemp("session") / "run"
    env = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT, render_mode="rgb_array" if pygame() else None)
    drive(gymnasium.wrappers.RecordEpisodeStatistics(env), path, save_interval=0)  # at its end, however long it takes
    return path


def pygame() -> bool:
    try:
        import pygame  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.slow
def test_its_policy_is_evaluated_in_the_environment_it_was_trained_in(run: Path, cli: Cli) -> None:
    done = cli.here("evaluate", run, "--episodes", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"return {LIMIT} .*, length {LIMIT}, over 3 episodes, 0 unfinished\nof the .*\n", done.stdout)


def test_it_is_played(run: Path, cli: Cli) -> None:
    done = cli.here("play", run, "--out", "x.gif")
    if not pygame():
        assert done.returncode == 2
        assert re.search("CartPole-v1 cannot be rendered: .*pygame", one_error_line(done))
        return
    assert (done.returncode, done.stdout) == (0, f"x.gif: {LIMIT + 1} frames, return {LIMIT}\n"), done.stderr
    with Image.open(cli.cwd / "x.gif") as picture:
        assert getattr(picture, "n_frames", 1) > 1  # equal pictures become one


def test_it_is_verified_and_goes_on_with_a_session_alone(run: Path, cli: Cli) -> None:
    done = cli.here("verify", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 ok ")
    refused = cli.here("train", "--resume", run)
    assert refused.returncode == 2
    line = one_error_line(refused)
    assert "has parts that were made in Python (loop); go on in Python by the Session that made it" in line
    assert line.endswith("resume=True")


class Halved(gymnasium.RewardWrapper):
    """A wrapper of one's own."""

    def reward(self, reward: Any) -> float:
        return float(reward) / 2


def unknown() -> Any:
    """Return an environment that is registered in this process alone."""
    if "OnesOwn-v0" not in gymnasium.registry:
        cartpole = importlib.import_module("gymnasium.envs.classic_control").CartPoleEnv
        gymnasium.register("OnesOwn-v0", entry_point=cartpole)
    return gymnasium.make("OnesOwn-v0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(lambda: Halved(gymnasium.make("CartPole-v1")), "CartPole-v1"),
        pytest.param(lambda: gymnasium.make("FrozenLake-v1", desc=["SF", "FG"]), "FrozenLake-v1"),
        (unknown, "OnesOwn-v0"),
    ],
    ids=["wrapped", "not plain", "unknown"],
)
def test_an_environment_that_no_name_can_rebuild_is_refused_in_one_line(
    make: Any, name: str, tmp_path: Path, cli: Cli
) -> None:
    drive(make(), tmp_path / "run")
    for command in ("evaluate", "play"):
        done = cli.here(command, tmp_path / "run")
        assert done.returncode == 2
        assert f"the environment gymnasium:{name} was made in Python; use load_policy" in one_error_line(done)
    env = make()
    assert env.action_space.contains(int(jaxrl.load_policy(tmp_path / "run")(env.reset(seed=0)[0])))


def test_a_vector_is_rebuilt_as_one_of_its_environments() -> None:
    made = jaxrl.training.session.inputs.describe_envs
    kwargs = {"num_envs": 2, "sutton_barto_reward": True, "max_episode_steps": LIMIT}
    for mode in ("sync", "vector_entry_point"):
        envs = gymnasium.make_vec("CartPole-v1", vectorization_mode=mode, **kwargs)
        numbers = {"sutton_barto_reward": True, "max_episode_steps": LIMIT}
        assert made(envs, 2).made == {"env": "gymnasium:CartPole-v1", "env_args": numbers}
        # The loop of a session says itself when an episode ends.
        rebuilt = jaxrl.make_env(**{"name": "gymnasium:CartPole-v1", **numbers}).spec
        assert (rebuilt.time_limit, rebuilt._replace(time_limit=None)) == (LIMIT, made(envs, 2).spec)
    normalised = gymnasium.wrappers.vector.NormalizeObservation(envs)
    assert made(normalised, 2).made is None
    assert (
        made(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", wrappers=[Halved]), 2).made
        is None
    )


@pytest.mark.slow
def test_no_module_is_imported_for_a_name_in_a_strangers_run(run: Path, cli: Cli) -> None:
    """Gymnasium itself would import the module of a name `module:Env`."""
    shutil.copytree(run, cli.cwd / "stranger")
    (cli.cwd / "evil.py").write_text("open('ran', 'w')")
    (best,) = (cli.cwd / "stranger" / "best").iterdir()
    told = json.loads((best / "manifest.json").read_text())
    told["facts"]["settings"]["env"] = "gymnasium:evil:CartPole-v1"
    (best / "manifest.json").write_text(json.dumps(seal(told)))
    (best / FILES).write_text(json.dumps(file_sums(best)))
    done = cli.run("evaluate", "stranger")
    assert done.returncode == 2
    assert "gymnasium:evil:CartPole-v1 would import evil" in one_error_line(done)
    assert not (cli.cwd / "ran").exists()

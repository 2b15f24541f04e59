"""MuJoCo Playground: every name keeps its contract, its numbers are the suite's, and limits are not ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_suites import checked, keeps_its_contract, played, presets_fit, resumes_to_the_same_bits, trains_by_command

from jaxrl.envs import make_env, vectorise
from jaxrl.envs.playground import PREFIX
from jaxrl.errors import SettingsError

playground = pytest.importorskip("mujoco_playground")
pytestmark = pytest.mark.slow

CARTPOLE = "playground:CartpoleBalance"
CONTROL = playground.dm_control_suite.ALL_ENVS
ROBOTS = [name for name in playground.registry.ALL_ENVS if name not in CONTROL]


@pytest.fixture(autouse=True)
def _loosely() -> Iterator[None]:
    """Let ranks be promoted, in all threads: the suite's own code relies on it, when an environment is made already."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.mark.parametrize("name", CONTROL)
def test_every_environment_without_robots_keeps_its_forms(name: str) -> None:
    spec = vectorise(make_env(PREFIX + name), 2).spec
    assert (spec.name, spec.time_limit) == (PREFIX + name, 1000)
    assert (spec.action_space.low, spec.action_space.high) == (-1.0, 1.0)


@pytest.mark.parametrize("name", ["CartpoleBalance", "PendulumSwingup", "ReacherEasy"])
def test_environments_pass_the_check(name: str) -> None:
    env = make_env(PREFIX + name)
    keeps_its_contract(env)
    assert checked(env) == []


def test_the_limit_truncates_and_the_last_observation_is_the_true_one() -> None:
    steps = played(make_env(CARTPOLE, episode_length=3.0), np.ones((7, 1), np.float32))
    assert steps.truncated.tolist() == [False, False, True, False, False, True, False]
    assert not steps.terminated.any()
    # Pushed to the right, the cart gains speed within an episode, and stands nearly still where the next one begins.
    speed, following = steps.final_obs[:, 3], steps.obs[:, 3]
    assert speed[0] < speed[1] < speed[2]
    assert abs(following[2]) < speed[2] / 2
    np.testing.assert_array_equal(following[:2], speed[:2])
    assert {"reward/upright", "episode_return"} <= steps.info.keys()


def test_numbers_are_those_of_the_suite_for_the_same_keys() -> None:
    env = make_env(CARTPOLE)
    theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    step, their_step = jax.jit(env.step), jax.jit(theirs.step)
    (state, obs), their = jax.jit(env.reset)(jax.random.key(3)), jax.jit(theirs.reset)(jax.random.key(3))
    np.testing.assert_array_equal(obs, their.obs)
    for t in range(5):
        action = np.full(1, 0.1 * t, np.float32)
        state, out = step(state, action, ())
        their = their_step(their, action)
        np.testing.assert_allclose(out.obs, their.obs, rtol=1e-5, atol=1e-6)
        assert float(out.reward) == pytest.approx(float(their.reward), rel=1e-5)
        assert not out.terminated


def test_a_repeated_action_adds_rewards_and_counts_steps_of_the_suite() -> None:
    once, twice = make_env(CARTPOLE), make_env(CARTPOLE, action_repeat=2, episode_length=7)
    assert twice.spec.time_limit == 4
    state, _ = jax.jit(once.reset)(jax.random.key(0))
    action = np.full(1, 0.5, np.float32)
    _, both = jax.jit(twice.step)(state, action, ())
    first_state, first = jax.jit(once.step)(state, action, ())
    _, second = jax.jit(once.step)(first_state, action, ())
    np.testing.assert_allclose(both.obs, second.obs, rtol=1e-5, atol=1e-6)
    assert float(both.reward) == pytest.approx(float(first.reward + second.reward), rel=1e-5)


@pytest.mark.parametrize("name", ROBOTS)
def test_robots_are_never_fetched_unasked(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "nowhere")
    monkeypatch.setattr(mjx_env, "ensure_menagerie_exists", lambda: pytest.fail("fetched"))
    with pytest.raises(SettingsError, match="which are never fetched unasked: git clone https:") as refused:
        make_env(PREFIX + name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("CartpoleBalanc", {}, "unknown environment 'playground:CartpoleBalanc'; did you mean playground:Cartpole"),
        ("CartpoleBalance", {"ctrl_td": 1}, r"CartpoleBalance has no parameter 'ctrl_td'; did you mean ctrl_dt\?"),
        ("CartpoleBalance", {"ctrl_dt": 0.001}, "ctrl_dt is 0.001; expected at least sim_dt, 0.01"),
        ("CartpoleBalance", {"impl": "bullet"}, "Playground cannot make CartpoleBalance: 'bullet'"),
        ("CartpoleBalance", {"episode_length": 0}, "episode_length is 0; expected a whole number of at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(name: str, params: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        make_env(PREFIX + name, **params)
    assert "\n" not in str(refused.value)


def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    resumes_to_the_same_bits(CARTPOLE, tmp_path, episode_length=6)


def test_a_run_is_trained_and_evaluated_by_the_command_line(tmp_path: Path) -> None:
    said = trains_by_command(CARTPOLE, tmp_path, "--env-args", "episode_length", "20")
    assert "over 4 episodes, 0 unfinished" in said


@pytest.mark.parametrize("name", ["CartpoleBalance"])
def test_presets_fit(name: str) -> None:
    presets_fit(f"playground:{name}")

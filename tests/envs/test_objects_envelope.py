"""Environments of envelope: what they do is to the bit what they would do as environments of jaxrl."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_envs import forget_envs
from toys_objects import (
    is_learnt_from_the_command_line,
    is_refused_by_the_command_line,
    is_the_walk,
    keeps_to_its_mask,
    learns_like_the_walk,
    random_actions,
    walked,
    walking,
)

import jaxrl
from jaxrl.errors import SettingsError

envelope = pytest.importorskip("envelope")
import toys_envelope as toys  # noqa: E402


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget_envs("toys_envelope")


def test_the_walk_is_the_same_to_the_bit() -> None:
    env = jaxrl.envelope_env(toys.Walk())
    assert env.spec.name == "Walk"
    is_the_walk(env)


@pytest.mark.slow
def test_what_is_learnt_is_the_same_to_the_bit() -> None:
    learns_like_the_walk(jaxrl.envelope_env(toys.Walk()))


def test_limits_are_taken_off_and_truncate_and_the_shortest_counts() -> None:
    counted = envelope.EpisodeStatisticsWrapper(env=toys.make_walk(limit=3))
    env = jaxrl.envelope_env(counted)
    assert env.spec.time_limit == 3
    assert jaxrl.envelope_env(counted, time_limit=2).spec.time_limit == 2
    mine = walking()._replace(spec=walking().spec._replace(time_limit=3))
    (_, wanted), (_, steps) = (walked(made, random_actions()) for made in (mine, env))
    for word in ("reward", "terminated", "truncated", "final_obs", "obs"):
        np.testing.assert_array_equal(getattr(wanted, word), getattr(steps, word))
    assert (steps.truncated & (steps.info["episode_length"] == 3)).any()
    np.testing.assert_array_equal(steps.info["stats/length"], steps.info["episode_length"])
    np.testing.assert_allclose(steps.info["stats/reward"], steps.info["episode_return"], rtol=1e-6)


def test_masks_are_flags_that_a_policy_keeps_to() -> None:
    env = jaxrl.envelope_env(toys.Masked())
    mask = jaxrl.Box(0, 1, (2,), "bool")
    assert env.spec.observation_space == {"place": jaxrl.Discrete(6), "action_mask": mask}
    keeps_to_its_mask(env)


def test_each_episode_may_have_fields_of_its_own() -> None:
    draw = lambda key, high: {"pay": jax.random.uniform(key, minval=1.0, maxval=high)}
    env = jaxrl.randomise(jaxrl.envelope_env(envelope.EpisodeStatisticsWrapper(env=toys.Walk())), draw, high=3.0)
    _, steps = walked(env, random_actions(40, 64))
    ends = steps.terminated
    np.testing.assert_allclose(np.abs(steps.reward[ends]), steps.info["params/pay"][ends], rtol=1e-6)
    drawn = steps.info["params/pay"][0]
    assert ((drawn >= 1) & (drawn <= 3)).all()
    assert len(np.unique(drawn)) == 64


def test_suites_that_envelope_adapts_are_those_of_the_suite() -> None:
    env = jaxrl.envelope_env(envelope.create("gymnax::CartPole-v1"))
    assert env.spec.time_limit == 500
    assert (env.spec.action_space, env.spec.observation_space.shape) == (jaxrl.Discrete(2), (4,))
    ours = jaxrl.make_env("CartPole-v1")
    key = jax.random.key(3)
    theirs, (state, obs) = env.reset(key), ours.reset(jax.random.split(key)[1])
    held = theirs[0]
    np.testing.assert_array_equal(theirs[1], obs)
    for _ in range(12):  # pushed to one side, it falls
        held, out = env.step(held, jnp.int32(1), ())
        state, wanted = ours.step(state, jnp.int32(1), jax.random.key(0))
        np.testing.assert_array_equal(out.obs, wanted.obs)
        assert (bool(out.terminated), float(out.reward)) == (bool(wanted.terminated), float(wanted.reward))
    assert out.terminated


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (toys.make_reset_by_itself, "AutoResetWrapper resets episodes, which jaxrl does itself; give the environment"),
        (toys.make_many, "VmapWrapper runs many copies, which jaxrl does itself"),
        (toys.make_pooled, "PooledInitVmapWrapper runs many copies, which jaxrl does itself"),
        (toys.make_normalised, "ObservationNormalizationWrapper keeps statistics from one episode to the next"),
        (toys.Growing, "environment Growing: the state after step has float32[] at .state.place; that after reset has"),
        (toys.Broken, "Broken cannot be used: RuntimeError: no licence"),
        (lambda: toys.Walk, "envelope_env was given the class Walk; expected an object of envelope.Environment"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(make: Any, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        jaxrl.envelope_env(make())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_strategy_says_what_to_give() -> None:
    with pytest.raises(SettingsError, match=r"^env is Walk of envelope; give jaxrl.envelope_env\(env\) instead$"):
        jaxrl.on_policy(toys.Walk(), jaxrl.ppo())


@pytest.mark.slow
def test_the_command_line_learns_the_walk(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    is_learnt_from_the_command_line("toys_envelope:make_walk", capsys)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("make_reset_by_itself", "AutoResetWrapper resets episodes, which jaxrl does itself"),
        ("Broken", "toys_envelope:Broken cannot be used: RuntimeError: no licence"),
    ],
)
def test_the_command_line_refuses_in_one_line(name: str, said: str) -> None:
    is_refused_by_the_command_line(f"toys_envelope:{name}", said)

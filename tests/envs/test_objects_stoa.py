"""Environments of stoa: what they do is to the bit what they would do as environments of jaxrl."""

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
from toys_suites import resumes_to_the_same_bits

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.session.inputs import describe_envs

stoa = pytest.importorskip("stoa")
import toys_stoa as toys  # noqa: E402


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget_envs("toys_stoa")


def test_the_walk_is_the_same_to_the_bit() -> None:
    env = jaxrl.stoa_env(toys.Walk())
    assert env.spec.name == "Walk"
    is_the_walk(env)


@pytest.mark.slow
def test_what_is_learnt_is_the_same_to_the_bit() -> None:
    learns_like_the_walk(jaxrl.stoa_env(toys.Walk()))


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    jaxrl.register_env("toys_stoa-walk", lambda: jaxrl.stoa_env(stoa.AddRNGKey(toys.make_walk(limit=5))))
    resumes_to_the_same_bits("toys_stoa-walk", tmp_path)


def test_wrappers_that_change_an_episode_stay() -> None:
    """Two keys are split otherwise than without the wrapper, so only the forms are compared."""
    env = jaxrl.stoa_env(stoa.FlattenObservationWrapper(stoa.RecordEpisodeMetrics(stoa.AddRNGKey(toys.Walk()))))
    assert jaxrl.check_env(env) == []
    _, steps = walked(env, random_actions())
    ends = steps.terminated | steps.truncated
    assert {"slipped", "inner/place", "episode_metrics/episode_return"} <= set(steps.info)
    np.testing.assert_allclose(
        steps.info["episode_metrics/episode_return"][ends], steps.info["episode_return"][ends], rtol=1e-6
    )


def test_limits_truncate_and_the_shortest_counts() -> None:
    env = jaxrl.stoa_env(toys.make_walk(limit=3))
    assert env.spec.time_limit == 3
    assert jaxrl.stoa_env(toys.make_walk(limit=3), time_limit=2).spec.time_limit == 2
    mine = walking()._replace(spec=walking().spec._replace(time_limit=3))
    (_, wanted), (_, steps) = (walked(made, random_actions()) for made in (mine, env))
    jax.tree.map(np.testing.assert_array_equal, wanted, steps)
    assert (steps.truncated & (steps.info["episode_length"] == 3)).any()


def test_masks_in_extras_become_a_part_of_the_observation() -> None:
    env = jaxrl.stoa_env(toys.Masked())
    mask = jaxrl.Box(0, 1, (2,), "bool")
    assert env.spec.observation_space == {"observation": jaxrl.Box(0.0, 9.0, (2,)), "action_mask": mask}
    keeps_to_its_mask(env)


def test_each_episode_may_have_parameters_of_its_own() -> None:
    env = jaxrl.randomise(
        jaxrl.stoa_env(toys.Masked()), lambda key, share: {"closed": jax.random.bernoulli(key, share) * 1}, share=0.25
    )
    first, steps = walked(env, random_actions(40, 64))
    closed = np.argmin(steps.final_obs["action_mask"], axis=-1)
    np.testing.assert_array_equal(closed, steps.info["params/closed"])
    assert not np.asarray(first["action_mask"]).all(axis=-1).any()
    assert abs(steps.info["params/closed"][0].mean() - 0.25) < 0.25  # 64 draws: more than four deviations
    assert len(np.unique(closed)) == 2


def test_spaces() -> None:
    def declared(seen: Any, done: Any) -> Any:
        class Declared(toys.Walk):  # type: ignore[misc,name-defined]
            def reset(self, rng_key: Any, env_params: Any = None) -> Any:
                state, out = super().reset(rng_key)
                return state, out.replace(observation=seen[1])

            def step(self, state: Any, action: Any, env_params: Any = None) -> Any:
                state, out = super().step(state, jnp.int32(0))
                return state, out.replace(observation=seen[1])

            def observation_space(self, env_params: Any = None) -> Any:
                return seen[0]

            def action_space(self, env_params: Any = None) -> Any:
                return done

        return jaxrl.stoa_env(Declared()).spec[1:3]

    parts = stoa.DictSpace({"grid": stoa.ArraySpace((3, 3), jnp.uint8), "item": stoa.DiscreteSpace(5, jnp.int32)})
    value = {"grid": jnp.zeros((3, 3), jnp.uint8), "item": jnp.int32(1)}
    grid = jaxrl.Box(-np.inf, np.inf, (3, 3), "uint8")
    assert declared((parts, value), stoa.MultiDiscreteSpace([2, 3], jnp.int32)) == (
        {"grid": grid, "item": jaxrl.Discrete(5)},
        jaxrl.MultiDiscrete((2, 3)),
    )
    both = stoa.TupleSpace([stoa.ArraySpace((2,), jnp.bool_), stoa.DiscreteSpace(3, jnp.int32)])
    force = stoa.BoundedArraySpace((2,), jnp.float32, -1.0, 2.0)
    assert declared((both, (jnp.zeros(2, bool), jnp.int32(0))), force) == (
        (jaxrl.Box(0, 1, (2,), "bool"), jaxrl.Discrete(3)),
        jaxrl.Box(-1.0, 2.0, (2,)),
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (toys.make_reset_by_itself, "AutoResetWrapper resets episodes, which jaxrl does itself; give the environment"),
        (toys.make_many, "VmapWrapper runs many copies, which jaxrl does itself"),
        (toys.make_optimistic, "OptimisticResetVmapWrapper resets episodes, which jaxrl does itself"),
        (toys.Growing, "environment Growing: the state after step has float32[] at .state.place; that after reset has"),
        (toys.Broken, "Broken cannot be used: RuntimeError: no licence"),
        (toys.MaskedLate, "MaskedLate returns an action mask after its reset or after its step alone"),
        (lambda: toys.Walk, "stoa_env was given the class Walk; expected an object of stoa.Environment"),
        (lambda: 3, "stoa_env was given int; expected an object of stoa.Environment"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(make: Any, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        jaxrl.stoa_env(make())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    if make is toys.Growing:
        return
    with pytest.raises(SettingsError, match="time_limit is 0; expected a whole number of at least 1"):
        jaxrl.stoa_env(toys.Walk(), time_limit=0)


@pytest.mark.skipif(not hasattr(stoa, "GymnaxToStoa"), reason="needs gymnax")
def test_adapters_that_do_not_tell_what_happened_are_refused() -> None:
    import gymnax

    with pytest.raises(SettingsError, match="GymnaxToStoa of stoa resets by itself and takes limits for ends; give"):
        jaxrl.stoa_env(stoa.GymnaxToStoa(*gymnax.make("CartPole-v1")))


def test_a_strategy_says_what_to_give_and_a_session_takes_the_object() -> None:
    with pytest.raises(SettingsError, match=r"^env is Walk of stoa; give jaxrl.stoa_env\(env\) instead$"):
        jaxrl.on_policy(toys.Walk(), jaxrl.ppo())
    assert describe_envs(toys.Walk(), 1).spec == jaxrl.stoa_env(toys.Walk()).spec


@pytest.mark.slow
def test_the_command_line_learns_the_walk(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    is_learnt_from_the_command_line("toys_stoa:make_walk", capsys)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("make_reset_by_itself", "AutoResetWrapper resets episodes, which jaxrl does itself"),
        ("Broken", "toys_stoa:Broken cannot be used: RuntimeError: no licence"),
        ("advance", "toys_stoa:advance failed with {}: TypeError"),
    ],
)
def test_the_command_line_refuses_in_one_line(name: str, said: str) -> None:
    is_refused_by_the_command_line(f"toys_stoa:{name}", said)

"""Environments of stoa and envelope: what they do is to the bit what they would do as environments of jaxrl."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnax
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
    random_actions,
    walked,
    walking,
)
from toys_suites import resumes_to_the_same_bits

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.training.session.inputs import describe_envs

BOTH = ("stoa", "envelope")
both = pytest.mark.parametrize("name", BOTH)


def toys_of(name: str) -> Any:
    """Return the module of toys of a library, which may not be installed."""
    pytest.importorskip(name)
    return importlib.import_module(f"toys_{name}")


def adapted(name: str, env: Any, **settings: Any) -> jaxrl.Env:
    made: jaxrl.Env = getattr(jaxrl, f"{name}_env")(env, **settings)
    return made


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in BOTH:
        forget_envs(f"toys_{name}")


@both
def test_the_walk_is_the_same_to_the_bit(name: str) -> None:
    env = adapted(name, toys_of(name).Walk())
    assert env.spec.name == "Walk"
    is_the_walk(env)


@both
def test_limits_truncate_and_the_shortest_counts(name: str) -> None:
    limited = toys_of(name).make_walk(limit=3)
    env = adapted(name, limited)
    assert env.spec.time_limit == 3
    assert adapted(name, limited, time_limit=2).spec.time_limit == 2
    mine = walking()._replace(spec=walking().spec._replace(time_limit=3))
    (_, wanted), (_, steps) = (walked(made, random_actions()) for made in (mine, env))
    info = wanted.info if name == "stoa" else {}  # to that of envelope its wrappers may add
    assert info.keys() <= steps.info.keys()
    jax.tree.map(np.testing.assert_array_equal, wanted._replace(info={}), steps._replace(info={}))
    for word, numbers in info.items():
        np.testing.assert_array_equal(numbers, steps.info[word])
    assert (steps.truncated & (steps.info["episode_length"] == 3)).any()


@both
def test_masks_are_a_part_of_the_observation_that_a_policy_keeps_to(name: str) -> None:
    env = adapted(name, toys_of(name).Masked())
    seen = {"observation": jaxrl.Box(0.0, 9.0, (2,))} if name == "stoa" else {"place": jaxrl.Discrete(6)}
    assert env.spec.observation_space == {**seen, "action_mask": jaxrl.Box(0, 1, (2,), "bool")}
    keeps_to_its_mask(env)


AUTO = "AutoResetWrapper resets episodes, which jaxrl does itself"
GROWING = "environment Growing: the state after step has float32[] at .state.place; that after reset has"
LICENCE = "Broken cannot be used: RuntimeError: no licence"


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        *((name, "make_reset_by_itself", f"{AUTO}; give the environment") for name in BOTH),
        *((name, "make_many", "VmapWrapper runs many copies, which jaxrl does itself") for name in BOTH),
        *((name, "Growing", GROWING) for name in BOTH),
        *((name, "Broken", LICENCE) for name in BOTH),
        ("stoa", "make_optimistic", "OptimisticResetVmapWrapper resets episodes, which jaxrl does itself"),
        ("stoa", "MaskedLate", "MaskedLate returns an action mask after its reset or after its step alone"),
        ("envelope", "make_pooled", "PooledInitVmapWrapper runs many copies, which jaxrl does itself"),
        ("envelope", "make_normalised", "ObservationNormalizationWrapper keeps statistics from one episode to the"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(name: str, make: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        adapted(name, getattr(toys_of(name), make)())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@both
def test_what_is_no_object_is_refused_and_a_strategy_says_what_to_give(name: str) -> None:
    toys = toys_of(name)
    with pytest.raises(SettingsError, match=f"{name}_env was given the class Walk; expected an object of {name}.Envir"):
        adapted(name, toys.Walk)
    with pytest.raises(SettingsError, match=f"{name}_env was given int; expected an object of {name}.Environment"):
        adapted(name, 3)
    with pytest.raises(SettingsError, match="time_limit is 0; expected a whole number of at least 1"):
        adapted(name, toys.Walk(), time_limit=0)
    with pytest.raises(SettingsError, match=rf"^env is Walk of {name}; give jaxrl.{name}_env\(env\) instead$"):
        jaxrl.on_policy(toys.Walk(), jaxrl.ppo())
    assert describe_envs(toys.Walk(), 1).spec == adapted(name, toys.Walk()).spec  # of a session


@pytest.mark.slow
@both
def test_the_command_line_learns_the_walk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toys_of(name)
    monkeypatch.chdir(tmp_path)
    is_learnt_from_the_command_line(f"toys_{name}:make_walk", capsys)


@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        *((name, "make_reset_by_itself", AUTO) for name in BOTH),
        *((name, "Broken", f"toys_{name}:{LICENCE}") for name in BOTH),
        ("stoa", "advance", "toys_stoa:advance failed with {}: TypeError"),
    ],
)
def test_the_command_line_refuses_in_one_line(name: str, made: str, said: str) -> None:
    toys_of(name)
    is_refused_by_the_command_line(f"toys_{name}:{made}", said)


# --- stoa -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    toys, stoa = toys_of("stoa"), importlib.import_module("stoa")
    jaxrl.register_env("toys_stoa-walk", lambda: jaxrl.stoa_env(stoa.AddRNGKey(toys.make_walk(limit=5))))
    resumes_to_the_same_bits("toys_stoa-walk", tmp_path)


def test_wrappers_that_change_an_episode_stay() -> None:
    """Two keys are split otherwise than without the wrapper, so only the forms are compared."""
    toys, stoa = toys_of("stoa"), importlib.import_module("stoa")
    env = jaxrl.stoa_env(stoa.FlattenObservationWrapper(stoa.RecordEpisodeMetrics(stoa.AddRNGKey(toys.Walk()))))
    assert jaxrl.check_env(env) == []
    _, steps = walked(env, random_actions())
    ends = steps.terminated | steps.truncated
    assert {"slipped", "inner/place", "episode_metrics/episode_return"} <= set(steps.info)
    np.testing.assert_allclose(
        steps.info["episode_metrics/episode_return"][ends], steps.info["episode_return"][ends], rtol=1e-6
    )


def test_each_episode_may_have_parameters_of_its_own() -> None:
    draw = lambda key, share: {"closed": jax.random.bernoulli(key, share) * 1}
    env = jaxrl.randomise(jaxrl.stoa_env(toys_of("stoa").Masked()), draw, share=0.25)
    first, steps = walked(env, random_actions(40, 64))
    closed = np.argmin(steps.final_obs["action_mask"], axis=-1)
    np.testing.assert_array_equal(closed, steps.info["params/closed"])
    assert not np.asarray(first["action_mask"]).all(axis=-1).any()
    assert abs(steps.info["params/closed"][0].mean() - 0.25) < 0.25  # 64 draws: more than four deviations
    assert len(np.unique(closed)) == 2


def test_spaces() -> None:
    toys, stoa = toys_of("stoa"), importlib.import_module("stoa")

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
    pair = stoa.TupleSpace([stoa.ArraySpace((2,), jnp.bool_), stoa.DiscreteSpace(3, jnp.int32)])
    force = stoa.BoundedArraySpace((2,), jnp.float32, -1.0, 2.0)
    assert declared((pair, (jnp.zeros(2, bool), jnp.int32(0))), force) == (
        (jaxrl.Box(0, 1, (2,), "bool"), jaxrl.Discrete(3)),
        jaxrl.Box(-1.0, 2.0, (2,)),
    )


def test_adapters_that_do_not_tell_what_happened_are_refused() -> None:
    stoa = pytest.importorskip("stoa")
    if not hasattr(stoa, "GymnaxToStoa"):
        pytest.skip("it has no adapter of gymnax here")
    with pytest.raises(SettingsError, match="GymnaxToStoa of stoa resets by itself and takes limits for ends; give"):
        jaxrl.stoa_env(stoa.GymnaxToStoa(*gymnax.make("CartPole-v1")))


# --- envelope -------------------------------------------------------------------------------------------------------


def test_statistics_of_a_wrapper_are_told() -> None:
    toys, envelope = toys_of("envelope"), importlib.import_module("envelope")
    env = jaxrl.envelope_env(envelope.EpisodeStatisticsWrapper(env=toys.make_walk(limit=3)))
    assert env.spec.time_limit == 3
    _, steps = walked(env, random_actions())
    np.testing.assert_array_equal(steps.info["stats/length"], steps.info["episode_length"])
    np.testing.assert_allclose(steps.info["stats/reward"], steps.info["episode_return"], rtol=1e-6)


def test_each_episode_may_have_fields_of_its_own() -> None:
    toys, envelope = toys_of("envelope"), importlib.import_module("envelope")
    draw = lambda key, high: {"pay": jax.random.uniform(key, minval=1.0, maxval=high)}
    env = jaxrl.randomise(jaxrl.envelope_env(envelope.EpisodeStatisticsWrapper(env=toys.Walk())), draw, high=3.0)
    _, steps = walked(env, random_actions(40, 64))
    ends = steps.terminated
    np.testing.assert_allclose(np.abs(steps.reward[ends]), steps.info["params/pay"][ends], rtol=1e-6)
    drawn = steps.info["params/pay"][0]
    assert ((drawn >= 1) & (drawn <= 3)).all()
    assert len(np.unique(drawn)) == 64


def test_suites_that_envelope_adapts_are_those_of_the_suite() -> None:
    env = jaxrl.envelope_env(pytest.importorskip("envelope").create("gymnax::CartPole-v1"))
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

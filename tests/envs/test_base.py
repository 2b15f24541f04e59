"""`vectorise`: `N` environments with auto-reset, time limits, true successors and no NaN past it."""

import math
from functools import cache
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import ks_2samp
from toys_envs import BREAK, breaking, counting, nan_at, rollout, time_limited

from jaxrl.envs import Env, TimeStep, VecEnv, make_env, vectorise
from jaxrl.envs.resets import FRESH_BYTES
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import Step

SMALL, LARGE = 0, FRESH_BYTES
"""Ballast of reset states that are drawn ahead of the loop, and of some that are made inside it."""


def idle(steps: int, num_envs: int = 3) -> np.ndarray:
    return np.zeros((steps, num_envs), np.int32)


def bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


# --- episodes ---------------------------------------------------------------------------------------------------


@cache
def threes(ballast: int) -> VecEnv:
    """Return three environments whose episodes take 3 steps."""
    return vectorise(counting(length=3, ballast=ballast), 3, "fresh")


@cache
def sixty(ballast: int) -> tuple[np.ndarray, Step]:
    """Return what they show at first and in 60 steps."""
    return rollout(threes(ballast), idle(60))


def episodes_of_3(ballast: int) -> tuple[np.ndarray, Step]:
    """Return what they show at first and in 7 steps."""
    first, steps = sixty(ballast)
    return first, jax.tree.map(lambda x: x[:7], steps)


@pytest.mark.parametrize("ballast", [SMALL, LARGE])
def test_an_end_starts_the_next_episode_in_the_same_step(ballast: int) -> None:
    first, steps = episodes_of_3(ballast)
    assert first[:, 0].tolist() == [0, 0, 0]
    assert steps.obs[:, 1, 0].tolist() == [1, 2, 0, 1, 2, 0, 1]
    assert steps.terminated[:, 1].tolist() == [False, False, True, False, False, True, False]
    assert not steps.truncated.any()


@pytest.mark.parametrize("ballast", [SMALL, LARGE])
def test_final_obs_is_the_true_successor_of_the_old_episode(ballast: int) -> None:
    first, steps = episodes_of_3(ballast)
    assert steps.final_obs[:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    np.testing.assert_array_equal(steps.final_obs[:3, :, 1], np.tile(first[:, 1], (3, 1)))
    np.testing.assert_array_equal(steps.final_obs[3:6, :, 1], np.tile(steps.obs[2, :, 1], (3, 1)))


@pytest.mark.parametrize("ballast", [SMALL, LARGE])
def test_every_episode_is_fresh(ballast: int) -> None:
    """Each reset draws anew, in each environment: no pool, no sharing."""
    first, steps = sixty(ballast)
    episodes = np.concatenate([first[None, :, 1], steps.obs[2::3, :, 1]])
    assert len(np.unique(episodes)) == 21 * 3


def test_large_reset_states_give_the_same_numbers_as_small_ones() -> None:
    for a, b in zip(*(jax.tree.leaves(episodes_of_3(ballast)) for ballast in (SMALL, LARGE)), strict=True):
        assert bits(a) == bits(b)


def test_the_time_limit_truncates() -> None:
    _, steps = rollout(vectorise(time_limited(4), 3), idle(9))
    assert steps.truncated[:, 2].tolist() == [False, False, False, True, False, False, False, True, False]
    assert not steps.terminated.any()
    assert steps.final_obs[3, 2, 0] == 4
    assert steps.obs[3, 2, 0] == 0


def test_an_end_at_the_time_limit_is_an_end() -> None:
    _, steps = rollout(vectorise(counting(length=4, time_limit=4), 3), idle(8))
    assert steps.terminated[[3, 7]].all()
    assert not steps.truncated.any()


def test_an_environment_that_says_both_has_terminated() -> None:
    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        return state, TimeStep(state, 1.0, terminated=True, truncated=True)

    env = Env(EnvSpec("both", Box(0, 1, (1,)), Discrete(2)), lambda key: (jnp.zeros(1), jnp.zeros(1)), step)
    _, steps = rollout(vectorise(env, 2), idle(3, 2))
    assert steps.terminated.all()
    assert not steps.truncated.any()


def test_episode_return_and_length_are_those_of_whole_episodes() -> None:
    """Rewards count 1, 2, 3, so an episode of 3 steps returns 6, whatever came before."""
    _, steps = episodes_of_3(SMALL)
    assert steps.info["episode_length"][:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert steps.info["episode_return"][:, 0].tolist() == [1, 3, 6, 1, 3, 6, 1]


def test_the_environments_own_scalars_are_passed_on_and_the_action_is_recorded() -> None:
    env = counting(length=3)

    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        state, out = env.step(state, action, key)
        return state, out._replace(info={"twice": 2 * state.step})

    actions = np.array([[0, 1], [1, 0], [0, 0], [1, 1]], np.int32)
    _, steps = rollout(vectorise(env._replace(step=step), 2), actions)
    assert steps.info["twice"][:, 1].tolist() == [2, 4, 6, 2]
    np.testing.assert_array_equal(steps.action, actions)


def test_a_run_follows_from_its_keys() -> None:
    once, again, other = (rollout(threes(SMALL), idle(60), seed=seed)[1].obs for seed in (0, 0, 1))
    assert bits(once) == bits(again)
    assert bits(once) != bits(other)


def test_a_key_inside_the_state_survives_auto_reset() -> None:
    """An environment may draw from a key of its own; every leaf keeps its type through a reset."""

    def reset(key: Any) -> tuple[Any, Any]:
        return (key, jnp.int32(0)), jnp.zeros(1)

    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        key, draw = jax.random.split(state[0])
        return (key, state[1] + 1), TimeStep(jax.random.uniform(draw, (1,)), 1.0, state[1] >= 2)

    env = Env(EnvSpec("own-key", Box(0, 1, (1,)), Discrete(2)), reset, step)
    _, steps = rollout(vectorise(env, 2), idle(6, 2))
    assert steps.terminated[:, 0].tolist() == [False, False, True] * 2
    assert len(np.unique(steps.final_obs)) == 12


def test_observations_may_be_any_pytree() -> None:
    def reset(key: Any) -> tuple[Any, Any]:
        return jnp.int32(0), {"seen": jnp.zeros(3), "mask": jnp.ones(2, bool)}

    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        obs = {"seen": jnp.full(3, state + 1.0), "mask": jnp.zeros(2, bool)}
        return state + 1, TimeStep(obs, 0.0, state >= 1)

    space = {"seen": Box(0, 9, (3,)), "mask": Box(0, 1, (2,), "bool")}
    first, steps = rollout(vectorise(Env(EnvSpec("dict", space, Discrete(2)), reset, step), 2), idle(2, 2))
    assert first["mask"].all()
    assert steps.final_obs["seen"][:, 0].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert steps.obs["seen"][:, 0].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert steps.obs["mask"][:, 0].tolist() == [[False, False], [True, True]]


# --- resets are true resets -----------------------------------------------------------------------------------------


def test_resets_of_cartpole_are_distributed_as_gymnaxs_own() -> None:
    """gymnax draws all four numbers uniformly from [-0.05, 0.05]; so must the first reset and every automatic one."""
    num_envs = 1000
    first, steps = rollout(vectorise(make_env("CartPole-v1", max_steps_in_episode=1), num_envs), idle(2, num_envs))
    env, params = gymnax.make("CartPole-v1")
    own, _ = jax.jit(jax.vmap(env.reset, in_axes=(0, None)))(jax.random.split(jax.random.key(7), 2000), params)

    for ours in (first, steps.obs[0], steps.obs[1]):
        assert np.abs(ours).max() <= 0.05
        assert all(ks_2samp(ours[:, i], np.asarray(own)[:, i]).pvalue > 1e-3 for i in range(4))
        correlation = np.corrcoef(ours.T) - np.eye(4)
        assert np.abs(correlation).max() < 0.15


# --- broken steps ---------------------------------------------------------------------------------------------------


@cache
def healthy_and_hurt(where: str) -> tuple[Step, Step]:
    """Return the same four steps of three environments, whole and with a break of the second in the second step."""
    venv, actions = vectorise(breaking(where), 3), idle(4)
    healthy = rollout(venv, actions)[1]
    actions[1, 1] = BREAK
    return healthy, rollout(venv, actions)[1]


@pytest.mark.parametrize("where", ["reward", "obs"])
def test_a_non_finite_step_is_cut_and_marked(where: str) -> None:
    _, steps = healthy_and_hurt(where)

    assert np.argwhere(~steps.valid).tolist() == [[1, 1]]
    assert np.argwhere(steps.truncated).tolist() == [[1, 1]]
    assert not steps.terminated.any()
    assert steps.reward[1, 1] == 0
    assert steps.final_obs[1, 1].tolist() == [0, 0]
    assert steps.obs[:, 1, 0].tolist() == [1, 0, 1, 2]
    assert steps.info["episode_return"][:, 1].tolist() == [1, 1, 1, 3]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((steps.obs, steps.final_obs, steps.reward)))


@pytest.mark.parametrize("where", ["reward", "obs"])
def test_the_other_environments_do_not_notice(where: str) -> None:
    healthy, hurt = healthy_and_hurt(where)
    for a, b in zip(jax.tree.leaves(healthy), jax.tree.leaves(hurt), strict=True):
        assert bits(a[:, [0, 2]]) == bits(b[:, [0, 2]])


def test_a_non_finite_step_does_not_terminate() -> None:
    """The last step of an episode breaks: whether it had ended can no longer be believed."""
    _, steps = rollout(vectorise(nan_at(3, length=3), 2), idle(3, 2))
    assert steps.truncated[2].all()
    assert not steps.terminated.any()


def test_infinities_are_as_bad_as_nan() -> None:
    env = counting()

    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        state, out = env.step(state, action, key)
        return state, out._replace(reward=jnp.array([0.0, math.nan, math.inf, -math.inf])[action])

    bad = env._replace(spec=env.spec._replace(action_space=Discrete(4)), step=step)
    _, steps = rollout(vectorise(bad, 4), np.arange(4, dtype=np.int32)[None])
    assert steps.valid.tolist() == [[True, False, False, False]]


# --- what vectorise refuses -------------------------------------------------------------------------------------------


def _reset(key: Any) -> tuple[Any, Any]:
    return {"count": jnp.int32(0)}, jnp.zeros(2)


def _env(step: Any, reset: Any = _reset, space: Any = None) -> Env:
    return Env(EnvSpec("mine", space or Box(-1, 1, (2,)), Discrete(2)), reset, step)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"count": jnp.float32(0)}, ["the state after step", "float32[]", "['count']", "int32[]"]),
        ({"count": jnp.zeros(3, jnp.int32)}, ["the state after step", "int32[3]", "['count']", "int32[]"]),
        ({"count": jnp.int32(0), "more": jnp.int32(0)}, ["after reset", "no leaf ['more']"]),
        ({}, ["after step", "no leaf ['count']"]),
    ],
)
def test_an_unstable_state_is_refused_by_the_name_of_its_leaf(state: Any, words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        vectorise(_env(lambda s, a, n: (state, TimeStep(jnp.zeros(2), 0.0, False))), 2)
    assert all(word in str(error.value) for word in ["environment mine", *words])


def test_a_container_of_another_type_is_refused() -> None:
    """A list where there was a tuple has the same leaves, but no compiled loop can carry it."""
    env = _env(lambda s, a, n: ([s[0]], TimeStep(jnp.zeros(2), 0.0, False)), lambda k: ((jnp.int32(0),), jnp.zeros(2)))
    with pytest.raises(SettingsError, match="the state after step"):
        vectorise(env, 2)


@pytest.mark.parametrize("obs", [jnp.zeros(2, jnp.int32), jnp.zeros(3)])
def test_an_unstable_observation_is_refused(obs: jax.Array) -> None:
    with pytest.raises(SettingsError, match=r"the observation after step has .* the array"):
        vectorise(_env(lambda s, a, n: (s, TimeStep(obs, 0.0, False))), 2)


def test_an_observation_that_is_not_the_declared_one_is_refused() -> None:
    with pytest.raises(SettingsError, match="the observation space has float32"):
        vectorise(_env(lambda s, a, n: (s, TimeStep(jnp.zeros(2), 0.0, False)), space=Box(-1, 1, (5,))), 2)


@pytest.mark.parametrize(
    ("field", "out"),
    [
        ("reward", TimeStep(jnp.zeros(2), jnp.zeros(1), False)),
        ("terminated", TimeStep(jnp.zeros(2), 0.0, jnp.zeros(1, bool))),
        ("truncated", TimeStep(jnp.zeros(2), 0.0, False, jnp.zeros(1, bool))),
    ],
)
def test_what_must_be_a_scalar_is(field: str, out: TimeStep) -> None:
    with pytest.raises(SettingsError, match=rf"{field} has shape \(1,\); expected a scalar"):
        vectorise(_env(lambda s, a, n: (s, out)), 2)


def test_a_step_of_another_library_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"expected \(state, jaxrl.TimeStep\)"):
        vectorise(_env(lambda s, a, n: (jnp.zeros(2), s, 0.0, False, {})), 2)


def test_a_reset_of_another_library_is_refused() -> None:
    env = _env(lambda s, a, n: (s, TimeStep(jnp.zeros(2), 0.0, False)), lambda key: jnp.zeros(3))
    with pytest.raises(SettingsError, match=r"reset returned .* expected \(state, observation\)"):
        vectorise(env, 2)


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, True])
def test_the_number_of_environments_is_a_count(num_envs: Any) -> None:
    with pytest.raises(SettingsError, match="num_envs"):
        vectorise(counting(), num_envs)

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
from toys_envs import BREAK, breaking, counting, idle, nan_at, rollout, time_limited

from jaxrl.envs import Env, TimeStep, VecEnv, make_env, vectorise
from jaxrl.envs.resets import FRESH_BYTES
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.types import Step


def bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


# --- episodes ---------------------------------------------------------------------------------------------------


@cache
def threes() -> VecEnv:
    return vectorise(counting(length=3), 3, "fresh")


@cache
def sixty() -> tuple[np.ndarray, Step]:
    return rollout(threes(), idle(60))


def test_an_end_starts_the_next_episode_in_the_same_step() -> None:
    """And what is shown last is the true successor; rewards count 1, 2, 3, so that an episode returns 6."""
    first, steps = sixty()
    assert first[:, 0].tolist() == [0, 0, 0]
    assert steps.obs[:7, 1, 0].tolist() == [1, 2, 0, 1, 2, 0, 1]
    assert steps.terminated[:7, 1].tolist() == [False, False, True, False, False, True, False]
    assert not steps.truncated.any()
    assert steps.final_obs[:7, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    np.testing.assert_array_equal(steps.final_obs[:3, :, 1], np.tile(first[:, 1], (3, 1)))
    np.testing.assert_array_equal(steps.final_obs[3:6, :, 1], np.tile(steps.obs[2, :, 1], (3, 1)))
    assert steps.info["episode_length"][:7, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert steps.info["episode_return"][:7, 0].tolist() == [1, 3, 6, 1, 3, 6, 1]


def test_every_episode_is_fresh() -> None:
    """Each reset draws anew, in each environment: no pool, no sharing."""
    first, steps = sixty()
    episodes = np.concatenate([first[None, :, 1], steps.obs[2::3, :, 1]])
    assert len(np.unique(episodes)) == 21 * 3


def test_a_run_follows_from_its_keys_whatever_the_size_of_a_reset_state() -> None:
    """Those of small states are drawn ahead of the loop, those of large ones inside it."""
    again, other = (rollout(threes(), idle(60), seed=seed)[1].obs for seed in (0, 1))
    assert bits(sixty()[1].obs) == bits(again)
    assert bits(other) != bits(again)
    large = rollout(vectorise(counting(length=3, ballast=FRESH_BYTES), 3, "fresh"), idle(60))
    for a, b in zip(jax.tree.leaves(sixty()), jax.tree.leaves(large), strict=True):
        assert bits(a) == bits(b)


def test_the_time_limit_truncates() -> None:
    _, steps = rollout(vectorise(time_limited(4), 3), idle(9))
    assert steps.truncated[:, 2].tolist() == [False, False, False, True, False, False, False, True, False]
    assert not steps.terminated.any()
    assert steps.final_obs[3, 2, 0] == 4
    assert steps.obs[3, 2, 0] == 0


def ends(steps: Any) -> list[list[int]]:
    """Return the numbers of the steps, from 1, in which each environment ends an episode."""
    return [(np.flatnonzero(column) + 1).tolist() for column in (steps.terminated | steps.truncated).T]


def test_staggered_first_episodes_are_cut_off_after_different_shares_of_the_time_limit() -> None:
    _, steps = rollout(vectorise(time_limited(10), 4, stagger=True), idle(30, 4))
    assert ends(steps) == [[3, 13, 23], [5, 15, 25], [8, 18, 28], [10, 20, 30]]
    assert not steps.terminated.any()
    # The length is that of the episode, and its successor is seen before it is reset.
    assert [int(steps.info["episode_length"][t, i]) for i, t in enumerate((2, 4, 7, 9))] == [3, 5, 8, 10]
    assert [int(steps.final_obs[t, i, 0]) for i, t in enumerate((2, 4, 7, 9))] == [3, 5, 8, 10]
    # Episodes that end by themselves do so.
    _, steps = rollout(vectorise(counting(length=4, time_limit=10), 4, stagger=True), idle(12, 4))
    assert ends(steps) == [[3, 7, 11], [4, 8, 12], [4, 8, 12], [4, 8, 12]]


def test_staggering_needs_a_time_limit_to_divide() -> None:
    with pytest.raises(SettingsError, match="counting has no time limit, which stagger divides; leave stagger out"):
        vectorise(counting(length=3), 2, stagger=True)


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


def test_the_environments_own_scalars_are_passed_on_and_the_action_is_recorded() -> None:
    env = counting(length=3)

    def step(state: Any, action: Any, key: Any) -> tuple[Any, TimeStep]:
        state, out = env.step(state, action, key)
        return state, out._replace(info={"twice": 2 * state.step})

    actions = np.array([[0, 1], [1, 0], [0, 0], [1, 1]], np.int32)
    _, steps = rollout(vectorise(env._replace(step=step), 2), actions)
    assert steps.info["twice"][:, 1].tolist() == [2, 4, 6, 2]
    np.testing.assert_array_equal(steps.action, actions)


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


@pytest.mark.parametrize("where", ["reward", "obs"])
def test_a_non_finite_step_is_cut_and_marked(where: str) -> None:
    """And the other environments do not notice."""
    venv, actions = vectorise(breaking(where), 3), idle(4)
    healthy = rollout(venv, actions)[1]
    actions[1, 1] = BREAK
    steps = rollout(venv, actions)[1]

    assert np.argwhere(~steps.valid).tolist() == [[1, 1]]
    assert np.argwhere(steps.truncated).tolist() == [[1, 1]]
    assert not steps.terminated.any()
    assert steps.reward[1, 1] == 0
    assert steps.final_obs[1, 1].tolist() == [0, 0]
    assert steps.obs[:, 1, 0].tolist() == [1, 0, 1, 2]
    assert steps.info["episode_return"][:, 1].tolist() == [1, 1, 1, 3]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((steps.obs, steps.final_obs, steps.reward)))
    for a, b in zip(jax.tree.leaves(healthy), jax.tree.leaves(steps), strict=True):
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


def mine(step: Any, reset: Any = _reset, space: Any = None) -> Env:
    return Env(EnvSpec("mine", space or Box(-1, 1, (2,)), Discrete(2)), reset, step)


def stays(state: Any = None, **out: Any) -> Any:
    """Return a step that stays where it is, but for what is given of the state and of the step."""
    still = TimeStep(np.zeros(2, np.float32), 0.0, False)
    return lambda s, action, key: (s if state is None else state, still._replace(**out))


REFUSED: dict[str, tuple[Env, str]] = {
    "dtype of the state": (
        mine(stays({"count": np.float32(0)})), r"mine: the state after step .*float32\[\].*\['count'\].*int32\[\]",
    ),
    "shape of the state": (
        mine(stays({"count": np.zeros(3, np.int32)})), r"the state after step .*int32\[3\].*\['count'\].*int32\[\]",
    ),
    "more state": (
        mine(stays({"count": np.int32(0), "more": np.int32(0)})), r"after reset has no leaf \['more'\]",
    ),
    "less state": (mine(stays({})), r"after step.*no leaf \['count'\]"),
    # A list where there was a tuple has the same leaves, but no compiled loop can carry it.
    "container of the state": (
        mine(lambda s, a, k: ([s[0]], TimeStep(jnp.zeros(2), 0.0, False)), lambda k: ((jnp.int32(0),), jnp.zeros(2))),
        "the state after step",
    ),
    "dtype of an observation": (
        mine(stays(obs=np.zeros(2, np.int32))), r"the observation after step has .* the array",
    ),
    "shape of an observation": (
        mine(stays(obs=np.zeros(3, np.float32))), r"the observation after step has .* the array",
    ),
    "another space": (mine(stays(), space=Box(-1, 1, (5,))), "the observation space has float32"),
    "reward": (mine(stays(reward=np.zeros(1))), r"reward has shape \(1,\); expected a scalar"),
    "terminated": (mine(stays(terminated=np.zeros(1, bool))), r"terminated has shape \(1,\); expected a scalar"),
    "truncated": (mine(stays(truncated=np.zeros(1, bool))), r"truncated has shape \(1,\); expected a scalar"),
    "a step of another library": (
        mine(lambda s, a, k: (jnp.zeros(2), s, 0.0, False, {})), r"expected \(state, jaxrl.TimeStep\)",
    ),
    "a reset of another library": (
        mine(stays(), lambda key: jnp.zeros(3)), r"reset returned .* expected \(state, observation\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_environment_that_no_loop_can_carry_is_refused_by_what_is_wrong(case: str) -> None:
    env, said = REFUSED[case]
    with pytest.raises(SettingsError, match=said):
        vectorise(env, 2)


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, True])
def test_the_number_of_environments_is_a_count(num_envs: Any) -> None:
    with pytest.raises(SettingsError, match="num_envs"):
        vectorise(counting(), num_envs)

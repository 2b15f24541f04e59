"""Brax: every name keeps its contract, its numbers are the suite's, and limits are not ends."""

import jax
import numpy as np
import pytest
from toys_suites import played

from jaxrl.envs import make_env, vectorise
from jaxrl.spaces import Box

envs = pytest.importorskip("brax.envs")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Brax System")]


@pytest.mark.parametrize("name", sorted(set(envs._envs) - {"swimmer"}))
def test_every_environment_keeps_its_forms(name: str) -> None:
    with jax.numpy_rank_promotion("allow"):
        spec = vectorise(make_env(f"brax:{name}"), 2).spec
    assert (spec.name, spec.time_limit) == (f"brax:{name}", 1000)
    assert (spec.action_space.low, spec.action_space.high) == (-1.0, 1.0)


def test_the_limit_truncates_and_the_last_observation_is_the_true_one() -> None:
    steps = played(make_env("brax:fast", episode_length=3.0), np.ones((4, 1), np.float32))
    assert steps.truncated.tolist() == [False, False, True, False]
    assert not steps.terminated.any()
    # With dt = 0.02 and a push at every step: velocity 0.02 t, place 0.0004 (1 + 2 + .. + t); the place is rewarded.
    places = np.array([0.0004, 0.0012, 0.0024, 0.0004])
    np.testing.assert_allclose(steps.final_obs[:, 0], places, rtol=1e-5)
    np.testing.assert_allclose(steps.final_obs[:, 1], [0.02, 0.04, 0.06, 0.02], rtol=1e-5)
    np.testing.assert_allclose(steps.reward, places, rtol=1e-5)
    assert steps.obs[2].tolist() == [0.0, 0.0]


def test_a_pole_that_falls_terminates_with_the_suites_own_numbers() -> None:
    env, theirs = make_env("brax:inverted_pendulum"), envs.get_environment("inverted_pendulum")
    with jax.numpy_rank_promotion("allow"):
        step, their_step = jax.jit(env.step), jax.jit(theirs.step)
        (state, obs), their = env.reset(jax.random.key(3)), theirs.reset(jax.random.key(3))
        np.testing.assert_array_equal(obs, their.obs)
        for _ in range(30):
            state, out = step(state, np.ones(1, np.float32), ())
            their = their_step(their, np.ones(1, np.float32))
            np.testing.assert_allclose(out.obs, their.obs, rtol=1e-5, atol=1e-6)
            assert (out.reward, out.terminated, out.truncated) == (their.reward, bool(their.done), False)
            if out.terminated:
                return
    pytest.fail("pushed to one side for 30 steps, the pole still stands")


def test_observations_of_several_parts_stay_apart() -> None:
    space = make_env("brax:fast", obs_mode="dict_state", asymmetric_obs=1.0).spec.observation_space
    assert space == {"state": Box(-np.inf, np.inf, (2,)), "privileged_state": Box(-np.inf, np.inf, (4,))}

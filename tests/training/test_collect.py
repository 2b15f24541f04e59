"""Gathering data: whole episodes in the order in which they began, with the noise that was asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_closed_form import counting_env

import jaxrl
from jaxrl.envs import randomise
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, EnvSpec
from jaxrl.strategies.policy import make_policy, policy_params_like
from jaxrl.training.data.collect import add_noise, in_order


def lazy(env: jaxrl.Env, agent: object) -> tuple[object, object]:
    """Return a policy and parameters that are all zeros: of two actions it takes the first."""
    bound = agent(env.spec)
    like = policy_params_like(bound, jaxrl.one_step(), env.spec)
    return make_policy(bound, jaxrl.one_step(), env.spec), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def test_episodes_are_whole_and_in_order_and_the_last_is_cut_with_its_successor() -> None:
    env = counting_env(terminate_at=7, time_limit=4)
    data = jaxrl.gather(env, *lazy(env, jaxrl.bc(features=())), jax.random.key(0), 10, num_envs=3)
    np.testing.assert_array_equal(data.obs[:, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(data.next_obs[:, 0], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    np.testing.assert_array_equal(data.reward, 10 * data.obs[:, 0])
    np.testing.assert_array_equal(data.truncated, np.isin(np.arange(10), [3, 7, 9]))
    assert not data.terminated.any()
    assert (data.rows, data.spec) == (10, env.spec)


def test_the_seed_decides_all_and_random_actions_are_as_many_as_asked_for() -> None:
    env = counting_env(terminate_at=7, time_limit=None)
    take = lambda seed, random: jaxrl.gather(
        env, *lazy(env, jaxrl.bc(features=())), jax.random.key(seed), 2_000, random=random
    )
    one, two = take(1, 0.5), take(1, 0.5)
    np.testing.assert_array_equal(one.reward, two.reward)
    # Half of the steps are random, and half of those take the other action.
    assert abs(one.action.mean() - 0.25) < 0.04
    assert one.terminated.sum() > 200
    np.testing.assert_array_equal(one.obs[1:][~one.terminated[:-1]], one.next_obs[:-1][~one.terminated[:-1]])


def test_scheduled_parameters_of_episodes_are_the_final_ones_as_in_evaluation() -> None:
    space = Box(-9.0, 9.0, (1,))
    reset = lambda key, params: (params, params[None])
    step = lambda state, action, key: (state, jaxrl.TimeStep(state[None], state, True))
    env = jaxrl.Env(EnvSpec("weight", space, jaxrl.Discrete(2), time_limit=9), reset, step)  # type: ignore[arg-type]
    env = randomise(env, lambda key, weight: jnp.asarray(weight), weight=jaxrl.linear(0.0, 3.0, 10))
    data = jaxrl.gather(env, *lazy(env, jaxrl.bc(features=())), jax.random.key(0), 8, num_envs=2)
    np.testing.assert_array_equal(data.reward, np.full(8, 3.0))


def test_short_episodes_are_no_likelier_than_long_ones() -> None:
    ends = np.zeros((8, 2), bool)
    ends[[0, 1, 2, 3, 4, 5], 0] = True  # of one step each
    ends[5, 1] = True
    times, envs = in_order(ends, 9)
    np.testing.assert_array_equal(times, [0, 0, 1, 2, 3, 4, 5, 1, 2])
    np.testing.assert_array_equal(envs, [0, 1, 1, 1, 1, 1, 1, 0, 0])
    # The one that began at time 6 in the first environment has not come to its end.
    assert in_order(ends, 15) is None
    assert in_order(ends, 14)[0].shape == (14,)


def test_steps_of_very_many_episodes_are_put_in_order() -> None:
    """To look at all episodes again for each of them would take minutes."""
    ends = np.ones((40_000, 2), bool)
    ends[[*range(0, 40_000, 2)], 1] = False  # in the second environment each takes two steps
    times, envs = in_order(ends, 80_000)
    np.testing.assert_array_equal(times, np.repeat(np.arange(0, 40_000, 2), 4) + np.tile([0, 0, 1, 1], 20_000))
    np.testing.assert_array_equal(envs, np.tile([0, 1, 1, 0], 20_000))


def test_noise_is_of_the_half_width_of_the_bounds_and_stays_within() -> None:
    spec = EnvSpec("Toy", Box(0.0, 1.0, (1,)), Box(-2.0, 6.0, (1,)))
    action = add_noise(spec, jnp.zeros((4_000, 1)), jnp.full((4_000, 1), 2.0), jax.random.key(0), 0.0, 0.1)
    np.testing.assert_allclose(action.std(), 0.4, atol=0.02)
    wild = add_noise(spec, jnp.zeros((4_000, 1)), jnp.full((4_000, 1), 2.0), jax.random.key(0), 0.0, 10.0)
    assert (wild.min(), wild.max()) == (-2.0, 6.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": 0.1}, "noise is for actions of a single Box"),
        ({"random": 1.5}, "random is 1.5"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"num_envs": 99_999_999_999}, "num_envs is 99999999999; expected at most 1048576"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    env = counting_env()
    with pytest.raises(SettingsError, match=message):
        jaxrl.gather(env, *lazy(env, jaxrl.bc(features=())), jax.random.key(0), 10, **settings)

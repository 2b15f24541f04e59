"""The equations of losses, worked by hand and against RLax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from jaxrl.agents.losses import huber, squared, td_error

MODES = {"jit": jax.jit, "no jit": lambda f: f}


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    q_tm1, q_t_value, q_t_select = rng.normal(size=(3, 64, 5)).astype(np.float32)
    action = rng.integers(0, 5, 64)
    reward = rng.normal(size=64).astype(np.float32)
    discount = rng.choice([0.0, 0.9, 0.99], 64).astype(np.float32)
    return [jnp.asarray(x) for x in (q_tm1, action, reward, discount, q_t_value, q_t_select)]


def test_the_td_error_of_q_learning_is_that_worked_by_hand(mode):
    values = jnp.array([0.5, 4.0, 3.0])
    error = mode(td_error)(jnp.array([1.0, 2.0, 7.0]), jnp.int32(1), 0.25, 0.5, values, values)
    assert error == 0.25 + 0.5 * 4.0 - 2.0


def test_the_td_error_takes_the_action_of_one_network_and_the_value_of_the_other(mode):
    value, select = jnp.array([0.5, 4.0, 3.0]), jnp.array([9.0, 0.0, 1.0])
    error = mode(td_error)(jnp.array([1.0, 2.0, 7.0]), jnp.int32(2), 1.0, 0.5, value, select)
    assert error == 1.0 + 0.5 * 0.5 - 7.0


def test_nothing_is_bootstrapped_after_termination(mode):
    values = jnp.array([1e6, 1e6])
    assert mode(td_error)(jnp.array([1.0, 2.0]), jnp.int32(0), 3.0, 0.0, values, values) == 2.0


def test_td_errors_are_those_of_rlax_q_learning(mode, batch):
    q_tm1, action, reward, discount, q_t_value, _ = batch
    ours = mode(jax.vmap(td_error))(q_tm1, action, reward, discount, q_t_value, q_t_value)
    theirs = jax.vmap(rlax.q_learning)(q_tm1, action, reward, discount, q_t_value)
    assert ours.shape == (64,)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_td_errors_are_those_of_rlax_double_q_learning(mode, batch):
    ours = mode(jax.vmap(td_error))(*batch)
    theirs = jax.vmap(rlax.double_q_learning)(*batch)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    single = jax.vmap(td_error)(*batch[:-1], batch[-2])
    assert np.abs(ours - single).max() > 0.1


@pytest.mark.parametrize(
    ("error", "loss"), [(0.0, 0.0), (0.5, 0.125), (-0.5, 0.125), (1.0, 0.5), (3.0, 2.5), (-3.0, 2.5)]
)
def test_huber_is_that_worked_by_hand(mode, error, loss):
    assert mode(huber)(jnp.float32(error)) == loss


def test_huber_bends_at_delta(mode):
    error = jnp.array([0.5, 2.0, -5.0])
    np.testing.assert_array_equal(mode(lambda e: huber(e, 2.0))(error), [0.125, 2.0, 2.0 + 2.0 * 3.0])


def test_huber_and_its_slope_are_those_of_rlax(mode):
    error = jnp.linspace(-3.0, 3.0, 41)
    np.testing.assert_allclose(mode(huber)(error), rlax.huber_loss(error, 1.0), atol=1e-6)
    slope = mode(jax.vmap(jax.grad(huber)))(error)
    np.testing.assert_allclose(slope, jnp.clip(error, -1.0, 1.0), atol=1e-6)


def test_the_slope_of_huber_is_right_at_zero_and_at_the_bend(mode):
    slope = mode(jax.vmap(jax.grad(huber)))(jnp.array([0.0, 1.0, -1.0]))
    np.testing.assert_array_equal(slope, [0.0, 1.0, -1.0])


def test_squared_is_half_the_square_and_its_slope_the_error(mode):
    error = jnp.array([-3.0, 0.0, 0.5])
    np.testing.assert_array_equal(mode(squared)(error), [4.5, 0.0, 0.125])
    np.testing.assert_array_equal(mode(jax.vmap(jax.grad(squared)))(error), error)


def test_the_gradient_of_a_td_loss_touches_only_the_action_taken(mode, batch):
    q_tm1, action, *rest = batch

    def loss(q):
        return jnp.sum(squared(jax.vmap(td_error)(q, action, *rest)))

    grads = np.asarray(mode(jax.grad(loss))(q_tm1))
    errors = np.asarray(jax.vmap(td_error)(*batch))
    expected = np.zeros_like(grads)
    expected[np.arange(64), np.asarray(action)] = -errors
    np.testing.assert_allclose(grads, expected, atol=1e-6)

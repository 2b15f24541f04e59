"""The equations of losses, worked by hand and against RLax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from jaxrl.agents.losses import cross_entropy, huber, munchausen, project, quantile_huber, squared
from jaxrl.agents.values import BootstrapTarget, expected, select_row


@functools.cache
def compiled(transform, loss):
    return jax.jit(transform(loss))


def td_error(q_tm1, action, reward, discount, q_t_value, q_t_select):
    """Return the error of values that are expectations, the next action chosen by `q_t_select`."""
    greedy = jax.nn.one_hot(jnp.argmax(q_t_select), q_t_select.shape[0])
    after = BootstrapTarget(reward, discount, q_t_value[:, None], greedy)
    return expected("squared").loss(select_row(q_tm1[:, None], action), jnp.zeros(1), after)[1]


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    q_tm1, q_t_value, q_t_select = rng.normal(size=(3, 64, 5)).astype(np.float32)
    action = rng.integers(0, 5, 64)
    reward = rng.normal(size=64).astype(np.float32)
    discount = rng.choice([0.0, 0.9, 0.99], 64).astype(np.float32)
    return [jnp.asarray(x) for x in (q_tm1, action, reward, discount, q_t_value, q_t_select)]


def test_the_td_error_of_q_learning_is_that_worked_by_hand():
    values = jnp.array([0.5, 4.0, 3.0])
    error = jax.jit(td_error)(jnp.array([1.0, 2.0, 7.0]), jnp.int32(1), 0.25, 0.5, values, values)
    assert error == 0.25 + 0.5 * 4.0 - 2.0


def test_the_td_error_takes_the_action_of_one_network_and_the_value_of_the_other():
    value, select = jnp.array([0.5, 4.0, 3.0]), jnp.array([9.0, 0.0, 1.0])
    error = jax.jit(td_error)(jnp.array([1.0, 2.0, 7.0]), jnp.int32(2), 1.0, 0.5, value, select)
    assert error == 1.0 + 0.5 * 0.5 - 7.0


def test_nothing_is_bootstrapped_after_termination():
    values = jnp.array([1e6, 1e6])
    assert jax.jit(td_error)(jnp.array([1.0, 2.0]), jnp.int32(0), 3.0, 0.0, values, values) == 2.0


def test_td_errors_are_those_of_rlax_q_learning(batch):
    q_tm1, action, reward, discount, q_t_value, _ = batch
    ours = jax.jit(jax.vmap(td_error))(q_tm1, action, reward, discount, q_t_value, q_t_value)
    theirs = jax.jit(jax.vmap(rlax.q_learning))(q_tm1, action, reward, discount, q_t_value)
    assert ours.shape == (64,)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_td_errors_are_those_of_rlax_double_q_learning(batch):
    ours = jax.jit(jax.vmap(td_error))(*batch)
    theirs = jax.jit(jax.vmap(rlax.double_q_learning))(*batch)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    single = jax.vmap(td_error)(*batch[:-1], batch[-2])
    assert np.abs(ours - single).max() > 0.1


@pytest.mark.parametrize(
    ("error", "loss"), [(0.0, 0.0), (0.5, 0.125), (-0.5, 0.125), (1.0, 0.5), (3.0, 2.5), (-3.0, 2.5)]
)
def test_huber_is_that_worked_by_hand(error, loss):
    assert jax.jit(huber)(jnp.float32(error)) == loss


def test_huber_bends_at_delta():
    error = jnp.array([0.5, 2.0, -5.0])
    np.testing.assert_array_equal(jax.jit(lambda e: huber(e, 2.0))(error), [0.125, 2.0, 2.0 + 2.0 * 3.0])


def test_huber_and_its_slope_are_those_of_rlax():
    error = jnp.linspace(-3.0, 3.0, 41)
    np.testing.assert_allclose(jax.jit(huber)(error), rlax.huber_loss(error, 1.0), atol=1e-6)
    slope = jax.jit(jax.vmap(jax.grad(huber)))(error)
    np.testing.assert_allclose(slope, jnp.clip(error, -1.0, 1.0), atol=1e-6)


def test_the_slope_of_huber_is_right_at_zero_and_at_the_bend():
    slope = jax.jit(jax.vmap(jax.grad(huber)))(jnp.array([0.0, 1.0, -1.0]))
    np.testing.assert_array_equal(slope, [0.0, 1.0, -1.0])


def test_squared_is_half_the_square_and_its_slope_the_error():
    error = jnp.array([-3.0, 0.0, 0.5])
    np.testing.assert_array_equal(jax.jit(squared)(error), [4.5, 0.0, 0.125])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(squared)))(error), error)


def test_the_gradient_of_a_td_loss_touches_only_the_action_taken(batch):
    q_tm1, action, *rest = batch

    def loss(q):
        return jnp.sum(squared(jax.vmap(td_error)(q, action, *rest)))

    grads = np.asarray(compiled(jax.grad, loss)(q_tm1))
    errors = np.asarray(jax.vmap(td_error)(*batch))
    expected = np.zeros_like(grads)
    expected[np.arange(64), np.asarray(action)] = -errors
    np.testing.assert_allclose(grads, expected, atol=1e-6)


# --- distributions of returns ---------------------------------------------------------------------------------------

SUPPORT = jnp.array([-1.0, 0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("z", "there"),
    [
        (0.0, [0, 1, 0, 0]),
        (2.0, [0, 0, 0, 1]),
        (-1.0, [1, 0, 0, 0]),
        (0.25, [0, 0.75, 0.25, 0]),
        (1.5, [0, 0, 0.5, 0.5]),
        (-7.0, [1, 0, 0, 0]),
        (1e30, [0, 0, 0, 1]),
        (-np.inf, [1, 0, 0, 0]),
    ],
)
def test_a_return_gives_its_probability_to_its_neighbours_on_the_support(z, there):
    np.testing.assert_array_equal(jax.jit(project)(jnp.array([z]), jnp.ones(1), SUPPORT), there)


def test_a_distribution_is_projected_as_worked_by_hand():
    z, p = jnp.array([-3.0, 0.5, 0.75, 5.0]), jnp.array([0.125, 0.25, 0.5, 0.125])
    there = [0.125, 0.125 + 0.125, 0.125 + 0.375, 0.125]
    np.testing.assert_array_equal(jax.jit(project)(z, p, SUPPORT), there)


@pytest.mark.parametrize(("low", "high", "atoms"), [(-10.0, 10.0, 51), (0.0, 100.0, 51), (-1.0, 1.0, 2), (5.0, 6.0, 7)])
def test_projections_are_those_of_rlax_and_lose_no_probability(low, high, atoms):
    rng, support = np.random.default_rng(0), jnp.linspace(low, high, atoms)
    z = jnp.asarray(rng.normal(low, 1.5 * (high - low), (32, 9)), jnp.float32)
    p = jax.nn.softmax(jnp.asarray(rng.normal(size=(32, 9)), jnp.float32))
    ours = jax.jit(jax.vmap(lambda z, p: project(z, p, support)))(z, p)
    theirs = jax.jit(jax.vmap(lambda z, p: rlax.categorical_l2_project(z, p, support)))(z, p)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    np.testing.assert_allclose(ours.sum(axis=1), 1, atol=2e-5)
    assert ours.min() >= 0
    # Inside of the support the mean stays, too.
    inside = jnp.clip(z, low, high)
    np.testing.assert_allclose(ours @ support, jnp.sum(p * inside, axis=1), atol=1e-5 * max(abs(low), abs(high)))


def test_a_projection_onto_its_own_support_changes_nothing():
    """What an episode that goes on without reward does with a discount of 1: errors would add up over updates."""
    support = jnp.linspace(-10.0, 10.0, 51)
    p = jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(size=51), jnp.float32))
    np.testing.assert_allclose(jax.jit(project)(support, p, support), p, atol=1e-6)


def test_cross_entropy_is_that_worked_by_hand():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    np.testing.assert_allclose(
        jax.jit(cross_entropy)(logits + 7, jnp.array([0.5, 0.5, 0.0])), 1.5 * np.log(2), rtol=1e-6
    )


def test_cross_entropy_is_that_of_rlax_and_its_slope_what_is_too_much():
    rng = np.random.default_rng(0)
    logits, target = jnp.asarray(rng.normal(size=9), jnp.float32), jax.nn.softmax(jnp.asarray(rng.normal(size=9)))
    theirs = jax.jit(rlax.categorical_cross_entropy)(target, logits)
    np.testing.assert_allclose(jax.jit(cross_entropy)(logits, target), theirs, rtol=1e-6)
    slope = compiled(jax.grad, cross_entropy)(logits, target)
    np.testing.assert_allclose(slope, jax.nn.softmax(logits) - target, atol=1e-6)


def test_cross_entropy_is_finite_where_a_logit_says_never():
    loss, slope = compiled(jax.value_and_grad, cross_entropy)(jnp.array([0.0, -1e4]), jnp.array([0.0, 1.0]))
    assert loss == 1e4
    np.testing.assert_array_equal(slope, [1.0, -1.0])


def test_the_loss_of_quantiles_is_that_worked_by_hand():
    # Errors of the first quantile are 0.5 and 3, of Huber's losses 0.125 and 2.5, and it is a quarter that counts.
    # Those of the second are -1.5 and 1: 1 (of weight 1 - 0.75) and 0.5 (of weight 0.75).
    loss = jax.jit(quantile_huber)(jnp.array([0.0, 2.0]), jnp.array([0.25, 0.75]), jnp.array([0.5, 3.0]))
    assert loss == 0.25 * (0.125 + 2.5) / 2 + (0.25 * 1.0 + 0.75 * 0.5) / 2


def test_the_loss_of_quantiles_and_its_slope_are_those_of_rlax():
    rng = np.random.default_rng(0)
    z, target = jnp.asarray(rng.normal(size=(16, 5)), jnp.float32), jnp.asarray(rng.normal(size=(16, 7)), jnp.float32)
    taus = jnp.asarray(rng.random((16, 5)), jnp.float32)
    target = target.at[:, 0].set(z[:, 0])  # An error of exactly 0.
    both = lambda loss: jax.vmap(jax.value_and_grad(loss))(z, taus, target)
    ours = jax.jit(lambda: both(quantile_huber))()
    of_rlax = lambda z, taus, target: rlax.quantile_regression_loss(z, taus, target, huber_param=1.0)
    theirs = jax.jit(lambda: both(of_rlax))()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_policy_of_munchausen_and_its_logarithm_are_those_worked_by_hand():
    policy, log_policy = jax.jit(munchausen)(0.5 * jnp.log(jnp.array([1.0, 3.0])) + 100, 0.5)
    np.testing.assert_allclose(policy, [0.25, 0.75], rtol=1e-4)
    np.testing.assert_allclose(log_policy, 0.5 * np.log([0.25, 0.75]), rtol=1e-4)


def test_munchausen_is_finite_where_an_action_is_never_taken():
    """At the temperature of 0.03 the probability of an action worth 50 less is nothing, and its logarithm -1667."""
    policy, log_policy = jax.jit(munchausen)(jnp.array([0.0, 50.0]), 0.03)
    np.testing.assert_array_equal(policy, [0.0, 1.0])
    np.testing.assert_allclose(log_policy, [-50.0, 0.0], rtol=1e-6)
    # So what it adds to a value is nothing, and not a number.
    assert jnp.sum(policy * log_policy) == 0

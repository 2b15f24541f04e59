"""What is learnt of returns, an expectation or a distribution: losses and priorities, by hand and against RLax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from toys_closed_form import hyperbolic, parabolic

from jaxrl.agents.values import (
    BootstrapTarget,
    ReturnBounds,
    c51,
    expected,
    init_return_bounds,
    midpoints,
    quantiles,
    rescaled,
    select_row,
    signed_hyperbolic,
    signed_parabolic,
    support_bounds,
    update_return_bounds,
)
from jaxrl.types import Transition

ACTIONS, ATOMS, ROWS = 3, 11, 32
LOW, HIGH = -2.0, 2.0
SUPPORT = np.linspace(LOW, HIGH, ATOMS, dtype=np.float32)
TAUS = midpoints(ATOMS)


@pytest.fixture(scope="module")
def steps():
    """Outputs before and after the step and of who selects, `[B, A, n]`, then actions, rewards and discounts."""
    rng = np.random.default_rng(0)
    outs = [jnp.asarray(x) for x in rng.normal(scale=2, size=(3, ROWS, ACTIONS, ATOMS)).astype(np.float32)]
    action = jnp.asarray(rng.integers(0, ACTIONS, ROWS))
    reward = jnp.asarray(rng.normal(size=ROWS), jnp.float32)
    discount = jnp.asarray(rng.choice([0.0, 0.9, 0.99], ROWS), jnp.float32)
    return *outs, action, reward, discount


C51, QUANTILES = c51(ATOMS, LOW, HIGH), quantiles(ATOMS)


@functools.partial(jax.jit, static_argnums=0)
def judged(values, out_tm1, out_t, out_select, action, reward, discount, taus=TAUS):
    """Return the losses and errors `[B]`, the next action chosen by `out_select`."""
    policy = jax.nn.one_hot(jnp.argmax(jax.vmap(values.mean)(out_select), axis=-1), ACTIONS)
    taus = jnp.broadcast_to(jnp.asarray(taus), (out_tm1.shape[0], len(taus)))
    after = BootstrapTarget(reward, discount, out_t, policy)
    judge = lambda out, action, taus, after: values.loss(select_row(out, action), taus, after)
    return jax.vmap(judge, in_axes=(0, 0, 0, BootstrapTarget(0, 0, 0, 0, None)))(out_tm1, action, taus, after)


def transposed(out):
    """RLax has quantiles first."""
    return jnp.swapaxes(out, 1, 2)


# --- against RLax -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
def test_the_loss_of_c51_is_that_of_rlax(steps, double):
    out_tm1, out_t, out_select, action, reward, discount = steps
    out_select = out_select if double else out_t
    ours, _ = judged(C51, out_tm1, out_t, out_select, action, reward, discount)
    select, support = jax.nn.softmax(out_select) @ SUPPORT, jnp.asarray(SUPPORT)
    theirs = jax.jit(jax.vmap(rlax.categorical_double_q_learning, in_axes=(None, 0, 0, 0, 0, None, 0, 0)))(
        support, out_tm1, action, reward, discount, support, out_t, select
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    # It matters who selects.
    other = jax.nn.softmax(out_t if double else steps[2]) @ SUPPORT
    assert (jnp.argmax(select, axis=1) != jnp.argmax(other, axis=1)).any()


@pytest.mark.parametrize("double", [False, True])
def test_the_loss_of_quantiles_is_that_of_rlax(steps, double):
    out_tm1, out_t, out_select, action, reward, discount = steps
    out_select = out_select if double else out_t
    ours, error = judged(QUANTILES, out_tm1, out_t, out_select, action, reward, discount)
    of_rlax = lambda *given: rlax.quantile_q_learning(*given, huber_param=1.0)
    theirs = jax.jit(jax.vmap(of_rlax, in_axes=(0, None, 0, 0, 0, 0, 0)))(
        transposed(out_tm1), jnp.asarray(TAUS), action, reward, discount, transposed(out_select), transposed(out_t)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    means = [x.mean(axis=-1) for x in (out_tm1, out_t, out_select)]
    errors = jax.jit(jax.vmap(rlax.double_q_learning))(means[0], action, reward, discount, *means[1:])
    np.testing.assert_allclose(error, errors, atol=1e-5)


# --- means ------------------------------------------------------------------------------------------------------


def test_means_are_those_worked_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])) + 3
    np.testing.assert_allclose(c51(3, -1.0, 3.0).mean(logits), [0.5, 3.0, 1.0], atol=1e-6)
    out = jnp.array([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(quantiles(3).mean(out), [3.0, 0.0])
    np.testing.assert_array_equal(expected("huber").mean(out[:, 2:]), [6.0, 0.0])


def test_quantiles_are_told_at_the_middles_of_equal_parts():
    np.testing.assert_array_equal(midpoints(4), [0.125, 0.375, 0.625, 0.875])
    assert midpoints(1).tolist() == [0.5]


# --- rescaled returns -------------------------------------------------------------------------------------------

SIZES = np.logspace(-6, 6, 1_201)
DECADES = np.concatenate([-SIZES[::-1], [0.0], SIZES]).astype(np.float32)


def test_returns_are_rescaled_and_back_to_the_last_bits_over_twelve_decades():
    np.testing.assert_allclose(jax.jit(signed_hyperbolic)(DECADES), hyperbolic(DECADES), rtol=4e-7)
    # The inverse is at most twice as sensitive, relatively, so it is compared where it came from.
    rescaled_returns = hyperbolic(DECADES).astype(np.float32)
    back = np.asarray(jax.jit(signed_parabolic)(rescaled_returns))
    np.testing.assert_allclose(back, DECADES, rtol=1e-6)
    np.testing.assert_allclose(hyperbolic(back), rescaled_returns, rtol=4e-7)
    assert back[len(SIZES)] == 0


@pytest.mark.parametrize("x", [0.0, -0.0, 1e-30, -1e-6, 1.0, -1e6, 1e12])
def test_slopes_of_rescaling_are_finite_and_positive(x):
    """The slope of `h` is `1 / (2 sqrt(|x| + 1)) + eps`, and that of its inverse the reciprocal."""
    slope = 0.5 / np.sqrt(abs(x) + 1) + 1e-3
    np.testing.assert_allclose(jax.grad(signed_hyperbolic)(x), slope, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(signed_parabolic)(float(hyperbolic(x))), 1 / slope, rtol=1e-4)


def test_rescaled_values_are_returns_and_their_errors_are_on_both_scales():
    values = rescaled("squared")
    np.testing.assert_allclose(values.mean(jnp.array([[3.0], [-5.0]])), parabolic(np.array([3.0, -5.0])), rtol=1e-5)
    after = BootstrapTarget(7.0, 0.5, jnp.array([[3.0], [5.0]]), jnp.array([0.0, 1.0]), jnp.zeros(2))
    loss, error = values.loss(jnp.array([2.0]), jnp.zeros(1), after)
    target = 7 + 0.5 * parabolic(5.0)
    np.testing.assert_allclose(error, hyperbolic(target) - 2, rtol=1e-5)
    np.testing.assert_allclose(loss, error**2 / 2, rtol=1e-6)
    np.testing.assert_allclose(values.return_error(jnp.array([2.0]), error), target - parabolic(2.0), rtol=1e-4)


# --- the support, where it is derived ---------------------------------------------------------------------------


updated_bounds = jax.jit(update_return_bounds)


def items(reward, discount, weight):
    return Transition((), (), *(jnp.array(x, jnp.float32) for x in (reward, discount)), (), (), jnp.array(weight))


def test_the_reach_is_what_each_reward_would_come_to_if_it_came_for_ever():
    # 1 / (1 - 0.75) = 4; -2 / (1 - 0.5) = -4; 5 at an end stays 5; the last two rows do not count.
    batch = items([1, -2, 5, 100, np.nan], [0.75, 0.5, 0, 0.75, 0.75], [1, 1, 1, 0, 0])
    assert [float(x) for x in updated_bounds(init_return_bounds(), batch)] == [-4.0, 5.0]
    # It never gets narrower, and 0 is always inside.
    assert [float(x) for x in updated_bounds(ReturnBounds(-1.0, 10.0), batch)] == [-4.0, 10.0]
    assert [float(x) for x in updated_bounds(init_return_bounds(), items([-3], [0], [1]))] == [-3.0, 0.0]
    # A discount of 1 allows anything; it counts as 0.999.
    assert [round(float(x)) for x in updated_bounds(init_return_bounds(), items([2], [1], [1]))] == [0, 2000]


@pytest.mark.parametrize(
    ("reach", "v_min", "v_max", "ends"),
    [
        ((-4, 5), None, None, (-4, 5)),
        ((-4, 5), -10, None, (-10, 5)),
        ((-4, 5), None, 2, (-4, 2)),
        ((0, 0), None, None, (0, 1)),
        ((-4, 0), 0, None, (0, 1)),
        ((0, 5), None, -20, (-40, -20)),
    ],
)
def test_a_support_has_the_ends_that_are_given_or_those_of_the_reach(reach, v_min, v_max, ends):
    assert tuple(float(x) for x in support_bounds(ReturnBounds(*map(jnp.float32, reach)), v_min, v_max)) == ends


def test_the_share_outside_of_a_support_is_that_of_the_target_before_it_is_projected():
    # The support 0, 1, 2 leads to 1, 1.5, 2 and stays inside; 0, 0.75, 1.5 leads to 1, 1.375 and 1.75, which does not.
    after = BootstrapTarget(jnp.float32(1), jnp.float32(0.5), jnp.log(jnp.array([[0.25, 0.25, 0.5]])), jnp.ones(1))
    outside = [float(c51(3, 0.0, high).outside(after)) for high in (2.0, 1.5)]
    np.testing.assert_allclose(outside, [0.0, 0.5], atol=1e-6)
    traced = jax.jit(lambda high: c51(3, 0.0, high).outside(after))(1.5)
    np.testing.assert_allclose(traced, 0.5, atol=1e-6)


# --- priorities -------------------------------------------------------------------------------------------------


def test_the_priority_of_c51_is_how_far_the_prediction_is_from_its_target(steps):
    out_tm1, out_t, out_select, action, reward, discount = steps
    loss, priority = judged(C51, *steps)
    p = jax.nn.softmax(out_t)[jnp.arange(ROWS), jnp.argmax(jax.nn.softmax(out_select) @ SUPPORT, axis=1)]
    z = reward[:, None] + discount[:, None] * SUPPORT[None]
    project = jax.jit(jax.vmap(rlax.categorical_l2_project, in_axes=(0, 0, None)))
    target = np.asarray(project(z, p, jnp.asarray(SUPPORT)))
    predicted = np.asarray(jax.nn.log_softmax(out_tm1))[np.arange(ROWS), np.asarray(action)]
    # 0 log 0 is 0.
    logs = np.log(np.where(target > 0, target, 1))
    np.testing.assert_allclose(priority, np.sum(target * (logs - predicted), axis=1), atol=1e-5)
    assert priority.min() > 0
    assert (loss > priority).any()


def test_the_priority_of_c51_is_0_where_the_prediction_is_its_target(steps):
    out_tm1, *_ = steps
    still = jnp.zeros(ROWS), jnp.ones(ROWS)
    values, best = C51, jnp.argmax(jax.nn.softmax(out_tm1) @ SUPPORT, axis=1)
    loss, priority = judged(values, out_tm1, out_tm1, out_tm1, best, *still)
    np.testing.assert_allclose(priority, 0, atol=1e-5)
    assert priority.min() >= 0
    assert loss.min() > 0.1


# --- a policy that is not greedy --------------------------------------------------------------------------------


def test_a_penalty_is_taken_from_what_each_action_is_worth_before_the_policy_weighs_them():
    # 1 + 0.5 * (0.25 * (4 - 2) + 0.75 * (8 - 4)) - 2
    after = lambda out: BootstrapTarget(1.0, 0.5, out, jnp.array([0.25, 0.75]), jnp.array([2.0, 4.0]))
    _, error = expected("squared").loss(jnp.array([2.0]), jnp.zeros(1), after(jnp.array([[4.0], [8.0]])))
    assert error == 0.75
    out = jnp.array([[3.0, 5.0], [6.0, 10.0]])
    loss, error = jax.jit(quantiles(2).loss)(jnp.array([1.0, 3.0]), midpoints(2), after(out))
    assert error == 0.75
    # Targets: 1 + 0.5 * (0.25 * (1, 3) + 0.75 * (2, 6)) = 1.875 and 3.625.
    theirs = rlax.quantile_regression_loss(
        jnp.array([1.0, 3.0]), jnp.array([0.25, 0.75]), jnp.array([1.875, 3.625]), huber_param=1.0
    )
    np.testing.assert_allclose(loss, theirs, rtol=1e-6)

"""The equations of losses, worked by hand and against RLax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from jaxrl.agents.losses import cross_entropy, huber, munchausen, project, quantile_huber

of_huber, of_entropy, of_quantiles = (
    jax.jit(jax.value_and_grad(loss)) for loss in (huber, cross_entropy, quantile_huber)
)


@pytest.mark.parametrize(
    ("error", "loss", "slope"),
    [
        (0.0, 0.0, 0.0), (0.5, 0.125, 0.5), (-0.5, 0.125, -0.5),
        (1.0, 0.5, 1.0), (-1.0, 0.5, -1.0), (3.0, 2.5, 1.0), (-3.0, 2.5, -1.0),
    ],
)  # fmt: skip
def test_huber_is_that_worked_by_hand(error, loss, slope):
    assert of_huber(error) == (loss, slope)


def test_huber_bends_at_delta():
    error = jnp.array([0.5, 2.0, -5.0])
    np.testing.assert_array_equal(jax.jit(lambda e: huber(e, 2.0))(error), [0.125, 2.0, 2.0 + 2.0 * 3.0])


# --- distributions of returns ---------------------------------------------------------------------------------------

SUPPORT = jnp.array([-1.0, 0.0, 1.0, 2.0])
projected = jax.jit(project)


@pytest.mark.parametrize(
    ("z", "p", "there"),
    [
        ([0.0], [1], [0, 1, 0, 0]),
        ([2.0], [1], [0, 0, 0, 1]),
        ([-1.0], [1], [1, 0, 0, 0]),
        ([0.25], [1], [0, 0.75, 0.25, 0]),
        ([1.5], [1], [0, 0, 0.5, 0.5]),
        ([-7.0], [1], [1, 0, 0, 0]),
        ([1e30], [1], [0, 0, 0, 1]),
        ([-np.inf], [1], [1, 0, 0, 0]),
        ([-3.0, 0.5, 0.75, 5.0], [0.125, 0.25, 0.5, 0.125], [0.125, 0.125 + 0.125, 0.125 + 0.375, 0.125]),
    ],
)
def test_returns_give_their_probabilities_to_their_neighbours_on_the_support(z, p, there):
    np.testing.assert_array_equal(projected(jnp.array(z), jnp.array(p, jnp.float32), SUPPORT), there)


@pytest.mark.parametrize(("low", "high", "atoms"), [(0.0, 100.0, 51), (-1.0, 1.0, 2)])
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
    np.testing.assert_allclose(projected(support, p, support), p, atol=1e-6)


def test_cross_entropy_is_finite_where_a_logit_says_never():
    loss, slope = of_entropy(jnp.array([0.0, -1e4]), jnp.array([0.0, 1.0]))
    assert loss == 1e4
    np.testing.assert_array_equal(slope, [1.0, -1.0])


def test_the_loss_of_quantiles_and_its_slope_are_those_worked_by_hand():
    # Errors of the first quantile are 0.5 and 3, of Huber's losses 0.125 and 2.5, and it is a quarter that counts.
    # Those of the second are -1.5 and 1: 1 (of weight 1 - 0.75) and 0.5 (of weight 0.75).
    loss, slope = of_quantiles(jnp.array([0.0, 2.0]), jnp.array([0.25, 0.75]), jnp.array([0.5, 3.0]))
    assert loss == 0.25 * (0.125 + 2.5) / 2 + (0.25 * 1.0 + 0.75 * 0.5) / 2
    np.testing.assert_array_equal(slope, [-0.25 * (0.5 + 1) / 2, (0.25 * 1 - 0.75 * 1) / 2])


def test_munchausen_is_finite_where_an_action_is_never_taken():
    """At the temperature of 0.03 the probability of an action worth 50 less is nothing, and its logarithm -1667."""
    policy, log_policy = jax.jit(munchausen)(jnp.array([0.0, 50.0]), 0.03)
    np.testing.assert_array_equal(policy, [0.0, 1.0])
    np.testing.assert_allclose(log_policy, [-50.0, 0.0], rtol=1e-6)
    # So what it adds to a value is nothing, and not a number.
    assert jnp.sum(policy * log_policy) == 0

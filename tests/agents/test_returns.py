"""The equations of returns, worked by hand and against RLax, with ends and cuts of episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from jaxrl.agents.returns import gae, lambda_returns, vtrace

GAMMA = 0.5
"""With halves and whole rewards every sum is exact in float32: numbers worked by hand are compared bit for bit."""


def on_device(*columns):
    return [jnp.asarray(x, bool if x.dtype == bool else jnp.float32) for x in columns]


def three_steps(last=None):
    """Rewards 1, 2, 4 and values 8, 4, 2, with 6 behind the end; row `last`, if any, is the last of an episode."""
    rows = [1.0, 2.0, 4.0], [GAMMA] * 3, np.arange(3) == last, [8.0, 4.0, 2.0], [4.0, 2.0, 6.0]
    return on_device(*map(np.asarray, rows))


def returns_of(reward, discount, last, v_tm1, v_t, lambda_):
    return lambda_returns(reward, discount, last, v_t, lambda_)


compiled = {"gae": jax.jit(gae), "returns": jax.jit(returns_of)}


def advantages(rows, lambda_):
    return compiled["gae"](*rows, lambda_).tolist()


def returns(rows, lambda_):
    return compiled["returns"](*rows, lambda_).tolist()


# --- by hand ----------------------------------------------------------------------------------------------------


def test_the_end_of_a_rollout_is_a_truncation():
    going_on, cut = three_steps(), three_steps(last=2)
    assert advantages(going_on, 0.5) == advantages(cut, 0.5)
    assert returns(going_on, 0.5) == returns(cut, 0.5)


def test_a_rollout_of_one_step_has_the_error_of_that_step():
    rows = [x[:1] for x in three_steps()]
    assert advantages(rows, 0.5) == [1 + 0.5 * 4 - 8]
    assert returns(rows, 0.5) == [1 + 0.5 * 4]


# --- against RLax -------------------------------------------------------------------------------------------------

STEPS = 24


def random_rows(seed, terminated=0.15, truncated=0.15):
    """Random rows in which a value after a step is that before the next, except where an episode ends."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, STEPS, p=[1 - terminated - truncated, terminated, truncated])
    reward, v_tm1, elsewhere = rng.normal(size=(3, STEPS))
    v_t = np.where(kind > 0, 3 * elsewhere, np.append(v_tm1[1:], elsewhere[-1]))
    discount = np.where(kind == 1, 0.0, rng.uniform(0.8, 1.0, STEPS))
    return on_device(reward, discount, kind > 0, v_tm1, v_t)


@jax.jit
def rlax_gae(rows, lambda_):
    reward, discount, _, v_tm1, v_t = rows
    values = jnp.append(v_tm1, v_t[-1])
    return rlax.truncated_generalized_advantage_estimation(reward, discount, lambda_, values)


@jax.jit
def rlax_returns(rows, lambda_):
    reward, discount, _, _, v_t = rows
    return rlax.lambda_returns(reward, discount, v_t, lambda_)


def episode_by_episode(equation, rows, lambda_):
    """Work out each episode apart, as RLax knows of no cuts."""
    ends = np.flatnonzero(rows[2]) + 1
    episodes = zip(*(np.split(np.asarray(x), ends) for x in rows), strict=True)
    parts = [equation([jnp.asarray(x) for x in episode], lambda_) for episode in episodes if len(episode[0])]
    return np.concatenate(parts)


EQUATIONS = {"gae": (gae, rlax_gae), "returns": (returns_of, rlax_returns)}


@pytest.mark.parametrize("name", EQUATIONS)
def test_ends_of_both_kinds_agree_with_rlax_on_each_episode_apart(name):
    """For any lambda, which may vary without compiling again."""
    equation, theirs = EQUATIONS[name]
    ours, rows = jax.jit(lambda *given: equation(*given)), random_rows(10)
    assert rows[2].sum() > 3
    for lambda_ in (0.0, 0.7, 1.0):
        expected = episode_by_episode(theirs, rows, lambda_)
        np.testing.assert_allclose(ours(*rows, jnp.float32(lambda_)), expected, rtol=1e-5, atol=1e-5)
    assert ours._cache_size() == 1
    # Without the cuts, the same would come out otherwise.
    assert np.abs(expected - theirs(rows, 1.0)).max() > 0.1


# --- V-trace ------------------------------------------------------------------------------------------------------

v_trace = jax.jit(vtrace)


def traced(rows, rho, lambda_=1.0, rho_clip=1.0, c_clip=1.0):
    """Return targets and advantages."""
    return [x.tolist() for x in v_trace(*rows, jnp.asarray(rho, jnp.float32), lambda_, rho_clip, c_clip)]


def test_each_bound_of_v_trace_is_on_its_own_ratio():
    """Errors are weighted up to 2, and passed back up to 0.5."""
    third = 2 * 5
    second = 2 * -1 + 0.5 * 0.5 * third
    first = 1 * -5 + 0.5 * 0.5 * second
    target, _ = traced(three_steps(), [1.0, 4.0, 4.0], rho_clip=2.0, c_clip=0.5)
    assert target == [8 + first, 4 + second, 2 + third] == [3.125, 4.5, 12]


def test_ratios_beyond_the_bounds_count_as_the_bounds_and_a_ratio_of_0_leaves_the_value():
    rows, rho = random_rows(7), jnp.linspace(0.0, 3.0, STEPS)
    beyond = v_trace(*rows, jnp.where(rho > 1.5, 1e9, rho), 0.9, 1.5, 1.5)
    at = v_trace(*rows, jnp.minimum(rho, 1.5), 0.9, 1e9, 1e9)
    for a, b in zip(beyond, at, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert beyond.target[0] == rows[3][0]


@pytest.mark.parametrize(("rho_clip", "lambda_"), [(0.5, 0.7), (1.0, 1.0), (2.0, 0.7), (2.0, 0.0)])
def test_v_trace_agrees_with_rlax_on_each_episode_apart(lambda_, rho_clip):
    rows = random_rows(8)
    rho = jnp.asarray(np.random.default_rng(9).uniform(0.1, 3.0, STEPS), jnp.float32)
    target, advantage = v_trace(*rows, rho, lambda_, rho_clip, 1.0)

    @jax.jit
    def theirs(columns, _):
        reward, discount, _, v_tm1, v_t, ratio = columns
        out = rlax.vtrace_td_error_and_advantage(v_tm1, v_t, reward, discount, ratio, lambda_, rho_clip, rho_clip)
        return jnp.stack([out.errors + v_tm1, out.pg_advantage], axis=1)

    assert rows[2].sum() > 3
    expected = episode_by_episode(theirs, [*rows, rho], lambda_)
    ours = np.stack([target, jnp.minimum(rho, rho_clip) * advantage], axis=1)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)

"""The equations of returns, worked by hand and against RLax, with ends and cuts of episodes."""

from functools import partial

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


def three_steps(terminated=None, truncated=None, successor=None):
    """Rewards 1, 2, 4 and values 8, 4, 2, with 6 behind the end; row `truncated` has a true successor of its own."""
    v_tm1, v_t = np.array([8.0, 4.0, 2.0]), np.array([4.0, 2.0, 6.0])
    time = np.arange(3)
    if truncated is not None:
        v_t[truncated] = successor
    discount = np.where(time == terminated, 0.0, GAMMA)
    last = (time == terminated) | (time == truncated)
    reward = np.array([1.0, 2.0, 4.0])
    return on_device(reward, discount, last, v_tm1, v_t)


def returns_of(reward, discount, last, v_tm1, v_t, lambda_):
    return lambda_returns(reward, discount, last, v_t, lambda_)


compiled = {"gae": jax.jit(gae), "returns": jax.jit(returns_of)}


def advantages(rows, lambda_):
    return compiled["gae"](*rows, lambda_).tolist()


def returns(rows, lambda_):
    return compiled["returns"](*rows, lambda_).tolist()


# --- by hand ----------------------------------------------------------------------------------------------------

NO_END, TERMINATED, TERMINATED_LAST = {}, {"terminated": 1}, {"terminated": 2}
CUT, CUT_LAST = {"truncated": 1, "successor": 16}, {"truncated": 2, "successor": 32}


@pytest.mark.parametrize(
    ("kind", "errors", "passed"),
    [
        (NO_END, (1 + 0.5 * 4 - 8, 2 + 0.5 * 2 - 4, 4 + 0.5 * 6 - 2), (1, 1)),
        # Neither the value of what follows nor the reward of step 2 reaches steps 0 and 1.
        (TERMINATED, (1 + 0.5 * 4 - 8, 2 - 4, 4 + 0.5 * 6 - 2), (1, 0)),
        # Step 1 is cut in a state worth 16, and step 2 begins another episode in one worth 2.
        (CUT, (1 + 0.5 * 4 - 8, 2 + 0.5 * 16 - 4, 4 + 0.5 * 6 - 2), (1, 0)),
        (TERMINATED_LAST, (1 + 0.5 * 4 - 8, 2 + 0.5 * 2 - 4, 4 - 2), (1, 1)),
        (CUT_LAST, (1 + 0.5 * 4 - 8, 2 + 0.5 * 2 - 4, 4 + 0.5 * 32 - 2), (1, 1)),
    ],
)
def test_advantages_are_those_worked_by_hand(kind, errors, passed):
    """An advantage is the error of its step, and what is passed on of the next one: `gamma * lambda`, or nothing."""
    for lambda_ in (0.0, 0.5, 1.0):
        third = errors[2]
        second = errors[1] + 0.5 * lambda_ * passed[1] * third
        first = errors[0] + 0.5 * lambda_ * passed[0] * second
        assert advantages(three_steps(**kind), lambda_) == [first, second, third]


@pytest.mark.parametrize(
    ("kind", "lambda_", "wanted"),
    [
        # From the last: 4 + 6 / 2 = 7; 2 + (2 + 7) / 4 = 4.25; 1 + (4 + 4.25) / 4 = 3.0625.
        (NO_END, 0.5, [3.0625, 4.25, 7]),
        (TERMINATED, 0.5, [1 + 0.25 * (4 + 2), 2, 7]),
        (CUT, 0.5, [1 + 0.25 * (4 + 10), 2 + 0.5 * 16, 7]),
        (TERMINATED_LAST, 0.5, [1 + 0.25 * (4 + 3.5), 2 + 0.25 * (2 + 4), 4]),
        (CUT_LAST, 0.5, [1 + 0.25 * (4 + 7.5), 2 + 0.25 * (2 + 20), 4 + 0.5 * 32]),
        # The target of one step, and the discounted sum of rewards.
        (CUT, 0.0, [1 + 0.5 * 4, 2 + 0.5 * 16, 4 + 0.5 * 6]),
        (NO_END, 1.0, [1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 6, 2 + 0.5 * 4 + 0.25 * 6, 4 + 0.5 * 6]),
        (TERMINATED_LAST, 1.0, [1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4]),
        (CUT, 1.0, [1 + 0.5 * 2 + 0.25 * 16, 2 + 0.5 * 16, 4 + 0.5 * 6]),
    ],
)
def test_returns_are_those_worked_by_hand(kind, lambda_, wanted):
    assert returns(three_steps(**kind), lambda_) == wanted


def test_the_end_of_a_rollout_is_a_truncation():
    going_on, cut = three_steps(), three_steps(truncated=2, successor=6)
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


@pytest.mark.parametrize("name", EQUATIONS)
def test_environments_side_by_side_are_as_each_alone(name):
    alone = [random_rows(seed) for seed in range(3)]
    together = [jnp.stack(column, axis=1) for column in zip(*alone, strict=True)]
    out = jax.jit(jax.vmap(partial(EQUATIONS[name][0], lambda_=0.9), in_axes=1, out_axes=1))(*together)
    assert out.shape == (STEPS, 3)
    for i, rows in enumerate(alone):
        np.testing.assert_allclose(out[:, i], compiled[name](*rows, 0.9), rtol=1e-6, atol=1e-6)


# --- V-trace ------------------------------------------------------------------------------------------------------

v_trace = jax.jit(vtrace)


def traced(rows, rho, lambda_=1.0, rho_clip=1.0, c_clip=1.0):
    """Return targets and advantages."""
    return [x.tolist() for x in v_trace(*rows, jnp.asarray(rho, jnp.float32), lambda_, rho_clip, c_clip)]


def test_v_trace_is_that_worked_by_hand():
    """Errors are -5, -1 and 5; the first ratio counts as 1, the second passes on and takes half."""
    third = 5
    second = 0.5 * -1 + 0.5 * 0.5 * third
    first = 1 * -5 + 0.5 * 1 * second
    assert (first, second) == (-4.625, 0.75)
    target, advantage = traced(three_steps(), [2.0, 0.5, 1.0])
    assert target == [8 + first, 4 + second, 2 + third]
    assert advantage == [1 + 0.5 * target[1] - 8, 2 + 0.5 * target[2] - 4, 4 + 0.5 * 6 - 2]


def test_each_bound_of_v_trace_is_on_its_own_ratio():
    """Errors are weighted up to 2, and passed back up to 0.5."""
    third = 2 * 5
    second = 2 * -1 + 0.5 * 0.5 * third
    first = 1 * -5 + 0.5 * 0.5 * second
    target, _ = traced(three_steps(), [1.0, 4.0, 4.0], rho_clip=2.0, c_clip=0.5)
    assert target == [8 + first, 4 + second, 2 + third] == [3.125, 4.5, 12]


def test_with_lambda_v_trace_passes_back_less_and_bootstraps_from_the_value_as_well():
    third = 0.5 * 5
    second = 1 * -1 + 0.5 * 0.5 * third
    first = 1 * -5 + 0.5 * 0.5 * second
    target, advantage = traced(three_steps(), [1.0, 1.0, 0.5], lambda_=0.5)
    assert target == [8 + first, 4 + second, 2 + third]
    later = [0.5 * target[1] + 0.5 * 4, 0.5 * target[2] + 0.5 * 2, 6]
    assert advantage == [1 + 0.5 * later[0] - 8, 2 + 0.5 * later[1] - 4, 4 + 0.5 * later[2] - 2]


@pytest.mark.parametrize(("kind", "error", "bootstrap"), [(TERMINATED, 2 - 4, 0), (CUT, 2 + 8 - 4, 8)])
def test_v_trace_passes_nothing_over_an_end_and_bootstraps_a_cut_from_the_true_successor(kind, error, bootstrap):
    second = 0.5 * error
    first = -5 + 0.5 * second
    target, advantage = traced(three_steps(**kind), [1.0, 0.5, 8.0])
    assert target == [8 + first, 4 + second, 2 + 5]
    assert advantage == [1 + 0.5 * target[1] - 8, 2 + bootstrap - 4, 5]


def test_on_policy_v_trace_is_the_lambda_return_and_gae():
    rows = random_rows(6)
    target, advantage = v_trace(*rows, jnp.ones(STEPS), 0.7, 1.0, 1.0)
    np.testing.assert_allclose(target, compiled["returns"](*rows, 0.7), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantage, compiled["gae"](*rows, 0.7), rtol=1e-5, atol=1e-5)


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

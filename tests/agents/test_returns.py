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


def advantages(rows, lambda_):
    return jax.jit(gae)(*rows, lambda_).tolist()


def returns(rows, lambda_):
    return jax.jit(returns_of)(*rows, lambda_).tolist()


# --- by hand ----------------------------------------------------------------------------------------------------


def test_advantages_without_an_end():
    deltas = [1 + 0.5 * 4 - 8, 2 + 0.5 * 2 - 4, 4 + 0.5 * 6 - 2]
    assert deltas == [-5, -1, 5]
    third = 5
    second = -1 + 0.5 * 0.5 * third
    first = -5 + 0.5 * 0.5 * second
    assert advantages(three_steps(), 0.5) == [first, second, third] == [-4.9375, 0.25, 5]


def test_returns_without_an_end():
    third = 4 + 0.5 * 6
    second = 2 + 0.5 * (0.5 * 2 + 0.5 * third)
    first = 1 + 0.5 * (0.5 * 4 + 0.5 * second)
    assert returns(three_steps(), 0.5) == [first, second, third] == [3.0625, 4.25, 7]


def test_nothing_behind_a_termination_counts_towards_an_advantage():
    """Step 1 ends its episode: neither the value of what follows nor the reward of step 2 reaches steps 0 and 1."""
    second = 2 - 4
    first = (1 + 0.5 * 4 - 8) + 0.5 * 0.5 * second
    third = 4 + 0.5 * 6 - 2
    assert advantages(three_steps(terminated=1), 0.5) == [first, second, third] == [-5.5, -2, 5]


def test_nothing_behind_a_termination_counts_towards_a_return():
    second = 2
    first = 1 + 0.5 * (0.5 * 4 + 0.5 * second)
    third = 4 + 0.5 * 6
    assert returns(three_steps(terminated=1), 0.5) == [first, second, third] == [2.5, 2, 7]


def test_an_advantage_at_a_truncation_is_bootstrapped_from_the_true_successor():
    """Step 1 is cut in a state worth 16, and step 2 begins another episode in one worth 2."""
    second = 2 + 0.5 * 16 - 4
    first = (1 + 0.5 * 4 - 8) + 0.5 * 0.5 * second
    third = 4 + 0.5 * 6 - 2
    rows = three_steps(truncated=1, successor=16)
    assert advantages(rows, 0.5) == [first, second, third] == [-3.5, 6, 5]


def test_a_return_at_a_truncation_is_bootstrapped_from_the_true_successor():
    second = 2 + 0.5 * 16
    first = 1 + 0.5 * (0.5 * 4 + 0.5 * second)
    third = 4 + 0.5 * 6
    rows = three_steps(truncated=1, successor=16)
    assert returns(rows, 0.5) == [first, second, third] == [4.5, 10, 7]


def test_a_truncation_at_the_last_row_is_bootstrapped_from_its_successor():
    third = 4 + 0.5 * 32 - 2
    second = (2 + 0.5 * 2 - 4) + 0.25 * third
    first = (1 + 0.5 * 4 - 8) + 0.25 * second
    rows = three_steps(truncated=2, successor=32)
    assert advantages(rows, 0.5) == [first, second, third] == [-4.125, 3.5, 18]
    third = 4 + 0.5 * 32
    second = 2 + 0.5 * (0.5 * 2 + 0.5 * third)
    first = 1 + 0.5 * (0.5 * 4 + 0.5 * second)
    assert returns(rows, 0.5) == [first, second, third] == [3.875, 7.5, 20]


def test_the_end_of_a_rollout_is_a_truncation():
    going_on, cut = three_steps(), three_steps(truncated=2, successor=6)
    assert advantages(going_on, 0.5) == advantages(cut, 0.5)
    assert returns(going_on, 0.5) == returns(cut, 0.5)


def test_a_termination_at_the_last_row_is_not_bootstrapped():
    rows = three_steps(terminated=2)
    second, third = (2 + 0.5 * 2 - 4) + 0.25 * (4 - 2), 4 - 2
    assert advantages(rows, 0.5) == [(1 + 0.5 * 4 - 8) + 0.25 * second, second, third]
    assert returns(rows, 0.5)[2] == 4


def test_with_lambda_0_an_advantage_is_the_error_of_one_step():
    rows = three_steps(truncated=1, successor=16)
    assert advantages(rows, 0.0) == [1 + 0.5 * 4 - 8, 2 + 0.5 * 16 - 4, 4 + 0.5 * 6 - 2]


def test_with_lambda_0_a_return_is_the_target_of_one_step():
    rows = three_steps(truncated=1, successor=16)
    assert returns(rows, 0.0) == [1 + 0.5 * 4, 2 + 0.5 * 16, 4 + 0.5 * 6]


def test_with_lambda_1_a_return_is_the_discounted_sum_of_rewards():
    assert returns(three_steps(terminated=2), 1.0) == [1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4]
    assert returns(three_steps(), 1.0) == [3 + 0.125 * 6, 4 + 0.25 * 6, 4 + 0.5 * 6]
    cut = three_steps(truncated=1, successor=16)
    assert returns(cut, 1.0) == [1 + 0.5 * 2 + 0.25 * 16, 2 + 0.5 * 16, 4 + 0.5 * 6]


def test_with_lambda_1_an_advantage_is_the_sum_of_rewards_less_the_value():
    assert advantages(three_steps(terminated=2), 1.0) == [3 - 8, 4 - 4, 4 - 2]
    cut = three_steps(truncated=1, successor=16)
    assert advantages(cut, 1.0) == [1 + 0.5 * 2 + 0.25 * 16 - 8, 2 + 0.5 * 16 - 4, 4 + 0.5 * 6 - 2]


def test_a_rollout_of_one_step_has_the_error_of_that_step():
    rows = [x[:1] for x in three_steps()]
    assert advantages(rows, 0.5) == [1 + 0.5 * 4 - 8]
    assert returns(rows, 0.5) == [1 + 0.5 * 4]


# --- against RLax -------------------------------------------------------------------------------------------------


def random_rows(seed, steps=40, terminated=0.0, truncated=0.0):
    """Random rows in which a value after a step is that before the next, except where an episode ends."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, steps, p=[1 - terminated - truncated, terminated, truncated])
    reward, v_tm1, elsewhere = rng.normal(size=(3, steps))
    v_t = np.where(kind > 0, 3 * elsewhere, np.append(v_tm1[1:], elsewhere[-1]))
    discount = np.where(kind == 1, 0.0, rng.uniform(0.8, 1.0, steps))
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


def returns_of(reward, discount, last, v_tm1, v_t, lambda_):
    return lambda_returns(reward, discount, last, v_t, lambda_)


EQUATIONS = {"gae": (gae, rlax_gae), "returns": (returns_of, rlax_returns)}


@pytest.fixture(params=EQUATIONS)
def equation(request):
    return EQUATIONS[request.param]


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_steps_without_an_end_agree_with_rlax(equation, lambda_):
    ours, theirs = equation
    rows = random_rows(0)
    np.testing.assert_allclose(jax.jit(ours)(*rows, lambda_), theirs(rows, lambda_), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_steps_with_terminations_agree_with_rlax(equation, lambda_):
    ours, theirs = equation
    rows = random_rows(1, terminated=0.2)
    assert 3 < rows[2].sum() < 15
    np.testing.assert_allclose(jax.jit(ours)(*rows, lambda_), theirs(rows, lambda_), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_a_truncated_episode_and_the_next_agree_with_rlax_on_each_apart(equation, lambda_):
    ours, theirs = equation
    reward, discount, last, v_tm1, v_t = random_rows(2)
    rows = [reward, discount, last.at[14].set(True), v_tm1, v_t.at[14].set(5.0)]
    before, after = [x[:15] for x in rows], [x[15:] for x in rows]
    apart = jnp.concatenate([theirs(before, lambda_), theirs(after, lambda_)])
    np.testing.assert_allclose(jax.jit(ours)(*rows, lambda_), apart, rtol=1e-5, atol=1e-5)
    if lambda_:
        assert np.abs(apart - theirs(rows, lambda_)).max() > 0.1


@pytest.mark.parametrize("seed", range(2))
def test_ends_of_both_kinds_agree_with_rlax_on_each_episode_apart(equation, seed):
    ours, theirs = equation
    rows = random_rows(10 + seed, steps=24, terminated=0.15, truncated=0.15)
    assert rows[2].sum() > 3
    expected = episode_by_episode(theirs, rows, 0.9)
    np.testing.assert_allclose(jax.jit(ours)(*rows, 0.9), expected, rtol=1e-5, atol=1e-5)


# --- together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_a_return_is_the_advantage_plus_the_value(lambda_):
    rows = random_rows(3, terminated=0.1, truncated=0.1)
    sums = jax.jit(gae)(*rows, lambda_) + rows[3]
    np.testing.assert_allclose(jax.jit(returns_of)(*rows, lambda_), sums, rtol=1e-5, atol=1e-5)


def test_compiled_and_not_they_are_equal(equation):
    ours, _ = equation
    rows = random_rows(4, terminated=0.1, truncated=0.1)
    np.testing.assert_allclose(jax.jit(ours)(*rows, 0.9), ours(*rows, 0.9), rtol=1e-6, atol=1e-6)


def test_environments_side_by_side_are_as_each_alone(equation):
    ours, _ = equation
    alone = [random_rows(seed, terminated=0.1, truncated=0.1) for seed in range(3)]
    together = [jnp.stack(column, axis=1) for column in zip(*alone, strict=True)]
    out = jax.jit(jax.vmap(partial(ours, lambda_=0.9), in_axes=1, out_axes=1))(*together)
    assert out.shape == (40, 3)
    for i, rows in enumerate(alone):
        np.testing.assert_allclose(out[:, i], jax.jit(ours)(*rows, 0.9), rtol=1e-6, atol=1e-6)


def test_lambda_may_vary_without_compiling_again(equation):
    ours, theirs = equation
    rows, compiled = random_rows(5), jax.jit(lambda *args: ours(*args))
    for lambda_ in (0.0, 0.5, 1.0):
        out = compiled(*rows, jnp.float32(lambda_))
        np.testing.assert_allclose(out, theirs(rows, lambda_), rtol=1e-5, atol=1e-5)
    assert compiled._cache_size() == 1


# --- V-trace ------------------------------------------------------------------------------------------------------


def traced(rows, rho, lambda_=1.0, rho_clip=1.0, c_clip=1.0):
    """Return targets and advantages."""
    rho = jnp.asarray(rho, jnp.float32)
    return [x.tolist() for x in jax.jit(vtrace)(*rows, rho, lambda_, rho_clip, c_clip)]


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


@pytest.mark.parametrize(
    ("kind", "error", "bootstrap"), [({"terminated": 1}, 2 - 4, 0), ({"truncated": 1, "successor": 16}, 2 + 8 - 4, 8)]
)
def test_v_trace_passes_nothing_over_an_end_and_bootstraps_a_cut_from_the_true_successor(kind, error, bootstrap):
    second = 0.5 * error
    first = -5 + 0.5 * second
    target, advantage = traced(three_steps(**kind), [1.0, 0.5, 8.0])
    assert target == [8 + first, 4 + second, 2 + 5]
    assert advantage == [1 + 0.5 * target[1] - 8, 2 + bootstrap - 4, 5]


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_on_policy_v_trace_is_the_lambda_return_and_gae(lambda_):
    rows = random_rows(6, terminated=0.1, truncated=0.1)
    target, advantage = jax.jit(vtrace)(*rows, jnp.ones(40), lambda_, 1.0, 1.0)
    np.testing.assert_allclose(target, jax.jit(returns_of)(*rows, lambda_), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantage, jax.jit(gae)(*rows, lambda_), rtol=1e-5, atol=1e-5)


def test_ratios_beyond_the_bounds_count_as_the_bounds_and_a_ratio_of_0_leaves_the_value():
    rows, rho = random_rows(7, truncated=0.1), jnp.linspace(0.0, 3.0, 40)
    beyond = jax.jit(vtrace)(*rows, jnp.where(rho > 1.5, 1e9, rho), 0.9, 1.5, 1.5)
    at = jax.jit(vtrace)(*rows, jnp.minimum(rho, 1.5), 0.9, 1e9, 1e9)
    for a, b in zip(beyond, at, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert beyond.target[0] == rows[3][0]


@pytest.mark.every_day("0.5-0.7", "1.0-1.0", "2.0-0.7")
@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rho_clip", [0.5, 1.0, 2.0])
def test_v_trace_agrees_with_rlax_on_each_episode_apart(lambda_, rho_clip):
    rows = random_rows(8, steps=24, terminated=0.15, truncated=0.15)
    rho = jnp.asarray(np.random.default_rng(9).uniform(0.1, 3.0, 24), jnp.float32)
    target, advantage = jax.jit(vtrace)(*rows, rho, lambda_, rho_clip, 1.0)

    @jax.jit
    def theirs(columns, _):
        reward, discount, _, v_tm1, v_t, ratio = columns
        out = rlax.vtrace_td_error_and_advantage(v_tm1, v_t, reward, discount, ratio, lambda_, rho_clip, rho_clip)
        return jnp.stack([out.errors + v_tm1, out.pg_advantage], axis=1)

    assert rows[2].sum() > 3
    expected = episode_by_episode(theirs, [*rows, rho], lambda_)
    ours = np.stack([target, jnp.minimum(rho, rho_clip) * advantage], axis=1)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)

"""Distributions of actions against sums, integrals and counts; and how raw actions become elements of a space."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.distributions import (
    LOG_STD,
    Categorical,
    Gaussian,
    Joint,
    MultiCategorical,
    TanhGaussian,
    apply_temperature,
    kl_divergence,
    log_tanh_slope,
    make_head,
    part_heads,
)
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete, from_box, to_box

INF = math.inf
DRAWS = 20_000


log_prob = jax.jit(lambda distribution, action: distribution.log_prob(action))
entropy = jax.jit(lambda distribution: distribution.entropy())
log_slope = jax.jit(jax.value_and_grad(log_tanh_slope))


def spec_of(action_space):
    return EnvSpec("Toy", Box(-1.0, 1.0, (4,)), action_space)


def to_env(space, raw, squash=False):
    return jax.jit(make_head(spec_of(space), squash).to_env)(np.asarray(raw, np.float32))


def normal(mean, log_std):
    return Gaussian(jnp.array([mean], jnp.float32), jnp.array([log_std], jnp.float32))


def drawn(space, outputs, squash=False, count=DRAWS):
    """Actions of the space, one an environment, all of the same outputs of a network."""
    head = make_head(spec_of(space), squash)

    def draw(key):
        rows = jnp.broadcast_to(jnp.array(outputs, jnp.float32), (count, len(outputs)))
        return head.to_env(head.distribution(rows).sample(key))

    return jax.tree.map(np.asarray, jax.jit(draw)(jax.random.key(0)))


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum()


def chi_squared(counts, probabilities):
    expected = np.sum(counts) * np.asarray(probabilities)
    return np.sum((counts - expected) ** 2 / expected)


def farthest_from(cdf, sample):
    """Return the statistic of Kolmogorov and Smirnov, times the root of the count."""
    at = cdf(np.sort(sample))
    rank = np.arange(len(at) + 1) / len(at)
    return max(np.max(rank[1:] - at), np.max(at - rank[:-1])) * len(at) ** 0.5


def normal_cdf(x, mean, std):
    return np.array([0.5 * math.erfc(-z / 2**0.5) for z in (np.asarray(x, np.float64) - mean) / std])


# --- categories -------------------------------------------------------------------------------------------------

LOGITS = [0.5, -1.0, 2.0, 0.0]
PARTS = (2, 3)
PART_LOGITS = [0.3, -0.4, 1.0, 0.0, -1.0]
PAIR_PROBABILITIES = np.outer(softmax(PART_LOGITS[:2]), softmax(PART_LOGITS[2:])).ravel()


PAIRS = np.array([(first, second) for first in range(2) for second in range(3)])


@pytest.mark.parametrize(
    ("make", "logits", "elements", "p"),
    [
        (Categorical, LOGITS, np.arange(4), softmax(LOGITS)),
        (lambda logits: MultiCategorical(logits, PARTS), PART_LOGITS, PAIRS, PAIR_PROBABILITIES),
    ],
    ids=["one", "several"],
)
def test_probabilities_entropy_and_mode_of_choices_are_those_of_softmax_and_products(make, logits, elements, p):
    one, each = make(jnp.array(logits)), make(jnp.tile(jnp.array(logits), (len(elements), 1)))
    prob = np.exp(jax.jit(each.log_prob)(elements))
    np.testing.assert_allclose(prob, p, rtol=1e-5)
    np.testing.assert_allclose(prob.sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(one.entropy)(), -np.sum(p * np.log(p)), rtol=1e-5)
    np.testing.assert_array_equal(one.mode(), elements[np.argmax(p)])


def test_a_sure_choice_has_entropy_0_and_a_finite_gradient():
    sure = Categorical(jnp.array([0.0, 1e4, -1e4]))
    value, slope = jax.jit(jax.value_and_grad(entropy))(sure)
    assert value == 0
    assert np.isfinite(slope.logits).all()


def test_frequencies_of_choices_are_their_probabilities():
    counts = np.bincount(drawn(Discrete(4), LOGITS), minlength=4)
    # Beyond 16.3 with probability 0.001, at three degrees of freedom; beyond 20.5 at five.
    assert chi_squared(counts, softmax(LOGITS)) < 16.3
    pairs = drawn(MultiDiscrete(PARTS), PART_LOGITS)
    assert chi_squared(np.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=6), PAIR_PROBABILITIES) < 20.5


def test_the_same_number_added_to_all_logits_changes_nothing():
    before, after = (log_prob(Categorical(jnp.array(LOGITS) + shift), jnp.int32(1)) for shift in (0.0, 500.0))
    np.testing.assert_allclose(before, after, atol=1e-4)


# --- numbers ------------------------------------------------------------------------------------------------------

GAUSSIANS = [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5)]
"""Means and logarithms of scales."""


def grid(mean, log_std):
    """Points before squashing, ten scales to each side, `[K, 1]`."""
    return np.linspace(mean - 10 * math.exp(log_std), mean + 10 * math.exp(log_std), 20_001)[:, None]


def density(distribution, points):
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x, points.shape), distribution)
    return np.exp(np.asarray(log_prob(wide, jnp.asarray(points, jnp.float32)), np.float64))


@pytest.mark.parametrize(("mean", "log_std"), GAUSSIANS)
def test_the_density_of_a_gaussian_integrates_to_1_and_its_entropy_is_the_integral(mean, log_std):
    points, base = grid(mean, log_std), normal(mean, log_std)
    p = np.maximum(density(base, points), 1e-300)
    np.testing.assert_allclose(np.trapezoid(p, points[:, 0]), 1.0, rtol=1e-4)
    np.testing.assert_allclose(entropy(base), np.trapezoid(-p * np.log(p), points[:, 0]), atol=1e-3)


@pytest.mark.parametrize(("mean", "log_std"), GAUSSIANS)
def test_the_density_of_squashed_actions_is_the_slope_of_their_distribution_and_integrates_to_1(mean, log_std):
    squashed = TanhGaussian(normal(mean, log_std))
    edges = np.linspace(-0.95, 0.95, 39)
    middles = (edges[1:] + edges[:-1]) / 2
    reached = normal_cdf(np.arctanh(edges), mean, math.exp(log_std))
    got = density(squashed, np.arctanh(middles)[:, None])
    np.testing.assert_allclose(got, np.diff(reached) / np.diff(edges), rtol=0.05, atol=0.01)
    points = grid(mean, log_std)
    np.testing.assert_allclose(np.trapezoid(density(squashed, points), np.tanh(points[:, 0])), 1.0, rtol=1e-3)


@pytest.mark.parametrize(("mean", "log_std"), [*GAUSSIANS, (0.2, -5.0), (6.0, 0.0), (2.0, 1.5)])
def test_the_entropy_of_a_squashed_gaussian_is_the_integral(mean, log_std):
    """Over the points before squashing, where the squashed density's logarithm is as smooth as the Gaussian."""
    points, base = grid(mean, log_std), normal(mean, log_std)
    log_p = np.log(np.maximum(density(TanhGaussian(base), points), 1e-300))
    integral = np.trapezoid(-density(base, points) * log_p, points[:, 0])
    np.testing.assert_allclose(entropy(TanhGaussian(base)), integral, atol=2e-3)


def test_no_squashed_gaussian_has_more_entropy_than_the_uniform():
    grids = np.meshgrid(np.linspace(-3, 3, 13, dtype=np.float32), np.linspace(*LOG_STD, 29, dtype=np.float32))
    mean, log_std = (x.reshape(-1, 1) for x in grids)
    distribution = TanhGaussian(Gaussian(mean, log_std))
    assert math.log(2) - 0.05 < entropy(distribution).max() < math.log(2)
    # Ever wider, all lies at the ends, and the entropy falls.
    slope = jax.jit(jax.grad(lambda x: TanhGaussian(Gaussian(mean, x)).entropy().sum()))(log_std)
    assert (np.asarray(slope)[log_std > 1] < 0).all()


def test_log_probabilities_and_entropies_of_several_numbers_are_sums():
    mean, log_std, point = np.array([[0.1, -2.0], [0.3, -0.7], [0.5, -1.0]], np.float32)
    for make in (Gaussian, lambda *args: TanhGaussian(Gaussian(*args))):
        both, parts = make(mean, log_std), [make(mean[i : i + 1], log_std[i : i + 1]) for i in range(2)]
        alone = [log_prob(part, point[i : i + 1]) for i, part in enumerate(parts)]
        np.testing.assert_allclose(log_prob(both, point), sum(alone), rtol=1e-5)
        np.testing.assert_allclose(entropy(both), sum(map(entropy, parts)), rtol=1e-5)


def test_samples_of_a_gaussian_are_distributed_as_it_says():
    space = Box(-INF, INF, (2,))
    actions = drawn(space, [0.7, -1.0, math.log(0.5), math.log(2.0)])
    # Beyond 1.95 with probability 0.001.
    assert farthest_from(lambda x: normal_cdf(x, 0.7, 0.5), actions[:, 0]) < 1.95
    assert farthest_from(lambda x: normal_cdf(x, -1.0, 2.0), actions[:, 1]) < 1.95
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.03


def test_samples_of_a_squashed_gaussian_are_distributed_as_it_says():
    actions = drawn(Box(-2.0, 6.0, (1,)), [0.3, math.log(0.8)], squash=True)[:, 0]
    unsquashed = lambda x: np.arctanh((np.asarray(x, np.float64) - 2) / 4)
    assert farthest_from(lambda x: normal_cdf(unsquashed(x), 0.3, 0.8), actions) < 1.95


def test_the_mode_of_a_squashed_gaussian_is_its_mean_before_squashing():
    base = Gaussian(jnp.array([0.4, -3.0]), jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(TanhGaussian(base).mode(), base.mean)


def test_outputs_of_a_network_are_a_mean_and_a_logarithm_of_a_scale_held_within_bounds():
    head = make_head(spec_of(Box(-1.0, 1.0, (2,))))
    assert (head.outputs, head.scales) == (4, 2)
    distribution = head.distribution(jnp.array([0.5, -0.5, 100.0, -100.0]))
    np.testing.assert_array_equal(distribution.mode(), [0.5, -0.5])
    low, high = LOG_STD
    np.testing.assert_allclose(distribution.at(jnp.ones(2)), [0.5 + math.exp(high), -0.5 + math.exp(low)], rtol=1e-6)


@pytest.mark.parametrize("u", [-3.0, -0.5, 0.0, 0.01, 2.0, -30.0, 30.0, -1000.0, 1000.0])
def test_log_slope_is_the_logarithm_of_the_slope_of_tanh_and_right_far_out(u):
    value, slope = log_slope(np.float32(u))
    exact = math.log(1 - math.tanh(u) ** 2) if abs(u) < 10 else 2 * (math.log(2) - abs(u))
    np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope, -2 * math.tanh(u), rtol=1e-5, atol=1e-6)


def test_the_log_probability_of_a_squashed_action_far_out_is_finite_with_its_gradient():
    of = lambda mean, raw: TanhGaussian(Gaussian(mean, jnp.zeros(1))).log_prob(raw)
    value, slopes = jax.jit(jax.value_and_grad(of, (0, 1)))(jnp.zeros(1), jnp.array([30.0]))
    exact = -(30.0**2) / 2 - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 30.0)
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    np.testing.assert_allclose(slopes, [[30.0], [-30.0 + 2.0]], rtol=1e-5)


# --- all of them --------------------------------------------------------------------------------------------------

SPACES = {
    "Discrete": (Discrete(5), False, ()),
    "MultiDiscrete": (MultiDiscrete((2, 3)), False, (2,)),
    "Box": (Box(-1.0, 1.0, (2, 2)), False, (4,)),
    "squashed Box": (Box(-1.0, 1.0, (2, 2)), True, (4,)),
}


@pytest.mark.parametrize("name", SPACES)
def test_outputs_may_have_any_leading_axes(name):
    space, squash, action = SPACES[name]
    head = make_head(spec_of(space), squash)

    @jax.jit
    def look(outputs):
        distribution = head.distribution(outputs)
        mode = distribution.mode()
        return mode, distribution.log_prob(mode), distribution.entropy()

    outputs = jax.random.normal(jax.random.key(0), (3, 2, head.outputs))
    together, alone = look(outputs), look(outputs[2, 1])
    assert head.outputs == {"Discrete": 5, "MultiDiscrete": 2 + 3}.get(name, 2 * 4)
    assert [x.shape for x in together] == [(3, 2, *action), (3, 2), (3, 2)]
    assert [x.shape for x in alone] == [action, (), ()]
    for many, one in zip(together, alone, strict=True):
        np.testing.assert_allclose(many[2, 1], one, rtol=1e-5, atol=1e-6)


# --- elements of a space ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "raw"),
    [
        (Discrete(3, "int8"), [2]),
        (Discrete(3), [2]),
        (MultiDiscrete((2, 3), "uint8"), [[1, 2]]),
        (MultiDiscrete((2, 3)), [[1, 2]]),
    ],
)
def test_whole_numbers_reach_the_environment_unchanged_and_as_its_dtype(space, raw):
    action = make_head(spec_of(space)).to_env(jnp.array(raw, jnp.int32))
    assert action.dtype == space.dtype
    np.testing.assert_array_equal(action, raw)


MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("low", "high", "raw", "actions"),
    [
        (2.0, 6.0, (-1.0, 1.0, 0.0, 0.5, -7.0, 7.0), [2, 6, 4, 5, 2, 6]),  # rescaled, and clipped beyond
        (0.0, INF, (-1.5, 0.5, 2.5), [0, 1.5, 3.5]),  # around a number 1 within, and only clipped there
        (-INF, 0.75, (-1.5, 0.5, 2.5), [-1.75, 0.25, 0.75]),
        (-2.0, INF, (-1.5, 0.5, 2.5), [-1.5, 0.5, 2.5]),  # 0 lies far enough within
        (5.0, INF, (-1.0, 0.0, 9.0), [5, 6, 15]),
        (-INF, -5.0, (-1.0, 0.0, 9.0), [-7, -6, -5]),
        (0.0, MOST, (-1.0, 0.0, 9.0), [0, 1, 10]),
        (-INF, INF, (-1e6, 0.25, 3.0), [-1e6, 0.25, 3.0]),  # left as they are
        (-MOST, MOST, (-1e6, 0.25, 3.0), [-1e6, 0.25, 3.0]),
    ],
)
def test_actions_are_rescaled_between_two_bounds_and_clipped_at_each(low, high, raw, actions):
    assert to_env(Box(low, high, (1,)), [[x] for x in raw])[:, 0].tolist() == actions


def test_every_entry_keeps_to_its_own_bounds():
    space = Box((-1.0, 0.0, -INF, 5.0), (1.0, 10.0, INF, INF), (4,))
    actions = to_env(space, [[1.0] * 4, [-1.0] * 4, [9.0] * 4])
    assert actions.tolist() == [[1, 10, 1, 7], [-1, 0, -1, 5], [1, 10, 9, 15]]
    high = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    matrix = Box(tuple(-x for x in high), high, (2, 3))
    np.testing.assert_array_equal(to_env(matrix, [[1.0] * 6])[0], [[1, 2, 3], [4, 5, 6]])
    half = math.tanh(0.5)
    squashed = to_env(Box((-1.0, 0.0), (1.0, 10.0), (2,)), [[0.5, 0.5]], squash=True)
    np.testing.assert_allclose(squashed, [[half, 5 + 5 * half]], rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2)])
def test_actions_have_the_shape_of_the_space(shape):
    size = math.prod(shape)
    raw = np.arange(3 * size, dtype=np.float32).reshape(3, size)
    space = Box(-INF, INF, shape)
    assert make_head(spec_of(space)).outputs == 2 * size
    np.testing.assert_array_equal(to_env(space, raw), raw.reshape(3, *shape))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.1, 0.3), (1e-3, 7.7), (-2.0, 1000.1)])
def test_squashed_actions_stay_within_their_bounds(low, high):
    raw = np.linspace(-4, 4, 101, dtype=np.float32)[:, None]
    actions = np.asarray(to_env(Box(low, high, (1,)), raw, squash=True))
    assert (actions > np.float32(low)).all()
    assert (actions < np.float32(high)).all()
    assert (np.diff(actions[:, 0]) > 0).all()
    far = np.asarray(to_env(Box(low, high, (1,)), [[-1e6], [-30.0], [30.0], [1e6]], squash=True))
    assert (far >= np.float32(low)).all()
    assert (far <= np.float32(high)).all()


@pytest.mark.parametrize(
    ("low", "high"), [(-INF, INF), (0.0, INF), (-INF, 0.0), ((-1.0, -INF), (1.0, 1.0)), ((-1.0, -1.0), (1.0, INF))]
)
def test_squashing_needs_bounds_of_every_entry(low, high):
    space = Box(low, high, (2,))
    with pytest.raises(SettingsError, match=r"agent\.squash.*Toy"):
        make_head(spec_of(space), squash=True)
    make_head(spec_of(space), squash=False)


@pytest.mark.parametrize(
    "space",
    [
        {"arm": Box(0, 10, (2,), "int32"), "grip": Discrete(2)},
        (Discrete(2), (Box(0, 10, (2,), "int32"),)),
        Box(0, 10, (2,), "int32"),
        Box(0, 255, (2,), "uint8"),
    ],
)
@pytest.mark.parametrize("squash", [False, True])
def test_other_actions_are_refused_by_name(space, squash):
    with pytest.raises(SettingsError, match=r"Toy has actions.* expected Discrete, MultiDiscrete or a Box"):
        make_head(spec_of(space), squash)


# --- several parts ------------------------------------------------------------------------------------------------

SEVERAL = {"aim": (Box(-1.0, 1.0, (2,)), MultiDiscrete((2, 3))), "move": Discrete(4)}
"""In the order of JAX's trees: a box of two numbers, choices of 2 and 3, and a choice of 4."""
OUTPUTS = np.random.default_rng(5).normal(size=(2, 6, 13))
"""Outputs `[6, 13]` of two networks: 2 means, 5 and 4 logits, then 2 log-scales."""
TAKEN = {
    "aim": (np.linspace(-1.5, 1.5, 12).reshape(6, 2), np.array([[0, 0], [1, 2], [0, 1], [1, 0], [0, 2], [1, 1]])),
    "move": np.array([0, 1, 2, 3, 3, 0]),
}


def joint_of(rows, squash=False):
    return make_head(spec_of(SEVERAL), squash).distribution(jnp.asarray(rows, jnp.float32))


def by_hand(rows, temperature=1.0):
    """Mean and scale `[6, 2]` of the box, and the log-probabilities `[6, n]` of the choices, in float64."""
    log_p = [np.log(np.apply_along_axis(softmax, 1, x / temperature)) for x in np.split(rows[:, 2:11], [2, 5], axis=1)]
    return rows[:, :2], np.exp(rows[:, 11:]) * temperature, log_p


def chosen(log_p):
    indices = *TAKEN["aim"][1].T, TAKEN["move"]
    return sum(row[np.arange(6), index] for row, index in zip(log_p, indices, strict=True))


def log_density(x, mean, scale):
    return (-((x - mean) ** 2) / (2 * scale**2) - np.log(scale * np.sqrt(2 * np.pi))).sum(1)


@pytest.mark.parametrize("temperature", [None, 0.5, 3.0])
def test_log_probabilities_and_entropies_of_independent_parts_add_up(temperature):
    joint = joint_of(OUTPUTS[0])
    joint = joint if temperature is None else apply_temperature(joint, jnp.float32(temperature))
    mean, scale, log_p = by_hand(OUTPUTS[0], temperature or 1.0)
    wanted = log_density(TAKEN["aim"][0], mean, scale) + chosen(log_p)
    actions = jax.tree.map(lambda x: x.astype(np.float32 if x.dtype.kind == "f" else np.int32), TAKEN)
    np.testing.assert_allclose(jax.jit(joint.log_prob)(actions), wanted, rtol=1e-5)
    spread = np.log(scale * np.sqrt(2 * np.pi * np.e)).sum(1) - sum((np.exp(x) * x).sum(1) for x in log_p)
    np.testing.assert_allclose(jax.jit(joint.entropy)(), spread, rtol=1e-5)
    mode = joint.mode()
    np.testing.assert_allclose(mode["aim"][0], mean, rtol=1e-6)
    np.testing.assert_array_equal(mode["aim"][1], np.stack([x.argmax(1) for x in log_p[:2]], 1))
    np.testing.assert_array_equal(mode["move"], log_p[2].argmax(1))


@pytest.mark.parametrize("squash", [False, True])
def test_divergences_of_independent_parts_add_up(squash):
    (m, s, log_p), (n, t, log_q) = map(by_hand, OUTPUTS)
    wanted = (np.log(t / s) + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5).sum(1)
    wanted += sum((np.exp(p) * (p - q)).sum(1) for p, q in zip(log_p, log_q, strict=True))
    divergence = jax.jit(lambda one, other: kl_divergence(joint_of(one, squash), joint_of(other, squash)))
    first, second = OUTPUTS.astype(np.float32)
    np.testing.assert_allclose(divergence(first, second), wanted, rtol=1e-4)
    np.testing.assert_allclose(divergence(first, first), np.zeros(6), atol=1e-6)


def test_parts_are_drawn_independently_and_each_as_often_as_its_probability_says():
    draws = drawn(SEVERAL, OUTPUTS[0][0])
    mean, _, log_p = by_hand(OUTPUTS[0])
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), draws) == {
        "aim": (((DRAWS, 2), "float32"), ((DRAWS, 2), "int32")),
        "move": ((DRAWS,), "int32"),
    }
    first, second = draws["aim"][1].T
    probability = [np.exp(x[0]) for x in log_p]
    together = np.einsum("i,j,k->ijk", *probability).ravel()
    counts = np.bincount(np.ravel_multi_index((first, second, draws["move"]), (2, 3, 4)), minlength=24)
    assert chi_squared(counts, together) < 60  # with 23 degrees of freedom, exceeded once in 30,000 times
    # What is beyond a bound is clipped to it, so that the shares below the mean are those of the normal distribution.
    inside = np.abs(mean[0]) < 1
    below = (draws["aim"][0] < mean[0][None].astype(np.float32)).mean(0)
    np.testing.assert_allclose(below[inside], 0.5, atol=0.02)


def test_a_head_of_heads_lays_out_scales_last_and_joins_what_it_splits():
    head = make_head(spec_of(SEVERAL))
    assert (head.outputs, head.scales) == (13, 2)
    rows = jnp.asarray(OUTPUTS[0], jnp.float32)
    split = head.split(rows)
    assert [x.shape for x in split] == [(6, part.outputs) for part in part_heads(head)] == [(6, 4), (6, 5), (6, 4)]
    np.testing.assert_array_equal(head.join(split), rows)
    np.testing.assert_array_equal(split[0], rows[:, np.array([0, 1, 11, 12])])


@pytest.mark.parametrize("squash", [False, True])
def test_actions_of_several_parts_go_to_their_spaces_and_back(squash):
    wide = {"aim": Box((-3.0, 0.0), (1.0, 0.5), (2,)), "move": Discrete(4), "turn": (Box(-1.0, 5.0, (1,)),)}
    head = make_head(spec_of(wide), squash)
    raw = {"aim": jnp.array([[0.5, -0.5]]), "move": jnp.array([3]), "turn": (jnp.array([[0.25]]),)}
    unit = np.tanh if squash else np.asarray
    action = head.to_env(raw)
    np.testing.assert_allclose(action["aim"], [[-1 + 2 * unit(0.5), 0.25 + 0.25 * unit(-0.5)]], rtol=1e-5)
    np.testing.assert_allclose(action["turn"][0], [[2 + 3 * unit(0.25)]], rtol=1e-5)
    assert action["move"].tolist() == [3]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), head.to_raw(action), raw)
    np.testing.assert_allclose(head.log_half_width, np.log(2 * 0.25 * 3), rtol=1e-6)


def test_a_joint_distribution_of_one_part_is_that_part():
    """To the bit, its draws included."""
    logits = jnp.asarray(OUTPUTS[0][:, :4], jnp.float32)
    one, joint = Categorical(logits), Joint({"only": Categorical(logits)})
    key, action = jax.random.key(3), jnp.array([0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(joint.sample(key)["only"], one.sample(key))
    np.testing.assert_array_equal(joint.log_prob({"only": action}), one.log_prob(action))
    np.testing.assert_array_equal(joint.entropy(), one.entropy())


# --- and back -----------------------------------------------------------------------------------------------------

BOXES = {
    "bounded": Box((-3.0, 0.0, 10.0, -1.0, -0.1, 5.0), (1.0, 0.5, 1000.0, 1.0, 0.3, 5.5), (6,)),
    "bounded below": Box(2.0, INF, (6,)),
    "bounded above": Box(-INF, 2.0, (6,)),
    "unbounded": Box(-INF, INF, (6,)),
    "of all kinds": Box((-3.0, -INF, -INF, -1.0, 0.0, 5.0), (1.0, 0.5, INF, 1.0, INF, 5.5), (6,)),
}


@pytest.mark.parametrize(("name", "shape"), [*((name, (6,)) for name in BOXES), ("bounded", (2, 3))])
def test_an_action_of_a_box_goes_back_to_where_it_came_from(name, shape):
    """Within the bounds, of whatever kind; what is clipped goes back to the bound that clipped it."""
    space = Box(BOXES[name].low, BOXES[name].high, shape)
    low, high = (np.broadcast_to(bound, 6).astype(float) for bound in (space.low, space.high))
    finite = np.isfinite(low) & np.isfinite(high)
    centre = np.where(np.isinf(low), np.minimum(high - 1, 0), np.maximum(low + 1, 0))  # of what is open
    ends = np.where(finite, -1.0, low - centre), np.where(finite, 1.0, high - centre)
    x = np.random.default_rng(0).uniform(-1, 1, (50, 6)) * np.where(finite, 1.0, 7.0)[None]
    x = np.concatenate([x, np.full((1, 6), -50.0), np.full((1, 6), 50.0)])
    action = to_box(space, jnp.asarray(x, jnp.float32))
    assert action.shape == (52, *shape)
    back = from_box(space, action)
    assert back.shape == (52, 6)
    assert back.dtype == jnp.float32
    np.testing.assert_allclose(back, np.clip(x, ends[0][None], ends[1][None]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_box(space, back), action, rtol=1e-6, atol=1e-6)


def test_bounds_go_back_exactly_and_a_single_number_too():
    space = Box((-3.0, 0.0), (1.0, 0.5), (2,))
    assert from_box(space, jnp.array([[-3.0, 0.0], [1.0, 0.5], [-1.0, 0.25]])).tolist() == [[-1, -1], [1, 1], [0, 0]]
    np.testing.assert_array_equal(from_box(Box(2.0, 6.0, ()), jnp.array([2.0, 5.0])), [[-1.0], [0.5]])


def test_an_entry_without_room_is_its_only_number_and_goes_back_to_0():
    """Never to NaN, whatever the network says; and entries beside it are not touched."""
    space = Box((3.0, -1.0), (3.0, 1.0), (2,))
    action = to_box(space, jnp.array([[-0.5, 0.5], [1e6, -1.0]]))
    np.testing.assert_array_equal(action, [[3.0, 0.5], [3.0, -1.0]])
    np.testing.assert_array_equal(from_box(space, action), [[0.0, 0.5], [0.0, -1.0]])


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_small_dtypes_reach_the_environment_and_go_back_as_float32_to_their_precision(dtype, atol):
    assert [to_env(Box(-1.0, 1.0, (2,), dtype), [[0.5, -0.5]], squash).dtype for squash in (False, True)] == [dtype] * 2
    space = Box(-2.0, 6.0, (3,), dtype)
    x = jnp.linspace(-1, 1, 30).reshape(10, 3)
    action = to_box(space, x)
    assert action.dtype == dtype
    assert from_box(space, action).dtype == jnp.float32
    np.testing.assert_allclose(from_box(space, action), x, atol=atol)
